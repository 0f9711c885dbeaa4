"""Draws of a posterior as functions of the inputs."""

import abc
import os
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Key

from numpyro_scalegp.core import batches, checks, summary
from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.kernels.indicated import Indicated
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs import exported
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction, constant_function
from numpyro_scalegp.programs.padded import PaddedRows

# The default number of random features of a prior draw.
NUM_FEATURES = 2000


class AbstractFunctionSamples(eqx.Module):
    """Functions drawn from a posterior, to call, differentiate and maximize.

    `functions(Xs)` returns the values of all functions at any inputs. The functions are pure, have
    the same values at each call and for any chunk size, and are differentiable with respect to Xs.
    They form a pytree, for JAX's transformations and `sgp.save`; `equinox.filter_jit(functions)`
    compiles them. Made by a posterior's `sample_functions`.
    """

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self)
        has_arrays = bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)
        d = self._num_columns if has_arrays else None
        return summary.one_line(self, [] if d is None else [f"of {summary.counted(d, 'column')}"])

    def __call__(
        self, Xs: Float[ArrayLike, "... m d"], *, chunk_size: int | None = None
    ) -> Float[Array, "num_samples *values"]:
        """Evaluate the functions, without observation noise.

        Args:
            Xs: inputs, shape (m, d); also (*batch, m, d) for a batch of functions with separate
                kernels or data.
            chunk_size: rows evaluated at a time; by default as many as fit 64 MiB in float32.

        Returns:
            Values, shape (num_samples, m); (num_samples, *batch, m) for a batch of functions,
            (num_samples, m, p) for a `MultiOutputGP`. The cost is linear in m, in the number of
            features and in the number of kernel functions.

        Raises:
            ValueError: if `Xs` is not a finite matrix of d columns.
        """
        Xs = checks.inputs("Xs", Xs, width=self._num_columns, may_be_batch=self._takes_batches)
        rows, size = PaddedRows.of(Xs), checks.count_or_none("chunk_size", chunk_size)
        return rows.unpad(self._values(rows.X, size), self._row_axis)

    def export(
        self,
        file: str | os.PathLike[str],
        *,
        num_rows: int | None = None,
        platforms: Sequence[str] | None = None,
    ) -> None:
        """Write the functions to a file, as a program that needs JAX or ONNX alone.

        The program returns a dict with their `values`; `AbstractPosterior.export` says how to read
        it, and what the arguments are.

        Raises:
            ImportError: if flatbuffers, or jax2onnx for ONNX, is not installed.
            ValueError: if the functions need the number of rows, or jax2onnx does not convert one
                of their operations.
        """

        def values(functions: AbstractFunctionSamples, Xs: Array) -> dict[str, Array]:
            return {"values": functions._values(Xs, None)}

        exported.write(file, self, values, self._num_columns, num_rows, platforms)

    @property
    def _row_axis(self) -> int:
        """The axis of the values along which the rows of inputs lie."""
        return -1

    @property
    def _takes_batches(self) -> bool:
        """Whether each function of a batch may have its own matrix of inputs."""
        return False

    @property
    @abc.abstractmethod
    def _num_columns(self) -> int | None:
        """The number of input dimensions; None if any number is valid."""

    @abc.abstractmethod
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        """The values at checked inputs."""


