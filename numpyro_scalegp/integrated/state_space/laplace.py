"""Laplace's approximation for functions of time, in linear time.

With R = 1 / W, the mode is the smoothed function given observations f - m + R g with noise R, so
that each step of Newton's method is a pass of filter and smoother. With v the marginal variances of
this smoother, a = K^-1 (f - m) and c = -v W' / 2, where W' is the derivative of W in f, a change of
kernel and data changes the approximation by

    dl(f) + a'dm + a'dK a / 2 - tr((K + R)^-1 dK) / 2 - v'dW / 2 + c'df,

all but the last at a fixed mode, and c'df = b'dK a + b'dm + (K b)'dg with b = (K + R)^-1 R c. Terms
with dK are derivatives of log densities under N(0, K + R), of combinations of a and b: nothing is
differentiated through the passes.

References:
    Rasmussen and Williams (2006), section 5.5.1; Nickisch, Solin and Grigorievskiy (2018), State
    Space Gaussian Processes with Non-Gaussian Likelihood.
"""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.integrated.laplace.search import (
    Entries,
    Sites,
    Step,
    at_least_tiny,
    derivatives,
    search,
    warn_of_digits,
    warn_of_search,
)
from numpyro_scalegp.integrated.state_space.passes import AtRows
from numpyro_scalegp.integrated.state_space.prior import (
    Prior,
    along,
    at_rows,
    log_density_derivatives,
)
from numpyro_scalegp.numerics import rounding
from numpyro_scalegp.numerics.derivatives import custom_jvp_all_orders
from numpyro_scalegp.programs.float64 import in_float64

# a a' + a b' + b a' = sum_k t_k u_k u_k' with u_k = (t_k a + b) / sqrt(1 + t_k^2), and the t_k add
# up to one.
_GOLDEN = tuple(0.5 * (1.0 + sign * math.sqrt(5.0)) for sign in (1.0, -1.0))


class Mode(NamedTuple):
    """The mode of the density of f and y."""

    f: Float[Array, "*batch n"]  # NaN if the search failed
    weights: Float[Array, "*batch n"]  # K^-1 (f - m)


def log_marginal(
    entries: Entries, prior: Prior, mean: Float[Array, "*batch n"], data: Any
) -> Float[Array, "*batch"]:
    """Laplace's approximation of log p(y), in O(n s^3) for each of about five to ten steps.

    Args:
        entries: log likelihoods, given f and `data`.
        prior: of f.
        mean: of f.
        data: further argument of `entries`, with y; differentiable.

    Returns:
        The approximation. NaN, with a warning, if there is no mode, or the likelihood is not
        log-concave at it. It has derivatives of every order.
    """
    variables, static = eqx.partition(prior, eqx.is_inexact_array)
    orders, static = eqx.partition(static, eqx.is_array)

    def value_and_moments(
        prior: Prior, mean: Array, data: Any, *, variances: bool
    ) -> tuple[Array, Mode, Array, Array, AtRows]:
        mode = _find_mode(entries, prior, mean, data)
        W = at_least_tiny(derivatives(entries, mode.f, data).curvature, prior.variance)
        y = mode.f - mean + mode.weights / W
        moments = at_rows(prior, y, 1.0 / W, variances=variances)
        warn_of_digits(jnp.any(moments.loss > rounding.FEW_DIGITS))

        def log_joint(mean: Array, data: Any, change: Array, weights: Array) -> Array:
            return jnp.sum(entries(mean + change, data) - 0.5 * weights * change, axis=-1)

        # In float64, since log likelihoods of large counts are differences of far larger terms.
        value = in_float64(log_joint, mean, data, moments.means, moments.weights)
        return value - 0.5 * jax.lax.stop_gradient(moments.log_ratio), mode, W, y, moments

    @custom_jvp_all_orders
    def value(variables: Any, orders: Any, mean: Array, data: Any) -> Array:
        prior = eqx.combine(variables, orders, static)
        return value_and_moments(prior, mean, data, variances=False)[0]

    @value.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        variables, orders, mean, data = primals
        d_variables, _, d_mean, d_data = tangents
        prior = eqx.combine(variables, orders, static)
        total, mode, W, y, moments = value_and_moments(prior, mean, data, variances=True)
        f, a, v = mode.f, mode.weights, moments.variances

        def curvature(f: Array) -> Array:
            return at_least_tiny(derivatives(entries, f, data).curvature, prior.variance)

        c = -0.5 * v * jax.jvp(curvature, (f,), (jnp.ones_like(f),))[1]
        scales = [math.sqrt(1.0 + t * t) for t in _GOLDEN]
        combined = jnp.stack(
            [(t * y + c / W) / scale for t, scale in zip(_GOLDEN, scales, strict=True)]
        )
        # A loop, so that the passes are compiled once.
        of_kernel, weights, means = jax.lax.map(
            lambda y: log_density_derivatives(prior, y, 1.0 / W), combined
        )
        b = scales[0] * weights[0] - _GOLDEN[0] * a
        Kb = scales[0] * means[0] - _GOLDEN[0] * moments.means

        def of_data(data: Any) -> Array:
            g, W = derivatives(entries, f, data)
            return jnp.sum(entries(f, data) + Kb * g - 0.5 * v * W, axis=-1)

        of_kernel = jax.tree.map(lambda d: _GOLDEN[0] * d[0] + _GOLDEN[1] * d[1], of_kernel)
        tangent = jax.jvp(of_data, (data,), (d_data,))[1] + jnp.sum((a + b) * d_mean, axis=-1)
        return total, tangent + along(of_kernel, prior, d_variables)

    return value(variables, orders, mean, data)


