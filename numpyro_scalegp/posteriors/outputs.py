"""The posteriors of independent functions that share a prior."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.function_samples import OutputsFunctionSamples
from numpyro_scalegp.posteriors.mixture import Restricted
from numpyro_scalegp.posteriors.posterior import AbstractPosterior


class OutputsPosterior(AbstractPosterior):
    """The posteriors of a batch of independent functions, as a plate over outputs makes them.

    Moments have shape (*batch, m), samples (num_samples, *batch, m). Each call conditions once, and
    what depends on the inputs alone, such as a factorization, serves all functions.

    Args:
        given: the posterior given the values of one function, a pure function.
        values: of all functions, shape (*batch, n).
        noise_variance: of the observations, of a shape that broadcasts with (*batch, 1), or None.
    """

    given: Callable[[Any], AbstractPosterior]
    values: Float[Array, "*batch n"]
    noise_variance: Float[Array, "..."] | None = None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of the batch of functions."""
        return self.values.shape[:-1]

    def _each(self, function: Callable[..., Any], *others: Array) -> Any:
        """What a function gives for the posterior of each function, and a part of the others."""

        def one(values: Array, *others: Array) -> Any:
            return function(self.given(values), *others)

        for _ in self.batch_shape:
            one = jax.vmap(one)
        return one(self.values, *others)

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
        keys = jax.random.split(key, self.batch_shape)
        draws = self._each(lambda posterior, key: posterior.sample(key, Xs, num_samples), keys)
        return jnp.moveaxis(draws, -2, 0)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> OutputsFunctionSamples:
        keys = jax.random.split(key, self.batch_shape)
        draws = self._each(lambda one, key: one._functions(key, num_samples, num_features), keys)
        return OutputsFunctionSamples(draws, len(self.batch_shape))

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "OutputsPosterior":
        """The posteriors of a part of each f; see `AbstractPosterior.restrict`."""
        return dataclasses.replace(self, given=Restricted(self.given, change))

    @property
    def diagnostics(self) -> dict[str, Array]:
        """Those of each function, with the axes of the batch in front."""
        return self._each(lambda posterior: posterior.diagnostics)
