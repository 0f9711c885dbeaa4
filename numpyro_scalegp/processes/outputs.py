"""The posteriors of independent functions that share a prior."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import batches
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.processes.function_samples import AbstractFunctionSamples, BatchFunctionSamples
from numpyro_scalegp.processes.mixture import Restricted
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.compiled import compiled


class OutputsPosterior(AbstractPosterior):
    """The posteriors of a batch of independent functions, such as those in a plate over outputs.

    Moments have shape (*batch, m), samples (num_samples, *batch, m). Each call conditions once; the
    functions share computations that depend on the inputs alone, such as a factorization.

    Args:
        posterior_given: a pure function from the values of one function to its posterior.
        values: values of all functions, shape (*batch, n).
        noise_variance: noise variance, of a shape that broadcasts with (*batch, 1), or None.
    """

    posterior_given: Callable[[Any], AbstractPosterior]
    values: Float[Array, "*batch n"]
    noise_variance: Float[Array, "..."] | None = None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of the batch of functions."""
        return self.values.shape[:-1]

    def _each(self, function: Callable[..., Any], *arguments: batches.Batch) -> Any:
        """Apply `function` to the posterior of each member, with its entries of `arguments`."""

        def of_one(values: Array, *arguments: Array) -> Any:
            return function(self.posterior_given(values), *arguments)

        return batches.each(of_one, batches.Batch(self.values, len(self.batch_shape)), *arguments)

    @compiled
    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._each(lambda posterior: posterior.mean(Xs, chunk_size=chunk_size))

    @compiled
    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._each(lambda posterior: posterior.variance(Xs, chunk_size=chunk_size))

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        return self._each(lambda posterior: posterior._covariance(Xs))

    @compiled
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        keys = batches.keys(key, self.batch_shape)
        draws = self._each(lambda posterior, key: posterior.sample(key, Xs, num_samples), keys)
        return jnp.moveaxis(draws, -2, 0)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> BatchFunctionSamples:
        def draw(posterior: AbstractPosterior, key: Array) -> AbstractFunctionSamples:
            return posterior._functions(key, num_samples, num_features)

        functions = self._each(draw, batches.keys(key, self.batch_shape))
        return BatchFunctionSamples(functions, len(self.batch_shape))

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "OutputsPosterior":
        """The posteriors of one component of each f; see `AbstractPosterior.restrict`."""
        return dataclasses.replace(self, posterior_given=Restricted(self.posterior_given, change))

    @property
    def diagnostics(self) -> dict[str, Array]:
        """The diagnostics of each function, with the batch axes in front."""
        return self._each(lambda posterior: posterior.diagnostics)
