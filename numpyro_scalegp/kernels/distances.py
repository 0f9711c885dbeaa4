"""Squared distances between rows, accurate in float32 for inputs far from the origin."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core.linalg import matmul

# Below this many columns explicit differences cost no more than a matrix product.
MAX_COLUMNS_OF_DIFFERENCES = 3


def squared_distances(
    X: Float[Array, "n d"], Z: Float[Array, "m d"], *, by_differences: bool = False
) -> Float[Array, "n m"]:
    """Compute ||x_i - z_j||^2 for all pairs of rows.

    Few columns are subtracted pair by pair. For more, both sets are centred and the distances
    come from one matrix product, ||x||^2 + ||z||^2 - 2 x'z, with an error of about `eps` times the
    squared spread of the data: small beside a smooth kernel's own scale, however far the data lie
    from the origin.

    Args:
        X: points, shape (n, d).
        Z: points, shape (m, d).
        by_differences: subtract pair by pair whatever d is, for kernels that are not differentiable
            at zero distance and would magnify that error.

    Returns:
        Squared distances, shape (n, m), never negative, zero for equal rows up to that error.
        Cost: O(n m d), by a matrix product unless `by_differences`.
    """
    if by_differences or X.shape[1] <= MAX_COLUMNS_OF_DIFFERENCES:
        differences = (X[:, None, i] - Z[None, :, i] for i in range(X.shape[1]))
        return sum((jnp.square(column) for column in differences), jnp.zeros((), X.dtype))
    centre = jax.lax.stop_gradient(jnp.mean(Z, axis=0))
    X, Z = X - centre[None, :], Z - centre[None, :]
    squares = jnp.sum(X * X, axis=1)[:, None] + jnp.sum(Z * Z, axis=1)[None, :]
    distances = squares - 2.0 * matmul(X, Z.T)
    # Lift what rounding made negative, and leave the derivative as it is.
    return distances + jax.lax.stop_gradient(jnp.maximum(-distances, 0.0))