def normal_sites(
    entries: Entries, prior: Prior, mean: Float[Array, "*batch n"], data: Any
) -> Sites:
    """The normal approximation around the mode; see `log_marginal` for arguments and costs.

    Uninformative rows, of zero curvature, have so much noise that their effect is below rounding.
    """
    f, weights = _find_mode(entries, prior, mean, data)
    W = at_least_tiny(derivatives(entries, f, data).curvature, prior.variance)
    return Sites(f, weights, W)


def _find_mode(entries: Entries, prior: Prior, mean: Array, data: Any) -> Mode:
    """The mode of p(f, y), with derivatives of every order."""
    variables, static = eqx.partition(prior, eqx.is_inexact_array)
    orders, static = eqx.partition(static, eqx.is_array)

    @custom_jvp_all_orders
    def find(variables: Any, orders: Any, mean: Array, data: Any) -> Mode:
        return _search(entries, eqx.combine(variables, orders, static), mean, data)

    @find.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Mode, Mode]:
        variables, orders, mean, data = primals
        d_variables, _, d_mean, d_data = tangents
        f, weights = mode = find(*primals)
        variance = eqx.combine(variables, orders, static).variance
        W = at_least_tiny(derivatives(entries, f, data).curvature, variance)
        dg = jax.jvp(lambda data: derivatives(entries, f, data).gradient, (data,), (d_data,))[1]

        def moments(variables: Any, y: Array) -> tuple[Array, Array]:
            prior = eqx.combine(variables, orders, static)
            moments = at_rows(prior, y, 1.0 / W, variances=False)
            return moments.means, moments.weights

        arguments = variables, f - mean + weights / W
        means, weights = jax.jvp(moments, arguments, (d_variables, dg / W - d_mean))[1]
        return mode, Mode(d_mean + means, weights)

    return find(variables, orders, mean, data)


def _search(entries: Entries, prior: Prior, mean: Array, data: Any) -> Mode:
    def newton_step(W: Array, g: Array, weights: Array) -> Step:
        W = at_least_tiny(W, prior.variance)
        moments = at_rows(prior, (g - weights) / W, 1.0 / W, variances=False)
        return Step(moments.means, moments.weights)

    deviation = jnp.sqrt(prior.variance)
    state = search(entries, mean, data, deviation, newton_step)
    W = derivatives(entries, state.f, data).curvature
    is_finite = jnp.all(jnp.isfinite(state.f + state.weights), axis=-1)
    works = warn_of_search(state, W, deviation, is_finite)
    return Mode(jnp.where(works[..., None], state.f, jnp.nan), state.weights)
