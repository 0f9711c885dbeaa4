"""The variance of a model's Gaussian noise around one of its functions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.ops.provenance import eval_provenance

from numpyro_scalegp.likelihoods.likelihood import log_terms
from numpyro_scalegp.sites.rows import unwrapped
from numpyro_scalegp.tracing.fitted_runs import trace_of
from numpyro_scalegp.tracing.runs import flat_provenance, is_observed


def with_noise(
    posterior: Any,
    model: Callable[..., Any],
    values: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
) -> Any:
    """A posterior with the noise variance of the model's Gaussian likelihood.

    Args:
        posterior: the posterior over the function.
        model: the model.
        values: values of parameters and latent sites, by name.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        name: the name of the function's site.

    Returns:
        The posterior with the noise variance, or unchanged if the model does not determine the
        noise at new inputs. The model does if the function enters a single observed site, as the
        mean of a normal distribution, whose scale is one value, or one for each function of a
        plate, and depends neither on the function nor on the inputs.
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
    inputs = args, kwargs, {key: value for key, value in values.items() if key != name}
    # NumPyro broadcasts a scalar scale to the shape of f. With several inputs the shape tells it
    # from a scale for each input; with one input, only the dependence on arrays does.
    is_ambiguous = f.shape[-1] == 1
    arrays, static = eqx.partition(
        inputs, lambda leaf: is_ambiguous and eqx.is_array(leaf) and leaf.ndim > 0
    )
    is_normal_around_f: dict[str, bool] = {}

    def terms_and_scales(f: Array, arrays: Any) -> dict[str, Any]:
        args, kwargs, values = eqx.combine(arrays, static)
        trace = trace_of(model, {**values, name: f}, args, kwargs)
        observed = {key: site for key, site in trace.items() if is_observed(site)}
        scales = {}
        for key, site in observed.items():
            fn = unwrapped(site["fn"]).distribution
            if is_normal_around_f.setdefault(key, isinstance(fn, dist.Normal) and fn.loc is f):
                is_normal_around_f[key] = jnp.ndim(fn.scale) == 0 or jnp.shape(fn.scale)[-1] == 1
                scales[key] = fn.scale
        return {"terms": {key: log_terms(site) for key, site in observed.items()}, "scales": scales}

    try:
        origins = eval_provenance(terms_and_scales, f=f, arrays=arrays)
    except jax.errors.JAXTypeError:  # a model that cannot be traced
        return None

    def names(leaves: Any) -> frozenset[str]:
        return frozenset().union(*flat_provenance(leaves))

    dependent = [key for key, origin in origins["terms"].items() if "f" in names([origin])]
    if len(dependent) != 1 or not is_normal_around_f[dependent[0]]:
        return None
    return None if names([origins["scales"][dependent[0]]]) else dependent[0]
