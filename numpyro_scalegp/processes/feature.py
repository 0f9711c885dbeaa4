"""The posterior of a GP whose kernel is an inner product of p features."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.features.linear_model import Weights, posterior, refined, statistics
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.numerics.rounding import at_least
from numpyro_scalegp.processes.function_samples import (
    AbstractFunctionSamples,
    FeatureFunctionSamples,
    zero_function,
)
from numpyro_scalegp.processes.posterior import NEEDS_OBSERVATIONS, AbstractInChunks
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction

PosteriorType = TypeVar("PosteriorType", bound="FeaturePosterior")

# Warn where 1 - h_i is below this many units of rounding: its error is then above 1 %.
_LOST_DIGITS = 100.0


class FeaturePosterior(AbstractInChunks):
    """The posterior of f(x) = m(x) + phi(x)'w given all observations, w ~ N(0, I) a priori.

    With A = I + Phi'D^-1 Phi for noise variances D: w | y ~ N(A^-1 Phi'D^-1 (y - m(X)), A^-1).

    Made by `FeatureSpaceGP.condition`, and by `GaussianProcess.condition` with `RandomFourier`;
    immutable. Moments at m inputs cost O(m p) for the mean and O(m p^2) for the variance, in chunks
    of rows; each sampled function costs O(p^2 + m p), and the same key gives the same functions at
    other inputs too.

    References:
        Rasmussen and Williams (2006), eq. 2.8 and 2.9; leave-one-out: eq. 5.12.
    """

    features: Callable[[Array], Array]
    X: Float[Array, "n d"]
    y: Float[Array, " n"]
    noise_variance: Float[Array, "..."] | None
    mean_function: RowsFunction
    weights: Weights
    of_values: bool = eqx.field(static=True, default=False)  # whether y are values of f

    @property
    def _is_of_values(self) -> bool:
        return self.of_values

    @classmethod
    @compiled
    def from_features(
        cls: type[PosteriorType],
        features: Callable[[Array], Array],
        num_features: int,
        X: Float[Array, "n d"],
        y: Float[Array, " n"],
        noise_variance: Float[Array, "..."],
        mean_function: RowsFunction,
        dtype: jnp.dtype,
    ) -> PosteriorType:
        """Compute the posterior of the weights, in chunks of rows."""
        noise = jnp.broadcast_to(noise_variance.astype(dtype), y.shape)
        residual = (y - mean_function(X)).astype(dtype)

        def of_rows(rows: Array) -> Array:
            return features(rows).astype(dtype)

        weights = posterior(statistics(of_rows, num_features, X, noise, residual[:, None]))
        return cls(
            features=features,
            X=X,
            y=y,
            noise_variance=noise_variance,
            mean_function=mean_function,
            weights=refined(weights, of_rows, X, noise, residual),
        )

    @property
    def diagnostics(self) -> dict[str, Array]:
        """The `jitter` of the factorization, relative to the unit prior variance of the weights."""
        return {"jitter": self.weights.jitter}

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "FeaturePosterior":
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        zero = zero_function(self.weights.mean.dtype)
        features = self.features.restrict(change)  # type: ignore[attr-defined]
        return dataclasses.replace(self, features=features, mean_function=zero)

    @property
    def _row_width(self) -> int:
        return self.weights.mean.size

    def _centered_mean(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        return matmul(self.features(rows), self.weights.mean)

    def _marginal_variance(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        return self._weights_variance(self.features(rows))

    def _weights_variance(self, Phi: Float[Array, "r p"]) -> Float[Array, " r"]:
        """The variance of phi(x)'w for each row of features."""
        return jnp.sum(jnp.square(self._white(Phi)), axis=1)

    def _white(self, Phi: Float[Array, "r p"]) -> Float[Array, "r p"]:
        """W phi(x) for each row x; their inner products are the covariances of phi(x)'w."""
        return matmul(Phi, self.weights.whitening.T)

    @compiled
    def _weights_variance_at_data(self) -> Float[Array, " n"]:
        return self._map(lambda rows: self._weights_variance(self.features(rows)), self.X, None)

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        white = self._white(self.features(Xs))
        return matmul(white, white.T)

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        return self._functions(key, num_samples)._values(Xs, None)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None = None
    ) -> AbstractFunctionSamples:
        weights = self._drawn_weights(key, num_samples)
        return FeatureFunctionSamples(
            self.features, self.mean_function, weights.T, self._num_columns
        )

    def _drawn_weights(self, key: Array, num_samples: int) -> Float[Array, "num_samples p"]:
        W = self.weights.whitening
        normal = jax.random.normal(key, (num_samples, len(W)), W.dtype)
        return self.weights.mean + matmul(normal, W)

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given all other observations.

        Mean y_i - r_i / (1 - h_i) and variance D_i / (1 - h_i) with the residual r of the mean and
        the leverage h_i = phi_i'A^-1 phi_i / D_i.

        Returns:
            A `numpyro.distributions.Normal` of batch shape (n,), in O(n p^2). Warns where the
            features fit an observation nearly exactly, since 1 - h_i then has few accurate digits.

        Raises:
            ValueError: if the posterior is conditioned on values of f, without noise.

        References:
            Rasmussen and Williams (2006), eq. 5.12, by the matrix inversion lemma.
        """
        if self.noise_variance is None or self.of_values:
            raise ValueError(NEEDS_OBSERVATIONS)
        noise = jnp.broadcast_to(self.noise_variance, self.y.shape)
        variance = self._weights_variance_at_data()
        # 1 - h_i is positive, but may be zero or negative after rounding.
        eps = jnp.finfo(variance.dtype).eps
        complement = at_least(1.0 - variance / noise, eps)
        call_where(jnp.min(complement) < _LOST_DIGITS * eps, _warn_of_leverage)
        residual = self.y - self.mean(self.X)
        return dist.Normal(self.y - residual / complement, jnp.sqrt(noise / complement))


def _warn_of_leverage() -> None:
    warnings.warn(
        "leave-one-out densities of features are inaccurate in this precision: some observations "
        "are fitted nearly exactly by their own leverage. Raise the noise variance, or work in "
        "float64.",
        RuntimeWarning,
        stacklevel=1,
    )
