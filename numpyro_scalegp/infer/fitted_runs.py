"""Runs of a model at fitted values, in which nothing is drawn from a prior."""

from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import primitives
from numpyro.primitives import Messenger

from numpyro_scalegp.distributions.rows import role_of, unwrapped
from numpyro_scalegp.tracing.runs import MADE_OF_OTHERS, Trace, is_latent, traced


def run_model(
    model: Callable[..., Any], values: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Trace:
    """The trace of a model at values of parameters and latent sites; GP sites without one are zero.

    Args:
        model: the model.
        values: of parameters, mutable and latent sites, by name.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: if a latent site has no value, and would be drawn from its prior.
    """
    draws = _Draws()
    with draws:
        trace = trace_of(model, values, args, kwargs)
    missing = [
        name
        for name, site in trace.items()
        if is_latent(site) and name in draws.names - values.keys() and not is_gp(site)
    ]
    if missing:
        raise ValueError(
            f"the fit has no values of the latent sites {missing}, and what a prior draws of them "
            "has nothing to do with it: give draws of all latent sites, or a guide for them."
        )
    return trace


def trace_of(
    model: Callable[..., Any], values: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Trace:
    """The same, with draws from the prior at other latent sites that have no value."""
    with Checked(values), WithoutDraws(), FunctionSites(without_white=values):
        return traced(model, jax.random.key(0), values, args, kwargs, values=values)


class FunctionSites(Messenger):
    """Keeps functions that `WhitenReparam` replaces as GP sites of the run, with their values.

    White values belong to the rows that they were drawn at. So a function at other rows is drawn
    from its posterior given the values at those rows, as without the reparametrization.

    Args:
        fn: the model, or None for a context manager.
        without_white: names of functions that get a value in another way.
    """

    def __init__(
        self, fn: Callable[..., Any] | None = None, without_white: Container[str] = ()
    ) -> None:
        super().__init__(fn)
        self.without_white = without_white
        self.whitened: dict[str, Any] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give a function that was made of white values."""
        if is_latent(msg) and msg["name"] in self.whitened and msg["value"] is None:
            msg["value"] = self.whitened[msg["name"]]
            msg["infer"] = {**msg["infer"], MADE_OF_OTHERS: True}


class EveryName:
    """A container of every name, for runs in which nothing depends on the functions' values."""

    def __contains__(self, name: object) -> bool:
        """True."""
        return True


def function_sites() -> FunctionSites | None:
    """The innermost `FunctionSites` around this call."""
    stack = reversed(primitives._PYRO_STACK)
    return next((one for one in stack if isinstance(one, FunctionSites)), None)


def white_name(name: str) -> str:
    """The site of the white values of a function."""
    return f"{name}_white"


class Checked(Messenger):
    """Raises where a value has another shape than its site, before the model goes on with it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = values

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Compare shapes at a latent site."""
        if not is_latent(msg) or msg["name"] not in self.values:
            return
        found, wanted = jnp.shape(msg["value"]), msg["fn"].shape()
        if found != wanted:
            raise ValueError(
                f"a draw of the site `{msg['name']}` has shape {found}, and the model's site "
                f"{wanted}: give draws with one leading axis (of `MCMC.get_samples`, those that "
                "are not grouped by chain), and the rows that a function was drawn at."
            )


class _Draws(Messenger):
    """Records the sites to which no handler around the model gives a value."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def process_message(self, msg: dict[str, Any]) -> None:
        """Record a site that will be drawn, or has been in a loop of `scan`."""
        if msg["value"] is None or msg.get("_control_flow_done"):
            self.names.add(msg.get("name", ""))


class WithoutDraws(Messenger):
    """Puts zeros at GP sites that have no value, in place of draws from the prior."""

    def process_message(self, msg: dict[str, Any]) -> None:
        """Put zeros where there is no value."""
        if is_gp(msg) and msg["value"] is None:
            X = unwrapped(msg["fn"]).distribution.X
            msg["value"] = jnp.zeros(msg["fn"].shape(), jnp.result_type(X, float))
            msg["stop"] = True


def is_gp(site: dict[str, Any]) -> bool:
    """Whether a model's site is a GP, over a function or over its observations."""
    return site["type"] == "sample" and role_of(site["fn"]) in ("prior", "collapsed")
