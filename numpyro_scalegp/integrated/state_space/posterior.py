"""The posterior of a function of time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.integrated.state_space import recursions, simulation
from numpyro_scalegp.integrated.state_space.filtered import FilteredPosterior
from numpyro_scalegp.integrated.state_space.passes import Smoothed, algebra_of, transition
from numpyro_scalegp.integrated.state_space.rows import (
    Series,
    form_of,
    missing_variance,
    num_until,
    order_of,
)
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.state_space import AbstractStateSpace
from numpyro_scalegp.numerics.rounding import remaining_variance
from numpyro_scalegp.processes.function_samples import (
    AbstractFunctionSamples,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.processes.posterior import AbstractInChunks
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction


class StateSpacePosterior(AbstractInChunks):
    """The posterior f | y of a function of time, exact and in linear time.

    It stores, for each row, what earlier rows say about the state there and what later rows say. A
    new time is filled in from the rows before and after it: moments at m times cost
    O(m (log n + s^3)), whether between the rows, before the first or after the last. Joint draws
    cost O((n + m) s^2) each, `covariance` O(n m s^2).

    Made by `GaussianProcess.condition` with `sgp.estimators.StateSpace`; immutable.

    References:
        de Jong (1989), Smoothing and Interpolation with the State-Space Model.
    """

    kernel: AbstractKernel
    X: Float[Array, "n d"]
    y: Float[Array, " n"]
    noise_variance: Float[Array, "..."] | None
    mean_function: RowsFunction
    times: Float[Array, " n"]  # in ascending order
    order: Int[Array, " n"]  # the row of each of these times
    smoothed: Smoothed
    num_harmonics: int = eqx.field(static=True)
    component_kernel: AbstractKernel | None = None  # covariance of a component with f

    @classmethod
    def of(
        cls,
        series: Series,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        residual: Float[Array, " n"],
        noise_variance: Float[Array, "..."],
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        num_harmonics: int,
    ) -> "StateSpacePosterior":
        """The posterior given observations y, with `residual` = y - m(X)."""
        values, noise = map(series.in_order, (residual, noise_variance))
        return cls(
            kernel=kernel,
            X=X,
            y=y,
            noise_variance=noise_variance,
            mean_function=mean_function,
            times=series.times,
            order=series.order,
            smoothed=recursions.smooth(series, values, noise),
            num_harmonics=num_harmonics,
        )

    def filtered(self) -> FilteredPosterior:
        """What the observations say about the function from the last of them on.

        It stores one state instead of all rows, and `update` adds new observations at a cost that
        does not depend on the number of earlier ones.
        """
        if self.component_kernel is not None:
            raise ValueError(
                "a component has no `filtered`: call it on the posterior, and `component` on what "
                "it returns."
            )
        return FilteredPosterior(
            kernel=self.kernel,
            row=self.X[self.order[-1:]],
            time=self.times[-1],
            state_mean=self.smoothed.mean[-1:],
            state_covariance=self.smoothed.covariance[-1:],
            noise_variance=None if self._has_noise_of_rows else self.noise_variance,
            mean_function=self.mean_function,
            num_harmonics=self.num_harmonics,
        )

    @property
    def diagnostics(self) -> dict[str, Array]:
        """The state of the process.

        `state_variables` is their number, and `missing_variance` the share of the prior variance
        that the truncated series of periodic kernels lack.
        """
        missing = missing_variance(self._form, self.kernel, self.X[:1])
        return {"state_variables": jnp.asarray(self._form.size), "missing_variance": missing}

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "StateSpacePosterior":
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        zero = zero_function(self.times.dtype)
        return dataclasses.replace(
            self, component_kernel=self._target_kernel.restrict(change), mean_function=zero
        )

    @property
    def _target_kernel(self) -> AbstractKernel:
        return self.kernel if self.component_kernel is None else self.component_kernel

    @property
    def _form(self) -> AbstractStateSpace:
        return form_of(self.kernel, self.X, self.num_harmonics)[0]

    @property
    def _row_width(self) -> int:
        return 4 * (self._form.size + 1) ** 2

    def _times_of(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        column = form_of(self.kernel, self.X, self.num_harmonics)[1]
        return rows[:, column].astype(self.times.dtype)

    def _readout(self, rows: Float[Array, "r d"]) -> Any:
        """The vectors h of new rows, in lanes."""
        form = form_of(self._target_kernel, self.X, self.num_harmonics)[0]
        h = form.observation(rows).astype(self.times.dtype)
        return algebra_of(form).vector(h)

    def _state(self, rows: Float[Array, "r d"]) -> tuple[Any, Any, Any, Any]:
        """The state at new rows: m and P given earlier rows, and r and N of later rows."""
        form = self._form
        ops, n = algebra_of(form), len(self.times)
        times = self._times_of(rows)
        later = num_until(self.times, times)
        has_earlier, has_later = later > 0, later < n
        earlier, later = jnp.maximum(later - 1, 0), jnp.minimum(later, n - 1)
        start = jnp.where(has_earlier, self.times[earlier], times)
        A, Q = transition(form, start, times - start)
        prior = ops.full(ops.from_blocks(jax.vmap(form.covariance, out_axes=-1)(times)), times)
        mean, covariance, score, information = (
            jnp.where(has[:, None], values[index], 0.0)
            for has, index, values in (
                (has_earlier, earlier, self.smoothed.mean),
                (has_earlier, earlier, self.smoothed.covariance),
                (has_later, later, self.smoothed.score),
                (has_later, later, self.smoothed.information),
            )
        )
        is_first = jnp.where(has_earlier, 0.0, 1.0).astype(times.dtype)
        m = ops.times(A, ops.vector(mean))
        P = ops.add(
            ops.congruence(A, ops.symmetric(covariance)),
            ops.scale(Q, 1.0 - is_first),
            ops.scale(prior, is_first),
        )
        until = jnp.where(has_later, self.times[later], times)
        B = ops.transpose(transition(form, times, until - times)[0])
        r = ops.times(B, ops.vector(score))
        N = ops.congruence(B, ops.symmetric(information))
        return m, P, r, N

    def _centered_mean(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        ops = algebra_of(self._form)
        m, P, r, _ = self._state(rows)
        return ops.dot(self._readout(rows), ops.add(m, ops.times(P, r)))

    def _marginal_variance(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        ops, h = algebra_of(self._form), self._readout(rows)
        _, P, _, N = self._state(rows)
        Ph = ops.times(P, h)
        return remaining_variance(ops.dot(h, Ph), ops.dot(Ph, ops.times(N, Ph)))

    def with_means(
        self, mean: Float[Array, "n s"], score: Float[Array, "n s"]
    ) -> "StateSpacePosterior":
        """The posterior given other observations, which have the same covariances."""
        smoothed = self.smoothed._replace(mean=mean, score=score)
        return eqx.tree_at(lambda posterior: posterior.smoothed, self, smoothed)

    @property
    def _noise(self) -> Float[Array, " n"]:
        noise: Any = self.noise_variance
        return jnp.broadcast_to(noise, self.y.shape).astype(self.times.dtype)

    def _smoothed_values(self, values: Float[Array, "n k"]) -> Smoothed:
        """Filter and smooth columns of values in place of the observations less their mean."""
        series = Series.of_sorted(self._form, self.X, self.times, self.order)
        noise = series.in_order(self._noise)

        def smoothed(values: Array) -> Smoothed:
            return recursions.smooth(series, series.in_order(values), noise)

        return jax.vmap(smoothed, in_axes=1)(values)

    def _conditioned(
        self, values: Float[Array, "n k"], rows: Float[Array, "m d"]
    ) -> Float[Array, "m k"]:
        """The posterior means at rows if the observations, less their mean, were `values`."""
        smoothed = self._smoothed_values(values)

        def mean(mean: Array, score: Array) -> Array:
            return self.with_means(mean, score)._centered_mean(rows)

        return jax.vmap(mean, out_axes=1)(smoothed.mean, smoothed.score)

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        kernel = self._target_kernel
        between = kernel.evaluate(self.X, Xs).astype(self.times.dtype)
        return kernel.evaluate_covariance(Xs) - self._conditioned(between, Xs)

    @compiled
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        prior_key, noise_key = jax.random.split(key)
        n = len(self.times)
        form = self._form
        target = form_of(self._target_kernel, self.X, self.num_harmonics)[0]
        times = jnp.concatenate([self._times_of(self.X), self._times_of(Xs)])
        h = jnp.concatenate([form.observation(self.X), target.observation(Xs)])
        order = order_of(times)
        series = Series(form, times[order], order, h[order].astype(times.dtype))
        drawn = series.by_row(simulation.draw(prior_key, series, num_samples))
        normal = jax.random.normal(noise_key, (num_samples, n), times.dtype)
        observed = drawn[:, :n] + jnp.sqrt(self._noise) * normal
        update = self._mean(Xs, None) - self._conditioned(observed.T, Xs).T
        return drawn[:, n:] + update

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> "StateSpaceFunctionSamples":
        X = self.X.astype(self.times.dtype)
        draws = prior_draws(key, self.kernel, num_samples, num_features, X)
        observed = draws.observations(self.kernel, X, self._noise)
        drawn, given = self._smoothed_values(observed), self.smoothed
        updates = given.mean - drawn.mean, given.score - drawn.score
        return StateSpaceFunctionSamples(self, draws, *updates)

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given all other observations.

        Mean y_i - a_i / P_ii and variance 1 / P_ii with a = H^-1 (y - m(X)) and P = H^-1, which the
        smoother computes for all rows: nothing is fitted again.

        Returns:
            A `numpyro.distributions.Normal` of batch shape (n,), in O(n).

        References:
            de Jong (1988), A Cross-Validation Filter for Time Series Models.
        """
        self._refuse_unknown_observations()
        weights = self._by_row(self.smoothed.weights)
        precision = self._precision()
        return dist.Normal(self.y - weights / precision, precision**-0.5)

    def _precision(self) -> Float[Array, " n"]:
        """The diagonal of H^-1."""
        return self._by_row(self.smoothed.precisions)

    def _by_row(self, values: Float[Array, " n"]) -> Float[Array, " n"]:
        return jnp.zeros_like(values).at[self.order].set(values)


class StateSpaceFunctionSamples(AbstractFunctionSamples):
    """Prior draws made of random features, updated by the smoother (Matheron's rule).

    Each evaluation costs O(log n + s^2 + num_features) for each function.
    """

    posterior: StateSpacePosterior
    draws: PriorDraws
    mean: Float[Array, "num_samples n s"]
    score: Float[Array, "num_samples n s"]

    @property
    def _num_columns(self) -> int:
        return self.posterior._num_columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        posterior, dtype = self.posterior, self.mean.dtype

        def values(rows: Array) -> Array:
            def update(mean: Array, score: Array) -> Array:
                return posterior.with_means(mean, score)._centered_mean(rows)

            updates = jax.vmap(update, out_axes=1)(self.mean, self.score)
            # The draws are different functions in another dtype.
            drawn = self.draws(posterior._target_kernel, rows.astype(dtype))
            return posterior.mean_function(rows)[:, None] + drawn + updates

        width = self.draws.num_draws * posterior._row_width
        size = rows_per_chunk(width) if chunk_size is None else chunk_size
        return map_rows(values, Xs, size, share=False).T
