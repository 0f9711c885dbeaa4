"""The posterior of a function whose observations were transformed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.function_samples import AbstractFunctionSamples
from numpyro_scalegp.posteriors.posterior import AbstractPosterior


class WarpedPosterior(AbstractPosterior):
    """The posterior of f given observations y = T(z), with z those of a Gaussian process.

    Moments and draws are those of f, on the scale of z; the noise variance likewise. Predictive
    distributions are those of y: their quantiles are `icdf`, their draws `sample`.

    Made by `sgp.posterior` of a site `dist.TransformedDistribution(sgp.GaussianProcess(...), T)`;
    immutable. Costs are those of the posterior given z.

    Args:
        process: the posterior given z = T^-1(y).
        transforms: those that make up T, of single values, the first one first.

    References:
        Snelson, Ghahramani and Rasmussen (2003), Warped Gaussian Processes.
    """

    process: Any
    transforms: tuple[Any, ...]

    @property
    def noise_variance(self) -> Float[Array, "..."] | None:
        """That of z."""
        return self.process.noise_variance

    @property
    def X(self) -> Float[Array, "... n d"]:
        """The inputs of the data."""
        return self.process.X

    @property
    def y(self) -> Float[Array, "... n"]:
        """The observations."""
        y = self.process.y
        for transform in self.transforms:
            y = transform(y)
        return y

    @property
    def _num_columns(self) -> int | None:
        return self.process._num_columns

    @property
    def _takes_batches(self) -> bool:
        return self.process._takes_batches

    @property
    def diagnostics(self) -> dict[str, Array]:
        """Those of the posterior given z."""
        return self.process.diagnostics

    def _check(self, Xs: ArrayLike) -> Float[Array, "... m d"]:
        return self.process._check(Xs)

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.process._mean(Xs, chunk_size)

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.process._variance(Xs, chunk_size)

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        return self.process._mean_and_variance(Xs, chunk_size)

    def _covariance(self, Xs: Array) -> Array:
        return self.process._covariance(Xs)

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        return self.process._sample(key, Xs, num_samples)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        return self.process._functions(key, num_samples, num_features)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> AbstractPosterior:
        """The posterior of a part of f; see `AbstractPosterior.restrict`."""
        return self.process.restrict(change)

    def predictive(
        self,
        Xs: Float[ArrayLike, "... m d"],
        noise_variance: Float[ArrayLike, "..."] | None = None,
        *,
        chunk_size: int | None = None,
    ) -> dist.TransformedDistribution:
        """The predictive distribution of new observations y; see `AbstractPosterior.predictive`.

        Args:
            Xs: inputs, shape (m, d).
            noise_variance: that of z at the new inputs; None for the model's own.
            chunk_size: rows worked on at a time.

        Returns:
            The normal distribution of z, transformed: `log_prob`, `cdf`, `icdf` and `sample`, of
            the means' shape.

        Raises:
            ValueError: as `AbstractPosterior.predictive`; if the transform has values for each
                training row.
        """
        if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(self.transforms)):
            raise ValueError(
                "the transform around the Gaussian process has an array of values, for the rows of "
                "the fit: take `sgp.infer.Predictive`, which runs the model at new rows."
            )
        normal = self.process.predictive(Xs, noise_variance, chunk_size=chunk_size)
        return dist.TransformedDistribution(normal, list(self.transforms))

    def leave_one_out(self) -> dist.TransformedDistribution:
        """The predictive distribution of each y_i given all other observations; shape (n,)."""
        return dist.TransformedDistribution(self.process.leave_one_out(), list(self.transforms))
