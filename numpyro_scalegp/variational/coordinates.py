"""Coordinates in which gradient steps train the many weights of a mean."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.variational.bases import Basis

# The least variance of the mean's points given the few points, relative to the prior variance, and
# the factor by which neighbors that vary together exceed it.
_LEAST_VARIANCE, _NEIGHBORS = 0.1, 4.0


class MeanCoordinates(NamedTuple):
    """Coordinates of the weights a of a mean k(x, P) a, by the few points Q of the covariance.

    The prior covariance K(P, P) of all points is too large to whiten. With K(Q, Q) = R R', the
    whitened values V a, V = R^-1 K(Q, P), are the mean at the few points; D is about the variance
    of f(P) given these. The coordinates are residual weights w and a whitened mean m at Q,

        a = D^-1/2 (w + W (I + W'W)^-1 (m - W'w)),  W = D^-1/2 V',

    in which V a is about m where the points Q determine it, and w otherwise. The map from (w, m) to
    weights is linear, and w = D^1/2 a with m = V a is exact. Other points with w = 0 leave such
    weights as they are.

    References:
        Cheng and Boots (2017), appendix A.1, suggest such a preconditioner; the variances D and
        the matrix V are from the Nystrom approximation.
    """

    features: Float[Array, "M_q M_p"]  # V
    deviation: Float[Array, " M_p"]  # the diagonal of D^1/2
    precision: Float[Array, "M_q M_q"]  # the inverse Cholesky factor of I + W'W

    @classmethod
    def at(cls, kernel: AbstractKernel, mean: Basis, cov: Basis) -> "MeanCoordinates":
        """The coordinates for two bases, in O(M_p M_q^2 + M_q^3)."""
        return _coordinates(as_single("kernel", kernel), mean, cov)

    def weights(
        self, residual: Float[Array, "*batch M_p"], loc: Float[Array, "*batch M_q"]
    ) -> Float[Array, "*batch M_p"]:
        """The weights a for residual weights w and a whitened mean m."""
        missing = loc - self.loc(residual / self.deviation)
        solved = matmul(matmul(missing, self.precision.T), self.precision)
        return (residual + matmul(solved, self.features) / self.deviation) / self.deviation

    def loc(self, weights: Float[Array, "*batch M_p"]) -> Float[Array, "*batch M_q"]:
        """The whitened mean V a at the few points."""
        return matmul(weights, self.features.T)


@compiled
def _coordinates(kernel: AbstractKernel, mean: Basis, cov: Basis) -> MeanCoordinates:
    (P, in_mean), (Q, in_cov) = mean, cov
    active = in_cov[:, None] & in_cov[None, :]
    K = jnp.where(active, kernel.evaluate_covariance(Q), jnp.eye(len(Q), dtype=Q.dtype))
    across = jnp.where(in_cov[:, None] & in_mean[None, :], kernel.evaluate(Q, P), 0.0)
    V = matmul(linalg.inverse_cholesky(linalg.add_jitter(K, None), warn=False), across)
    prior = kernel.evaluate_diag(P)
    variance = jnp.maximum(prior - jnp.sum(jnp.square(V), axis=0), _LEAST_VARIANCE * prior.mean())
    deviation = jnp.sqrt(_NEIGHBORS * variance)
    W = V / deviation
    precision = matmul(W, W.T) + jnp.eye(len(Q), dtype=W.dtype)
    return MeanCoordinates(V, deviation, linalg.inverse_cholesky(precision, warn=False))
