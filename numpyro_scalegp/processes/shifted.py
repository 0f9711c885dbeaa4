"""A process with a mean function added."""

from typing import Any

import jax
from jaxtyping import Array, Float

from numpyro_scalegp.core import chunks
from numpyro_scalegp.processes.function_samples import ShiftedFunctionSamples
from numpyro_scalegp.processes.posterior import AbstractDerived, Inputs
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction, is_of_rows


class ShiftedPosterior(AbstractDerived):
    """The posterior of f(x) = m(x) + g(x), given the posterior of g, whose prior mean may be zero.

    Args:
        process: the posterior of g.
        mean_function: m.
        noise_variance: noise variance of observations of f, or None.
    """

    process: Any
    mean_function: RowsFunction
    noise_variance: Float[Array, "..."] | None = None

    def _check(self, Xs: Inputs) -> Any:
        X = super()._check(Xs)
        if is_of_rows(self.mean_function):
            self.mean_function(X)  # raises if the rows are not the training rows
        return X

    @compiled
    def _mean_at(self, Xs: Any, chunk_size: int | None) -> Array:
        m = self.mean_function
        if is_of_rows(m) or Xs.ndim > 2 or jax.eval_shape(lambda X: m(X), Xs).ndim != 1:
            return m(Xs)
        size = chunks.rows_per_chunk(Xs.shape[-1]) if chunk_size is None else chunk_size
        return chunks.map_rows(m, Xs, size)

    def _mean(self, Xs: Any, chunk_size: int | None) -> Array:
        return self._mean_at(Xs, chunk_size) + self.process._mean(Xs, chunk_size)

    def _mean_and_variance(self, Xs: Any, chunk_size: int | None) -> tuple[Array, Array]:
        mean, variance = self.process._mean_and_variance(Xs, chunk_size)
        return self._mean_at(Xs, chunk_size) + mean, variance

    def _sample(self, key: Array, Xs: Any, num_samples: int) -> Array:
        return self.mean_function(Xs) + self.process._sample(key, Xs, num_samples)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> ShiftedFunctionSamples:
        functions = self.process._functions(key, num_samples, num_features)
        return ShiftedFunctionSamples(functions, self.mean_function)
