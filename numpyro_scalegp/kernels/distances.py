"""Squared distances between rows, accurate in float32 for inputs far from the origin."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Num

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import largest_of_batch
from numpyro_scalegp.core.linalg import matmul

# Below this many columns explicit differences cost no more than a matrix product.
MAX_COLUMNS_OF_DIFFERENCES = 3
# Errors of a squared distance up to which it is left to a matrix product: whatever the noise, and
# where differences of a few columns would not make it much smaller.
_SMALL_ERROR = 1e-6
_MAX_ERROR = 1e-3
# How much smaller is much.
_GAIN = 4.0


@jax.custom_jvp
def reciprocal(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / x, with a derivative that multiplies by it twice: 0 / x^2 is NaN where x^2 is zero."""
    return 1.0 / jnp.maximum(x, float(jnp.finfo(x.dtype).tiny))


@reciprocal.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    inverse = reciprocal(x)
    return inverse, -inverse * (inverse * dx)


def squared_distances(
    X: Float[Array, "n d"],
    Z: Float[Array, "m d"],
    lengthscale: Num[ArrayLike, "..."] = 1.0,
    *,
    by_differences: bool = False,
) -> Float[Array, "n m"]:
    """Compute sum_k ((x_ik - z_jk) / lengthscale_k)^2 for all pairs of rows.

    Few columns are subtracted pair by pair, before anything is rounded. For more, both sets are
    centered and the distances come from one product, ||x||^2 + ||z||^2 - 2 x'z, with an error
    of about `eps` times the squared spread of the data in lengthscales: small beside a smooth
    kernel's own scale, however far the data lie from the origin, but not beside little noise.
    Where three columns are much wider than all others, as where few are relevant, these are
    subtracted and the product has the rest. Where the error would still be larger than 1e-3, for
    rows a hundred lengthscales wide in float32, all are.

    Args:
        X: points, shape (n, d).
        Z: points, shape (m, d).
        lengthscale: shape () or (d,).
        by_differences: subtract pair by pair whatever d is, for kernels that are not differentiable
            at zero distance and would magnify that error.

    Returns:
        Squared distances, shape (n, m), never negative, zero for equal rows up to that error, and
        finite: each column's part ends where the sum would overflow, and has no derivative there.
        Cost: O(n m d), by a matrix product for what is not subtracted.
    """
    d = X.shape[1]
    inverse = jnp.broadcast_to(reciprocal(checks.as_float(lengthscale, "lengthscale")), (d,))
    # One type throughout: rows in float32 may meet hyperparameters or rows in float64.
    X, Z, inverse = (part.astype(jnp.result_type(X, Z, inverse)) for part in (X, Z, inverse))
    center = jax.lax.stop_gradient(jnp.mean(Z, axis=0, keepdims=True))
    if by_differences or d <= MAX_COLUMNS_OF_DIFFERENCES:
        return _few_columns(X, Z, center, inverse)
    near = _scaled(X - center, inverse), _scaled(Z - center, inverse)
    squares = [jnp.square(jax.lax.stop_gradient(one)) for one in near]
    widths = sum(jnp.max(one, axis=0, initial=0.0) for one in squares)
    widest = jax.lax.top_k(widths, MAX_COLUMNS_OF_DIFFERENCES)[1]
    eps = jnp.finfo(near[0].dtype).eps
    errors = [
        eps * sum(jnp.max(jnp.sum(one, axis=1), initial=0.0) for one in parts)
        for parts in (squares, [one.at[:, widest].set(0.0) for one in squares])
    ]
    # One way for all of a batch, or under `vmap` all of them would be taken.
    way = _way(*map(largest_of_batch, errors))
    distances = jax.lax.switch(way, _WAYS, X, Z, center, inverse, widest)
    # Lift what rounding made negative, and leave the derivative as it is. Here, after the branches,
    # it costs no further pass over the pairs: it becomes part of what is done with them next.
    return distances - jax.lax.stop_gradient(jnp.minimum(distances, 0.0))


