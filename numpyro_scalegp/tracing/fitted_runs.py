"""Runs of a model at fitted values, without draws from priors."""

from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import primitives
from numpyro.primitives import Messenger

from numpyro_scalegp.sites.rows import role_of, unwrapped
from numpyro_scalegp.tracing.runs import MADE_OF_OTHERS, Trace, is_latent, traced


def run_model(
    model: Callable[..., Any], values: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Trace:
    """The trace of a model at values of its parameters and latent sites.

    GP sites without a value are zero.

    Args:
        model: the model.
        values: values of parameters, mutable and latent sites, by name.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: if another latent site has no value, and would be drawn from its prior.
    """
    unset = _RecordUnset()
    with unset:
        trace = trace_of(model, values, args, kwargs)
    missing = [
        name
        for name, site in trace.items()
        if is_latent(site) and name in unset.names - values.keys() and not is_gp(site)
    ]
    if missing:
        raise ValueError(
            f"the fit has no values of the latent sites {missing}, and draws from their priors "
            "would ignore the data: give draws of all latent sites, or a guide for them."
        )
    return trace


def trace_of(
    model: Callable[..., Any], values: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Trace:
    """The trace of a model at values of its sites, with prior draws at latent sites without one.

    GP sites without a value are zero.
    """
    with CheckShapes(values), WithoutDraws(), FunctionSites(without_white=values):
        return traced(model, jax.random.key(0), values, args, kwargs, values=values)


class FunctionSites(Messenger):
    """Keeps functions that `WhitenReparam` replaces as GP sites of the run, with their values.

    White values are valid only at the inputs where they were sampled. At other inputs the function
    is drawn from its posterior given its values, as without the reparametrization.

    Args:
        fn: the model, or None for a context manager.
        without_white: names of functions whose values do not come from white values.
    """

    def __init__(
        self, fn: Callable[..., Any] | None = None, without_white: Container[str] = ()
    ) -> None:
        super().__init__(fn)
        self.without_white = without_white
        self.whitened: dict[str, Any] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        """Set the value of a function that was computed from white values."""
        if is_latent(msg) and msg["name"] in self.whitened and msg["value"] is None:
            msg["value"] = self.whitened[msg["name"]]
            msg["infer"] = {**msg["infer"], MADE_OF_OTHERS: True}


class EveryName:
    """A container of all names, for runs in which nothing depends on the functions' values."""

    def __contains__(self, name: object) -> bool:
        """Return True for any name."""
        return True


def function_sites() -> FunctionSites | None:
    """The innermost `FunctionSites` handler around this call, or None."""
    stack = reversed(primitives._PYRO_STACK)
    return next((handler for handler in stack if isinstance(handler, FunctionSites)), None)


def white_name(name: str) -> str:
    """The name of the site with the white values of a function."""
    return f"{name}_white"


class CheckShapes(Messenger):
    """Raises where a value and its site differ in shape, before the model uses the value."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = values

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Compare shapes at a latent site."""
        if not is_latent(msg) or msg["name"] not in self.values:
            return
        shape, expected = jnp.shape(msg["value"]), msg["fn"].shape()
        if shape != expected:
            raise ValueError(
                f"a draw of the site `{msg['name']}` has shape {shape}, and the model's site "
                f"{expected}: give draws with one leading axis (`MCMC.get_samples()` without "
                "`group_by_chain`), and the inputs at which a function was drawn."
            )


class _RecordUnset(Messenger):
    """Records the names of the sites to which no handler around the model gives a value."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def process_message(self, msg: dict[str, Any]) -> None:
        """Record a site that will be drawn, or that a `scan` has drawn."""
        if msg["value"] is None or msg.get("_control_flow_done"):
            self.names.add(msg.get("name", ""))


class WithoutDraws(Messenger):
    """Sets GP sites without a value to zero, in place of draws from the prior."""

    def process_message(self, msg: dict[str, Any]) -> None:
        """Set the value to zeros, if there is none."""
        if is_gp(msg) and msg["value"] is None:
            X = unwrapped(msg["fn"]).distribution.X
            msg["value"] = jnp.zeros(msg["fn"].shape(), jnp.result_type(X, float))
            msg["stop"] = True


def is_gp(site: dict[str, Any]) -> bool:
    """Whether a model's site is a GP, of a latent function or collapsed over observations."""
    return site["type"] == "sample" and role_of(site["fn"]) in ("prior", "collapsed")
