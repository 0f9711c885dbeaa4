"""Kernel functions centered on inducing points, as features."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.features.feature_map import AbstractKernelFeatures
from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.numerics.linalg import default_jitter


class InducingPoints(AbstractKernelFeatures):
    """Kernel functions at given points, phi_r(x) = k(x, z_r), with prior precision S = K(Z, Z).

    With that precision, phi(x)'S^-1 phi(z) is the Nystrom approximation of k(x, z). A diagonal
    precision in its place (`WeightSpaceGP(..., precision=s)`) makes a relevance vector machine.

    Args:
        kernel: covariance function.
        points: Z, shape (m, d).
        jitter: added to the diagonal of S, relative to k(z, z); None for 100 times machine epsilon.

    Raises:
        ValueError: if `points` is not of rank 2, or holds NaN or infinity.

    References:
        Evans and Nair (2020), Quadruply Stochastic Gaussian Processes, appendix I.2.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> phi = sgp.features.InducingPoints(sgp.kernels.RBF(0.5), jnp.zeros((7, 2)))
        >>> phi(jnp.ones((3, 2))).shape
        (3, 7)
    """

    kernel: AbstractKernel
    points: Float[Array, "m d"] = eqx.field(
        converter=lambda points: checks.inputs("points", points)
    )
    jitter: float | None = eqx.field(static=True, converter=checks.plain, default=None)

    def __check_init__(self) -> None:
        as_single("kernel", self.kernel)
        checks.jitter(self.jitter)
        self.kernel.check_inputs("points", self.points)

    @property
    def num_features(self) -> int:
        """The number of points."""
        return self.points.shape[0]

    def size(self, X: Float[Array, "n d"]) -> int:
        """The number of points."""
        return self.num_features

    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index`, shape (n, num)."""
        checks.inputs("points", self.points, width=X.shape[1])
        return self.kernel.evaluate(X, self.points[index])

    @property
    def has_dense_precision(self) -> bool:
        """True: S is a dense matrix."""
        return True

    def precision(self, rows: Int[Array, " r"], columns: Int[Array, " c"]) -> Float[Array, "r c"]:
        """The block K(Z[rows], Z[columns]), with jitter on the diagonal of S."""
        K = self.kernel.evaluate(self.points[rows], self.points[columns])
        on_diagonal = rows[:, None] == columns[None, :]
        return jnp.where(on_diagonal, self.precision_diagonal(rows)[:, None], K)

    def precision_diagonal(self, index: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The variances k(z, z), with jitter."""
        variance = self.kernel.evaluate_diag(self.points[index.reshape(-1)]).reshape(index.shape)
        jitter = default_jitter(variance.dtype) if self.jitter is None else self.jitter
        return variance * (1.0 + jitter)

    def covariance(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The kernel itself, shape (n, m)."""
        return self.kernel.evaluate(X, Z)

    def with_kernel(self, kernel: AbstractKernel) -> "InducingPoints":
        """The same points with another kernel."""
        return InducingPoints(kernel, self.points, self.jitter)
