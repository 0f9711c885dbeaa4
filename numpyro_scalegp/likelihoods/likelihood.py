"""Expected log-likelihoods of a model under normal marginals of a function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from numpyro_scalegp.likelihoods.dependence import table_of
from numpyro_scalegp.likelihoods.quadrature import normal_expectation, product_nodes
from numpyro_scalegp.tracing.runs import is_observed, traced


class ExpectedLikelihood:
    """E[log p(y | f)] of a model for normal marginals of f, by quadrature.

    Args:
        model: the model.
        site: the name of the function site.
        params: values of parameters and mutable sites.
        values: values of all other latent sites.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        num_nodes: nodes of the Gauss-Hermite rule.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        site: str,
        params: dict[str, Any],
        values: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_nodes: int,
    ) -> None:
        self.site = site
        self.num_nodes = num_nodes

        def terms(f: Array) -> dict[str, Array]:
            trace = traced(
                model, jax.random.key(0), params, args, kwargs, values={**values, site: f}
            )
            return {name: log_terms(site) for name, site in trace.items() if is_observed(site)}

        self.terms = terms

    def check_rows(self, like: Float[Array, "*batch n"]) -> None:
        """Raise if the likelihood combines rows of the function, or functions of a plate.

        Args:
            like: an array with the shape and dtype of f.
        """
        table_of(self.terms, like, self.site).check_additive()

    def __call__(
        self, mean: Float[Array, "*batch n"], variance: Float[Array, "*batch n"]
    ) -> Float[Array, ""]:
        """The sum over rows, scaled by plates, for moments of shape (*batch, n)."""

        def total(f: Array) -> Array:
            return summed(self.terms(f))

        return normal_expectation(total, [(mean, variance)], product_nodes(self.num_nodes))

    def derivatives(
        self, mean: Float[Array, "*batch n"], variance: Float[Array, "*batch n"]
    ) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """Expectations of the log-likelihood's first two derivatives in f(x_i).

        Valid if `check_rows` passes.

        Returns:
            E[l'] and E[l''] at each row, from derivatives of E[l] in mean and variance.

        References:
            Opper and Archambeau (2009), The Variational Gaussian Approximation Revisited, eq. 7
            and 8.
        """
        gradient, half_curvature = jax.grad(self, argnums=(0, 1))(mean, variance)
        return gradient, 2.0 * half_curvature

    def step_length(
        self,
        means: tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]],
        variance: Float[Array, "*batch n"],
        divergence: Callable[[Float[Array, ""]], Float[Array, ""]],
    ) -> Float[Array, ""]:
        """The length of a Newton step, by backtracking until the bound does not decrease.

        A full step is optimal for a Gaussian likelihood, but may be far too long if the curvature
        grows along it, as for a Poisson likelihood.

        Args:
            means: means of f at each row, now and after the full step.
            variance: variances of f at each row.
            divergence: the divergence from the prior, up to a constant, after a step of the given
                length.

        Returns:
            1, or the largest of 1/2, 1/4, ... for which the bound does not decrease.
        """
        now, after = means

        def bound(length: Array) -> Array:
            mean = jnp.where(length == 1.0, after, now + length * (after - now))
            return self(mean, variance) - divergence(length)

        start = bound(jnp.zeros((), now.dtype))
        least = start - 100.0 * jnp.finfo(now.dtype).eps * jnp.abs(start)
        return jax.lax.while_loop(
            lambda length: ~(bound(length) >= least) & (length > 2.0**-30),
            lambda length: 0.5 * length,
            jnp.ones((), now.dtype),
        )


def pseudo_observations(
    mean: Float[Array, "*batch n"],
    gradient: Float[Array, "*batch n"],
    curvature: Float[Array, "*batch n"],
) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
    """Targets and precisions of the Gaussian approximation to the likelihood in a Newton step.

    Where the likelihood is not concave, any positive precision leads to the same optimum.
    """
    concave = jnp.maximum(-curvature, 0.0)
    least = 1e-3 * jnp.mean(concave, axis=-1, keepdims=True)
    precision = jnp.maximum(concave, least)
    return mean + gradient / precision, precision


def log_terms(site: dict[str, Any]) -> Float[Array, "..."]:
    """The log density of a traced site's value, scaled, for each of its entries.

    Raises:
        ValueError: if value and distribution broadcast against each other, as a column and a row.
    """
    check_value(site)
    intermediates = [site["intermediates"]] if site["intermediates"] else []
    terms = site["fn"].log_prob(site["value"], *intermediates)
    return terms if site["scale"] is None else site["scale"] * terms


def check_value(site: dict[str, Any]) -> None:
    """Raise if a site's value and its distribution broadcast against each other."""
    shape, expected = jnp.shape(site["value"]), tuple(site["fn"].shape())
    if np.broadcast_shapes(shape, expected) not in (shape, expected):
        raise ValueError(
            f"the site `{site['name']}` has a value of shape {shape} and a distribution of shape "
            f"{expected}: broadcasting would pair each observation with several distributions. "
            "Give observations the shape of the distribution, such as y[:, 0] for a column y."
        )


def log_density(site: dict[str, Any]) -> Float[Array, ""]:
    """The log density of a traced site's value, summed and scaled."""
    return jnp.sum(log_terms(site))


def summed(terms: dict[str, Float[Array, "..."]]) -> Float[Array, ""]:
    """The sum over the entries of all terms."""
    return sum(map(jnp.sum, terms.values()), jnp.zeros(()))