class KernelFunctionSamples(AbstractFunctionSamples):
    """Prior draws updated by kernel functions: f_j(x) = m(x) + p_j(x) + k(x, Z) a_j.

    The prior draws p_j are sums of random features. The update is Matheron's rule: with H the
    covariance of the observations or inducing values u at Z, a_j = H^-1 (u_j - p_j(Z)) for a draw
    u_j of u. Given any features, the mean of f_j is exact; its covariance is exact on average over
    the features.

    References:
        Wilson et al. (2021), Pathwise Conditioning of Gaussian Processes, eq. 13 and 33.
    """

    kernel: AbstractKernel  # of f, or of the drawn component of f
    mean_function: RowsFunction
    draws: PriorDraws
    columns: Int[Array, " k"]  # indices of the draws, in the order of the flattened weights
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
            # The draws are different functions in another dtype.
            drawn = self.draws(self.kernel, rows.astype(weights.dtype))
            update = matmul(self.kernel.evaluate(rows, points), weights)
            return self.mean_function(rows)[:, None] + drawn[:, self.columns] + update

        size = rows_per_chunk(M + self.draws.num_draws) if chunk_size is None else chunk_size
        return map_rows(values, Xs, size, share=False).T.reshape(*shape, Xs.shape[0])


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
    """Functions that are each drawn from a different posterior."""

    functions: AbstractFunctionSamples  # its arrays have a leading axis over the functions

    @property
    def _takes_batches(self) -> bool:
        return self.functions._takes_batches

    @property
    def _row_axis(self) -> int:
        return self.functions._row_axis

    @property
    def _num_columns(self) -> int | None:
        return self.functions._num_columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        def values(function: AbstractFunctionSamples) -> Array:
            return function._values(Xs, chunk_size)[0]

        return jax.lax.map(values, self.functions)


class BatchFunctionSamples(AbstractFunctionSamples):
    """Functions of each member of a batch."""

    functions: AbstractFunctionSamples  # its arrays have the batch axes in front
    num_axes: int = eqx.field(static=True)
    is_indicated: bool = eqx.field(static=True, default=False)  # their kernels are `Indicated`

    @property
    def _takes_batches(self) -> bool:
        return self.num_axes > 0

    @property
    def _num_columns(self) -> int | None:
        columns = self.functions._num_columns
        return columns - 1 if columns and self.is_indicated else columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        def values(functions: AbstractFunctionSamples, rows: Array) -> Array:
            return functions._values(rows, chunk_size)

        rows = Indicated.with_indicator(Xs) if self.is_indicated else Xs
        members = batches.Batch(self.functions, self.num_axes)
        each = batches.each(values, members, batches.Batch(rows, Xs.ndim - 2))
        return jnp.moveaxis(each, -2, 0)


class ShiftedFunctionSamples(AbstractFunctionSamples):
    """Functions f_j(x) = m(x) + g_j(x)."""

    functions: AbstractFunctionSamples
    mean_function: RowsFunction

    @property
    def _takes_batches(self) -> bool:
        return self.functions._takes_batches

    @property
    def _row_axis(self) -> int:
        return self.functions._row_axis

    @property
    def _num_columns(self) -> int | None:
        return self.functions._num_columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.mean_function(Xs) + self.functions._values(Xs, chunk_size)


def prior_draws(
    key: Key[Array, ""],
    kernel: AbstractKernel,
    num_draws: int,
    num_features: int | None,
    X: Float[Array, "n d"],
) -> PriorDraws:
    """Prior draws of a kernel, as functions.

    Args:
        key: a typed JAX key.
        kernel: covariance function.
        num_draws: number of draws.
        num_features: number of features of each draw; None for `NUM_FEATURES`.
        X: inputs, whose center is the origin of the random features.

    Raises:
        ValueError: if the kernel has no random features.
    """
    num_features = NUM_FEATURES if num_features is None else num_features
    try:
        jax.eval_shape(lambda: kernel.evaluate_features(key, X[:1], num_features, None))
    except ValueError as error:
        raise ValueError(
            "functions are drawn by random features of the prior, and the kernel "
            f"`{type(kernel).__name__}` has none: draw at all inputs at once by `sample`, or give "
            f"the kernel `evaluate_features` (see `AbstractKernel`). The reason: {error}"
        ) from None
    return PriorDraws.from_key(key, num_draws, num_features, X)


def draws_with_covariance(
    draws: PriorDraws, kernel: AbstractKernel, points: Float[Array, "M d"], L: Float[Array, "M M"]
) -> Float[Array, "M num_draws"]:
    """Values of prior draws at points, plus noise that makes their covariance L L'."""
    # The noise and the jitter on the diagonal of L L'.
    added = jnp.sum(jnp.square(L), axis=1) - kernel.evaluate_diag(points)
    return draws.observations(kernel, points, jnp.maximum(added, 0.0))


def zero_function(dtype: Any) -> RowsFunction:
    """The mean function of a prior with mean zero."""
    return constant_function(jnp.zeros((), dtype))
