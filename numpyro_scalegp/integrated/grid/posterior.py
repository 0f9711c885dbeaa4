"""The posterior of a function on a grid."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.integrated.grid import passes
from numpyro_scalegp.integrated.grid.axes import (
    Axes,
    Factors,
    as_axes,
    axes_of_rows,
    rows_of,
    shape_of,
    terms_of,
    widths_of,
)
from numpyro_scalegp.integrated.grid.kronecker import Rotation, inverse_diagonal, solve
from numpyro_scalegp.integrated.grid.space_time import SpaceTime, Steps
from numpyro_scalegp.integrated.state_space.rows import order_of
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics import linalg, rounding
from numpyro_scalegp.numerics.axes import along, along_all, outer
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.numerics.rounding import remaining_variance
from numpyro_scalegp.processes.function_samples import (
    KernelFunctionSamples,
    ShiftedFunctionSamples,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.processes.posterior import AbstractConditioned
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction

# Rows are split where values at all pairs of their times and places are more than these.
_MOST_VALUES = 2**24


class AbstractGridPosterior(AbstractConditioned):
    """The posterior of a function given observations on a grid.

    Inputs are rows, the columns of all axes side by side, or a sequence with the inputs of each
    axis, such as `[times, places]`: then moments have the shape of that grid.

    Made by `GridGP.condition`; immutable.
    """

    kernel: eqx.AbstractVar[AbstractKernel]  # of rows
    inputs: eqx.AbstractVar[Axes]

    @property
    def X(self) -> Float[Array, "n d"]:
        """The inputs of all cells, in the order of `y.ravel()`."""
        return rows_of(self.inputs)

    def at_data(self) -> dist.Normal:
        """The predictive distribution at all cells of the grid, for replicates of y."""
        return self.predictive(self.inputs, self.noise_variance)

    @property
    def _mask(self) -> Bool[Array, "*shape"] | None:
        """The cells that are observed; None for all."""
        return None

    def _with_hidden(
        self, loc: Float[Array, "*shape"], scale: Float[Array, "*shape"]
    ) -> dist.Normal:
        """Distributions given all other cells, in cells without an observation given all."""
        if (observed := self._mask) is None:
            return dist.Normal(loc, scale)
        at_data = self.at_data()
        return dist.Normal(
            jnp.where(observed, loc, at_data.loc), jnp.where(observed, scale, at_data.scale)
        )

    def _noise(self) -> Float[Array, "..."]:
        noise: Any = self.noise_variance
        return noise

    @property
    def _num_columns(self) -> int:
        return sum(widths_of(self.inputs))

    @property
    def _has_noise_of_rows(self) -> bool:
        return jnp.ndim(self._noise()) > 0

    def _check(self, Xs: Any) -> Any:
        if not checks.is_grid(Xs):
            return super()._check(Xs)
        axes = as_axes("Xs", Xs, widths_of(self.inputs))
        for factors in terms_of(self.kernel, len(axes)):
            for j, kernel in enumerate(factors or ()):
                kernel.check_values(f"Xs[{j}]", axes[j])
        return axes

    @abc.abstractmethod
    def _mean(self, Xs: Array | Axes, chunk_size: int | None) -> Array:
        """The mean at checked inputs."""

    @abc.abstractmethod
    def _variance(self, Xs: Array | Axes, chunk_size: int | None) -> Array:
        """The variance at checked inputs."""

    def _mean_and_variance(self, Xs: Array | Axes, chunk_size: int | None) -> tuple[Array, Array]:
        """The mean and the variance at checked inputs."""
        return self._mean(Xs, chunk_size), self._variance(Xs, chunk_size)

    @abc.abstractmethod
    def _sample(self, key: Array, Xs: Array | Axes, num_samples: int) -> Array:
        """Joint draws at checked inputs."""

    @abc.abstractmethod
    def _row_covariance(self, rows: Float[Array, "m d"]) -> Float[Array, "m m"]:
        """The covariance of all pairs of rows."""

    def _covariance(self, Xs: Array | Axes) -> Array:
        covariance = self._row_covariance(rows_at(Xs))
        if isinstance(Xs, tuple):
            return covariance.reshape(*shape_of(Xs), *shape_of(Xs))
        return covariance

    def _prior_mean(self, at: Array | Axes) -> Array:
        if isinstance(at, tuple):
            return self.mean_function(rows_of(at)).reshape(shape_of(at))
        return self.mean_function(at)


class AbstractSolvedGrid(AbstractGridPosterior):
    """The posterior by solves of the linear system of the grid, H = K + noise."""

    if TYPE_CHECKING:  # type checkers take an `AbstractVar` for the first argument of subclasses

        @property
        def residual(self) -> Float[Array, "*shape"]: ...  # noqa: D102

        @property
        def component_kernel(self) -> AbstractKernel | None: ...  # noqa: D102
    else:
        residual: eqx.AbstractVar[Float[Array, "*shape"]]  # y - m, zero where there is no y
        component_kernel: eqx.AbstractVar[AbstractKernel | None]  # covariance of a part with f

    @abc.abstractmethod
    def _centered_mean(self, at: Array | Axes, chunk_size: int | None) -> Array:
        """The mean of f less its prior mean."""

    @abc.abstractmethod
    def _solve(self, values: Float[Array, "k *shape"]) -> Float[Array, "k *shape"]:
        """H^-1 times arrays on the grid; zero in cells without an observation."""

    @abc.abstractmethod
    def _weights_and_precisions(self) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        """H^-1 (y - m) and the diagonal of H^-1."""

    @abc.abstractmethod
    def _draws(self, key: Array, axes: Axes, num_samples: int) -> Float[Array, "num_samples *m"]:
        """Joint draws on a grid."""

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each cell given all others, of the shape of the grid.

        For a cell without an observation, the predictive distribution given all observations.
        """
        weights, precisions = self._weights_and_precisions()
        if (observed := self._mask) is not None:
            precisions = jnp.where(observed, precisions, 1.0)
        return self._with_hidden(self.y - weights / precisions, precisions**-0.5)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> Any:
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        fields: dict[str, Any] = {"component_kernel": self._target_kernel.restrict(change)}
        return dataclasses.replace(self, mean_function=zero_function(self.y.dtype), **fields)

    @property
    def _target_kernel(self) -> AbstractKernel:
        return self.kernel if self.component_kernel is None else self.component_kernel

    def _mean(self, Xs: Array | Axes, chunk_size: int | None) -> Array:
        return self._prior_mean(Xs) + self._centered_mean(Xs, chunk_size)

    def _sample(self, key: Array, Xs: Array | Axes, num_samples: int) -> Array:
        if isinstance(Xs, tuple):
            return self._prior_mean(Xs) + self._draws(key, Xs, num_samples)
        return self._prior_mean(Xs) + self._draws_at_rows(key, Xs, num_samples)

    def _draws_at_rows(self, key: Array, at: Array | Axes, num_samples: int) -> Array:
        """Joint draws less the prior mean, from the covariance of all pairs."""
        rows = rows_at(at)
        moments = self._centered_mean(rows, None), self._row_covariance(rows)
        return _on_grid(self._drawn(key, rows, *moments, num_samples), at)

    @compiled
    def _drawn(
        self, key: Array, rows: Array, mean: Array, covariance: Array, num_samples: int
    ) -> Float[Array, "num_samples m"]:
        prior = self._target_kernel.evaluate_diag(rows)
        return self._joint_sample(key, mean, covariance, prior, num_samples)

    @compiled
    def _row_covariance(self, rows: Array) -> Array:
        kernel = self._target_kernel
        between = kernel.evaluate(rows, self.X)
        shape = shape_of(self.inputs)
        solved = self._solve(between.reshape(-1, *shape)).reshape(between.shape)
        return kernel.evaluate_covariance(rows) - matmul(between, solved.T)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> KernelFunctionSamples:
        X, shape = self.X, shape_of(self.inputs)
        draws = prior_draws(key, self.kernel, num_samples, num_features, X)
        noise = jnp.broadcast_to(self._noise(), shape).ravel()
        observed = draws.observations(self.kernel, X, noise).T.reshape(-1, *shape)
        weights = self._solve(self.residual - observed).reshape(num_samples, -1).T
        return KernelFunctionSamples(
            self._target_kernel, self.mean_function, draws, jnp.arange(num_samples), X, weights
        )


