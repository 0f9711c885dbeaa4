"""The rows of a Gaussian process in the order of time, with the form of its kernel."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.state_space import AbstractStateSpace, array

# Warn where a truncated form lacks more than this share of the prior variance.
_MOST_MISSING = 0.01
# Warn where the resolution of a time exceeds this fraction of the mean gap between times.
_COARSE = 0.05
# The same for times without a gap between them.
_COLLAPSED = 1e-5


def form_in(kernel: AbstractKernel, num_harmonics: int, dtype: Any) -> AbstractStateSpace:
    """The state-space form of a kernel, in a dtype."""
    form = kernel.state_space(num_harmonics=num_harmonics)
    arrays, static = eqx.partition(form, eqx.is_inexact_array)
    return eqx.combine(jax.tree.map(lambda leaf: leaf.astype(dtype), arrays), static)


def form_of(
    kernel: AbstractKernel, X: Float[Array, "n d"], num_harmonics: int
) -> tuple[AbstractStateSpace, int]:
    """The state-space form of a kernel, in the dtype of the results, and the column of times."""
    form = form_in(kernel, num_harmonics, kernel_dtype(kernel, X))
    column = form.time_column(X.shape[1])
    if column is None:
        raise ValueError(
            "the kernel does not depend on the time: multiply `Coregion` by a kernel of time, as "
            "in `Matern32(1.0).on((0,)) * Coregion(W, diag).on((1,))`."
        )
    return form, column


class Series(eqx.Module):
    """The rows of a Gaussian process in the order of time."""

    form: AbstractStateSpace
    times: Float[Array, "*batch n"]
    order: Int[Array, "*batch n"]  # the row at each of these times
    varying_h: Float[Array, "..."] | None = None
    known_h: tuple[float, ...] | None = eqx.field(static=True, default=None)

    @classmethod
    def of(
        cls,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        num_harmonics: int,
        dtype: jnp.dtype | None = None,
    ) -> "Series":
        """The series of one kernel at the rows of X, in the dtype of the kernel's values."""
        form, column = form_of(kernel, X, num_harmonics)
        dtype = kernel_dtype(kernel, X) if dtype is None else dtype
        order = order_of(X[:, column])
        times = X[order, column].astype(dtype)
        check_times(form, kernel, X, times)
        return cls.of_sorted(form, X, times, order)

    @classmethod
    def of_sorted(
        cls,
        form: AbstractStateSpace,
        X: Float[Array, "n d"],
        times: Float[Array, " n"],
        order: Int[Array, " n"],
    ) -> "Series":
        """The series of rows whose order is known."""
        if not form.has_equal_observations:
            return cls(form, times, order, form.observation(X[order]).astype(times.dtype))
        with jax.ensure_compile_time_eval():
            h = form.observation(jnp.zeros((1, X.shape[1]), X.dtype)).astype(times.dtype)[0]
        if checks.is_concrete(h):
            return cls(form, times, order, known_h=tuple(np.asarray(h).tolist()))
        return cls(form, times, order, h)

    @property
    def h(self) -> Any:
        """The vectors h of the rows, shape (n, s), or (s,) if they are equal.

        In NumPy if they are known: then products with zero are left out.
        """
        if self.known_h is None:
            return self.varying_h
        return np.asarray(self.known_h, self.times.dtype)

    def in_order(self, values: Float[ArrayLike, "..."]) -> Float[Array, " n"]:
        """Values of all rows, or one for all rows, in the order of time."""
        values = jnp.asarray(values, self.times.dtype)
        return values[self.order] if values.ndim else jnp.broadcast_to(values, self.times.shape)

    def by_row(self, values: Float[Array, "*draws n"]) -> Float[Array, "*draws n"]:
        """Values in the order of time, in the order of the rows."""
        return jnp.zeros_like(values).at[..., self.order].set(values)


def check_times(
    form: AbstractStateSpace,
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    times: Float[Array, " n"],
) -> None:
    """Warn of sorted times that this precision cannot tell apart, and of truncated series."""
    call_where(_is_coarse(times), _warn_of_coarse_times)
    missing = missing_variance(form, kernel, X[:1])
    call_where(missing > _MOST_MISSING, _warn_of_missing_variance)


def kernel_dtype(kernel: AbstractKernel, X: Float[Array, "n d"]) -> jnp.dtype:
    """The dtype of a kernel's values."""
    return jax.eval_shape(lambda k, x: k.evaluate_diag(x), kernel, X[:1]).dtype


def num_until(times: Float[Array, " n"], new: Float[Array, " m"]) -> Int[Array, " m"]:
    """How many of the sorted times are at or before each new time, in O(m log n).

    By bisection, in half the time of `jnp.searchsorted`.
    """
    n = times.shape[0]
    num_steps = n.bit_length()

    def step(i: Array, num: Int[Array, " m"]) -> Int[Array, " m"]:
        larger = num + (1 << (num_steps - 1 - i))
        is_until = (larger <= n) & (times[jnp.minimum(larger, n) - 1] <= new)
        return jnp.where(is_until, larger, num)

    return jax.lax.fori_loop(0, num_steps, step, jnp.zeros(new.shape, jnp.int32))


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
    resolution = jnp.finfo(times.dtype).eps * size
    # Without a gap the times are equal, or have collapsed.
    least = jnp.where(gap > 0.0, _COARSE * gap, _COLLAPSED)
    return (times.size > 1) & (resolution > least)


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
