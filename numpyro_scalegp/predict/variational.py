"""What posteriors that are summarised by basis functions share."""

import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import checks, chunks
from numpyro_scalegp.predict.base import AbstractPosterior


class AbstractVariationalPosterior(AbstractPosterior):
    """A variational posterior over a function, from basis functions rather than all data."""

    @property
    @abc.abstractmethod
    def _num_columns(self) -> int:
        """Columns of the inputs."""

    @property
    @abc.abstractmethod
    def _row_width(self) -> int:
        """Numbers at once for each row of inputs that is worked on."""

    @abc.abstractmethod
    def _factorise(self) -> Any:
        """What the moments at all inputs need once."""

    @abc.abstractmethod
    def _moments(
        self, factors: Any, X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """The mean and the variance of f at each row of X."""

    @abc.abstractmethod
    def _joint(
        self, factors: Any, X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        """The mean and the covariance of f at the rows of X."""

    @abc.abstractmethod
    def _prior_variance(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """k(x, x) of each row."""

    # Outside of `jit`, as when SVI sets itself up, one compilation instead of one per operation.
    @eqx.filter_jit
    def marginals(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """The mean and the variance of f at each row of X, all rows at once.

        Args:
            X: inputs, shape (n, d).

        Returns:
            Means and variances, each of shape (n,).
        """
        return self._moments(self._factorise(), X)

    def _check(self, Xs: ArrayLike) -> Float[Array, "m d"]:
        return checks.inputs("Xs", Xs, width=self._num_columns)

    def _rows(self, chunk_size: int | None) -> int:
        return chunks.rows_per_chunk(self._row_width) if chunk_size is None else chunk_size

    @eqx.filter_jit
    def _chunked_marginals(self, Xs: Array, chunk_size: int) -> tuple[Array, Array]:
        factors = self._factorise()
        return chunks.map_rows(lambda X: self._moments(factors, X), Xs, chunk_size)

    def mean(
        self, Xs: Float[ArrayLike, "m d"], *, chunk_size: int | None = None
    ) -> Float[Array, " m"]:
        """The posterior mean of f; see `AbstractPosterior.mean`."""
        return self._chunked_marginals(self._check(Xs), self._rows(chunk_size))[0]

    def variance(
        self, Xs: Float[ArrayLike, "m d"], *, chunk_size: int | None = None
    ) -> Float[Array, " m"]:
        """The posterior variance of f; see `AbstractPosterior.variance`."""
        return self._chunked_marginals(self._check(Xs), self._rows(chunk_size))[1]

    def sample(
        self, key: Key[Array, ""], Xs: Float[ArrayLike, "m d"], num_samples: int = 1
    ) -> Float[Array, "num_samples m"]:
        """Draw jointly at all rows of Xs; see `AbstractPosterior.sample`."""
        return self._sample(key, self._check(Xs), num_samples)

    @eqx.filter_jit
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        mean, covariance = self._joint(self._factorise(), Xs)
        return self._joint_sample(key, mean, covariance, self._prior_variance(Xs), num_samples)
