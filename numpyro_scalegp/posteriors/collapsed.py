"""The posterior of a sparse GP with the optimal distribution over its inducing values."""

import dataclasses
import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from numpyro_scalegp.core import linalg, rounding
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.feature import FeaturePosterior
from numpyro_scalegp.posteriors.function_samples import (
    AbstractFunctionSamples,
    KernelFunctionSamples,
    draws_with,
    prior_draws,
)

# A variance so small beside the jitter of the points' covariance is a good part that jitter.
_FEW_JITTERS = 5.0


class WhitenedPoints(eqx.Module):
    """The features L^-1 k(Z, x), with K(Z, Z) = L L': of variance one a priori."""

    kernel: AbstractKernel
    points: Float[Array, "M d"]
    whitening: Float[Array, "M M"]  # L^-1
    part: AbstractKernel | None = None  # of f, in place of the whole

    @property
    def of_f(self) -> AbstractKernel:
        """The prior's kernel, of f or of the part of it that this is."""
        return self.kernel if self.part is None else self.part

    def __call__(self, X: Float[Array, "n d"]) -> Float[Array, "n M"]:
        """The features of each row."""
        return matmul(self.of_f(X, self.points), self.whitening.T)

    def unexplained(self, X: Float[Array, "n d"], Phi: Float[Array, "n M"]) -> Float[Array, " n"]:
        """The variance that the features Phi of X leave unexplained."""
        return rounding.remaining_variance(self.of_f.diag(X), jnp.sum(jnp.square(Phi), axis=1))

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "WhitenedPoints":
        """Those of a part of f, with the whole's whitening."""
        return dataclasses.replace(self, part=change(self.of_f))


class CollapsedPosterior(FeaturePosterior):
    """The posterior of a sparse GP under the optimal q over its inducing values.

    That of the features L^-1 k(Z, x), with K(Z, Z) = L L', and in its variances what these leave of
    the prior's: mean phi(x)'B^-1 Phi'D^-1 (y - m(X)) and covariance k(x, z) - phi(x)'phi(z) +
    phi(x)'B^-1 phi(z), with B = I + Phi'D^-1 Phi.

    Made by `GaussianProcess.condition` with `SGPR`; immutable. Moments at m inputs cost O(m M^2)
    with M inducing points, in chunks of rows; joint samples cost O(m^3) on top.

    References:
        Titsias (2009), Variational Learning of Inducing Variables in Sparse Gaussian Processes,
        eq. 6.
    """

    features: WhitenedPoints

    def _unexplained(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        Phi = self.features(rows)
        return self.features.unexplained(rows, Phi) + self._of_weights(Phi)

    @compiled
    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        variance = self._map(self._unexplained, Xs, chunk_size)
        jitter = linalg.default_jitter(variance.dtype) * self.features.of_f.diag(Xs)
        call_where(jnp.mean(variance) < _FEW_JITTERS * jnp.mean(jitter), _warn_of_jitter)
        return variance

    @compiled
    def _rest_at_data(self) -> Float[Array, " n"]:
        def rest(rows: Array) -> Array:
            return self.features.unexplained(rows, self.features(rows))

        return self._map(rest, self.X, None)

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        Phi = self.features(Xs)
        white = self._white(Phi)
        return self.features.of_f.covariance(Xs) - matmul(Phi, Phi.T) + matmul(white, white.T)

    @compiled
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        prior = self.features.of_f.diag(Xs)
        return self._joint_sample(key, self.mean(Xs), self._covariance(Xs), prior, num_samples)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None = None
    ) -> AbstractFunctionSamples:
        weight_key, draw_key = jax.random.split(key)
        W, kernel = self.features.whitening, self.features.kernel
        Z = self.features.points.astype(W.dtype)
        draws = prior_draws(draw_key, kernel, num_samples, num_features, Z)
        at_points = draws_with(draws, kernel, Z, linalg.triangular_inverse(W))
        white = self._drawn_weights(weight_key, num_samples).T - matmul(W, at_points)
        columns = jnp.arange(num_samples)
        weights = matmul(W.T, white)
        return KernelFunctionSamples(
            self.features.of_f, self.mean_function, draws, columns, Z, weights
        )

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i under the optimal q given all other observations.

        That of the features, see `FeaturePosterior.leave_one_out`, with the unexplained variance.
        """
        of_features = super().leave_one_out()
        return dist.Normal(of_features.loc, jnp.sqrt(of_features.scale**2 + self._rest_at_data()))


def _warn_of_jitter() -> None:
    warnings.warn(
        "variances of a posterior with inducing points are too large in this precision: the jitter "
        "that the covariance of the points needs is a good part of them. Work in float64 "
        "(numpyro.enable_x64()).",
        RuntimeWarning,
        stacklevel=1,
    )
