"""How a model's likelihood depends on the function at each row."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro import handlers

from numpyro_scalegp.core.quadrature import normal_nodes
from numpyro_scalegp.guides.additivity import check_additive
from numpyro_scalegp.guides.sites import WithoutSite
from numpyro_scalegp.guides.substitution import substituted


def expected_slopes(
    model: Callable[..., Any],
    site: str,
    params: dict[str, Any],
    values: dict[str, Any],
    mean: Float[Array, "*batch n"],
    variance: Float[Array, "*batch n"],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_nodes: int = 20,
) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
    """Expectations of the log-likelihood's first two derivatives in f(x_i), by quadrature.

    Args:
        model: the model.
        site: the name of the function site.
        params: values of parameters and mutable sites.
        values: values of all other latent sites.
        mean: the mean of f at each row, shape (*batch, n).
        variance: the variance of f at each row, shape (*batch, n).
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        num_nodes: nodes of the Gauss-Hermite rule.

    Returns:
        E[l'] and E[l''] at each row, with the scales of plates, from derivatives of E[l] in mean
        and variance.

    Raises:
        ValueError: if the likelihood combines rows of the function, or functions of a plate, or the
            model is that of an inner guide, without the outer one's function.

    References:
        Opper and Archambeau (2009), The Variational Gaussian Approximation Revisited, eq. 7 and 8.
    """
    if isinstance(model, WithoutSite):
        raise ValueError(
            f"the guide of `{site}` is the `rest` of another guide, and does not see that guide's "
            f"function: to solve for `{site}`, build a guide with site={site!r} and the other GP "
            "guide as its `rest`; parameters have the same names."
        )
    nodes, weights = (jnp.asarray(one, mean.dtype) for one in normal_nodes(num_nodes))

    def terms(f: Array) -> dict[str, Array]:
        given = substituted(handlers.seed(model, jax.random.key(0)), params, {**values, site: f})
        trace = handlers.trace(given).get_trace(*args, **kwargs)
        return {name: log_terms(one) for name, one in trace.items() if _is_observed(one)}

    def expected(mean: Array, variance: Array) -> Array:
        scale = jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))

        def at_node(node: Array) -> Array:
            return sum(map(jnp.sum, terms(mean + scale * node).values()), jnp.zeros(()))

        return weights.dot(jax.vmap(at_node)(nodes))

    check_additive(terms, mean, site)
    slope, half_curvature = jax.grad(expected, argnums=(0, 1))(mean, variance)
    return slope, 2.0 * half_curvature


def pseudo_observations(
    mean: Float[Array, "*batch n"],
    slope: Float[Array, "*batch n"],
    curvature: Float[Array, "*batch n"],
) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
    """Targets and precisions of the Gaussian likelihood that a Newton step puts in place.

    Where the likelihood is not concave, any positive precision leads to the same optimum.
    """
    concave = jnp.maximum(-curvature, 0.0)
    least = 1e-3 * jnp.mean(concave, axis=-1, keepdims=True)
    precision = jnp.maximum(concave, least)
    return mean + slope / precision, precision


def _is_observed(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and site["is_observed"]


def log_terms(site: dict[str, Any]) -> Float[Array, "..."]:
    """The log density of a traced site's value, scaled, for each of its entries."""
    intermediates = [site["intermediates"]] if site["intermediates"] else []
    terms = site["fn"].log_prob(site["value"], *intermediates)
    return terms if site["scale"] is None else site["scale"] * terms


def log_density(site: dict[str, Any]) -> Float[Array, ""]:
    """The log density of a traced site's value, summed and scaled."""
    return jnp.sum(log_terms(site))
