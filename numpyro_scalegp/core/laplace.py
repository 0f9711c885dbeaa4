"""Laplace's approximation: a function integrated out under any log-concave likelihood.

With f ~ N(m, K), log likelihoods l_i(f_i), their derivatives g and negative second derivatives W,
and f = m + K g at the mode of p(f, y):

    log p(y) ~ sum_i l_i(f_i) - g'(f - m) / 2 - log|I + W K| / 2.

All of it rests on the factor L of B = I + W^1/2 K W^1/2, whose eigenvalues are at least one. The
mode moves with what it depends on, df = (I + K W)^-1 (dK g + dm + K dg): derivatives are exact, of
every order, and none goes through the iterations.

References:
    Rasmussen and Williams (2006), sections 3.4 and 5.5.1, algorithms 3.1 and 5.1.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core import linalg, rounding
from numpyro_scalegp.core.derivatives import lasting_jvp
from numpyro_scalegp.core.float64 import in_float64
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.core.linalg import matmul

_MAX_STEPS = 100
# Shares of a step of Newton's method that are tried, the best of which is taken. From a rate far
# below large counts, a step is too long by as many times as they are larger.
_SHARES = tuple(0.5**power for power in (0, 1, 2, 3, 4, 5, 7, 9, 12, 15, 18, 21, 24))

# Log likelihoods (*batch, n), each of one entry of f, given f and a pytree of arrays.
Entries = Callable[[Array, Any], Array]


class Slopes(NamedTuple):
    """Derivatives of log likelihoods with respect to f."""

    gradient: Float[Array, "*batch n"]  # g
    curvature: Float[Array, "*batch n"]  # W


class Mode(NamedTuple):
    """Where the density of f and y is largest."""

    f: Float[Array, "*batch n"]  # NaN where it was not found
    weights: Float[Array, "*batch n"]  # K^-1 (f - m), which is g with less of its rounding
    tril: Float[Array, "*batch n n"]  # the factor of B there, which carries no derivative


class Sites(NamedTuple):
    """The mode as the mean of a posterior given observations of f with normal noise."""

    f: Float[Array, "*batch n"]
    weights: Float[Array, "*batch n"]  # representer weights, the derivatives g
    precision: Float[Array, "*batch n"]  # of the noise, positive
    tril: Float[Array, "*batch n n"]  # the factor of K + 1 / precision, with its derivative


def log_marginal(
    entries: Entries, K: Float[Array, "*batch n n"], mean: Float[Array, "*batch n"], data: Any
) -> Float[Array, "*batch"]:
    """Laplace's approximation of log p(y).

    Args:
        entries: log likelihoods, given f and `data`.
        K: covariance of f.
        mean: of f.
        data: what `entries` takes besides, y included; all of it may be differentiated.

    Returns:
        The approximation. NaN, with a warning, where there is no mode, or the likelihood is not
        log-concave at it. Time O(n^3) for each of some five to ten steps, memory O(n^2).
    """
    f, weights, L = find_mode(entries, K, mean, data)
    W = slopes(entries, f, data).curvature
    return _log_joint(entries, K, mean, data, f, weights) - 0.5 * _log_det(K, W, L)


def normal_sites(
    entries: Entries, K: Float[Array, "*batch n n"], mean: Float[Array, "*batch n"], data: Any
) -> Sites:
    """The normal approximation around the mode; arguments and costs as of `log_marginal`.

    Rows that say nothing, of no curvature, have noise that is large beyond rounding.
    """
    f, weights, L = find_mode(entries, K, mean, data)
    W = slopes(entries, f, data).curvature
    least = jnp.finfo(K.dtype).eps ** 2 / jnp.diagonal(K, axis1=-2, axis2=-1)
    W = jnp.maximum(W, least)
    L = _factor_given(_unit(K, W), L)
    return Sites(f, weights, W, L / jnp.sqrt(W)[..., None])


def slopes(entries: Entries, f: Float[Array, "*batch n"], data: Any) -> Slopes:
    """First and negative second derivatives of log likelihoods with respect to f."""
    gradient = jax.grad(lambda f: jnp.sum(entries(f, data)))
    g, change = jax.jvp(gradient, (f,), (jnp.ones_like(f),))
    return Slopes(g, -change)


def find_mode(
    entries: Entries, K: Float[Array, "*batch n n"], mean: Float[Array, "*batch n"], data: Any
) -> Mode:
    """The mode of p(f, y), by Newton's method with a search along each step.

    Arguments and costs as of `log_marginal`; with derivatives of every order.
    """
    find = lasting_jvp(lambda K, mean, data: _iterate(entries, K, mean, data))

    @find.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Mode, Mode]:
        (K, mean, data), (dK, dmean, ddata) = primals, tangents
        f, weights, L = mode = find(K, mean, data)
        W = slopes(entries, f, data).curvature
        _, dg = jax.jvp(lambda data: slopes(entries, f, data).gradient, (data,), (ddata,))
        df = _solve_motion(K, W, L, _times(dK, weights) + dmean + _times(K, dg))
        return mode, Mode(df, dg - W * df, jnp.zeros_like(L))

    return find(K, mean, data)


def _log_joint(
    entries: Entries, K: Array, mean: Array, data: Any, f: Array, weights: Array
) -> Array:
    """sum_i l_i(f_i) - (f - m)'K^-1 (f - m) / 2 at the mode.

    There it does not change with f: leaving that out of the derivative leaves out differences of
    large terms.
    """

    def joint(K: Array, mean: Array, data: Any, f: Array, weights: Array) -> Array:
        # With f that belongs to the rounded weights, errors of these are of second order.
        change = jnp.where(jnp.isnan(f), jnp.nan, _times(K, weights))
        return jnp.sum(entries(mean + change, data) - 0.5 * weights * change, axis=-1)

    # Log likelihoods of large counts are differences of far larger terms.
    value = lasting_jvp(lambda *arguments: in_float64(joint, *arguments))

    @value.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        (_, _, data, f, weights), (dK, dmean, ddata, _, _) = primals, tangents
        _, of_data = jax.jvp(lambda data: entries(f, data), (data,), (ddata,))
        tangent = of_data + weights * (0.5 * _times(dK, weights) + dmean)
        return value(*primals), jnp.sum(tangent, axis=-1)

    return value(K, mean, data, f, weights)


class _State(NamedTuple):
    f: Float[Array, "*batch n"]
    weights: Float[Array, "*batch n"]  # K^-1 (f - m)
    is_done: Bool[Array, "*batch"]
    num_steps: Array


def _iterate(entries: Entries, K: Array, mean: Array, data: Any) -> Mode:
    deviation = jnp.sqrt(jnp.diagonal(K, axis1=-2, axis2=-1))
    eps = jnp.finfo(K.dtype).eps
    tolerance = eps**0.5

    def step(state: _State) -> _State:
        f, weights = state.f, state.weights
        g, W = slopes(entries, f, data)
        # K^-1 times the step, from what is left of it: errors of rounding shrink with the steps.
        excess = g - weights
        L = _factorize(_unit(K, W))
        d_weights = _transposed_motion(K, W, L, excess)
        df = _times(K, d_weights)
        # A full step of this size leaves an error of about its square, or one of rounding.
        least = jnp.maximum(tolerance * deviation, 10.0 * eps * jnp.abs(f))
        is_small = jnp.all(jnp.abs(df) <= least, axis=-1)
        share = jnp.where(is_small, 1.0, _share_of_step(entries, data, state, df, d_weights))
        share = share[..., None]
        keep = state.is_done[..., None]
        return _State(
            jnp.where(keep, f, f + share * df),
            jnp.where(keep, weights, weights + share * d_weights),
            state.is_done | is_small,
            state.num_steps + 1,
        )

    def goes_on(state: _State) -> Array:
        may_find = jnp.all(jnp.isfinite(state.f), axis=-1) & ~state.is_done
        return jnp.any(may_find) & (state.num_steps < _MAX_STEPS)

    start = jnp.broadcast_to(mean, K.shape[:-1]).astype(K.dtype)
    no_batch = jnp.zeros(K.shape[:-2], bool)
    state = _State(start, jnp.zeros_like(start), no_batch, jnp.zeros((), jnp.int32))
    state = jax.lax.while_loop(goes_on, step, state)

    W = slopes(entries, state.f, data).curvature
    L = _factorize(_unit(K, W))
    is_concave = jnp.all(W * deviation**2 >= -tolerance, axis=-1)
    is_finite = jnp.all(jnp.isfinite(jnp.diagonal(L, axis1=-2, axis2=-1)), axis=-1)
    pivots = jnp.square(jnp.diagonal(L, axis1=-2, axis2=-1))
    has_few = jnp.any(pivots < linalg.FEW_ROUNDINGS * eps * (1.0 + W * deviation**2))
    lost = jnp.vectorize(rounding.relative_rounding, signature="(n,n)->()")(L)
    call_where(has_few | jnp.any(lost > rounding.FEW_DIGITS), _warn_of_digits)
    call_where(jnp.any(state.is_done & is_finite & ~is_concave), _warn_of_curvature)
    call_where(jnp.any(~is_finite), _warn_of_what_is_not_finite)
    call_where(jnp.any(~state.is_done & is_finite), _warn_of_failure)
    works = state.is_done & is_concave & is_finite
    return Mode(jnp.where(works[..., None], state.f, jnp.nan), state.weights, L)


def _share_of_step(
    entries: Entries, data: Any, state: _State, df: Array, d_weights: Array
) -> Float[Array, "*batch"]:
    """The share of a step of Newton's method at the end of which p(f, y) is largest.

    By the slope along the step, integrated by the trapezoidal rule: values of p(f, y) are
    differences of large terms, whose rounding can be larger than all that the step gains.
    """
    shares = jnp.array([0.0, *_SHARES[::-1]], df.dtype)

    def along(share: Array) -> Array:
        f = state.f + share * df
        values, g = jax.vjp(lambda f: jnp.sum(entries(f, data), axis=-1), f)
        g = g(jnp.ones_like(values))[0]
        slope = jnp.sum((g - state.weights - share * d_weights) * df, axis=-1)
        return jnp.where(jnp.isfinite(values) & jnp.isfinite(slope), slope, -jnp.inf)

    slopes_along = jax.vmap(along)(shares)
    widths = jnp.diff(shares).reshape(-1, *[1] * (slopes_along.ndim - 1))
    gains = jnp.cumsum(0.5 * widths * (slopes_along[1:] + slopes_along[:-1]), axis=0)
    return shares[1:][jnp.argmax(gains, axis=0)]


def _warn_of_curvature() -> None:
    warnings.warn(
        "Laplace's approximation needs a likelihood whose logarithm is concave in the function, "
        "and at the mode this one is not: the result is NaN. For heavy tails, such as those of "
        "`StudentT`, take `sgp.LatentGP` with `sgp.guides.AutoSparseGP`, or under NUTS.",
        RuntimeWarning,
        stacklevel=1,
    )


def _warn_of_digits() -> None:
    warnings.warn(
        "observations say so much more of the function than its prior that Laplace's approximation "
        "has few digits left in this precision. Work in float64, unless a sampler that warms up "
        "only tried it.",
        RuntimeWarning,
        stacklevel=1,
    )


def _warn_of_failure() -> None:
    warnings.warn(
        f"Laplace's approximation found no mode in {_MAX_STEPS} steps: the result is NaN. Work in "
        "float64; if it stays, the likelihood's logarithm may not be concave in the function, or "
        "not smooth. A sampler that warms up may try hyperparameters for which this is so: it "
        "rejects them, and there is nothing to mend.",
        RuntimeWarning,
        stacklevel=1,
    )


def _warn_of_what_is_not_finite() -> None:
    warnings.warn(
        "Laplace's approximation found no mode, since it met what is not finite: the result is "
        "NaN. Check y against the likelihood's support, and the inputs and what the likelihood "
        "holds for NaN. A sampler that warms up may try hyperparameters for which this is so: it "
        "rejects them, and there is nothing to mend.",
        RuntimeWarning,
        stacklevel=1,
    )


# The functions below take K, W and, carrying no derivative, L. With P = (K + W^-1)^-1, which is
# W^1/2 B^-1 W^1/2, and S = (I + K W)^-1 = I - K P: dP = -P dK P + S' dW S.


def _solve_motion(K: Array, W: Array, L: Array, change: Array) -> Array:
    """S times a vector, in O(n^2)."""

    def product(v: Array) -> Array:
        return v + _times(K, W * v)

    def solve(_: Callable, v: Array) -> Array:
        return _motion(K, W, L, v)

    def transposed_solve(_: Callable, v: Array) -> Array:
        return _transposed_motion(K, W, L, v)

    return jax.lax.custom_linear_solve(product, change, solve, transposed_solve)


# S = I - K P = W^-1 P. The difference loses its digits in rows that say much of the function, where
# it is small, and the other form divides by zero in rows that say nothing.


def _says_much(K: Array, W: Array) -> Bool[Array, "*batch n"]:
    return W * jnp.diagonal(K, axis1=-2, axis2=-1) > 1.0


def _motion(K: Array, W: Array, L: Array, v: Array) -> Array:
    """S v."""
    says_much = _says_much(K, W)
    Pv = _precision_times(W, L, v)
    return jnp.where(says_much, Pv / jnp.where(says_much, W, 1.0), v - _times(K, Pv))


def _transposed_motion(K: Array, W: Array, L: Array, v: Array) -> Array:
    """S'v."""
    says_much = _says_much(K, W)
    few, much = jnp.where(says_much, 0.0, v), jnp.where(says_much, v, 0.0)
    return few + _precision_times(W, L, much / jnp.where(says_much, W, 1.0) - _times(K, few))


