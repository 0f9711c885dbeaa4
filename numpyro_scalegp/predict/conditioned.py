"""What posteriors given all observations share, however their weights were found."""

import abc

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks, chunks
from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.predict.base import AbstractPosterior


class AbstractConditioned(AbstractPosterior):
    """A posterior given noisy observations y at X, with the mean function m."""

    X: eqx.AbstractVar[Float[Array, "n d"]]
    y: eqx.AbstractVar[Float[Array, " n"]]
    noise_variance: eqx.AbstractVar[Float[Array, "..."]]
    mean_function: eqx.AbstractVar[RowsFunction]

    @property
    @abc.abstractmethod
    def _row_width(self) -> int:
        """Numbers at once for each row of inputs that is worked on."""

    @abc.abstractmethod
    def _explained(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        """The posterior mean without m."""

    def at_data(self) -> dist.Normal:
        """The predictive distribution at the training inputs, for replicates of y; shape (n,)."""
        return self.predictive(self.X, self.noise_variance)

    def _check(self, Xs: ArrayLike) -> Float[Array, "m d"]:
        return checks.inputs("Xs", Xs, width=self.X.shape[1])

    def _rows(self, chunk_size: int | None) -> int:
        return (
            chunks.rows_per_chunk(self._row_width)
            if chunk_size is None
            else checks.count("chunk_size", chunk_size)
        )

    def mean(
        self, Xs: Float[ArrayLike, "m d"], *, chunk_size: int | None = None
    ) -> Float[Array, " m"]:
        """The posterior mean of f; see `AbstractPosterior.mean`."""
        return self._mean(self._check(Xs), self._rows(chunk_size))

    @eqx.filter_jit
    def _mean(self, Xs: Array, chunk_size: int) -> Array:
        def chunk(rows: Array) -> Array:
            return self.mean_function(rows) + self._explained(rows)

        return chunks.map_rows(chunk, Xs, chunk_size)

    def predictive(
        self,
        Xs: Float[ArrayLike, "m d"],
        noise_variance: Float[ArrayLike, "..."] | None = None,
        *,
        chunk_size: int | None = None,
    ) -> dist.Normal:
        """The predictive distribution of new observations; see `AbstractPosterior.predictive`.

        By default the noise is the model's own, if that is a scalar.

        Raises:
            ValueError: if the model's noise is one value a row and `noise_variance` is not given.
        """
        if noise_variance is None:
            noise_variance = self.noise_variance
            if jnp.ndim(noise_variance) > 0:
                raise ValueError(
                    "`noise_variance` must be given: the model has one noise variance for each "
                    f"training row (shape {noise_variance.shape}) and none for new inputs."
                )
        return super().predictive(Xs, noise_variance, chunk_size=chunk_size)
