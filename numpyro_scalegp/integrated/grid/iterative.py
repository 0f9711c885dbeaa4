"""The posterior of a function on a grid by pathwise conditioning, from iterative solves."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.integrated.grid.axes import (
    Axes,
    axes_of_rows,
    shape_of,
    terms_of,
    widths_of,
)
from numpyro_scalegp.integrated.grid.posterior import (
    AbstractGridPosterior,
    contracted,
    kernel_rows,
    rows_at,
)
from numpyro_scalegp.kernels.indicated import Indicated
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.linear.grid_operator import GridOperator
from numpyro_scalegp.numerics.axes import along_all
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.function_samples import KernelFunctionSamples, zero_function
from numpyro_scalegp.processes.pathwise import PathwisePosterior
from numpyro_scalegp.programs.compiled import compiled, compiled_unless_traced
from numpyro_scalegp.programs.functions import RowsFunction


class IterativeGridPosterior(AbstractGridPosterior):
    """The posterior of a function on a grid as functions: prior draws plus kernel functions.

    See `PathwisePosterior` for the formulas. Moments and samples at another grid cost a product
    along each axis for each of s samples, and O(m n) for m rows.

    Made by `GridGP.condition` with an iterative estimator; immutable.

    References:
        Lin et al. (2025), Scalable Gaussian Processes with Latent Kronecker Structure.
    """

    kernel: AbstractKernel
    inputs: Axes
    y: Float[Array, "*shape"]
    noise_variance: Float[Array, "..."]
    mean_function: RowsFunction
    process: PathwisePosterior  # of the function less its mean, at the rows of the solve
    observed: Bool[Array, "*shape"] | None
    cells: Int[Array, " n"] | None  # of the rows of the solve; None for all
    component_kernel: AbstractKernel | None = None

    @property
    def _mask(self) -> Bool[Array, "*shape"] | None:
        return self.observed

    @property
    def diagnostics(self) -> dict[str, Array]:
        """The diagnostics of the solve; see `PathwisePosterior.diagnostics`."""
        return self.process.diagnostics

    def restrict(
        self, change: Callable[[AbstractKernel], AbstractKernel]
    ) -> "IterativeGridPosterior":
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        kernel, zero = self._target_kernel.restrict(change), zero_function(self.y.dtype)
        return dataclasses.replace(self, component_kernel=kernel, mean_function=zero)

    @property
    def _target_kernel(self) -> AbstractKernel:
        return self.kernel if self.component_kernel is None else self.component_kernel

    def _on_data(self, values: Float[Array, "n k"]) -> Float[Array, "*shape_and_k"]:
        """Values at the rows of the solve on the grid, zero in cells without an observation."""
        shape = shape_of(self.inputs)
        if self.cells is not None:
            zeros = jnp.zeros((math.prod(shape), values.shape[1]), values.dtype)
            values = zeros.at[self.cells].set(values)
        on_grid = values.reshape(*shape, -1)
        if self.observed is None:
            return on_grid
        return jnp.where(self.observed[..., None], on_grid, 0.0)

    def _kernel_sum(
        self, at: Array | Axes, weights: Float[Array, "*shape_and_k"], chunk_size: int | None
    ) -> Float[Array, "*m_and_k"]:
        """The sum of kernel functions at the cells, for each column of weights."""
        terms = [f for f in terms_of(self._target_kernel, len(self.inputs)) if f is not None]
        weights = weights.astype(self.process.solution.value.dtype)

        def at_axes(axes: Axes) -> list[list[Float[Array, "_m _n_j"]]]:
            matrices = [kernel_rows(factors, axes, self.inputs) for factors in terms]
            return [[K.astype(weights.dtype) for K in of_term] for of_term in matrices]

        if isinstance(at, tuple):
            products = [along_all(matrices, weights) for matrices in at_axes(at)]
            return functools.reduce(operator.add, products)

        def at_rows(rows: Array) -> Array:
            axes = axes_of_rows(rows, widths_of(self.inputs))
            products = [contracted(matrices, weights) for matrices in at_axes(axes)]
            return functools.reduce(operator.add, products)

        width = weights.size // len(self.inputs[0]) + sum(shape_of(self.inputs))
        size = rows_per_chunk(width) if chunk_size is None else chunk_size
        return map_rows(at_rows, at, size)

    @compiled
    def _centered_mean(self, at: Array | Axes, chunk_size: int | None) -> Array:
        weights = self._on_data(self.process.solution.value[:, :1])
        return self._kernel_sum(at, weights, chunk_size)[..., 0]

    @property
    def _prior_draws(self) -> PriorDraws:
        """The prior draws as functions of rows, which a traced mask adds a column to."""
        draws = self.process.draws
        return dataclasses.replace(draws, origin=draws.origin[: self._num_columns])

    def _deviations(self, at: Array | Axes, chunk_size: int | None) -> Float[Array, "*m_and_s"]:
        """The samples less the posterior mean."""
        U = self.process.solution.value[:, 1:]
        drawn = self._prior_draws(self._target_kernel, rows_at(at).astype(U.dtype))
        if isinstance(at, tuple):
            drawn = drawn.reshape(*shape_of(at), -1)
        return drawn - self._kernel_sum(at, self._on_data(U), chunk_size)

    def _mean(self, Xs: Array | Axes, chunk_size: int | None) -> Array:
        return self._prior_mean(Xs) + self._centered_mean(Xs, chunk_size)

    @compiled
    def _variance(self, Xs: Array | Axes, chunk_size: int | None) -> Array:
        return jnp.mean(jnp.square(self._deviations(Xs, chunk_size)), axis=-1)

    @compiled
    def _row_covariance(self, rows: Array) -> Array:
        deviations = self._deviations(rows, None)
        return matmul(deviations, deviations.T) / self.process.num_samples

    def _sample(self, key: Array, Xs: Array | Axes, num_samples: int) -> Array:
        source = self
        if num_samples > self.process.num_samples:
            features = self.process.draws.num_features
            source = self._with_samples(key, num_samples, features)
        columns = jax.random.permutation(key, source.process.num_samples)[:num_samples]
        mean, deviations = source._mean(Xs, None), source._all_deviations(Xs)
        return mean + jnp.moveaxis(deviations, -1, 0)[columns]

    @compiled
    def _all_deviations(self, Xs: Array | Axes) -> Array:
        return self._deviations(Xs, None)

    def _with_samples(
        self, key: Array, num_samples: int, num_features: int
    ) -> "IterativeGridPosterior":
        process = self.process._resampled(key, num_samples, num_features, self._operator())
        return dataclasses.replace(self, process=process)

    def _operator(self) -> GridOperator:
        process = self.process
        observed = None
        if self.cells is None and self.observed is not None:
            observed = self.observed.ravel()
        return grid_operator(
            self.kernel, self.inputs, process.X, process.noise_variance, self.cells, observed
        )

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> KernelFunctionSamples:
        source, stored = self, self.process.draws.num_features
        if num_samples > self.process.num_samples or num_features not in (None, stored):
            source = self._with_samples(key, num_samples, num_features or stored)
        value = source.process.solution.value
        columns = jax.random.permutation(key, source.process.num_samples)[:num_samples]
        weights = self._on_data(value[:, :1] - value[:, 1 + columns])
        X = self.X.astype(value.dtype)
        return KernelFunctionSamples(
            self._target_kernel,
            self.mean_function,
            source._prior_draws,
            columns,
            X,
            weights.reshape(len(X), -1),
        )

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each cell given all others, of the shape of the grid.

        See `PathwisePosterior.leave_one_out`. For a cell without an observation, the predictive
        distribution given all observations.
        """
        of_rows = self.process.leave_one_out()
        moments = jnp.stack([of_rows.loc, of_rows.scale], axis=1)
        loc, scale = jnp.moveaxis(self._on_data(moments), -1, 0)
        return self._with_hidden(loc + self._prior_mean(self.inputs), scale)


@compiled_unless_traced
def grid_operator(
    kernel: AbstractKernel,
    inputs: Axes,
    X: Float[Array, "n d"],
    noise_variance: Float[Array, "..."],
    cells: Int[Array, " n"] | None,
    observed: Bool[Array, " n"] | None,
) -> GridOperator:
    """The covariance of the observations, with X and the noise of the rows of the solve."""
    terms = terms_of(kernel, len(inputs))
    covariances = tuple(
        tuple(k.evaluate_covariance(X) for k, X in zip(factors or (), inputs, strict=True))
        for factors in terms
    )
    rows_kernel = kernel if X.shape[1] == sum(widths_of(inputs)) else Indicated(kernel)
    return GridOperator.of_grid(rows_kernel, X, noise_variance, covariances, cells, observed)