def kernel_rows(factors: Factors, rows: Axes, axes: Axes) -> list[Float[Array, "_m _n_j"]]:
    """The covariances of rows with each axis."""
    return [k.evaluate(Z, X) for k, Z, X in zip(factors, rows, axes, strict=True)]


def contracted(matrices: Sequence[Float[Array, "_m _n_j"]], A: Float[Array, "*shape"]) -> Array:
    """The sum over all cells of A times an entry of each matrix, for each row: shape (m, ...)."""
    product = along(matrices[0], A, 0)
    for matrix in matrices[1:]:
        product = jnp.einsum("mn,mn...->m...", matrix, product, precision="highest")
    return product


class GridPosterior(AbstractSolvedGrid):
    """The posterior given a complete grid, by the eigenvectors of each axis.

    With H = Q (L + 1) Q', the mean costs O(m n) for m rows and n cells, as the variance does, and
    on another grid a product along each axis.

    Made by `GridGP.condition`; immutable.

    References:
        Saatci (2011), Scalable Inference for Structured Gaussian Process Models, chapter 5.
    """

    kernel: AbstractKernel
    inputs: Axes
    y: Float[Array, "*shape"]
    noise_variance: Float[Array, "..."]
    mean_function: RowsFunction
    residual: Float[Array, "*shape"]
    weights: Float[Array, "*shape"]  # H^-1 (y - m)
    rotation: Rotation
    component_kernel: AbstractKernel | None = None

    @property
    def diagnostics(self) -> dict[str, Array]:
        """`digits` is the number of accurate decimal digits of solutions with H.

        At most six to seven in float32; below 1.7 there is a warning.
        """
        return {"digits": rounding.digits_left(self.rotation.rounding)}

    @property
    def _factors(self) -> Factors:
        # A component of a sum of products has one product, or none.
        (factors,) = terms_of(self._target_kernel, len(self.inputs))
        assert factors is not None
        return factors

    def _solve(self, values: Float[Array, "k *shape"]) -> Float[Array, "k *shape"]:
        return jax.vmap(lambda R: solve(self.rotation, R))(values)

    def _weights_and_precisions(self) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        return self.weights, inverse_diagonal(self.rotation)

    @compiled
    def _centered_mean(self, at: Array | Axes, chunk_size: int | None) -> Array:
        factors = self._factors
        if isinstance(at, tuple):
            return along_all(kernel_rows(factors, at, self.inputs), self.weights)

        def mean(rows: Array) -> Array:
            axes = axes_of_rows(rows, widths_of(self.inputs))
            return contracted(kernel_rows(factors, axes, self.inputs), self.weights)

        return self._map(mean, at, chunk_size)

    @compiled
    def _variance(self, Xs: Array | Axes, chunk_size: int | None) -> Array:
        factors, rotation = self._factors, self.rotation

        def squares(axes: Axes) -> list[Float[Array, "_m _n_j"]]:
            matrices = kernel_rows(factors, axes, self.inputs)
            pairs = zip(matrices, rotation.vectors, strict=True)
            return [jnp.square(matmul(matrix, V)) for matrix, V in pairs]

        def priors(axes: Axes) -> list[Float[Array, " _m"]]:
            return [k.evaluate_diag(X) for k, X in zip(factors, axes, strict=True)]

        if isinstance(Xs, tuple):
            explained = along_all(squares(Xs), rotation.precisions)
            return remaining_variance(outer(priors(Xs)), explained)

        def variance(rows: Array) -> Array:
            axes = axes_of_rows(rows, widths_of(self.inputs))
            explained = contracted(squares(axes), rotation.precisions)
            return remaining_variance(jnp.prod(jnp.stack(priors(axes)), axis=0), explained)

        return self._map(variance, Xs, chunk_size)

    def _map(self, function: Callable[[Array], Array], Xs: Array, chunk_size: int | None) -> Array:
        width = self.y.size // len(self.inputs[0]) + sum(shape_of(self.inputs))
        size = rows_per_chunk(width) if chunk_size is None else chunk_size
        return map_rows(function, Xs, size)

    @compiled
    def _draws(self, key: Array, axes: Axes, num_samples: int) -> Array:
        if self.component_kernel is not None:
            return self._draws_at_rows(key, axes, num_samples)
        prior_key, noise_key = jax.random.split(key)
        shape, dtype = shape_of(self.inputs), self.weights.dtype
        joined = [jnp.concatenate(pair) for pair in zip(self.inputs, axes, strict=True)]
        pairs = zip(self._factors, joined, strict=True)
        covariances = (k.evaluate_covariance(X) for k, X in pairs)
        # Without a warning, since inputs may be the same.
        factors = [linalg.cholesky(K, warn=False).astype(dtype) for K in covariances]
        normal = jax.random.normal(prior_key, (num_samples, *map(len, joined)), dtype)
        drawn = jax.vmap(lambda white: along_all(factors, white))(normal)
        at_data = (slice(None), *(slice(n) for n in shape))
        new = (slice(None), *(slice(n, None) for n in shape))
        noise = jax.random.normal(noise_key, (num_samples, *shape), dtype)
        observed = drawn[at_data] + jnp.sqrt(self._noise()) * noise
        weights = self.weights - self._solve(observed)
        between = kernel_rows(self._factors, axes, self.inputs)
        return drawn[new] + jax.vmap(lambda A: along_all(between, A))(weights)


