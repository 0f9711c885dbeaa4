"""The posterior of a sparse Gaussian process with further basis functions for its mean."""

from typing import Any

from jaxtyping import Array, Float

from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.predict.sparse import SparsePosterior
from numpyro_scalegp.predict.variational import AbstractKernelPosterior


class HybridPosterior(AbstractKernelPosterior):
    """A sparse posterior plus k(x, R) a in the mean, for residual points R with weights a.

    Moments at m inputs cost O(m (M^2 + d M_r) + M^3) with M inducing and M_r residual points.

    Args:
        sparse: the posterior without the residual part.
        residual_points: R, shape (M_r, d).
        residual_weights: a, shape (M_r,), or (*batch, M_r) for several functions.

    References:
        Cheng and Boots (2017), Variational Inference for Gaussian Process Models with Linear
        Complexity, appendix A.3.
    """

    sparse: SparsePosterior
    residual_points: Float[Array, "M_r d"]
    residual_weights: Float[Array, "*batch M_r"]

    @property
    def _num_columns(self) -> int:
        return self.sparse._num_columns

    @property
    def _row_width(self) -> int:
        return self.sparse._row_width + self.residual_points.shape[0]

    def _weights(self) -> tuple[Any, ...]:
        return self.residual_weights, *self.sparse._weights()

    def _factorise(self) -> Any:
        return self.sparse._factorise()

    def _residual(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return matmul(self.sparse.kernel(X, self.residual_points), self.residual_weights)

    def _moments(
        self, factors: Any, X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        mean, variance = self.sparse._moments(factors, X)
        return mean + self._residual(X), variance

    def _joint(
        self, factors: Any, X: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        mean, covariance = self.sparse._joint(factors, X)
        return mean + self._residual(X), covariance

    def _prior_variance(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return self.sparse._prior_variance(X)
