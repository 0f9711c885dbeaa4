"""The posterior of a Gaussian process that is summarised by inducing points."""

import equinox as eqx
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import checks, chunks, linalg
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.whitening import whitened_moments
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.predict.base import AbstractPosterior


class SparsePosterior(AbstractPosterior):
    """The variational posterior of a whitened sparse Gaussian process.

    With K(Z, Z) = L L', A = L^-1 k(Z, X) and q(v) = N(loc, S S') over v = L^-1 f(Z):
    mean A'loc, covariance k(x, x') - A'A + A'S S'A.

    Moments at m inputs cost O(m M^2 + M^3) with M inducing points, in chunks of rows; joint samples
    cost O(m^3) on top.

    Args:
        kernel: covariance function of the prior.
        inducing_points: Z, shape (M, d).
        loc: mean of v, shape (M,).
        scale_tril: S, lower triangular, shape (M, M).
        jitter: what K(Z, Z) gets on its diagonal, relative to its mean; None for 100 `eps`.

    References:
        Hensman, Matthews and Ghahramani (2015), Scalable Variational Gaussian Process
        Classification, eq. 9, in whitened form.
    """

    kernel: AbstractKernel
    inducing_points: Float[Array, "M d"]
    loc: Float[Array, " M"]
    scale_tril: Float[Array, "M M"]
    jitter: float | None = eqx.field(static=True, default=None)

    def _inducing_covariance(self) -> Float[Array, "M M"]:
        return linalg.add_jitter(self.kernel.covariance(self.inducing_points), self.jitter)

    def _moments(
        self, K: Float[Array, "M M"], factor: linalg.Factor, X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        across = self.kernel(self.inducing_points, X)
        diagonal = self.kernel.diag(X)
        return whitened_moments(K, across, diagonal, self.loc, self.scale_tril, factor)

    # Outside of `jit`, as when SVI sets itself up, one compilation instead of one per operation.
    @eqx.filter_jit
    def marginals(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """The mean and the variance of f at each row of X, all rows at once.

        Args:
            X: inputs, shape (n, d).

        Returns:
            Means and variances, each of shape (n,), in O(n M^2 + M^3).
        """
        K = self._inducing_covariance()
        return self._moments(K, linalg.factorise(K), X)

    def _check(self, Xs: ArrayLike) -> Float[Array, "m d"]:
        return checks.inputs("Xs", Xs, width=self.inducing_points.shape[1])

    def _rows(self, chunk_size: int | None) -> int:
        M = self.inducing_points.shape[0]
        return chunks.rows_per_chunk(M) if chunk_size is None else chunk_size

    @eqx.filter_jit
    def _chunked_marginals(self, Xs: Array, chunk_size: int) -> tuple[Array, Array]:
        K = self._inducing_covariance()
        factor = linalg.factorise(K)
        return chunks.map_rows(lambda X: self._moments(K, factor, X), Xs, chunk_size)

    def mean(
        self, Xs: Float[ArrayLike, "m d"], *, chunk_size: int | None = None
    ) -> Float[Array, " m"]:
        """The posterior mean of f; see `AbstractPosterior.mean`."""
        return self._chunked_marginals(self._check(Xs), self._rows(chunk_size))[0]

    def variance(
        self, Xs: Float[ArrayLike, "m d"], *, chunk_size: int | None = None
    ) -> Float[Array, " m"]:
        """The posterior variance of f; see `AbstractPosterior.variance`."""
        return self._chunked_marginals(self._check(Xs), self._rows(chunk_size))[1]

    def sample(
        self, key: Key[Array, ""], Xs: Float[ArrayLike, "m d"], num_samples: int = 1
    ) -> Float[Array, "num_samples m"]:
        """Draw jointly at all rows of Xs; see `AbstractPosterior.sample`."""
        return self._sample(key, self._check(Xs), num_samples)

    @eqx.filter_jit
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        whitener = linalg.inverse_cholesky(self._inducing_covariance())
        A = matmul(whitener, self.kernel(self.inducing_points, Xs))
        SA = matmul(self.scale_tril.T, A)
        covariance = self.kernel.covariance(Xs) - matmul(A.T, A) + matmul(SA.T, SA)
        mean, prior = matmul(self.loc, A), self.kernel.diag(Xs)
        return self._joint_sample(key, mean, covariance, prior, num_samples)