def _way(error: Float[Array, ""], of_rest: Float[Array, ""]) -> Int[Array, ""]:
    """The branch to take."""
    is_better = (error > _SMALL_ERROR) & (of_rest <= error / _GAIN) & (of_rest <= _MAX_ERROR)
    return jnp.where(is_better, 1, jnp.where(error <= _MAX_ERROR, 0, 2))


@jax.custom_jvp
def _few_columns(X: Array, Z: Array, center: Array, inverse: Array) -> Float[Array, "n m"]:
    total = jnp.zeros((), jnp.result_type(X, inverse))
    for k in range(X.shape[1]):
        total += jnp.square((X[:, None, k] - Z[None, :, k]) * inverse[k])
    return jnp.minimum(total, _largest(total.dtype))


@_few_columns.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    (X, Z, center, inverse), (dX, dZ, _, dinverse) = primals, tangents
    squared = _few_columns(X, Z, center, inverse)
    inside = ~(squared >= _largest(squared.dtype))  # NaN stays NaN
    # Derivatives in the scales by way of single rows cost no further pass over the pairs.
    moved = [rows * inverse + (points - center) * dinverse for rows, points in ((dX, X), (dZ, Z))]
    total = jnp.zeros_like(squared)
    for k in range(X.shape[1]):
        column = jnp.where(inside, (X[:, None, k] - Z[None, :, k]) * inverse[k], 0.0)
        total += 2.0 * column * (moved[0][:, None, k] - moved[1][None, :, k])
    return squared, total


def _by_both(
    X: Array, Z: Array, center: Array, inverse: Array, widest: Int[Array, " few"]
) -> Float[Array, "n m"]:
    """The widest columns by differences, the others by a product."""
    of_widest = X[:, widest], Z[:, widest], center[:, widest], inverse[widest]
    rest = inverse.at[widest].set(0.0)
    return _few_columns(*of_widest) + _by_product(X, Z, center, rest, widest)


def _by_product(
    X: Array, Z: Array, center: Array, inverse: Array, widest: Int[Array, " few"]
) -> Float[Array, "n m"]:
    """||x||^2 + ||z||^2 - 2 x'z, with the squares as two more columns of one product."""
    X, Z = _scaled(X - center, inverse), _scaled(Z - center, inverse)
    squares = [jnp.sum(rows * rows, axis=1, keepdims=True) for rows in (X, Z)]
    ones = [jnp.ones_like(square) for square in squares]
    left = jnp.concatenate([-2.0 * X, squares[0], ones[0]], axis=1)
    right = jnp.concatenate([Z, ones[1], squares[1]], axis=1)
    return matmul(left, right.T)


def _by_differences(
    X: Array, Z: Array, center: Array, inverse: Array, widest: Int[Array, " few"]
) -> Float[Array, "n m"]:
    @jax.checkpoint  # no (n, m) array is kept of each column
    def add(total: Array, column: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x, z, of_column = column
        scaled = _within_bounds((x[:, None] - z[None, :]) * of_column, inverse.size)
        return total + jnp.square(scaled), None

    zeros = jnp.zeros((len(X), len(Z)), jnp.result_type(X, inverse))
    return jax.lax.scan(add, zeros, (X.T, Z.T, inverse))[0]


def _scaled(differences: Float[Array, "n d"], inverse: Float[Array, " d"]) -> Float[Array, "n d"]:
    """Differences in lengthscales."""
    return _within_bounds(differences * inverse, inverse.size)


def _within_bounds(scaled: Float[Array, "..."], num_columns: int) -> Float[Array, "..."]:
    """Keep the sum of the squares of `num_columns` columns finite."""
    bound = (_largest(scaled.dtype) / max(num_columns, 1)) ** 0.5
    return jnp.clip(scaled, -bound, bound)


def _largest(dtype: jnp.dtype) -> float:
    """The largest squared distance, which correlations may still multiply."""
    return float(jnp.finfo(dtype).max) / 64.0


# What the way back needs is computed again: else all branches would keep (n, m, d) arrays.
_WAYS = [jax.checkpoint(way) for way in (_by_product, _by_both, _by_differences)]
