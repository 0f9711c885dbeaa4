"""The squared-exponential kernel with separate lengthscales for each point."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.distances import squared_distances
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.stationary import check_columns, check_lengthscale_and_variance


class MultiscaleRBF(AbstractKernel):
    """`RBF` on inputs (x, c) with a scale c for each column: each point has separate lengthscales.

    k((x, c), (z, e)) = variance * prod_i sqrt(2 c_i e_i / q_i) exp(-(x_i - z_i)^2 / (l_i^2 q_i)),
    with q_i = c_i^2 + e_i^2 and l the lengthscales. If all scales are one, this is `RBF`. Data have
    scales of one, which `with_unit_scales` adds. The scales of a guide's inducing points start at
    one and are learned, so that each point has lengthscales l_i c_i: small where the function is
    rough, large where it is smooth. The sign of a scale does not matter; at zero there is no
    derivative. The arguments are the same as for `RBF`.

    Raises:
        ValueError: as for `RBF`, or, when called, if the inputs do not have 2 d columns.

    References:
        Cheng and Boots (2017), section 4.1; Walder, Kim and Schölkopf (2008), Sparse Multiscale
        Gaussian Process Regression. O(n m d) for n times m pairs, without a matrix product.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = sgp.kernels.MultiscaleRBF.with_unit_scales(jnp.array([[0.0], [2.0]]))
        >>> X.tolist()
        [[0.0, 1.0], [2.0, 1.0]]
        >>> sgp.kernels.MultiscaleRBF(2.0)(X, X).round(2).tolist()
        [[1.0, 0.6100000143051147], [0.6100000143051147, 1.0]]
    """

    hyperparameter_ndims = {"lengthscale": 1, "variance": 0}

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def __check_init__(self) -> None:
        check_lengthscale_and_variance(self.lengthscale, self.variance)
        _ = self.batch_shape  # raises unless batch shapes fit together

    @staticmethod
    def with_unit_scales(X: Float[ArrayLike, "n d"]) -> Float[Array, "n two_d"]:
        """Add a scale of one for each column.

        Args:
            X: inputs, shape (n, d).

        Returns:
            The inputs and their scales, shape (n, 2 d).
        """
        X = checks.inputs("X", X)
        return jnp.concatenate([X, jnp.ones_like(X)], axis=1)

    def _check_width(self, X: Float[Array, "n two_d"]) -> int:
        """The number d of input dimensions without their scales."""
        d, remainder = divmod(X.shape[1], 2)
        if remainder:
            raise ValueError(
                f"`MultiscaleRBF` needs inputs with a scale for each column, got {X.shape[1]} "
                "columns: add them by `MultiscaleRBF.with_unit_scales(X)`."
            )
        check_columns("lengthscale", self.lengthscale, d)
        return d

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        d = self._check_width(X)
        scales_X, scales_Z = X[:, d:], Z[:, d:]
        lengthscale = jnp.broadcast_to(self.lengthscale, (d,))
        log_sizes = [0.5 * jnp.sum(jnp.log(jnp.abs(c)), axis=1) for c in (scales_X, scales_Z)]
        exponent = log_sizes[0][:, None] + log_sizes[1][None, :]
        for i in range(d):
            total = jnp.square(scales_X[:, None, i]) + jnp.square(scales_Z[None, :, i])
            squared = squared_distances(X[:, i : i + 1], Z[:, i : i + 1], lengthscale[i])
            exponent = exponent - squared / total - 0.5 * jnp.log(0.5 * total)
        return self.variance * jnp.exp(exponent)

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        self._check_width(X)
        dtype = jnp.result_type(X, self.lengthscale, self.variance)
        return jnp.broadcast_to(self.variance.astype(dtype), X.shape[:1])
