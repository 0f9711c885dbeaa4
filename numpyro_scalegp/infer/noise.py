"""The Gaussian noise that a model's observations have around one of its functions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.ops.provenance import eval_provenance

from numpyro_scalegp.distributions.rows import unwrapped
from numpyro_scalegp.infer.fitted_runs import trace_of
from numpyro_scalegp.tracing.likelihood import log_terms
from numpyro_scalegp.tracing.runs import flat_provenance, is_observed


def with_noise(
    posterior: Any,
    model: Callable[..., Any],
    values: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
) -> Any:
    """A posterior with the noise variance of the Gaussian likelihood around a function.

    Args:
        posterior: over the function.
        model: the model.
        values: of parameters and latent sites, by name.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        name: of the function's site.

    Returns:
        The posterior unchanged where the model does not say what the noise at new inputs is. It
        says so if the function enters a single observed site, as the mean of a normal distribution,
        and the scale is one value, or one for each function of a plate, and depends neither on the
        function nor, as far as its shape leaves that open, on the rows.
    """
    trace = trace_of(model, values, args, kwargs)
    f = jnp.asarray(trace[name]["value"])
    site = _likelihood(model, values, args, kwargs, name, f)
    if site is None:
        return posterior
    noise = jnp.square(unwrapped(trace[site]["fn"]).distribution.scale)
    noise = noise.reshape(()) if noise.size == 1 else noise
    return dataclasses.replace(posterior, noise_variance=noise)


def _likelihood(
    model: Callable[..., Any],
    values: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    f: Array,
) -> str | None:
    """The name of the observed site that is normal around f with one scale, if there is one."""
    given = args, kwargs, {key: value for key, value in values.items() if key != name}
    # NumPyro gives a scale without axes as many as f has: of one row it says nothing then.
    may_be_of_rows = f.shape[-1] == 1
    rows, others = eqx.partition(
        given, lambda leaf: may_be_of_rows and eqx.is_array(leaf) and leaf.ndim > 0
    )
    around: dict[str, bool] = {}

    def parts(f: Array, rows: Any) -> dict[str, Any]:
        args, kwargs, values = eqx.combine(rows, others)
        trace = trace_of(model, {**values, name: f}, args, kwargs)
        observed = {key: site for key, site in trace.items() if is_observed(site)}
        scales = {}
        for key, site in observed.items():
            fn = unwrapped(site["fn"]).distribution
            if around.setdefault(key, isinstance(fn, dist.Normal) and fn.loc is f):
                around[key] = jnp.ndim(fn.scale) == 0 or jnp.shape(fn.scale)[-1] == 1
                scales[key] = fn.scale
        return {"terms": {key: log_terms(site) for key, site in observed.items()}, "scales": scales}

    try:
        origins = eval_provenance(parts, f=f, rows=rows)
    except jax.errors.JAXTypeError:  # a model that is not to be traced
        return None

    def names(leaves: Any) -> frozenset[str]:
        return frozenset().union(*flat_provenance(leaves))

    dependent = [key for key, origin in origins["terms"].items() if "f" in names([origin])]
    if len(dependent) != 1 or not around[dependent[0]]:
        return None
    return None if names([origins["scales"][dependent[0]]]) else dependent[0]
