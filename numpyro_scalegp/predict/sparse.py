"""The posterior of a Gaussian process that is summarised by inducing points."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from numpyro_scalegp.core import linalg
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.whitening import whitened_moments
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.predict.variational import AbstractKernelPosterior


class SparsePosterior(AbstractKernelPosterior):
    """The variational posterior of a whitened sparse Gaussian process.

    With K(Z, Z) = L L', A = L^-1 k(Z, X) and q(v) = N(loc, S S') over v = L^-1 f(Z):
    mean A'loc, covariance k(x, x') - A'A + A'S S'A.

    Moments at m inputs cost O(m M^2 + M^3) with M inducing points, in chunks of rows; joint samples
    cost O(m^3) on top.

    Args:
        kernel: covariance function of the prior.
        inducing_points: Z, shape (M, d).
        loc: mean of v, shape (M,), or (*batch, M) for several functions.
        scale_tril: S, lower triangular, shape (*batch, M, M).
        jitter: what K(Z, Z) gets on its diagonal, relative to its mean; None for 100 `eps`.

    References:
        Hensman, Matthews and Ghahramani (2015), Scalable Variational Gaussian Process
        Classification, eq. 9, in whitened form.
    """

    kernel: AbstractKernel
    inducing_points: Float[Array, "M d"]
    loc: Float[Array, "*batch M"]
    scale_tril: Float[Array, "*batch M M"]
    jitter: float | None = eqx.field(static=True, default=None)

    @property
    def _num_columns(self) -> int:
        return self.inducing_points.shape[1]

    @property
    def _row_width(self) -> int:
        return self.inducing_points.shape[0]

    def _weights(self) -> tuple[Any, ...]:
        return self.loc, self.scale_tril

    def _factorise(self) -> tuple[Float[Array, "M M"], linalg.Factor]:
        K = linalg.add_jitter(self.kernel.covariance(self.inducing_points), self.jitter)
        return K, linalg.factorise(K)

    def _moments(
        self, factors: tuple[Float[Array, "M M"], linalg.Factor], X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        K, factor = factors
        across = self.kernel(self.inducing_points, X)
        diagonal = self.kernel.diag(X)
        return whitened_moments(K, across, diagonal, self.loc, self.scale_tril, factor)

    def _joint(
        self, factors: tuple[Float[Array, "M M"], linalg.Factor], X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        K, factor = factors
        whitener = linalg.inverse_cholesky_given(K, factor.tril)
        A = matmul(whitener, self.kernel(self.inducing_points, X))
        SA = matmul(self.scale_tril.T, A)
        covariance = self.kernel.covariance(X) - matmul(A.T, A) + matmul(SA.T, SA)
        return matmul(self.loc, A), covariance

    def _prior_variance(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return self.kernel.diag(X)
