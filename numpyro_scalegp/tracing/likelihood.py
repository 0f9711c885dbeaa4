"""How a model's likelihood depends on the function at each row."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro import handlers

from numpyro_scalegp.core.quadrature import normal_nodes
from numpyro_scalegp.tracing.additivity import check_additive
from numpyro_scalegp.tracing.sites import WithoutSite
from numpyro_scalegp.tracing.substitution import substituted


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

    Raises:
        ValueError: if the model is that of an inner guide, without the outer one's function.
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
        if isinstance(model, WithoutSite):
            raise ValueError(
                f"the guide of `{site}` is the `rest` of another guide, and does not see that "
                f"guide's function: to solve for `{site}`, build a guide with site={site!r} and "
                "the other GP guide as its `rest`; parameters have the same names."
            )
        self.site = site
        self.rule = normal_nodes(num_nodes)

        def terms(f: Array) -> dict[str, Array]:
            drawn = substituted(
                handlers.seed(model, jax.random.key(0)), params, {**values, site: f}
            )
            trace = handlers.trace(drawn).get_trace(*args, **kwargs)
            return {name: log_terms(one) for name, one in trace.items() if _is_observed(one)}

        self.terms = terms

    def check_rows(self, like: Float[Array, "*batch n"]) -> None:
        """Raise if the likelihood combines rows of the function, or functions of a plate.

        Args:
            like: an f, of which shape and type count.
        """
        check_additive(self.terms, like, self.site)

    def __call__(
        self, mean: Float[Array, "*batch n"], variance: Float[Array, "*batch n"]
    ) -> Float[Array, ""]:
        """The sum over rows, with the scales of plates, for moments of shape (*batch, n)."""
        nodes, weights = (jnp.asarray(one, mean.dtype) for one in self.rule)
        scale = jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))

        def at_node(node: Array) -> Array:
            return sum(map(jnp.sum, self.terms(mean + scale * node).values()), jnp.zeros(()))

        return weights.dot(jax.vmap(at_node)(nodes))

    def slopes(
        self, mean: Float[Array, "*batch n"], variance: Float[Array, "*batch n"]
    ) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """Expectations of the log-likelihood's first two derivatives in f(x_i); see `check_rows`.

        Returns:
            E[l'] and E[l''] at each row, from derivatives of E[l] in mean and variance.

        References:
            Opper and Archambeau (2009), The Variational Gaussian Approximation Revisited, eq. 7
            and 8.
        """
        slope, half_curvature = jax.grad(self, argnums=(0, 1))(mean, variance)
        return slope, 2.0 * half_curvature

    def step_length(
        self,
        means: tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]],
        variance: Float[Array, "*batch n"],
        divergence: Callable[[Float[Array, ""]], Float[Array, ""]],
    ) -> Float[Array, ""]:
        """How far to go from one mean to another, so that the bound does not fall.

        A Newton step may be far too long where the curvature grows along it, as of a Poisson
        likelihood; a part of it is not, and the whole of it is right for a Gaussian one.

        Args:
            means: of f at each row, now and after the whole step.
            variance: of f at each row.
            divergence: the divergence from the prior, up to a constant, after a part of the step.

        Returns:
            1, or the largest of 1/2, 1/4, ... that does.
        """
        now, after = means

        def bound(part: Array) -> Array:
            mean = jnp.where(part == 1.0, after, now + part * (after - now))
            return self(mean, variance) - divergence(part)

        start = bound(jnp.zeros((), now.dtype))
        least = start - 100.0 * jnp.finfo(now.dtype).eps * jnp.abs(start)
        return jax.lax.while_loop(
            lambda part: ~(bound(part) >= least) & (part > 2.0**-30),
            lambda part: 0.5 * part,
            jnp.ones((), now.dtype),
        )


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
    """The log density of a traced site's value, scaled, for each of its entries.

    Raises:
        ValueError: if value and distribution make each other larger, as a column and a row do.
    """
    check_value(site)
    intermediates = [site["intermediates"]] if site["intermediates"] else []
    terms = site["fn"].log_prob(site["value"], *intermediates)
    return terms if site["scale"] is None else site["scale"] * terms


def check_value(site: dict[str, Any]) -> None:
    """Raise where a site's value and its distribution make each other larger."""
    found, wanted = jnp.shape(site["value"]), tuple(site["fn"].shape())
    if np.broadcast_shapes(found, wanted) not in (found, wanted):
        raise ValueError(
            f"the site `{site['name']}` has a value of shape {found} and a distribution of shape "
            f"{wanted}: each entry of one would be paired with all of the other. Give observations "
            "the shape of the distribution, such as y[:, 0] of a column."
        )


def log_density(site: dict[str, Any]) -> Float[Array, ""]:
    """The log density of a traced site's value, summed and scaled."""
    return jnp.sum(log_terms(site))
