"""The base class of posteriors that are summarized by basis functions."""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import batches, chunks, linalg
from numpyro_scalegp.core.derivatives import explained_forward_mode
from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.summation import pairwise_product
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.function_samples import (
    AbstractFunctionSamples,
    KernelFunctionSamples,
    OutputsFunctionSamples,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.posteriors.posterior import AbstractPosterior

# Rows worked on at a time: with more, a CPU waits for memory.
_CACHED_ROWS = 4096


class AbstractVariationalPosterior(AbstractPosterior):
    """A variational posterior over a function, from basis functions rather than all data.

    Weights with leading dimensions make it a batch of functions: then moments have shape
    (*batch, m), and draws (num_samples, *batch, m). They share kernel and points, and what is
    computed of these once, unless `_members` says otherwise.
    """

    @property
    @abc.abstractmethod
    def _row_width(self) -> int:
        """Entries of intermediate arrays for each row of inputs in a chunk."""

    @abc.abstractmethod
    def _weights(self) -> tuple[Any, ...]:
        """What differs between the functions of a batch: first the weights of the mean."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of a batch of functions, () for one."""
        return self._weights()[0].shape[:-1]

    def _members(self) -> batches.Batch:
        """This with the number of leading axes of each of its arrays."""
        leading = jax.tree.map(lambda _: 0, self)
        weights = jax.tree.map(lambda _: len(self.batch_shape), self._weights())
        return batches.Batch(self, eqx.tree_at(lambda one: one._weights(), leading, weights))

    def _each(self, function: Callable[..., Any], *others: batches.Batch) -> Any:
        """Apply `function` to this posterior, or to each of a batch, and a part of the others."""
        return batches.each(function, self._members(), *others)

    @property
    def _shares_rows(self) -> bool:
        """Whether the devices of a mesh share the rows of inputs, or what the weights are of."""
        return True

    @property
    def _takes_batches(self) -> bool:
        return bool(self.batch_shape)

    @abc.abstractmethod
    def _moments(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        """The mean and the parts of the variance of f at each row of X; see `split_marginals`."""

    @property
    def _lift(self) -> Float[Array, "..."]:
        """What factorizations added to the diagonal, as `linalg.lift` gives it."""
        return jnp.zeros(())

    def marginals(
        self, X: Float[Array, "... n d"], *, chunk_size: int | None = None
    ) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """The mean and the variance of f at each row of X.

        Args:
            X: inputs, shape (n, d), or (*batch, n, d).
            chunk_size: rows worked on at a time; by default `rows_per_chunk()`.

        Returns:
            Means and variances, each of shape (*batch, n).
        """
        mean, *variances = self._parts(X, chunk_size or self.rows_per_chunk())
        return mean, functools.reduce(jnp.add, variances)

    def split_marginals(self, X: Float[Array, "... n d"]) -> tuple[Float[Array, "*batch n"], ...]:
        """The mean and the parts of the variance of f at each row of X, each of shape (*batch, n).

        With inducing points the variance has two: that of their values, and what they leave
        unexplained.
        """
        return self._parts(X, None)

    def _parts(self, X: Array, chunk_size: int | None) -> tuple[Array, ...]:
        linalg.warn_of_lift(self._lift)
        with explained_forward_mode():
            return self._split(X, chunk_size)

    # Outside of `jit` one compilation in place of one for each operation.
    @compiled
    def _split(self, X: Array, chunk_size: int | None) -> tuple[Array, ...]:
        def of_one(one: AbstractVariationalPosterior, X: Array) -> tuple[Array, ...]:
            if chunk_size is None:
                return one._moments(divided(X, mesh_of(X)))
            return chunks.map_rows(one._moments, X, chunk_size, share=one._shares_rows)

        return self._each(of_one, batches.Batch(X, X.ndim - 2))

    def rows_per_chunk(self) -> int:
        """The rows for `marginals`, 4096 or as many as fit 64 MiB in float32."""
        width = self._row_width * max(1, math.prod(self.batch_shape))
        return min(_CACHED_ROWS, chunks.rows_per_chunk(width))

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.marginals(Xs, chunk_size=chunk_size)[0]

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.marginals(Xs, chunk_size=chunk_size)[1]

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        return self.marginals(Xs, chunk_size=chunk_size)


class AbstractKernelPosterior(AbstractVariationalPosterior):
    """A variational posterior with a covariance at any rows, from which draws are made."""

    @abc.abstractmethod
    def _expansions(self) -> list[tuple[Float[Array, "M d"], Float[Array, " M"]]]:
        """Points and weights of kernel functions that add up to the mean."""

    @abc.abstractmethod
    def _joint(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        """The mean and the covariance of f at the rows of X."""

    @property
    @abc.abstractmethod
    def _of_f(self) -> AbstractKernel:
        """The prior's kernel, of f or of the part of it that this is."""

    @property
    @abc.abstractmethod
    def _whole(self) -> AbstractKernel:
        """The prior's kernel of f."""

    @property
    @abc.abstractmethod
    def _centers(self) -> Float[Array, "M d"]:
        """The points of all kernel functions."""

    @abc.abstractmethod
    def _update(self, prior: Float[Array, "M s"], key: Key[Array, ""]) -> Float[Array, "M s"]:
        """The weights a with which draws of the prior plus k(., centers) a are draws of f.

        Args:
            prior: the prior draws' values at the centers.
            key: of all else that is drawn.
        """

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        linalg.warn_of_lift(self._lift)
        return self._expanded_mean(Xs, chunk_size)

    @compiled
    def _expanded_mean(self, Xs: Array, chunk_size: int | None) -> Array:
        def of_one(one: AbstractKernelPosterior, Xs: Array) -> Array:
            expansions = one._expansions()

            def mean(rows: Array) -> Array:
                parts = [
                    pairwise_product(divided(one._of_f(rows, points), mesh_of(rows)), weights)
                    for points, weights in expansions
                ]
                return functools.reduce(jnp.add, parts)

            size = chunk_size or self.rows_per_chunk()
            return chunks.map_rows(mean, Xs, size, share=one._shares_rows)

        return self._each(of_one, batches.Batch(Xs, Xs.ndim - 2))

    def _covariance(self, Xs: Array) -> Array:
        linalg.warn_of_lift(self._lift)
        return self._joint_covariance(Xs)

    @compiled
    def _joint_covariance(self, Xs: Array) -> Array:
        return self._each(lambda one, Xs: one._joint(Xs)[1], batches.Batch(Xs, Xs.ndim - 2))

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        linalg.warn_of_lift(self._lift)
        return self._drawn(key, Xs, num_samples)

    @compiled
    def _drawn(self, key: Array, Xs: Array, num_samples: int) -> Array:
        def draw(one: AbstractKernelPosterior, Xs: Array, key: Array) -> Array:
            return self._joint_sample(key, *one._joint(Xs), one._of_f.diag(Xs), num_samples)

        draws = self._each(
            draw, batches.Batch(Xs, Xs.ndim - 2), batches.keys(key, self.batch_shape)
        )
        return jnp.moveaxis(draws, -2, 0)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        linalg.warn_of_lift(self._lift)
        return self._drawn_functions(key, num_samples, num_features)

    @property
    def _shares_kernel(self) -> bool:
        """Whether the functions of a batch have the same kernel and centers."""
        return True

    @compiled
    def _drawn_functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        if not self._shares_kernel:

            def of_one(one: AbstractKernelPosterior, key: Array) -> AbstractFunctionSamples:
                return one._drawn_functions(key, num_samples, num_features)

            functions = self._each(of_one, batches.keys(key, self.batch_shape))
            return OutputsFunctionSamples(functions, len(self.batch_shape))
        draw_key, key = jax.random.split(key)
        centers = self._centers.astype(self._weights()[0].dtype)
        num = num_samples * math.prod(self.batch_shape)
        draws = prior_draws(draw_key, self._whole, num, num_features, centers)
        prior = draws(self._whole, centers)
        # One prior draw for each function of the batch and sample, (*batch, M, num_samples).
        prior = jnp.moveaxis(prior.reshape(-1, num_samples, *self.batch_shape), (0, 1), (-2, -1))

        def update(one: AbstractKernelPosterior, prior: Array, key: Array) -> Array:
            return one._update(prior, key)

        of_members = batches.Batch(prior, len(self.batch_shape))
        weights = self._each(update, of_members, batches.keys(key, self.batch_shape))
        return KernelFunctionSamples(
            self._of_f,
            zero_function(weights.dtype),
            draws,
            jnp.arange(num),
            centers,
            jnp.moveaxis(weights, (-2, -1), (0, 1)),
        )
