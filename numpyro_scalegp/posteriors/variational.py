"""What posteriors that are summarized by basis functions share."""

import abc
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import checks, chunks
from numpyro_scalegp.posteriors.posterior import AbstractPosterior


class AbstractVariationalPosterior(AbstractPosterior):
    """A variational posterior over a function, from basis functions rather than all data.

    Weights with leading dimensions make it a batch of functions that share kernel and points: then
    moments have shape (*batch, m), and draws (num_samples, *batch, m).
    """

    @property
    @abc.abstractmethod
    def _num_columns(self) -> int | None:
        """Columns of the inputs; None if any number will do."""

    @property
    @abc.abstractmethod
    def _row_width(self) -> int:
        """Numbers at once for each row of inputs that is worked on."""

    @abc.abstractmethod
    def _weights(self) -> tuple[Any, ...]:
        """What differs between the functions of a batch: first the weights of the mean."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of a batch of functions, () for one."""
        return self._weights()[0].shape[:-1]

    def _each(self, function: Callable[[Any], Any]) -> Any:
        """Apply `function` to this posterior, or to each of a batch."""

        def apply(*weights: Array) -> Any:
            return function(eqx.tree_at(lambda one: one._weights(), self, weights))

        for _ in self.batch_shape:
            apply = jax.vmap(apply)
        return apply(*self._weights())

    @abc.abstractmethod
    def _factorize(self) -> Any:
        """What the moments at all inputs need once."""

    @abc.abstractmethod
    def _moments(
        self, factors: Any, X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """The mean and the variance of f at each row of X."""

    # Outside of `jit`, as when SVI sets itself up, one compilation instead of one per operation.
    @eqx.filter_jit
    def marginals(
        self, X: Float[Array, "n d"], *, chunk_size: int | None = None
    ) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """The mean and the variance of f at each row of X.

        Args:
            X: inputs, shape (n, d).
            chunk_size: rows worked on at a time; None for all.

        Returns:
            Means and variances, each of shape (*batch, n).
        """

        def of_one(one: AbstractVariationalPosterior) -> tuple[Array, Array]:
            factors = one._factorize()
            if chunk_size is None:
                return one._moments(factors, X)
            return chunks.map_rows(lambda rows: one._moments(factors, rows), X, chunk_size)

        return self._each(of_one)

    def _check(self, Xs: ArrayLike) -> Float[Array, "m d"]:
        return checks.inputs("Xs", Xs, width=self._num_columns)

    def rows_per_chunk(self, chunk_size: int | None = None) -> int:
        """A number of rows for `marginals`: the given one, or what fits 64 MiB in float32."""
        if chunk_size is None:
            return chunks.rows_per_chunk(self._row_width * max(1, math.prod(self.batch_shape)))
        return checks.count("chunk_size", chunk_size)

    def mean(
        self, Xs: Float[ArrayLike, "m d"], *, chunk_size: int | None = None
    ) -> Float[Array, "*batch m"]:
        """The posterior mean of f; see `AbstractPosterior.mean`."""
        return self.marginals(self._check(Xs), chunk_size=self.rows_per_chunk(chunk_size))[0]

    def variance(
        self, Xs: Float[ArrayLike, "m d"], *, chunk_size: int | None = None
    ) -> Float[Array, "*batch m"]:
        """The posterior variance of f; see `AbstractPosterior.variance`."""
        return self.marginals(self._check(Xs), chunk_size=self.rows_per_chunk(chunk_size))[1]

    def sample(
        self, key: Key[Array, ""], Xs: Float[ArrayLike, "m d"], num_samples: int = 1
    ) -> Float[Array, "num_samples *batch m"]:
        """Draw jointly at all rows of Xs; see `AbstractPosterior.sample`."""
        num_samples = checks.count("num_samples", num_samples)
        return self._sample(checks.as_key(key), self._check(Xs), num_samples)

    @abc.abstractmethod
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        """Draw jointly at all rows of Xs."""


class AbstractKernelPosterior(AbstractVariationalPosterior):
    """A variational posterior with a covariance at any rows, from which draws are made."""

    @abc.abstractmethod
    def _joint(
        self, factors: Any, X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        """The mean and the covariance of f at the rows of X."""

    @abc.abstractmethod
    def _prior_variance(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """k(x, x) of each row."""

    @eqx.filter_jit
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        mean, covariance = self._each(lambda one: one._joint(one._factorize(), Xs))
        prior_variance = self._prior_variance(Xs)

        def draw(key: Array, mean: Array, covariance: Array) -> Array:
            return self._joint_sample(key, mean, covariance, prior_variance, num_samples)

        keys = key
        if self.batch_shape:
            keys = jax.random.split(key, self.batch_shape)
        for _ in self.batch_shape:
            draw = jax.vmap(draw)
        return jnp.moveaxis(draw(keys, mean, covariance), -2, 0)
