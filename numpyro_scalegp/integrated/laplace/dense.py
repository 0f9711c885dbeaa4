"""Laplace's approximation from the dense covariance matrix.

With f ~ N(m, K), log likelihoods l_i(f_i), their derivatives g and negative second derivatives W,
and f = m + K g at the mode of p(f, y):

    log p(y) ~ sum_i l_i(f_i) - g'(f - m) / 2 - log|I + W K| / 2.

The computations use the factor L of B = I + W^1/2 K W^1/2, whose eigenvalues are at least one. The
derivative of the mode is df = (I + K W)^-1 (dK g + dm + K dg), by the implicit function theorem:
derivatives are exact, of every order, and do not go through the iterations.

References:
    Rasmussen and Williams (2006), sections 3.4 and 5.5.1, algorithms 3.1 and 5.1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core import batches
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
from numpyro_scalegp.numerics import lapack, linalg, rounding
from numpyro_scalegp.numerics.derivatives import custom_jvp_all_orders
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.float64 import in_float64


class Mode(NamedTuple):
    """The mode of the density of f and y."""

    f: Float[Array, "*batch n"]  # NaN if the search failed
    weights: Float[Array, "*batch n"]  # K^-1 (f - m), equal to g but with less rounding error
    tril: Float[Array, "*batch n n"]  # the factor of B, without a derivative


def log_marginal(
    entries: Entries, K: Float[Array, "*batch n n"], mean: Float[Array, "*batch n"], data: Any
) -> Float[Array, "*batch"]:
    """Laplace's approximation of log p(y).

    Args:
        entries: log likelihoods, given f and `data`.
        K: covariance of f.
        mean: of f.
        data: further argument of `entries`, with y; differentiable.

    Returns:
        The approximation. NaN, with a warning, if there is no mode, or the likelihood is not
        log-concave at it. Time O(n^3) for each of about five to ten steps, memory O(n^2).
    """
    f, weights, L = find_mode(entries, K, mean, data)
    W = derivatives(entries, f, data).curvature
    return _log_joint(entries, K, mean, data, f, weights) - 0.5 * _log_det(K, W, L)


def normal_sites(
    entries: Entries, K: Float[Array, "*batch n n"], mean: Float[Array, "*batch n"], data: Any
) -> Sites:
    """The normal approximation around the mode; see `log_marginal` for arguments and costs.

    Uninformative rows, of zero curvature, have so much noise that their effect is below rounding.
    """
    f, weights, L = find_mode(entries, K, mean, data)
    W = derivatives(entries, f, data).curvature
    W = at_least_tiny(W, jnp.diagonal(K, axis1=-2, axis2=-1))
    L = _factor_given(_scaled_covariance(K, W), L)
    return Sites(f, weights, W, L / jnp.sqrt(W)[..., None])


def find_mode(
    entries: Entries, K: Float[Array, "*batch n n"], mean: Float[Array, "*batch n"], data: Any
) -> Mode:
    """The mode of p(f, y), by Newton's method with a line search, with derivatives of every order.

    See `log_marginal` for arguments and costs.
    """
    find = custom_jvp_all_orders(lambda K, mean, data: _search(entries, K, mean, data))

    @find.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Mode, Mode]:
        (K, mean, data), (dK, dmean, ddata) = primals, tangents
        f, weights, L = mode = find(K, mean, data)
        W = derivatives(entries, f, data).curvature
        _, dg = jax.jvp(lambda data: derivatives(entries, f, data).gradient, (data,), (ddata,))
        df = _solve_implicit(K, W, L, _times(dK, weights) + dmean + _times(K, dg))
        return mode, Mode(df, dg - W * df, jnp.zeros_like(L))

    return find(K, mean, data)


def _log_joint(
    entries: Entries, K: Array, mean: Array, data: Any, f: Array, weights: Array
) -> Array:
    """sum_i l_i(f_i) - (f - m)'K^-1 (f - m) / 2 at the mode.

    Its derivative with respect to f is zero there. The rule omits it, and with it the rounding
    errors of differences of large terms.
    """

    def joint(K: Array, mean: Array, data: Any, f: Array, weights: Array) -> Array:
        # With f computed from the weights, rounding errors of the weights are of second order.
        change = jnp.where(jnp.isnan(f), jnp.nan, _times(K, weights))
        return jnp.sum(entries(mean + change, data) - 0.5 * weights * change, axis=-1)

    # In float64, since log likelihoods of large counts are differences of far larger terms.
    value = custom_jvp_all_orders(lambda *arguments: in_float64(joint, *arguments))

    @value.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        (_, _, data, f, weights), (dK, dmean, ddata, _, _) = primals, tangents
        _, data_tangent = jax.jvp(lambda data: entries(f, data), (data,), (ddata,))
        tangent = data_tangent + weights * (0.5 * _times(dK, weights) + dmean)
        return value(*primals), jnp.sum(tangent, axis=-1)

    return value(K, mean, data, f, weights)


def _search(entries: Entries, K: Array, mean: Array, data: Any) -> Mode:
    def newton_step(W: Array, g: Array, weights: Array) -> Step:
        L = _factorize(_scaled_covariance(K, W))
        d_weights = _apply_transposed(K, W, L, g - weights)
        return Step(_times(K, d_weights), d_weights)

    deviation = jnp.sqrt(jnp.diagonal(K, axis1=-2, axis2=-1))
    start = jnp.broadcast_to(mean, K.shape[:-1]).astype(K.dtype)
    state = search(entries, start, data, deviation, newton_step)
    W = derivatives(entries, state.f, data).curvature
    L = _factorize(_scaled_covariance(K, W))
    pivots = jnp.square(jnp.diagonal(L, axis1=-2, axis2=-1))
    least = linalg.FEW_ROUNDINGS * jnp.finfo(K.dtype).eps * (1.0 + W * deviation**2)
    relative_error = batches.mapped(rounding.relative_rounding, 2)(L)
    warn_of_digits(jnp.any(pivots < least) | jnp.any(relative_error > rounding.FEW_DIGITS))
    works = warn_of_search(state, W, deviation, jnp.all(jnp.isfinite(pivots), axis=-1))
    return Mode(jnp.where(works[..., None], state.f, jnp.nan), state.weights, L)


# The functions below take K, W and L, which has no derivative. With P = (K + W^-1)^-1
# = W^1/2 B^-1 W^1/2 and S = (I + K W)^-1 = I - K P: dP = -P dK P + S' dW S.


def _solve_implicit(K: Array, W: Array, L: Array, change: Array) -> Array:
    """S times a vector, differentiable, in O(n^2)."""

    def product(v: Array) -> Array:
        return v + _times(K, W * v)

    def solve(_: Callable, v: Array) -> Array:
        return _apply(K, W, L, v)

    def transposed_solve(_: Callable, v: Array) -> Array:
        return _apply_transposed(K, W, L, v)

    return jax.lax.custom_linear_solve(product, change, solve, transposed_solve)


# S = I - K P = W^-1 P. The difference suffers from cancellation in informative rows, where it is
# small; the other form divides by zero in uninformative rows.


def _is_informative(K: Array, W: Array) -> Bool[Array, "*batch n"]:
    return W * jnp.diagonal(K, axis1=-2, axis2=-1) > 1.0


def _apply(K: Array, W: Array, L: Array, v: Array) -> Array:
    """S v."""
    informative = _is_informative(K, W)
    Pv = _precision_times(W, L, v)
    return jnp.where(informative, Pv / jnp.where(informative, W, 1.0), v - _times(K, Pv))


def _apply_transposed(K: Array, W: Array, L: Array, v: Array) -> Array:
    """S'v."""
    informative = _is_informative(K, W)
    v_weak, v_informative = jnp.where(informative, 0.0, v), jnp.where(informative, v, 0.0)
    scaled = v_informative / jnp.where(informative, W, 1.0)
    return v_weak + _precision_times(W, L, scaled - _times(K, v_weak))