class _Inverse(NamedTuple):
    precision: Float[Array, "*batch n n"]  # P
    variance: Float[Array, "*batch n"]  # the diagonal of K - K P K


@lasting_jvp
def _inverse(K: Array, W: Array, L: Array) -> _Inverse:
    root = jnp.sqrt(jnp.maximum(W, 0.0))
    B_inverse = _inverse_from_factor(L)
    P = root[..., :, None] * B_inverse * root[..., None, :]
    # Where W is zero it is a minimum of W, whose derivative the variance is multiplied with.
    is_zero = root == 0.0
    diagonal = jnp.diagonal(B_inverse, axis1=-2, axis2=-1)
    variance = jnp.where(is_zero, 0.0, (1.0 - diagonal) / jnp.where(is_zero, 1.0, W))
    return _Inverse(P, variance)


@_inverse.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[_Inverse, _Inverse]:
    (K, W, L), (dK, dW, _) = primals, tangents
    P, _ = found = _inverse(K, W, L)
    says_much = _says_much(K, W)[..., :, None]
    difference = jnp.eye(K.shape[-1], dtype=K.dtype) - matmul(K, P)
    S = jnp.where(says_much, P / jnp.where(says_much, W[..., :, None], 1.0), difference)
    transposed = jnp.swapaxes(S, -1, -2)
    dP = matmul(transposed, dW[..., :, None] * S) - matmul(matmul(P, dK), P)
    covariance = matmul(S, K)
    of_K = jnp.sum(matmul(S, dK) * S, axis=-1)
    of_W = jnp.sum(jnp.square(covariance) * dW[..., None, :], axis=-1)
    return found, _Inverse(dP, of_K - of_W)


@lasting_jvp
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


def _unit(K: Array, W: Array) -> Array:
    """B = I + W^1/2 K W^1/2, where W is negative as if it were zero."""
    root = jnp.sqrt(jnp.maximum(W, 0.0))
    eye = jnp.eye(K.shape[-1], dtype=K.dtype)
    return eye + root[..., :, None] * K * root[..., None, :]


def _times(A: Float[Array, "*batch n n"], v: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    return matmul(A, v[..., None])[..., 0]


_factorize = jnp.vectorize(linalg.factorize_on_platform, signature="(n,n)->(n,n)")
_factor_given = jnp.vectorize(linalg.cholesky_given, signature="(n,n),(n,n)->(n,n)")
_inverse_from_factor = jnp.vectorize(linalg.inverse_from_factor, signature="(n,n)->(n,n)")
_solve = jnp.vectorize(lambda L, v: cho_solve((L, True), v), signature="(n,n),(n)->(n)")
