"""The posterior of a Gaussian process with one basis for its mean and one for its covariance."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import linalg
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.predict.variational import AbstractKernelPosterior


class DecoupledPosterior(AbstractKernelPosterior):
    """A Gaussian process with mean k(x, P) a and covariance k(x, x') - k(x, Q) G k(Q, x').

    With L the scale, B = L L' and M = I + L'K(Q, Q) L: G = (B^-1 + K(Q, Q))^-1 = L M^-1 L'.

    Moments at m inputs cost O(m (M_p d + M_q^2) + M_q^3) with M_p mean and M_q covariance points.

    Args:
        kernel: covariance function of the prior.
        mean_points: P, shape (M_p, d).
        mean_weights: a, shape (M_p,), or (*batch, M_p) for several functions.
        cov_points: Q, shape (M_q, d).
        cov_scale_tril: L, lower triangular, shape (*batch, M_q, M_q).

    References:
        Cheng and Boots (2017), Variational Inference for Gaussian Process Models with Linear
        Complexity, eq. 8.
    """

    kernel: AbstractKernel
    mean_points: Float[Array, "M_p d"]
    mean_weights: Float[Array, "*batch M_p"]
    cov_points: Float[Array, "M_q d"]
    cov_scale_tril: Float[Array, "*batch M_q M_q"]

    @property
    def _num_columns(self) -> int:
        return self.mean_points.shape[1]

    @property
    def _row_width(self) -> int:
        return self.mean_points.shape[0] + self.cov_points.shape[0]

    def _weights(self) -> tuple[Any, ...]:
        return self.mean_weights, self.cov_scale_tril

    def whitening(self) -> Float[Array, "*batch M_q M_q"]:
        """The inverse C^-1 of the lower Cholesky factor of M, in O(M_q^3)."""
        return self._each(lambda one: one._whitening())

    def _whitening(self) -> Float[Array, "M_q M_q"]:
        L = self.cov_scale_tril
        if L.size == 0:
            return L
        M = matmul(L.T, matmul(self.kernel.covariance(self.cov_points), L))
        # Eigenvalues of one or more: there is nothing to warn of, for which a batch would have to
        # ask the host.
        return linalg.inverse_cholesky(M + jnp.eye(len(L), dtype=L.dtype), warn=False)

    def _factorise(self) -> Float[Array, "M_q M_q"]:
        return matmul(self._whitening(), self.cov_scale_tril.T)

    def _mean(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return matmul(self.kernel(X, self.mean_points), self.mean_weights)

    def _moments(
        self, factors: Float[Array, "M_q M_q"], X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        explained = jnp.sum(jnp.square(matmul(factors, self.kernel(self.cov_points, X))), axis=0)
        return self._mean(X), jnp.maximum(self.kernel.diag(X) - explained, 0.0)

    def _joint(
        self, factors: Float[Array, "M_q M_q"], X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        white = matmul(factors, self.kernel(self.cov_points, X))
        return self._mean(X), self.kernel.covariance(X) - matmul(white.T, white)

    def _prior_variance(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return self.kernel.diag(X)
