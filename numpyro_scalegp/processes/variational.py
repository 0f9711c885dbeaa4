"""The base class of variational posteriors over functions."""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import batches, chunks
from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.derivatives import explained_forward_mode
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.compiled import compiled

# The most rows evaluated at a time: with more, a CPU waits for memory.
_CACHED_ROWS = 4096


class AbstractVariationalPosterior(AbstractPosterior):
    """A variational posterior of a function, which stores basis functions instead of all data.

    Variational parameters with leading axes make it a batch of functions, with moments of shape
    (*batch, m) and draws of shape (num_samples, *batch, m). The functions share the kernel, the
    points and what is computed from them, unless a subclass overrides `_members`.
    """

    @property
    @abc.abstractmethod
    def _row_width(self) -> int:
        """Entries of intermediate arrays for each row of inputs in a chunk."""

    @abc.abstractmethod
    def _weights(self) -> tuple[Any, ...]:
        """The arrays that differ between functions of a batch, first the weights of the mean."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of the batch of functions, () for a single function."""
        return self._weights()[0].shape[:-1]

    def _members(self) -> batches.Batch:
        """This posterior as a batch, with the number of batch axes of each of its arrays."""
        leading = jax.tree.map(lambda _: 0, self)
        weights = jax.tree.map(lambda _: len(self.batch_shape), self._weights())
        return batches.Batch(self, eqx.tree_at(lambda p: p._weights(), leading, weights))

    def _each(self, function: Callable[..., Any], *arguments: batches.Batch) -> Any:
        """Apply `function` to the posterior of each member, with its entries of `arguments`."""
        return batches.each(function, self._members(), *arguments)

    @property
    def _shares_rows(self) -> bool:
        """Whether the devices of a mesh share the rows of inputs, not the basis functions."""
        return True

    @property
    def _takes_batches(self) -> bool:
        return bool(self.batch_shape)

    @abc.abstractmethod
    def _moments(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        """The mean and the terms of the variance of f at each row of X; see `split_marginals`."""

    @property
    def _added_jitter(self) -> Float[Array, "..."]:
        """The jitter that factorizations added to the diagonal; NaN where one failed."""
        return jnp.zeros(())

    def marginals(
        self, X: Float[Array, "... n d"], *, chunk_size: int | None = None
    ) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """The mean and the variance of f at each row of X.

        Args:
            X: inputs, shape (n, d), or (*batch, n, d).
            chunk_size: rows evaluated at a time; by default `rows_per_chunk()`.

        Returns:
            Means and variances, each of shape (*batch, n).
        """
        mean, *variances = self._warn_and_split(X, chunk_size or self.rows_per_chunk())
        return mean, functools.reduce(jnp.add, variances)

    def split_marginals(self, X: Float[Array, "... n d"]) -> tuple[Float[Array, "*batch n"], ...]:
        """The mean and the terms of the variance of f at each row of X, each of shape (*batch, n).

        With inducing points the variance has two terms: the variance of their values, and the
        variance that they leave unexplained.
        """
        return self._warn_and_split(X, None)

    def _warn_and_split(self, X: Array, chunk_size: int | None) -> tuple[Array, ...]:
        linalg.warn_of_added_jitter(self._added_jitter)
        with explained_forward_mode():
            return self._split(X, chunk_size)

    # Outside of `jit`, this is compiled once, not operation by operation.
    @compiled
    def _split(self, X: Array, chunk_size: int | None) -> tuple[Array, ...]:
        def of_one(posterior: AbstractVariationalPosterior, X: Array) -> tuple[Array, ...]:
            if chunk_size is None:
                return posterior._moments(divided(X, mesh_of(X)))
            share = posterior._shares_rows
            return chunks.map_rows(posterior._moments, X, chunk_size, share=share)

        return self._each(of_one, batches.Batch(X, X.ndim - 2))

    def rows_per_chunk(self) -> int:
        """The default chunk size of `marginals`: 4096, or what fits 64 MiB in float32."""
        width = self._row_width * max(1, math.prod(self.batch_shape))
        return min(_CACHED_ROWS, chunks.rows_per_chunk(width))

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.marginals(Xs, chunk_size=chunk_size)[0]

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.marginals(Xs, chunk_size=chunk_size)[1]

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        return self.marginals(Xs, chunk_size=chunk_size)
