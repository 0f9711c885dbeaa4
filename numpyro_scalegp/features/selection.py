"""Selection of inducing points: cluster centers, or rows with the largest variance."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.distances import squared_distances
from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.linear.pivoted_cholesky import pivoted_cholesky


def kmeans_points(
    key: Key[Array, ""],
    X: Float[ArrayLike, "n d"],
    num_points: int,
    *,
    num_steps: int = 10,
    max_rows: int = 20_000,
    categories: Sequence[int] = (),
) -> Float[Array, "num_points d"]:
    """Choose inducing points as the centers of k-means clusters.

    Distances are Euclidean: scale the columns first, by their standard deviations or lengthscales.
    Columns of categories are scaled so that rows of different categories are further apart than
    rows of one category. Each category then has separate clusters, if there are enough clusters.

    Args:
        key: a typed JAX key.
        X: inputs, shape (n, d).
        num_points: number of centers, at most n.
        num_steps: number of Lloyd iterations after a k-means++ initialization.
        max_rows: maximum number of rows to use, drawn at random.
        categories: columns of categories, as for a kernel with `Coregion`; there a center has the
            category of the row nearest to it.

    Returns:
        Centers, shape (num_points, d). Time O(max_rows num_points d num_steps).

    Raises:
        ValueError: if `num_points` is not between 1 and the number of rows, or `categories` are not
            columns of X.

    References:
        Arthur and Vassilvitskii (2007), k-means++: The Advantages of Careful Seeding.

    Example:
        >>> import jax
        >>> import numpyro_scalegp as sgp
        >>> X = jax.random.normal(jax.random.key(0), (1000, 2))
        >>> sgp.features.kmeans_points(jax.random.key(1), X, 50).shape
        (50, 2)
    """
    X, key = _checked(X, num_points), checks.as_key(key)
    checks.count("num_steps", num_steps, 0)
    checks.count("max_rows", max_rows)
    if X.shape[0] > max(max_rows, num_points):
        rows_key, key = jax.random.split(key)
        rows = jax.random.choice(rows_key, X.shape[0], (max(max_rows, num_points),), replace=False)
        X = X[rows]
    is_category = _is_category(X.shape[1], categories)
    if not is_category.any():
        return _kmeans(key, X, num_points, num_steps)
    scale = jnp.where(is_category, _category_scale(X, is_category), 1.0).astype(X.dtype)
    centers = _kmeans(key, X * scale, num_points, num_steps)
    nearest = jnp.argmin(squared_distances(centers, X * scale), axis=1)
    return jnp.where(is_category, X[nearest], centers)


def _is_category(d: int, categories: Sequence[int]) -> np.ndarray:
    """Which columns hold categories."""
    checks.instance("categories", categories, (tuple, list), "a tuple of columns such as (1,)")
    for column in categories:
        if checks.count("categories", column, 0) >= d:
            raise ValueError(f"`categories` must lie in 0..{d - 1}, got {column}.")
    return np.isin(np.arange(d), categories)


def _category_scale(X: Float[Array, "n d"], is_category: np.ndarray) -> Float[Array, ""]:
    """A scale at which two categories are twice as far apart as rows of one category can be."""
    widths = jnp.where(is_category, 0.0, jnp.max(X, axis=0) - jnp.min(X, axis=0))
    diameter = jnp.sqrt(jnp.sum(jnp.square(widths)))
    return jnp.where(diameter > 0, 2.0 * diameter, 1.0)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _kmeans(key: Array, X: Array, num_points: int, num_steps: int) -> Array:
    def seed(nearest: Array, uniform: Array) -> tuple[Array, Array]:
        point = X[_index_at(nearest, uniform)]
        return jnp.minimum(nearest, jnp.sum(jnp.square(X - point), axis=1)), point

    # Before the first center, all rows are equally far away.
    start = jnp.full(X.shape[0], jnp.finfo(X.dtype).max / (2 * X.shape[0]), X.dtype)
    _, centers = jax.lax.scan(seed, start, jax.random.uniform(key, (num_points,), X.dtype))

    def step(centers: Array, _: None) -> tuple[Array, None]:
        owner = jnp.argmin(squared_distances(X, centers), axis=1)
        count = jnp.zeros(num_points, X.dtype).at[owner].add(1.0)
        total = jnp.zeros_like(centers).at[owner].add(X)
        mean = total / jnp.maximum(count, 1.0)[:, None]
        return jnp.where(count[:, None] > 0, mean, centers), None

    return jax.lax.scan(step, centers, length=num_steps)[0]


def _index_at(weights: Float[Array, " n"], fraction: Float[Array, ""]) -> Int[Array, ""]:
    """Where the cumulative sum of weights passes a fraction of its total.

    In two stages, over blocks and within a block, since a long cumulative sum is slow.
    """
    n = weights.shape[0]
    size = math.isqrt(n - 1) + 1
    blocks = jnp.pad(weights, (0, size * size - n)).reshape(size, size)

    def stage(weights: Array, target: Array) -> tuple[Array, Array]:
        sums = jnp.cumsum(weights)
        index = jnp.minimum(jnp.sum(sums <= target), size - 1)
        return index, target - (sums[index] - weights[index])

    totals = jnp.sum(blocks, axis=1)
    block, remainder = stage(totals, fraction * jnp.sum(totals))
    return jnp.minimum(block * size + stage(blocks[block], remainder)[0], n - 1)


def greedy_points(
    kernel: AbstractKernel, X: Float[ArrayLike, "n d"], num_points: int
) -> Float[Array, "num_points d"]:
    """Choose rows of X one by one, each with the largest variance given the earlier rows.

    These are the pivots of a partial Cholesky factorization of K(X, X), which are near optimal for
    a sparse GP with this kernel: use them if the hyperparameters are roughly known.

    Args:
        kernel: covariance function with concrete hyperparameters.
        X: inputs, shape (n, d).
        num_points: number of points, at most n.

    Returns:
        Rows of X, shape (num_points, d). Time O(n num_points^2), memory O(n num_points).

    Raises:
        ValueError: if `num_points` is not between 1 and the number of rows.

    References:
        Burt, Rasmussen and van der Wilk (2020), Convergence of Sparse Variational Inference in
        Gaussian Processes Regression, section 4.

    Example:
        >>> import jax
        >>> import numpyro_scalegp as sgp
        >>> X = jax.random.normal(jax.random.key(0), (1000, 2))
        >>> sgp.features.greedy_points(sgp.kernels.RBF(0.5), X, 50).shape
        (50, 2)
    """
    as_single("kernel", kernel)
    X = _checked(X, num_points)
    kernel.check_inputs("X", X)
    rows, pivots = pivoted_cholesky(kernel, X, num_points)
    # A kernel that is NaN has pivots, but no valid points.
    return X[pivots] * jnp.where(jnp.all(jnp.isfinite(rows)), 1.0, jnp.nan)


def _checked(X: ArrayLike, num_points: int) -> Float[Array, "n d"]:
    X = checks.inputs("X", X)
    if checks.count("num_points", num_points) > X.shape[0]:
        raise ValueError(
            f"`num_points` must be in 1..{X.shape[0]}, the number of rows of `X`, got {num_points}."
        )
    return X
