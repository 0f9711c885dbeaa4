"""Squared distances between rows, accurate in float32 for inputs far from the origin."""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num

from numpyro_scalegp.core.host import largest_of_batch
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.numerics.rounding import at_least, at_most

Result = TypeVar("Result")

# Up to this many columns explicit differences cost no more than a matrix product.
MAX_COLUMNS_OF_DIFFERENCES = 3
# A matrix product is used up to the first error of a squared distance, and up to the second one if
# subtracting a few columns would not reduce the error by `_GAIN`.
_SMALL_ERROR = 1e-6
_MAX_ERROR = 1e-3
_GAIN = 4.0


@jax.custom_jvp
def reciprocal(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / x, differentiated without x^2: if that underflows to zero, 0 / x^2 is NaN."""
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
    """Compute sum_k ((x_ik - z_jk) / lengthscale_k)^2 for all pairs of points.

    Up to three columns are subtracted pair by pair, without rounding first. With more columns, both
    sets are centered and the distances come from one product, ||x||^2 + ||z||^2 - 2 x'z, with an
    error of about `eps` times the squared spread of the data in lengthscales. However far the data
    lie from the origin, this is small for a smooth kernel, but not compared to a small noise
    variance. If three columns are much wider than all others, as when few inputs are relevant,
    these are subtracted and the product has the other columns. If the error would still exceed
    1e-3, as for data a hundred lengthscales wide in float32, all columns are subtracted.

    Args:
        X: points, shape (n, d).
        Z: points, shape (m, d).
        lengthscale: shape () or (d,).
        by_differences: subtract pair by pair for any d; for kernels that are not differentiable at
            zero distance, which would magnify the error.

    Returns:
        Squared distances, shape (n, m), not negative, zero for equal points up to the error, and
        finite: differences are clipped where the sum would overflow, with zero derivative there.
        Cost: O(n m d), by a matrix product for columns that are not subtracted.
    """
    d = X.shape[1]
    inverse = jnp.broadcast_to(reciprocal(1.0 * jnp.asarray(lengthscale)), (d,))
    # A common dtype: inputs in float32 may meet hyperparameters or inputs in float64.
    X, Z, inverse = (array.astype(jnp.result_type(X, Z, inverse)) for array in (X, Z, inverse))
    center = jax.lax.stop_gradient(jnp.mean(Z, axis=0, keepdims=True))
    if by_differences or d <= MAX_COLUMNS_OF_DIFFERENCES:
        return _few_columns(X, Z, center, inverse)
    centered = _scaled(X - center, inverse), _scaled(Z - center, inverse)
    squares = [jnp.square(jax.lax.stop_gradient(rows)) for rows in centered]
    widths = sum(jnp.max(square, axis=0, initial=0.0) for square in squares)
    widest = jax.lax.top_k(widths, MAX_COLUMNS_OF_DIFFERENCES)[1]
    is_narrow = ~_is_in(widest, d)
    eps = jnp.finfo(centered[0].dtype).eps
    errors = [
        eps * sum(jnp.max(jnp.sum(square, axis=1), initial=0.0) for square in pair)
        for pair in (squares, [jnp.where(is_narrow, square, 0.0) for square in squares])
    ]
    # The same method for all members of a batch: otherwise `vmap` would compute all of them.
    method = _method(*map(largest_of_batch, errors))
    if (choices := _choices.get()) is not None:
        choices.append(method)
    if (chosen := _method_of_all.get()) is not None:
        distances = _METHODS[chosen](X, Z, center, inverse, widest)
    else:
        distances = jax.lax.switch(method, _METHODS, X, Z, center, inverse, widest)
    # Set rounding errors below zero to zero, without changing the derivative. Here, after the
    # branches, this needs no further pass over the pairs: it is fused with the next operation.
    return distances - jax.lax.stop_gradient(jnp.minimum(distances, 0.0))


def by_one_method(evaluate: Callable[[], Array], compute: Callable[[], Result]) -> Result:
    """Compute with one method for all squared distances, chosen once and not for each block.

    Args:
        evaluate: evaluates a kernel at all rows, of which only the choices are computed.
        compute: evaluates the kernel at blocks of these rows.

    Returns:
        The result of `compute` with the most accurate of the methods that are chosen.
    """

    def choices() -> list[Int[Array, ""]]:
        choices = list[Int[Array, ""]]()
        token = _choices.set(choices)
        try:
            evaluate()
        finally:
            _choices.reset(token)
        return choices

    # Only what the choices need, which is no matrix of all pairs.
    closed = jax.make_jaxpr(choices)()
    if not closed.jaxpr.outvars:
        return compute()
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    methods = jax.core.eval_jaxpr(jaxpr, closed.consts)

    def computed_by(method: int) -> Result:
        token = _method_of_all.set(method)
        try:
            return compute()
        finally:
            _method_of_all.reset(token)

    branches = [functools.partial(computed_by, method) for method in range(len(_METHODS))]
    return jax.lax.switch(functools.reduce(jnp.maximum, methods), branches)


# Within `by_one_method`: the choices so far, and the method of all squared distances.
_choices: ContextVar[list[Int[Array, ""]] | None] = ContextVar("_choices", default=None)
_method_of_all: ContextVar[int | None] = ContextVar("_method_of_all", default=None)


def _method(error: Float[Array, ""], reduced: Float[Array, ""]) -> Int[Array, ""]:
    """The index in `_METHODS`; `reduced` is a product's error without the widest columns."""
    is_mixed = (error > _SMALL_ERROR) & (reduced <= error / _GAIN) & (reduced <= _MAX_ERROR)
    return jnp.where(is_mixed, 1, jnp.where(error <= _MAX_ERROR, 0, 2))


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
    # Tangents of scaled points: derivatives in the scales need no further pass over the pairs.
    scaled = [rows * inverse + (points - center) * dinverse for rows, points in ((dX, X), (dZ, Z))]
    total = jnp.zeros_like(squared)
    for k in range(X.shape[1]):
        column = jnp.where(inside, (X[:, None, k] - Z[None, :, k]) * inverse[k], 0.0)
        total += 2.0 * column * (scaled[0][:, None, k] - scaled[1][None, :, k])
    return squared, total


def _mixed(
    X: Array, Z: Array, center: Array, inverse: Array, widest: Int[Array, " few"]
) -> Float[Array, "n m"]:
    """The widest columns by differences, the others by a product."""
    wide = _few_columns(X[:, widest], Z[:, widest], center[:, widest], inverse[widest])
    narrow = jnp.where(_is_in(widest, inverse.size), 0.0, inverse)
    return wide + _by_product(X, Z, center, narrow, widest)


def _is_in(columns: Int[Array, " few"], num_columns: int) -> Bool[Array, " d"]:
    """Which of all columns are in these; without a scatter, which ONNX lacks."""
    return jnp.any(jnp.arange(num_columns, dtype=columns.dtype)[:, None] == columns, axis=1)


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
    @jax.checkpoint  # stores no (n, m) array for each column
    def add(total: Array, column: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x, z, scale = column
        scaled = _within_bounds((x[:, None] - z[None, :]) * scale, inverse.size)
        return total + jnp.square(scaled), None

    zeros = jnp.zeros((X.shape[0], Z.shape[0]), jnp.result_type(X, inverse))
    return jax.lax.scan(add, zeros, (X.T, Z.T, inverse))[0]


def _scaled(differences: Float[Array, "n d"], inverse: Float[Array, " d"]) -> Float[Array, "n d"]:
    """Differences in lengthscales."""
    return _within_bounds(differences * inverse, inverse.size)


def _within_bounds(scaled: Float[Array, "..."], num_columns: int) -> Float[Array, "..."]:
    """Keep the sum of the squares of `num_columns` columns finite."""
    bound = (_largest(scaled.dtype) / max(num_columns, 1)) ** 0.5
    return at_least(at_most(scaled, bound), -bound)


def _largest(dtype: jnp.dtype) -> float:
    """The largest squared distance; correlations can multiply it without overflow."""
    return float(jnp.finfo(dtype).max) / 64.0


# Recompute in the backward pass: otherwise all branches would store (n, m, d) arrays.
_METHODS = [jax.checkpoint(method) for method in (_by_product, _mixed, _by_differences)]
