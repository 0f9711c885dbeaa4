"""How a model's likelihood depends on the function at each row."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro import handlers


def expected_slopes(
    model: Callable[..., Any],
    site: str,
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
        values: values of all other latent sites, of parameters and of mutable sites.
        mean: the mean of f at each row, shape (*batch, n).
        variance: the variance of f at each row, shape (*batch, n).
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        num_nodes: nodes of the Gauss-Hermite rule.

    Returns:
        E[l'] and E[l''] at each row, with the scales of plates, from derivatives of E[l] in mean
        and variance.

    References:
        Opper and Archambeau (2009), The Variational Gaussian Approximation Revisited, eq. 7 and 8.
    """
    places, masses = np.polynomial.hermite_e.hermegauss(num_nodes)
    nodes, weights = (jnp.asarray(one, mean.dtype) for one in (places, masses / masses.sum()))

    def expected(mean: Array, variance: Array) -> Array:
        scale = jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))

        def at_node(node: Array) -> Array:
            data = {**values, site: mean + scale * node}
            given = handlers.substitute(handlers.seed(model, jax.random.key(0)), data=data)
            trace = handlers.trace(given).get_trace(*args, **kwargs)
            observed = [site for site in trace.values() if _is_observed(site)]
            for one in observed:
                check_keeps_functions_apart(one, mean.shape[:-1], mean.shape[-1])
            return jnp.sum(jnp.stack([log_density(one) for one in observed]))

        return weights.dot(jax.vmap(at_node)(nodes))

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


def check_keeps_functions_apart(site: dict[str, Any], batch: tuple[int, ...], n: int) -> None:
    """Raise where an observed site has rows, but does not have them for each function of a plate.

    The functions' marginals alone then do not determine the expected log-likelihood.
    """
    shape, several = site["fn"].batch_shape, tuple(size for size in batch if size > 1)
    wanted = (*several, n)
    if several and shape[-1:] == (n,) and shape[-len(wanted) :] != wanted:
        raise ValueError(
            f"the observed site `{site['name']}` has the batch shape {shape}, and the functions in "
            f"a plate have the shape {wanted}: its likelihood must be one for each of them. "
            "Where it combines functions, write a GP site for each, outside of plates, and nest "
            "the guides."
        )


def _is_observed(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and site["is_observed"]


def log_density(site: dict[str, Any]) -> Float[Array, ""]:
    """The log density of a traced site's value, summed and scaled."""
    intermediates = [site["intermediates"]] if site["intermediates"] else []
    terms = site["fn"].log_prob(site["value"], *intermediates)
    return jnp.sum(terms if site["scale"] is None else site["scale"] * terms)
