"""The rows of a Gaussian process in the order of time, with the form of its kernel."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.state_space import AbstractStateSpace, array
from numpyro_scalegp.linear.operator import KernelOperator

# Warn where a truncated form lacks more than this share of the prior variance.
_MOST_MISSING = 0.01
# Warn where the resolution of a time exceeds this fraction of the mean gap between times.
_COARSE = 0.05


def form_of(
    kernel: AbstractKernel, X: Float[Array, "n d"], num_harmonics: int
) -> tuple[AbstractStateSpace, int]:
    """The state-space form of a kernel, in the dtype of the results, and the column of times."""
    form = kernel.state_space(num_harmonics=num_harmonics)
    dtype = jax.eval_shape(lambda k, x: k.evaluate_diag(x), kernel, X[:1]).dtype
    arrays, static = eqx.partition(form, eqx.is_inexact_array)
    form = eqx.combine(jax.tree.map(lambda leaf: leaf.astype(dtype), arrays), static)
    return form, form.time_column(X.shape[1])


def in_order(
    form: AbstractStateSpace, column: int, operator: KernelOperator, values: Float[Array, " n"]
) -> tuple[Int[Array, " n"], Array, Array, Array, Any]:
    """The order of the rows in time, and times, values, noise and vectors h in this order."""
    X, dtype = operator.X, operator.dtype
    order = order_of(X[:, column])
    times = X[order, column].astype(dtype)
    call_where(_is_coarse(times), _warn_of_coarse_times)
    missing = missing_variance(form, operator.kernel, X[:1])
    call_where(missing > _MOST_MISSING, _warn_of_missing_variance)
    noise = operator.noise()
    noise = noise if operator.noise_variance.ndim == 0 else noise[order]
    return order, times, values[order], noise, vectors(form, X[order], dtype)


def vectors(form: AbstractStateSpace, X: Float[Array, "n d"], dtype: jnp.dtype) -> Any:
    """The vectors h of rows, shape (n, s), or (s,) if they are equal; known ones in NumPy."""
    if not form.has_equal_observations:
        return form.observation(X).astype(dtype)
    with jax.ensure_compile_time_eval():
        h = form.observation(jnp.zeros((1, X.shape[1]), X.dtype)).astype(dtype)
    return np.asarray(h)[0] if checks.is_concrete(h) else h[0]


def order_of(times: Float[Array, " n"]) -> Int[Array, " n"]:
    """The order in which times ascend, at little cost if they do already."""
    if checks.is_concrete(times):
        with jax.ensure_compile_time_eval():
            return jnp.asarray(np.argsort(np.asarray(times), kind="stable"))

    def ascending(times: Array) -> Array:
        return jnp.arange(times.size)

    is_sorted = jnp.all(times[1:] >= times[:-1])
    return jax.lax.cond(is_sorted, ascending, jnp.argsort, times)


def _is_coarse(times: Float[Array, " n"]) -> Bool[Array, ""]:
    """Whether rounding moves times by a part of the gaps between them."""
    times = jax.lax.stop_gradient(times)
    size = jnp.maximum(jnp.abs(times[0]), jnp.abs(times[-1]))
    gap = (times[-1] - times[0]) / times.size
    return (times.size > 1) & (jnp.finfo(times.dtype).eps * size > _COARSE * gap)


def missing_variance(
    form: AbstractStateSpace, kernel: AbstractKernel, X: Float[Array, "one d"]
) -> Float[Array, ""]:
    """The share of the prior variance at a row that the form of a truncated series lacks."""
    form, kernel, X = jax.lax.stop_gradient((form, kernel, X))
    h, total, start = form.observation(X)[0], jnp.zeros((), X.dtype), 0
    for block in form.covariance(X[0, form.time_column(X.shape[1])]):
        part = h[start : start + len(block)]
        total = total + jnp.sum(part[:, None] * array(block) * part)
        start += len(block)
    variance = kernel.evaluate_diag(X)[0]
    return jnp.where(variance > 0.0, 1.0 - total / jnp.where(variance > 0.0, variance, 1.0), 0.0)


def _warn_of_missing_variance() -> None:
    warnings.warn(
        "the Fourier series of a periodic kernel lacks more than a hundredth of the prior "
        "variance: raise `num_harmonics` of `sgp.estimators.StateSpace`, or the lengthscale.",
        RuntimeWarning,
        stacklevel=1,
    )


def _warn_of_coarse_times() -> None:
    warnings.warn(
        "the times of the rows are so large that this precision cannot tell their distances: "
        "subtract the first time before they become an array, or work in float64 "
        "(numpyro.enable_x64()).",
        RuntimeWarning,
        stacklevel=1,
    )