class _Inverse(NamedTuple):
    precision: Float[Array, "*batch n n"]  # P
    variance: Float[Array, "*batch n"]  # the diagonal of K - K P K


@custom_jvp_all_orders
def _inverse(K: Array, W: Array, L: Array) -> _Inverse:
    root = jnp.sqrt(jnp.maximum(W, 0.0))
    B_inverse = _inverse_from_factor(L)
    P = root[..., :, None] * B_inverse * root[..., None, :]
    # The variance is multiplied by dW, which is zero where W is zero, a minimum of W.
    is_zero = root == 0.0
    diagonal = jnp.diagonal(B_inverse, axis1=-2, axis2=-1)
    variance = jnp.where(is_zero, 0.0, (1.0 - diagonal) / jnp.where(is_zero, 1.0, W))
    return _Inverse(P, variance)


@_inverse.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[_Inverse, _Inverse]:
    (K, W, L), (dK, dW, _) = primals, tangents
    P, _ = inverse = _inverse(K, W, L)
    informative = _is_informative(K, W)[..., :, None]
    difference = jnp.eye(K.shape[-1], dtype=K.dtype) - matmul(K, P)
    S = jnp.where(informative, P / jnp.where(informative, W[..., :, None], 1.0), difference)
    transposed = jnp.swapaxes(S, -1, -2)
    dP = matmul(transposed, dW[..., :, None] * S) - matmul(matmul(P, dK), P)
    covariance = matmul(S, K)
    of_K = jnp.sum(matmul(S, dK) * S, axis=-1)
    of_W = jnp.sum(jnp.square(covariance) * dW[..., None, :], axis=-1)
    return inverse, _Inverse(dP, of_K - of_W)


@custom_jvp_all_orders
def _log_det(K: Array, W: Array, L: Array) -> Array:
    return 2.0 * jnp.sum(jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)), axis=-1)


@_log_det.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    (K, W, L), (dK, dW, _) = primals, tangents
    P, variance = _inverse(K, W, L)
    tangent = jnp.sum(P * dK, axis=(-2, -1)) + jnp.sum(variance * dW, axis=-1)
    return _log_det(K, W, L), tangent


def _precision_times(W: Array, L: Array, v: Array) -> Array:
    root = jnp.sqrt(jnp.maximum(W, 0.0))
    return root * _solve(L, root * v)


def _scaled_covariance(K: Array, W: Array) -> Array:
    """B = I + W^1/2 K W^1/2, with negative entries of W set to zero."""
    root = jnp.sqrt(jnp.maximum(W, 0.0))
    eye = jnp.eye(K.shape[-1], dtype=K.dtype)
    return eye + root[..., :, None] * K * root[..., None, :]


def _times(A: Float[Array, "*batch n n"], v: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    return matmul(A, v[..., None])[..., 0]


_factorize = batches.mapped(linalg.factorize_on_platform, 2)
_factor_given = batches.mapped(linalg.cholesky_given, 2, 2)
_inverse_from_factor = batches.mapped(linalg.inverse_from_factor, 2)
_solve = batches.mapped(lapack.cholesky_solve, 2, 1)
