"""The search for the mode of p(f, y) under any log-concave likelihood."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.numerics import rounding

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


class Sites(NamedTuple):
    """The mode as the mean of a posterior given pseudo-observations of f with normal noise."""

    f: Float[Array, "*batch n"]
    weights: Float[Array, "*batch n"]  # representer weights, the derivatives g
    precision: Float[Array, "*batch n"]  # of the noise, positive
    tril: Float[Array, "*batch n n"] | None = None  # the factor of K + 1 / precision, if dense


class Step(NamedTuple):
    """A step of f and of its weights."""

    f: Float[Array, "*batch n"]
    weights: Float[Array, "*batch k"]


class State(NamedTuple):
    """A state of the search."""

    f: Float[Array, "*batch n"]
    weights: Float[Array, "*batch k"]  # K^-1 (f - m), or v with f = m + L v and K = L L'
    is_done: Bool[Array, "*batch"]
    num_steps: Array


def search(
    entries: Entries,
    start: Float[Array, "*batch n"],
    data: Any,
    deviation: Float[Array, "*batch n"],
    newton_step: Callable[[Array, Array, Array], Step],
    white: Float[Array, "*batch k"] | None = None,
) -> State:
    """Search for the mode of p(f, y) from the prior mean, by Newton's method with a line search.

    Args:
        entries: log likelihoods, given f and `data`.
        start: the prior mean of f.
        data: further argument of `entries`.
        deviation: prior standard deviations of f.
        newton_step: maps W, g and the weights to the step (K^-1 + W)^-1 (g - K^-1 (f - m)) of f,
            and to the step of the weights. Negative entries of W count as zero.
        white: zeros of the shape of v, if the weights are v with f = m + L v and K = L L'; None if
            they are K^-1 (f - m).
    """
    eps = jnp.finfo(start.dtype).eps

    def step(state: State) -> State:
        f, weights = state.f, state.weights
        g, W = derivatives(entries, f, data)
        # The step is computed from the gradient that remains, so that rounding errors decrease with
        # the steps.
        newton = newton_step(W, g, weights)
        df = newton.f
        # After a full step of this size, the error is about its square, or rounding error.
        smallest = jnp.maximum(eps**0.5 * deviation, 10.0 * eps * jnp.abs(f))
        is_small = jnp.all(jnp.abs(df) <= smallest, axis=-1)
        step_size = jnp.where(
            is_small, 1.0, _line_search(entries, data, state, newton, white is not None)
        )
        step_size = step_size[..., None]
        is_done = state.is_done[..., None]
        return State(
            jnp.where(is_done, f, f + step_size * df),
            jnp.where(is_done, weights, weights + step_size * newton.weights),
            state.is_done | is_small,
            state.num_steps + 1,
        )

    def should_continue(state: State) -> Array:
        may_succeed = jnp.all(jnp.isfinite(state.f), axis=-1) & ~state.is_done
        return jnp.any(may_succeed) & (state.num_steps < _MAX_STEPS)

    is_done, zero = jnp.zeros(start.shape[:-1], bool), jnp.zeros((), jnp.int32)
    first = State(start, jnp.zeros_like(start) if white is None else white, is_done, zero)
    return jax.lax.while_loop(should_continue, step, first)


def warn_of_search(
    state: State,
    W: Float[Array, "*batch n"],
    deviation: Float[Array, "*batch n"],
    is_finite: Bool[Array, "*batch"],
) -> Bool[Array, "*batch"]:
    """Whether a search found a mode, with a warning for each reason to doubt it.

    Args:
        state: the end of the search.
        W: negative second derivatives of the log likelihoods there.
        deviation: prior standard deviations of f.
        is_finite: whether the factorization at W has no NaN.
    """
    tolerance = jnp.finfo(W.dtype).eps ** 0.5
    is_concave = jnp.all(W * deviation**2 >= -tolerance, axis=-1)
    call_where(jnp.any(state.is_done & is_finite & ~is_concave), _warn_of_curvature)
    call_where(jnp.any(~is_finite), _warn_of_nonfinite)
    call_where(jnp.any(~state.is_done & is_finite), _warn_of_failure)
    return state.is_done & is_concave & is_finite


def warn_of_digits(few_digits: Bool[Array, ""]) -> None:
    """Warn if the factorization at the mode has few digits."""
    call_where(few_digits, _warn_of_digits)


def at_least_tiny(
    W: Float[Array, "*batch n"], variance: Float[Array, "*batch n"]
) -> Float[Array, "*batch n"]:
    """W, but in uninformative rows so little that its effect is below rounding."""
    positive = jnp.where(variance > 0.0, variance, 1.0)
    return rounding.at_least(W, jnp.finfo(W.dtype).eps ** 2 / positive)


def _line_search(
    entries: Entries, data: Any, state: State, step: Step, is_white: bool
) -> Float[Array, "*batch"]:
    """The fraction of a Newton step with the largest p(f, y).

    It integrates the derivative along the step by the trapezoidal rule. Values of p(f, y) itself
    are differences of large terms, whose rounding errors can exceed the improvement.
    """
    df = step.f
    step_sizes = jnp.array([0.0, *_STEP_SIZES[::-1]], df.dtype)

    def derivative(step_size: Array) -> Array:
        f = state.f + step_size * df
        values, pullback = jax.vjp(lambda f: jnp.sum(entries(f, data), axis=-1), f)
        g = pullback(jnp.ones_like(values))[0]
        weights = state.weights + step_size * step.weights
        if is_white:
            value = jnp.sum(g * df, axis=-1) - jnp.sum(weights * step.weights, axis=-1)
        else:
            value = jnp.sum((g - weights) * df, axis=-1)
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


def derivatives(entries: Entries, f: Float[Array, "*batch n"], data: Any) -> Derivatives:
    """First and negative second derivatives of log likelihoods with respect to f."""
    gradient = jax.grad(lambda f: jnp.sum(entries(f, data)))
    g, second = jax.jvp(gradient, (f,), (jnp.ones_like(f),))
    return Derivatives(g, -second)
