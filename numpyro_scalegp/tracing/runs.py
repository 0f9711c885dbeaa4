"""Runs of models and guides, with chosen values for their sites."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Key
from numpyro import handlers

from numpyro_scalegp.core import checks, tables
from numpyro_scalegp.sites.rows import role_of, unwrapped

Trace = dict[str, Any]

# Marks, in a site's `infer`, that its value is a function of other sites in this run.
MADE_OF_OTHERS = "made_of_other_sites"


def substituted(
    run: Callable[..., Any] | None,
    params: dict[str, Any],
    values: dict[str, Any] | None = None,
    indices: dict[str, Any] | None = None,
) -> handlers.substitute:
    """Substitute values for the parameters, latent sites and plates of a model or a guide.

    Deterministic and observed sites are never replaced, though NumPyro's samples and medians have
    values of deterministic sites, too.

    Args:
        run: a model or a guide; None for a context manager.
        params: values of parameters and mutable sites, by name.
        values: values of latent sample sites, by name.
        indices: indices of plates, by name.
    """
    latent, plates = values or {}, indices or {}

    def value_of(site: dict[str, Any]) -> Any:
        if site["type"] in ("param", "mutable"):
            return params.get(site["name"])
        if site["type"] == "plate":
            return plates.get(site["name"])
        if is_latent(site) and MADE_OF_OTHERS not in site["infer"]:
            return latent.get(site["name"])
        return None

    return handlers.substitute(run, substitute_fn=value_of)


def traced(
    run: Callable[..., Any],
    key: Key[Array, ""],
    params: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    values: dict[str, Any] | None = None,
    replayed: Trace | None = None,
) -> Trace:
    """Run a model or a guide under a key, and return its trace.

    Args:
        run: a model or a guide.
        key: a JAX key.
        params: values of parameters and mutable sites, by name; the run does not change them.
        args: positional arguments of the run.
        kwargs: keyword arguments of the run.
        values: values of latent sample sites, by name.
        replayed: the trace of a guide, from which latent sites and plates take their values.
    """
    # The run writes mutable state in place, here to a copy.
    params = jax.tree.map(lambda leaf: leaf, params)
    handled: Callable[..., Any] = substituted(handlers.seed(run, key), params, values)
    if replayed is not None:
        handled = handlers.replay(handled, replayed)
    return trace_of_call(handled, args, kwargs)


def trace_of_call(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """The trace of a call; a collapsed GP's observations become arrays if they are a table.

    Raises:
        TypeError: if a table is the value of a site with another distribution.
    """
    trace = handlers.trace(run).get_trace(*args, **kwargs)
    for name, site in trace.items():
        if is_observed(site) and tables.is_table(site["value"]):
            if role_of(site["fn"]) != "collapsed":
                raise TypeError(
                    f"the observations of `{name}` are {checks.described(site['value'])}, of which "
                    "NumPyro's distributions have no density: give the model arrays, such as "
                    "`y.to_numpy()` or `jnp.asarray(y)`, or take them by `sgp.plate(...).take`."
                )
            site["value"] = tables.as_arrays(site["value"], name)
    return trace


def is_latent(site: dict[str, Any]) -> bool:
    """Whether a site is sampled and not observed."""
    return site["type"] == "sample" and not site["is_observed"]


def is_observed(site: dict[str, Any]) -> bool:
    """Whether a site is an observed sample site."""
    return site["type"] == "sample" and site["is_observed"]


def is_data(site: dict[str, Any]) -> bool:
    """Whether a site is an observed sample site with data: a `numpyro.factor` term has none."""
    return is_observed(site) and not isinstance(unwrapped(site["fn"]).distribution, dist.Unit)


def drawn_values(trace: Trace) -> dict[str, Any]:
    """The values of the sample sites."""
    return {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}


def indices_of(trace: Trace) -> dict[str, Any]:
    """The indices of each plate."""
    return {name: site["value"] for name, site in trace.items() if site["type"] == "plate"}


def mutable_values(trace: Trace) -> dict[str, Any]:
    """The values of the mutable sites."""
    return {name: site["value"] for name, site in trace.items() if site["type"] == "mutable"}


class TracedProgram:
    """A function that is traced once, immediately; calls evaluate the traced program.

    So a model runs once, even if it is evaluated at many values of a function, differentiated and
    inspected.

    Args:
        function: maps trees of arrays to a tree of arrays; it may close over traced values.
        *like: arguments that have the shapes and dtypes of later ones.
    """

    def __init__(self, function: Callable[..., Any], *like: Any) -> None:
        structure = None

        def flat(*args: Any) -> list[Any]:
            nonlocal structure
            leaves, structure = jax.tree.flatten(function(*args))
            return leaves

        self.program: ClosedJaxpr = jax.make_jaxpr(flat)(*like)
        self.structure = structure

    def __call__(self, *args: Any) -> Any:
        """The result of the function."""
        leaves = zip(jax.tree.leaves(args), self.program.in_avals, strict=True)
        arrays = [jnp.asarray(leaf, aval.dtype) for leaf, aval in leaves]
        return jax.tree.unflatten(self.structure, jaxpr_as_fun(self.program)(*arrays))

    def variables(self) -> Any:
        """The function's result, with variables of the program in place of arrays."""
        return jax.tree.unflatten(self.structure, self.program.jaxpr.outvars)


def flat_provenance(leaves: Any) -> list[frozenset[str]]:
    """The sets of names in a tree from `numpyro.ops.provenance.eval_provenance`."""
    return jax.tree.leaves(leaves, is_leaf=lambda leaf: isinstance(leaf, frozenset))
