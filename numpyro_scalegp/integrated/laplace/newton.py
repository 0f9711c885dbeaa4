"""Laplace's approximation: a function integrated out under any log-concave likelihood.

With f ~ N(m, K), log likelihoods l_i(f_i), their derivatives g and negative second derivatives W,
and f = m + K g at the mode of p(f, y):

    log p(y) ~ sum_i l_i(f_i) - g'(f - m) / 2 - log|I + W K| / 2.

The computations use the factor L of B = I + W^1/2 K W^1/2, whose eigenvalues are at least one. The
derivative of the mode is df = (I + K W)^-1 (dK g + dm + K dg), by the implicit function theorem:
derivatives are exact, of every order, and do not go through the iterations.

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

from numpyro_scalegp.core import batches
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.numerics import linalg, rounding
from numpyro_scalegp.numerics.derivatives import custom_jvp_all_orders
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.float64 import in_float64

_MAX_STEPS = 100
# Fractions of a Newton step to try. If the initial rate is far below large counts, a full step is
# too long by the ratio of the counts and the rate.
_STEP_SIZES = tuple(0.5**power for power in (0, 1, 2, 3, 4, 5, 7, 9, 12, 15, 18, 21, 24))

# Log likelihoods (*batch, n), each of one entry of f, given f and a pytree of arrays.
Entries = Callable[[Array, Any], Array]


class Derivatives(NamedTuple):
    """Derivatives of log likelihoods with respect to f."""

    gradient: Float[Array, "*batch n"]  # g
    curvature: Float[Array, "*batch n"]  # W


class Mode(NamedTuple):
    """The mode of the density of f and y."""

    f: Float[Array, "*batch n"]  # NaN if the search failed
    weights: Float[Array, "*batch n"]  # K^-1 (f - m), equal to g but with less rounding error
    tril: Float[Array, "*batch n n"]  # the factor of B, without a derivative


class Sites(NamedTuple):
    """The mode as the mean of a posterior given pseudo-observations of f with normal noise."""

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
    smallest = jnp.finfo(K.dtype).eps ** 2 / jnp.diagonal(K, axis1=-2, axis2=-1)
    W = jnp.maximum(W, smallest)
    L = _factor_given(_scaled_covariance(K, W), L)
    return Sites(f, weights, W, L / jnp.sqrt(W)[..., None])


def derivatives(entries: Entries, f: Float[Array, "*batch n"], data: Any) -> Derivatives:
    """First and negative second derivatives of log likelihoods with respect to f."""
    gradient = jax.grad(lambda f: jnp.sum(entries(f, data)))
    g, second = jax.jvp(gradient, (f,), (jnp.ones_like(f),))
    return Derivatives(g, -second)


def find_mode(
    entries: Entries, K: Float[Array, "*batch n n"], mean: Float[Array, "*batch n"], data: Any
) -> Mode:
    """The mode of p(f, y), by Newton's method with a line search, with derivatives of every order.

    See `log_marginal` for arguments and costs.
    """
    find = custom_jvp_all_orders(lambda K, mean, data: _iterate(entries, K, mean, data))

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
        g, W = derivatives(entries, f, data)
        # K^-1 times the step. It is computed from the gradient that remains, so that rounding
        # errors decrease with the steps.
        remaining = g - weights
        L = _factorize(_scaled_covariance(K, W))
        d_weights = _apply_transposed(K, W, L, remaining)
        df = _times(K, d_weights)
        # After a full step of this size, the error is about its square, or rounding error.
        smallest = jnp.maximum(tolerance * deviation, 10.0 * eps * jnp.abs(f))
        is_small = jnp.all(jnp.abs(df) <= smallest, axis=-1)
        step_size = jnp.where(is_small, 1.0, _line_search(entries, data, state, df, d_weights))
        step_size = step_size[..., None]
        is_done = state.is_done[..., None]
        return _State(
            jnp.where(is_done, f, f + step_size * df),
            jnp.where(is_done, weights, weights + step_size * d_weights),
            state.is_done | is_small,
            state.num_steps + 1,
        )

    def should_continue(state: _State) -> Array:
        may_succeed = jnp.all(jnp.isfinite(state.f), axis=-1) & ~state.is_done
        return jnp.any(may_succeed) & (state.num_steps < _MAX_STEPS)

    start = jnp.broadcast_to(mean, K.shape[:-1]).astype(K.dtype)
    is_done = jnp.zeros(K.shape[:-2], bool)
    state = _State(start, jnp.zeros_like(start), is_done, jnp.zeros((), jnp.int32))
    state = jax.lax.while_loop(should_continue, step, state)

    W = derivatives(entries, state.f, data).curvature
    L = _factorize(_scaled_covariance(K, W))
    is_concave = jnp.all(W * deviation**2 >= -tolerance, axis=-1)
    is_finite = jnp.all(jnp.isfinite(jnp.diagonal(L, axis1=-2, axis2=-1)), axis=-1)
    pivots = jnp.square(jnp.diagonal(L, axis1=-2, axis2=-1))
    has_small_pivot = jnp.any(pivots < linalg.FEW_ROUNDINGS * eps * (1.0 + W * deviation**2))
    relative_error = batches.mapped(rounding.relative_rounding, 2)(L)
    has_few_digits = has_small_pivot | jnp.any(relative_error > rounding.FEW_DIGITS)
    call_where(has_few_digits, _warn_of_digits)
    call_where(jnp.any(state.is_done & is_finite & ~is_concave), _warn_of_curvature)
    call_where(jnp.any(~is_finite), _warn_of_nonfinite)
    call_where(jnp.any(~state.is_done & is_finite), _warn_of_failure)
    works = state.is_done & is_concave & is_finite
    return Mode(jnp.where(works[..., None], state.f, jnp.nan), state.weights, L)


def _line_search(
    entries: Entries, data: Any, state: _State, df: Array, d_weights: Array
) -> Float[Array, "*batch"]:
    """The fraction of a Newton step with the largest p(f, y).

    It integrates the derivative along the step by the trapezoidal rule. Values of p(f, y) itself
    are differences of large terms, whose rounding errors can exceed the improvement.
    """
    step_sizes = jnp.array([0.0, *_STEP_SIZES[::-1]], df.dtype)

    def derivative(step_size: Array) -> Array:
        f = state.f + step_size * df
        values, pullback = jax.vjp(lambda f: jnp.sum(entries(f, data), axis=-1), f)
        g = pullback(jnp.ones_like(values))[0]
        value = jnp.sum((g - state.weights - step_size * d_weights) * df, axis=-1)
        return jnp.where(jnp.isfinite(values) & jnp.isfinite(value), value, -jnp.inf)

    along_step = jax.vmap(derivative)(step_sizes)
    widths = jnp.diff(step_sizes).reshape(-1, *[1] * (along_step.ndim - 1))
    gains = jnp.cumsum(0.5 * widths * (along_step[1:] + along_step[:-1]), axis=0)
    return step_sizes[1:][jnp.argmax(gains, axis=0)]


def _warn_of_curvature() -> None:
    warnings.warn(
        "Laplace's approximation needs a log-concave likelihood, but this likelihood is not "
        "log-concave at the mode: the result is NaN. For heavy-tailed likelihoods such as "
        "`StudentT`, use `sgp.LatentGP` with `sgp.guides.AutoSparseGP`, or under NUTS.",
        RuntimeWarning,
        stacklevel=1,
    )


def _warn_of_digits() -> None:
    warnings.warn(
        "observations are so much more informative about the function than its prior that "
        "Laplace's approximation has few digits left in this precision. Work in float64; in the "
        "warmup of a sampler, no action is needed.",
        RuntimeWarning,
        stacklevel=1,
    )


def _warn_of_failure() -> None:
    warnings.warn(
        f"Laplace's approximation found no mode in {_MAX_STEPS} steps: the result is NaN. Work in "
        "float64. If the warning remains, the likelihood may not be log-concave or not smooth. In "
        "its warmup, a sampler may try such hyperparameters and rejects them: no action is "
        "needed.",
        RuntimeWarning,
        stacklevel=1,
    )


def _warn_of_nonfinite() -> None:
    warnings.warn(
        "Laplace's approximation found no mode, since a value was not finite: the result is NaN. "
        "Check that y lies in the likelihood's support, and check the inputs and the variables "
        "that the likelihood reads for NaN. In its warmup, a sampler may try such hyperparameters "
        "and rejects them: no action is needed.",
        RuntimeWarning,
        stacklevel=1,
    )


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
_solve = batches.mapped(lambda L, v: cho_solve((L, True), v), 2, 1)
