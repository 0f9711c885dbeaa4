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
    def _factorize(self) -> Any:
        """What the moments at all inputs need once."""

    @abc.abstractmethod
    def _moments(self, factors: Any, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        """The mean and the parts of the variance of f at each row of X; see `split_marginals`."""

    def _lift(self, factors: Any) -> Float[Array, ""]:
        """What the factorization added to the diagonal, as `linalg.lift` gives it."""
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
        with explained_forward_mode():
            moments, lift = self._split(X, chunk_size)
        linalg.warn_of_lift(lift)
        return moments

    # Outside of `jit` one compilation in place of one for each operation.
    @compiled
    def _split(self, X: Array, chunk_size: int | None) -> tuple[tuple[Array, ...], Array]:
        def of_one(one: AbstractVariationalPosterior, X: Array) -> tuple[tuple[Array, ...], Array]:
            factors = one._factorize()
            lift = one._lift(factors)
            if chunk_size is None:
                return one._moments(factors, divided(X, mesh_of(X))), lift

            def moments(rows: Array) -> tuple[Array, ...]:
                return one._moments(factors, rows)

            return chunks.map_rows(moments, X, chunk_size, share=one._shares_rows), lift

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
    def _joint(
        self, factors: Any, X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
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
    def _update(
        self, factors: Any, prior: Float[Array, "M s"], key: Key[Array, ""]
    ) -> Float[Array, "M s"]:
        """The weights a with which draws of the prior plus k(., centers) a are draws of f.

        Args:
            factors: as `_factorize` gives them.
            prior: the prior draws' values at the centers.
            key: of all else that is drawn.
        """

    def _covariance(self, Xs: Array) -> Array:
        covariance, lift = self._joint_covariance(Xs)
        linalg.warn_of_lift(lift)
        return covariance

    @compiled
    def _joint_covariance(self, Xs: Array) -> tuple[Array, Array]:
        def of_one(one: AbstractKernelPosterior, Xs: Array) -> tuple[Array, Array]:
            factors = one._factorize()
            return one._joint(factors, Xs)[1], one._lift(factors)

        return self._each(of_one, batches.Batch(Xs, Xs.ndim - 2))

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        draws, lift = self._drawn(key, Xs, num_samples)
        linalg.warn_of_lift(lift)
        return draws

    @compiled
    def _drawn(self, key: Array, Xs: Array, num_samples: int) -> tuple[Array, Array]:
        def draw(one: AbstractKernelPosterior, Xs: Array, key: Array) -> tuple[Array, Array]:
            factors = one._factorize()
            moments, prior_variance = one._joint(factors, Xs), one._of_f.diag(Xs)
            drawn = self._joint_sample(key, *moments, prior_variance, num_samples)
            return drawn, one._lift(factors)

        draws, lift = self._each(
            draw, batches.Batch(Xs, Xs.ndim - 2), batches.keys(key, self.batch_shape)
        )
        return jnp.moveaxis(draws, -2, 0), lift

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        functions, lift = self._drawn_functions(key, num_samples, num_features)
        linalg.warn_of_lift(lift)
        return functions

    @property
    def _shares_kernel(self) -> bool:
        """Whether the functions of a batch have the same kernel and centers."""
        return True

    @compiled
    def _drawn_functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> tuple[AbstractFunctionSamples, Array]:
        if not self._shares_kernel:

            def of_one(one: AbstractKernelPosterior, key: Array) -> tuple:
                return one._drawn_functions(key, num_samples, num_features)

            functions, lift = self._each(of_one, batches.keys(key, self.batch_shape))
            return OutputsFunctionSamples(functions, len(self.batch_shape)), lift
        draw_key, key = jax.random.split(key)
        centers = self._centers.astype(self._weights()[0].dtype)
        num = num_samples * math.prod(self.batch_shape)
        draws = prior_draws(draw_key, self._whole, num, num_features, centers)
        prior = draws(self._whole, centers)
        # One prior draw for each function of the batch and sample, (*batch, M, num_samples).
        prior = jnp.moveaxis(prior.reshape(-1, num_samples, *self.batch_shape), (0, 1), (-2, -1))

        def update(one: AbstractKernelPosterior, prior: Array, key: Array) -> tuple[Array, Array]:
            factors = one._factorize()
            return one._update(factors, prior, key), one._lift(factors)

        of_members = batches.Batch(prior, len(self.batch_shape))
        weights, lift = self._each(update, of_members, batches.keys(key, self.batch_shape))
        functions = KernelFunctionSamples(
            self._of_f,
            zero_function(weights.dtype),
            draws,
            jnp.arange(num),
            centers,
            jnp.moveaxis(weights, (-2, -1), (0, 1)),
        )
        return functions, lift