class SpaceTimePosterior(AbstractSolvedGrid):
    """The posterior of a function of time at places, by filter and smoother.

    Each call passes over the n_t times of the grid and over new times, in O((s p)^3) each, for p
    places and s state variables; calls with known inputs take each new time once. Places of the
    grid are free; others follow from these.

    Made by `GridGP.condition` with `sgp.estimators.StateSpace`; immutable.

    References:
        Sarkka, Solin and Hartikainen (2013), Spatiotemporal Learning via Infinite-Dimensional
        Bayesian Filtering and Smoothing.
    """

    kernel: AbstractKernel
    inputs: Axes
    y: Float[Array, "*shape"]
    noise_variance: Float[Array, "..."]
    mean_function: RowsFunction
    residual: Float[Array, "*shape"]
    process: SpaceTime
    component_kernel: AbstractKernel | None = None

    @property
    def diagnostics(self) -> dict[str, Array]:
        """`state_variables` is their number at one place, `places` the number of places."""
        size, places = len(self.process.prior().terms), len(self.process.places)
        return {"state_variables": jnp.asarray(size), "places": jnp.asarray(places)}

    @property
    def _mask(self) -> Bool[Array, "*shape"] | None:
        return self.process.observed

    def _own_steps(self) -> Steps:
        times = self.process.times
        return Steps(times[:0], jnp.arange(len(times)))

    @compiled
    def _at_grid(
        self, values: Float[Array, "k *shape"], *, variances: bool
    ) -> tuple[Float[Array, "k *shape"], Any]:
        """The weights H^-1 values, and the diagonal of H^-1."""
        process = self.process
        none = jnp.zeros((len(process.prior().forms), 0, len(process.places)), process.dtype)
        smoothed = process.smoothed(
            values, self._own_steps(), self.kernel, none, variances=variances
        )
        weights = process.on_grid(smoothed.weights, self.inputs)
        if smoothed.precisions is None:
            return weights, None
        return weights, process.on_grid(smoothed.precisions[..., None], self.inputs)[0]

    def _solve(self, values: Float[Array, "k *shape"]) -> Float[Array, "k *shape"]:
        return self._at_grid(values, variances=False)[0]

    def _weights_and_precisions(self) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        weights, precisions = self._at_grid(self.residual[None], variances=True)
        return weights[0], precisions

    @compiled
    def _moments(
        self,
        values: Float[Array, "k *shape"],
        times: Float[Array, " m"],
        steps: Steps,
        places: Float[Array, "q d"],
        *,
        variances: bool,
    ) -> tuple[Float[Array, "m q k"], Any]:
        process, kernel = self.process, self._target_kernel
        readout, remaining = process.readout(kernel, places)
        smoothed = process.smoothed(values, steps, kernel, readout, variances=variances)
        if smoothed.variances is None:
            return smoothed.means, None
        # What the places of the grid do not determine is independent of the observations.
        prior = matmul(process.variance_in_time(kernel, times).T, remaining)
        return smoothed.means, smoothed.variances + prior

    def _at(self, at: Array | Axes, values: Array, *, variances: bool) -> tuple[Array, Any]:
        """Means, shape (k, *shape of the inputs), and variances."""
        process = self.process
        if isinstance(at, tuple):
            times = at[process.axis][:, 0].astype(process.dtype)
            places = process._without_time(at)
            steps = Steps.of(process.times, times)
            means, of_f = self._moments(values, times, steps, places, variances=variances)
            of_f = None if of_f is None else process.on_grid(of_f[..., None], at)[0]
            return process.on_grid(means, at), of_f
        times, places = process.split(at)
        times, of_time = _distinct(times)
        places, of_place = _distinct(places)
        num_values = len(times) * len(places) * len(values)
        num_parts = math.ceil(math.sqrt(num_values / _MOST_VALUES))
        if 1 < num_parts <= len(at):
            order = np.argsort(of_time, kind="stable")
            parts = [
                self._at(at[rows], values, variances=variances)
                for rows in np.array_split(order, num_parts)
            ]
            by_row = np.argsort(order)
            means, of_f = zip(*parts, strict=True)
            means = jnp.concatenate(means, axis=1)[:, by_row]
            return means, jnp.concatenate(of_f)[by_row] if variances else None
        steps = Steps.of(process.times, times)
        means, of_f = self._moments(values, times, steps, places, variances=variances)
        return means[of_time, of_place].T, None if of_f is None else of_f[of_time, of_place]

    def _centered_mean(self, at: Array | Axes, chunk_size: int | None) -> Array:
        return self._at(at, self.residual[None], variances=False)[0][0]

    def _variance(self, Xs: Array | Axes, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[1]

    def _mean_and_variance(self, Xs: Array | Axes, chunk_size: int | None) -> tuple[Array, Array]:
        means, variances = self._at(Xs, self.residual[None], variances=True)
        return self._prior_mean(Xs) + means[0], variances

    def _sample(self, key: Array, Xs: Array | Axes, num_samples: int) -> Array:
        return self._prior_mean(Xs) + self._draws(key, Xs, num_samples)

    def _draws(self, key: Array, axes: Array | Axes, num_samples: int) -> Array:
        process = self.process
        if process.is_component_of_places(self._target_kernel):
            return self._draws_at_rows(key, axes, num_samples)
        if isinstance(axes, tuple):
            times = axes[process.axis][:, 0].astype(process.dtype)
            drawn, observed = self._prior_draws(
                key, times, process._without_time(axes), num_samples
            )
            drawn = process.on_grid(jnp.moveaxis(drawn, 0, -1), axes)
        else:
            times, places = process.split(axes)
            times, of_time = _distinct(times)
            places, of_place = _distinct(places)
            if len(times) * len(places) * num_samples > max(len(axes) ** 2, _MOST_VALUES):
                return self._draws_at_rows(key, axes, num_samples)
            drawn, observed = self._prior_draws(key, times, places, num_samples)
            drawn = drawn[:, of_time, of_place]
        return drawn + self._at(axes, self.residual - observed, variances=False)[0]

    @compiled
    def _prior_draws(
        self, key: Array, times: Float[Array, " m"], places: Float[Array, "q d"], num_samples: int
    ) -> tuple[Float[Array, "num_samples m q"], Float[Array, "num_samples *shape"]]:
        """Draws of f or its component at times and places, and of the observations less m."""
        process, kernel = self.process, self._target_kernel
        keys = jax.random.split(key)
        all_times = jnp.concatenate([process.times, times])
        order = order_of(all_times)
        rank, n_t, p = jnp.argsort(order), len(process.times), len(process.places)
        prior = process.prior(jnp.concatenate([process.places, places]))
        factors = tuple(linalg.cholesky(K, warn=False) for K in prior.places)
        vectors = tuple(process.observation(k, all_times[order]) for k in (self.kernel, kernel))
        of_f, of_target = (
            values[:, rank]
            for values in passes.draw(
                keys[0], prior, all_times[order], vectors, factors, num_samples
            )
        )
        on_grid = process.on_grid(jnp.moveaxis(of_f[:, :n_t, :p], 0, -1), self.inputs)
        noise = jax.random.normal(keys[1], on_grid.shape, on_grid.dtype)
        return of_target[:, n_t:, p:], on_grid + jnp.sqrt(self._noise()) * noise


def _distinct(
    rows: Float[Array, "m *d"],
) -> tuple[Float[Array, "u *_d"], Int[np.ndarray, " m"]]:
    """The distinct rows and the place of each among them; all rows if they are not known."""
    if not checks.is_concrete(rows) or rows.shape[1:] == (0,):
        few = rows.shape[1:] == (0,)
        return (rows[:1], np.zeros(len(rows), int)) if few else (rows, np.arange(len(rows)))
    distinct, index = np.unique(np.asarray(rows), axis=0, return_inverse=True)
    return jnp.asarray(distinct), index.reshape(-1)


class GridRowsPosterior(AbstractGridPosterior):
    """The posterior of a function on a grid, by an estimator whose rows are its observed cells.

    Made by `GridGP.condition`; immutable. For the costs see the posterior `process`.
    """

    kernel: AbstractKernel
    inputs: Axes
    y: Float[Array, "*shape"]
    noise_variance: Float[Array, "..."]
    mean_function: RowsFunction
    process: AbstractConditioned  # of the function less its mean
    observed: Bool[Array, "*shape"] | None
    cells: Int[Array, " k"] | None  # those that `process` has as rows; None for all

    @property
    def diagnostics(self) -> dict[str, Array]:
        """The diagnostics of `process`."""
        return self.process.diagnostics

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "GridRowsPosterior":
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        zero = zero_function(self.y.dtype)
        process: Any = self.process.restrict(change)
        return dataclasses.replace(self, process=process, mean_function=zero)

    def _mean(self, Xs: Array | Axes, chunk_size: int | None) -> Array:
        return self._prior_mean(Xs) + _on_grid(self.process._mean(rows_at(Xs), chunk_size), Xs)

    def _variance(self, Xs: Array | Axes, chunk_size: int | None) -> Array:
        return _on_grid(self.process._variance(rows_at(Xs), chunk_size), Xs)

    def _mean_and_variance(self, Xs: Array | Axes, chunk_size: int | None) -> tuple[Array, Array]:
        mean, variance = self.process._mean_and_variance(rows_at(Xs), chunk_size)
        return self._prior_mean(Xs) + _on_grid(mean, Xs), _on_grid(variance, Xs)

    def _row_covariance(self, rows: Array) -> Array:
        return self.process._covariance(rows)

    def _sample(self, key: Array, Xs: Array | Axes, num_samples: int) -> Array:
        draws = self.process._sample(key, rows_at(Xs), num_samples)
        return self._prior_mean(Xs) + _on_grid(draws, Xs)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> ShiftedFunctionSamples:
        functions = self.process._functions(key, num_samples, num_features)
        return ShiftedFunctionSamples(functions, self.mean_function)

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each cell given all others, of the shape of the grid.

        For a cell without an observation, the predictive distribution given all observations.
        """
        of_cells, mean = self.process.leave_one_out(), self._prior_mean(self.inputs).ravel()
        loc, scale = of_cells.loc, of_cells.scale
        if self.cells is None:
            loc = loc + mean
        else:
            at_data = self.at_data()
            loc = at_data.loc.ravel().at[self.cells].set(loc + mean[self.cells])
            scale = at_data.scale.ravel().at[self.cells].set(scale)
        return dist.Normal(loc.reshape(self.y.shape), scale.reshape(self.y.shape))


def rows_at(at: Array | Axes) -> Float[Array, "m d"]:
    """Inputs as rows."""
    return rows_of(at) if isinstance(at, tuple) else at


def _on_grid(values: Float[Array, "... m"], at: Array | Axes) -> Array:
    return values.reshape(*values.shape[:-1], *shape_of(at)) if isinstance(at, tuple) else values
