"""Moments of a function of time given Gaussian sites, with natural gradients in the sites.

The family is q(f) = p(f) exp(sum_i (b_i f_i - p_i f_i^2 / 2)), normalized: the posterior given
observations z = b / p with noise variances R = 1 / p. Write F for the log density of z - m under
N(0, K + R), with derivatives F_z = -u and F_R, and F0_R for F_R with z = m. Then f has mean z - R u
and variance R + 2 R^2 F0_R, and the divergence from the prior is -F - R'F_R less a constant. So a
function of the moments with derivatives g and e, less w times the divergence, changes with kernel,
inputs and mean by

    w dF + (R g)'dF_z + (w R)'dF_R + (2 R^2 e)'dF0_R,

which are derivatives of F, and derivatives of these along two directions. Nothing is differentiated
backward through a recursion.

References:
    Khan and Lin (2017), Conjugate-Computation Variational Inference; Chang, Wilkinson, Khan and
    Solin (2020), Fast Variational Learning in State-Space Gaussian Process Models.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.integrated.laplace.search import at_least_tiny
from numpyro_scalegp.integrated.state_space.prior import (
    Prior,
    along,
    at_rows,
    log_density_derivatives,
)

# The most prior standard deviations by which a step of a site may move the function. With more,
# sites of Student's t distribution may alternate between two states.
_MOST_DEVIATIONS = 1.0


class Sites(NamedTuple):
    """The natural parameters b and p of the sites exp(b f - p f^2 / 2), one for each row."""

    loc: Float[Array, "*batch n"]
    precision: Float[Array, "*batch n"]


class Moments(NamedTuple):
    """Moments of f - m at the rows, and the divergence of q from the prior."""

    means: Float[Array, "*batch n"]
    variances: Float[Array, "*batch n"]
    divergence: Float[Array, "*batch"]


def observations(
    prior: Prior, mean: Float[Array, "*batch n"], sites: Sites
) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
    """The observations less their mean, z - m, and R.

    Sites of no precision have so much noise that their effect is rounded away.
    """
    precision = at_least_tiny(sites.precision, prior.variance)
    return sites.loc / precision - mean, 1.0 / precision


def moments_given_sites(prior: Prior, mean: Float[Array, "*batch n"], sites: Sites) -> Moments:
    """The moments of q, in O(n s^3).

    Args:
        prior: of f.
        mean: of f, m.
        sites: b and p. Their derivatives are natural gradients; the derivatives of other arguments
            are for sites that stay as they are.
    """
    variables, static = eqx.partition(prior, eqx.is_inexact_array)
    orders, static = eqx.partition(static, eqx.is_array)

    @jax.custom_vjp
    def moments(variables: Any, orders: Any, mean: Array, sites: Sites) -> Moments:
        return forward(variables, orders, mean, sites)[0]

    def forward(variables: Any, orders: Any, mean: Array, sites: Sites) -> tuple[Moments, Any]:
        prior = eqx.combine(variables, orders, static)
        y, noise = observations(prior, mean, sites)
        weights, means, variances, log_ratio, _ = at_rows(prior, y, noise, variances=True)
        explained = weights * means - variances / noise
        divergence = 0.5 * (log_ratio + jnp.sum(explained, axis=-1))
        values = Moments(means, variances, divergence)
        return values, (variables, orders, mean, sites, weights, values)

    def backward(residuals: Any, cotangents: Moments) -> tuple[Any, ...]:
        variables, orders, mean, sites, u, values = residuals
        prior = eqx.combine(variables, orders, static)
        y, noise = observations(prior, mean, sites)
        g, e, of_divergence = cotangents
        weight = -of_divergence
        # The derivative along (R g, w R), and the one along (0, 2 R^2 e) with z = m.
        zeros = jnp.zeros_like(y)
        of_weight = jnp.broadcast_to(weight[..., None], noise.shape) * noise
        columns = jnp.stack([y, zeros]), jnp.stack([weight, jnp.zeros_like(weight)])
        directions = jnp.stack([noise * g, zeros]), jnp.stack([of_weight, 2.0 * noise**2 * e])

        def of_column(y: Array, weight: Array, d_y: Array, d_noise: Array) -> Any:
            def log_density(y: Array, noise: Array) -> tuple[Any, Array]:
                derivatives, weights, _ = log_density_derivatives(prior, y, noise)
                return derivatives, weights

            first, second = jax.jvp(log_density, (y, noise), (d_y, d_noise))

            def total(first: Array, second: Array) -> Array:
                axes = range(weight.ndim, first.ndim)
                return jnp.expand_dims(weight, tuple(axes)) * first + second

            return jax.tree.map(total, first, second)

        summands = jax.lax.map(lambda a: of_column(*a), (*columns, *directions))
        derivatives, d_mean = jax.tree.map(lambda pair: pair[0] + pair[1], summands)
        d_mean = d_mean - g  # the means are less m

        def along_tangents(tangents: Any) -> Array:
            return jnp.sum(along(derivatives, prior, tangents))

        (d_variables,) = jax.vjp(along_tangents, variables)[1](jnp.ones((), d_mean.dtype))
        # A negative curvature, possible if the likelihood is not log-concave, counts as zero.
        curvature = 2.0 * jnp.maximum(e, 0.0)
        of_each = of_divergence[..., None]
        # A site wants to move f by u + g over its precision. Far from the optimum, as from a rate
        # of one to counts of thousands, that is too far: more precision keeps it within a prior
        # standard deviation. There is none to add at the optimum, where u + g is zero.
        variance = jnp.where(prior.variance > 0.0, prior.variance, 1.0)
        residual = jnp.abs(of_each * u + g)
        least = residual / (_MOST_DEVIATIONS * jnp.sqrt(variance)) - of_each / variance
        curvature = jnp.maximum(curvature, least)
        d_sites = Sites(
            of_each * sites.loc + g - curvature * (mean + values.means),
            of_each * sites.precision - curvature,
        )
        return d_variables, None, d_mean, d_sites

    moments.defvjp(forward, backward)
    return moments(variables, orders, mean, sites)
