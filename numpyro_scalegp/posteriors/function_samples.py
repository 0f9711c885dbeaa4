"""Draws of a posterior as functions of the inputs."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Key

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.core.functions import RowsFunction, constant_function
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.kernels import AbstractKernel

# Random features of a prior draw, unless another number is asked for.
NUM_FEATURES = 2000


class AbstractFunctionSamples(eqx.Module):
    """Functions drawn from a posterior: to be called, differentiated and maximized.

    `functions(Xs)` has the values of all functions at any inputs: pure, the same at each call and
    in chunks of any size, differentiable with respect to Xs, and a pytree that passes through JAX's
    transformations and `sgp.save`; `equinox.filter_jit(functions)` compiles them. Made by
    `sample_functions` of a posterior.
    """

    def __call__(
        self, Xs: Float[ArrayLike, "... m d"], *, chunk_size: int | None = None
    ) -> Float[Array, "num_samples *values"]:
        """The functions' values, without observation noise.

        Args:
            Xs: inputs, shape (m, d); where functions of a batch have kernels or data of their own
                also (*batch, m, d).
            chunk_size: rows worked on at a time; by default what fits 64 MiB in float32.

        Returns:
            Values, shape (num_samples, m); of a batch of functions (num_samples, *batch, m), of a
            `MultiOutputGP` (num_samples, m, p). Linear in m: a row costs what the number of
            features and of kernel functions makes it.

        Raises:
            ValueError: if `Xs` is not a finite matrix of d columns.
        """
        Xs = checks.inputs("Xs", Xs, width=self._num_columns, may_be_batch=self._takes_batches)
        return self._values(Xs, checks.count_or_none("chunk_size", chunk_size))

    @property
    def _takes_batches(self) -> bool:
        """Whether there may be a matrix of inputs for each of a batch of functions."""
        return False

    @property
    @abc.abstractmethod
    def _num_columns(self) -> int | None:
        """Columns of the inputs; None if any number will do."""

    @abc.abstractmethod
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        """The values at inputs that were checked."""


class KernelFunctionSamples(AbstractFunctionSamples):
    """Prior draws, updated by kernel functions: f_j(x) = m(x) + p_j(x) + k(x, Z) a_j.

    The draws p_j of the prior are made of random features, and the update is that of Matheron's
    rule: with H the covariance of what is known at Z, a_j = H^-1 (u_j - p_j(Z)) for a draw u_j of
    it. Given any features the mean of f_j is exact, and its covariance is so on average over them.

    References:
        Wilson et al. (2021), Pathwise Conditioning of Gaussian Processes, eq. 13 and 33.
    """

    kernel: AbstractKernel  # of f, or of the part of it that these functions are
    mean_function: RowsFunction
    draws: PriorDraws
    columns: Int[Array, " k"]  # which of the draws, in the order of the flattened weights
    points: Float[Array, "M d"]  # Z
    weights: Float[Array, "M num_samples *batch"]  # a_j; k functions in all

    @property
    def _num_columns(self) -> int:
        return self.points.shape[-1]

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        M, *shape = self.weights.shape
        mesh = mesh_of(self.points)
        points, weights = divided((self.points, self.weights.reshape(M, -1)), mesh)

        def values(rows: Array) -> Array:
            # In another dtype the draws would be other functions.
            drawn = self.draws(self.kernel, rows.astype(weights.dtype))
            update = matmul(self.kernel(rows, points), weights)
            return self.mean_function(rows)[:, None] + drawn[:, self.columns] + update

        size = rows_per_chunk(M + self.draws.num_draws) if chunk_size is None else chunk_size
        return map_rows(values, Xs, size, share=False).T.reshape(*shape, len(Xs))


class FeatureFunctionSamples(AbstractFunctionSamples):
    """Functions f_j(x) = m(x) + phi(x)'w_j with drawn weights w_j."""

    features: Any  # a function of rows
    mean_function: RowsFunction
    weights: Float[Array, "p num_samples"]
    num_columns: int | None = eqx.field(static=True)

    @property
    def _num_columns(self) -> int | None:
        return self.num_columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        def values(rows: Array) -> Array:
            return self.mean_function(rows)[:, None] + matmul(self.features(rows), self.weights)

        size = rows_per_chunk(self.weights.shape[0]) if chunk_size is None else chunk_size
        return map_rows(values, Xs, size).T


class MixtureFunctionSamples(AbstractFunctionSamples):
    """Functions that were drawn each from a posterior of its own."""

    functions: AbstractFunctionSamples  # its arrays have a leading axis, one entry a function

    @property
    def _takes_batches(self) -> bool:
        return self.functions._takes_batches

    @property
    def _num_columns(self) -> int | None:
        return self.functions._num_columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        return jax.lax.map(lambda one: one._values(Xs, chunk_size)[0], self.functions)


class OutputsFunctionSamples(AbstractFunctionSamples):
    """Functions of each of a batch of independent posteriors."""

    functions: AbstractFunctionSamples  # its arrays have the axes of the batch in front
    num_axes: int = eqx.field(static=True)

    @property
    def _takes_batches(self) -> bool:
        return self.num_axes > 0

    @property
    def _num_columns(self) -> int | None:
        return self.functions._num_columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        def values(functions: AbstractFunctionSamples, Xs: Array) -> Array:
            return functions._values(Xs, chunk_size)

        of_members = batches.Batch(self.functions, self.num_axes), batches.Batch(Xs, Xs.ndim - 2)
        return jnp.moveaxis(batches.each(values, *of_members), -2, 0)


def prior_draws(
    key: Key[Array, ""],
    kernel: AbstractKernel,
    num_draws: int,
    num_features: int | None,
    X: Float[Array, "n d"],
) -> PriorDraws:
    """Draws of a kernel's prior that are functions.

    Args:
        key: a typed JAX key.
        kernel: covariance function.
        num_draws: number of draws.
        num_features: of each; None for `NUM_FEATURES`.
        X: inputs, at whose center the draws' waves begin.

    Raises:
        ValueError: if the kernel has no random features.
    """
    num_features = NUM_FEATURES if num_features is None else num_features
    try:
        jax.eval_shape(lambda: kernel.random_features(key, X[:1], num_features))
    except ValueError as error:
        raise ValueError(
            "functions are drawn by random features of the prior, and the kernel "
            f"`{type(kernel).__name__}` has none: draw at all inputs at once by `sample`, or give "
            f"the kernel `evaluate_features` (see `AbstractKernel`). The reason: {error}"
        ) from None
    return PriorDraws.from_key(key, num_draws, num_features, X)


def draws_with(
    draws: PriorDraws, kernel: AbstractKernel, points: Float[Array, "M d"], L: Float[Array, "M M"]
) -> Float[Array, "M num_draws"]:
    """Values of prior draws at points, with what it takes for a covariance of L L'."""
    # Whatever stands on the diagonal besides the prior's variance: noise, jitter or both.
    added = jnp.sum(jnp.square(L), axis=1) - kernel.diag(points)
    return draws.observations(kernel, points, jnp.maximum(added, 0.0))


def zero_function(dtype: Any) -> RowsFunction:
    """The mean of a function whose prior has none."""
    return constant_function(jnp.zeros((), dtype))
