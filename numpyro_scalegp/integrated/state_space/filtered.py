"""The posterior of a function of time from its last observation on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks, chunks
from numpyro_scalegp.integrated.state_space.passes import (
    Moments,
    Passes,
    algebra_of,
    rows_at,
    transition,
)
from numpyro_scalegp.integrated.state_space.rows import Series, form_of, order_of
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.state_space import AbstractStateSpace
from numpyro_scalegp.numerics.rounding import at_least
from numpyro_scalegp.processes.function_samples import AbstractFunctionSamples, zero_function
from numpyro_scalegp.processes.posterior import AbstractPosterior, Inputs
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction, is_of_rows


class FilteredPosterior(AbstractPosterior):
    """The posterior of a function of time from its last observation on, for forecasts.

    It stores the mean and the covariance of the state at the last observation, s and s^2 numbers
    for any number of observations. `update` adds observations at later times in O(s^3) each. Means
    and variances cost O(s^3) for each new time, joint draws and covariances O(m^2 s^2 + m^3).

    Made by `StateSpacePosterior.filtered`; immutable. Times before the last observation raise an
    error; inside `jit` their results are NaN.

    References:
        Kalman (1960), A New Approach to Linear Filtering and Prediction Problems.
    """

    kernel: AbstractKernel
    row: Float[Array, "1 d"]  # inputs of the last observation
    time: Float[Array, ""]
    state_mean: Float[Array, "1 s"]
    state_covariance: Float[Array, "1 p"]  # packed; see `matrices`
    noise_variance: Float[Array, "..."] | None
    mean_function: RowsFunction
    num_harmonics: int = eqx.field(static=True)
    component_kernel: AbstractKernel | None = None  # covariance of a component with f

    @property
    def _num_columns(self) -> int:
        return self.row.shape[1]

    @property
    def _form(self) -> AbstractStateSpace:
        return form_of(self.kernel, self.row, self.num_harmonics)[0]

    def _check(self, Xs: Inputs) -> Any:
        X = super()._check(Xs)
        self._refuse_earlier(self._times_of(X), "Xs")
        return X

    def _refuse_earlier(self, times: Float[Array, " m"], name: str) -> None:
        is_earlier = times < self.time
        if checks.is_concrete(is_earlier) and np.any(np.asarray(is_earlier)):
            raise ValueError(
                f"`{name}` has a time before the last observation, {float(self.time):.6g}: a "
                "filtered posterior looks ahead only. Use the posterior that it is from."
            )

    def _times_of(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        column = form_of(self.kernel, self.row, self.num_harmonics)[1]
        return rows[:, column].astype(self.time.dtype)

    def _readout(self, rows: Float[Array, "r d"]) -> Any:
        """The vectors h of new rows, in lanes."""
        kernel = self.kernel if self.component_kernel is None else self.component_kernel
        form = form_of(kernel, self.row, self.num_harmonics)[0]
        return algebra_of(form).vector(form.observation(rows).astype(self.time.dtype))

    def _state_at(self, rows: Float[Array, "r d"]) -> tuple[Any, Any]:
        """Mean and covariance of the state at new rows, in lanes; NaN for earlier times."""
        ops, times = algebra_of(self._form), self._times_of(rows)
        elapsed = jnp.where(times < self.time, jnp.nan, times - self.time)
        A, Q = transition(self._form, jnp.broadcast_to(self.time, times.shape), elapsed)
        m, P = (
            jnp.broadcast_to(array, (len(rows), array.shape[1]))
            for array in (self.state_mean, self.state_covariance)
        )
        covariance = ops.add(ops.congruence(A, ops.symmetric(P)), Q)
        return ops.times(A, ops.vector(m)), covariance

    def _moments_at(self, rows: Float[Array, "r d"]) -> tuple[Array, Array]:
        ops, h = algebra_of(self._form), self._readout(rows)
        m, P = self._state_at(rows)
        return ops.dot(h, m), at_least(ops.dot(h, ops.times(P, h)), 0.0)

    @compiled
    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        size = chunks.rows_per_chunk(4 * (self._form.size + 1) ** 2)
        size = size if chunk_size is None else chunk_size
        mean, variance = chunks.map_rows(self._moments_at, Xs, size)
        return self.mean_function(Xs) + mean, variance

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[0]

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[1]

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        form, times, h = self._form, self._times_of(Xs), self._readout(Xs)
        ops = algebra_of(form)
        Ph = ops.times(self._state_at(Xs)[1], h)  # of the state with the function, at each time
        vectors = ops.by_row(jax.tree.map(lambda leaf: leaf[None], h))[0]

        def with_later(row: tuple[Array, Array]) -> Float[Array, " m"]:
            time, vector = row
            elapsed = at_least(time - times, 0.0)
            h = ops.vector(jnp.broadcast_to(vector, (len(times), form.size)))
            return ops.dot(h, ops.times(transition(form, times, elapsed)[0], Ph))

        with_earlier = jax.lax.map(with_later, (times, vectors))
        is_earlier = times[None, :] <= times[:, None]
        return jnp.where(is_earlier, with_earlier, with_earlier.T)

    @compiled
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        prior = self.kernel.evaluate_diag(Xs).astype(self.time.dtype)
        mean = self._mean(Xs, None)
        return self._joint_sample(key, mean, self._covariance(Xs), prior, num_samples)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        raise ValueError(
            "a `FilteredPosterior` has no `sample_functions`: call `sample` with all inputs, or "
            "use the posterior that it is from."
        )

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "FilteredPosterior":
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        kernel = self.kernel if self.component_kernel is None else self.component_kernel
        zero = zero_function(self.time.dtype)
        component = kernel.restrict(change)
        return dataclasses.replace(self, component_kernel=component, mean_function=zero)

    def update(
        self,
        X: Float[ArrayLike, "m d"],
        y: Float[ArrayLike, " m"],
        noise_variance: Float[ArrayLike, "..."] | None = None,
    ) -> "FilteredPosterior":
        """The posterior given further observations, at or after the last time.

        Args:
            X: inputs, shape (m, d), in any order.
            y: observations, shape (m,).
            noise_variance: of these observations, shape () or (m,); None for the model's.

        Returns:
            The posterior from the last of these observations on, in O(m s^3). Calls with the same m
            share one compiled program.

        Raises:
            ValueError: if shapes do not fit, a value is NaN or infinite, or a time lies before the
                last observation; if the mean is known at the rows of the fit only, or
                `noise_variance` is None and the model has one for each row; for a component.
        """
        if self.component_kernel is not None:
            raise ValueError("a component has no observations: call `update` on the whole.")
        if is_of_rows(self.mean_function):
            self.mean_function(self.row[:0])  # raises
        X = checks.inputs("X", X, width=self._num_columns)
        y = checks.as_float(y, "y")
        checks.shape("y", y, X.shape[:1], why="one observation for each row of `X`")
        checks.finite("y", y)
        self._refuse_earlier(self._times_of(X), "X")
        noise = self._noise_or_raise() if noise_variance is None else noise_variance
        noise = checks.as_positive(noise, "noise_variance")
        if noise.ndim:
            checks.shape("noise_variance", noise, y.shape, why="one value for each row of `X`")
        return self._updated(X, y, noise)

    @compiled
    def _updated(self, X: Array, y: Array, noise: Array) -> "FilteredPosterior":
        form, all_times = self._form, self._times_of(X)
        ops, dtype = algebra_of(form), self.time.dtype
        order = order_of(all_times)
        times = all_times[order]
        series = Series.of_sorted(form, X, times, order)
        residual = (y - self.mean_function(X)).astype(dtype)
        values, variances = map(series.in_order, (residual, noise))
        rows = rows_at(times, values, variances, series.h)
        # The first row comes after the last observation, not after itself.
        start = rows.start.at[0].set(self.time)
        rows = rows._replace(start=start, elapsed=times - start)
        first = Moments(ops.vector(self.state_mean), ops.pack(ops.symmetric(self.state_covariance)))
        last = Passes(form, rows, first).last()
        state, covariance = (
            ops.by_row(jax.tree.map(lambda leaf: leaf[None], part))[0] for part in last
        )
        is_later = times[0] >= self.time
        return dataclasses.replace(
            self,
            row=X[order[-1:]].astype(self.row.dtype),
            time=times[-1],
            state_mean=jnp.where(is_later, state, jnp.nan),
            state_covariance=covariance,
        )
