"""The posterior of a sparse GP with the optimal distribution of its inducing values."""

import dataclasses
import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics import linalg, rounding
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.feature import FeaturePosterior
from numpyro_scalegp.processes.function_samples import (
    AbstractFunctionSamples,
    KernelFunctionSamples,
    draws_with_covariance,
    prior_draws,
)
from numpyro_scalegp.programs.compiled import compiled

# Warn about variances below this multiple of the jitter on the covariance of the inducing points.
_FEW_JITTERS = 5.0


class WhitenedPoints(eqx.Module):
    """The features L^-1 k(Z, x) with K(Z, Z) = L L', whose weights have prior variance one."""

    kernel: AbstractKernel
    points: Float[Array, "M d"]
    whitening: Float[Array, "M M"]  # L^-1
    component_kernel: AbstractKernel | None = None  # for the posterior of a component of f

    @property
    def of_f(self) -> AbstractKernel:
        """The prior kernel of f, or of a component of f."""
        return self.kernel if self.component_kernel is None else self.component_kernel

    def __call__(self, X: Float[Array, "n d"]) -> Float[Array, "n M"]:
        """The features, shape (n, M)."""
        return matmul(self.of_f.evaluate(X, self.points), self.whitening.T)

    def unexplained(self, X: Float[Array, "n d"], Phi: Float[Array, "n M"]) -> Float[Array, " n"]:
        """The prior variance at X that the features Phi do not explain."""
        return rounding.remaining_variance(
            self.of_f.evaluate_diag(X), jnp.sum(jnp.square(Phi), axis=1)
        )

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "WhitenedPoints":
        """The features of a term of f, with the same whitening."""
        return dataclasses.replace(self, component_kernel=change(self.of_f))


class CollapsedPosterior(FeaturePosterior):
    """The posterior of a sparse GP under the optimal q of its inducing values.

    With the features phi(x) = L^-1 k(Z, x), K(Z, Z) = L L', the noise variances D and
    B = I + Phi'D^-1 Phi, the mean is m(x) + phi(x)'B^-1 Phi'D^-1 (y - m(X)) and the covariance is
    k(x, z) - phi(x)'phi(z) + phi(x)'B^-1 phi(z).

    Made by `GaussianProcess.condition` with `SGPR`; immutable. Moments at m inputs cost O(m M^2)
    with M inducing points, in chunks of rows; joint samples cost an additional O(m^3).

    References:
        Titsias (2009), Variational Learning of Inducing Variables in Sparse Gaussian Processes,
        eq. 6.
    """

    features: WhitenedPoints

    def _marginal_variance(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        Phi = self.features(rows)
        return self.features.unexplained(rows, Phi) + self._weights_variance(Phi)

    @compiled
    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        variance = self._map(self._marginal_variance, Xs, chunk_size)
        jitter = linalg.default_jitter(variance.dtype) * self.features.of_f.evaluate_diag(Xs)
        call_where(jnp.mean(variance) < _FEW_JITTERS * jnp.mean(jitter), _warn_of_jitter)
        return variance

    @compiled
    def _unexplained_at_data(self) -> Float[Array, " n"]:
        def unexplained(rows: Array) -> Array:
            return self.features.unexplained(rows, self.features(rows))

        return self._map(unexplained, self.X, None)

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        Phi = self.features(Xs)
        white = self._white(Phi)
        return (
            self.features.of_f.evaluate_covariance(Xs) - matmul(Phi, Phi.T) + matmul(white, white.T)
        )

    @compiled
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        prior = self.features.of_f.evaluate_diag(Xs)
        return self._joint_sample(key, self.mean(Xs), self._covariance(Xs), prior, num_samples)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None = None
    ) -> AbstractFunctionSamples:
        weight_key, draw_key = jax.random.split(key)
        W, kernel = self.features.whitening, self.features.kernel
        Z = self.features.points.astype(W.dtype)
        draws = prior_draws(draw_key, kernel, num_samples, num_features, Z)
        at_points = draws_with_covariance(draws, kernel, Z, linalg.triangular_inverse(W))
        white = self._drawn_weights(weight_key, num_samples).T - matmul(W, at_points)
        columns = jnp.arange(num_samples)
        weights = matmul(W.T, white)
        return KernelFunctionSamples(
            self.features.of_f, self.mean_function, draws, columns, Z, weights
        )

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i under the optimal q given all other observations.

        It is `FeaturePosterior.leave_one_out` plus the prior variance that the features do not
        explain.
        """
        explained = super().leave_one_out()
        variance = explained.scale**2 + self._unexplained_at_data()
        return dist.Normal(explained.loc, jnp.sqrt(variance))


def _warn_of_jitter() -> None:
    warnings.warn(
        "variances of a posterior with inducing points are too large in this precision: a large "
        "part of them is the jitter on the covariance of the points. Work in float64 "
        "(numpyro.enable_x64()).",
        RuntimeWarning,
        stacklevel=1,
    )
