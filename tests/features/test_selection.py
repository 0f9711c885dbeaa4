"""Inducing points from data: k-means centers and greedy pivots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.features import greedy_points, kmeans_points
from numpyro_scalegp.kernels import RBF, Linear, Matern32, Matern52

# Compiled once for each set of shapes; two tests compare with plain calls.
kmeans = jax.jit(kmeans_points, static_argnames=("num_points", "num_steps", "max_rows"))
greedy = jax.jit(greedy_points, static_argnames="num_points")


def rows(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def sum_of_squares(X, centers):
    """The within-cluster sum of squares with each row at its nearest center."""
    squares = np.sum(np.square(X[:, None] - np.asarray(centers)[None]), axis=-1)
    return np.sum(np.min(squares, axis=1))


def distinct_rows(points):
    return len(np.unique(np.asarray(points), axis=0))


# k-means


@pytest.mark.parametrize("d", [1, 5])
def test_kmeans_lowers_the_sum_of_squares(d, dtype):
    X = rows(400, d)
    points = kmeans(jax.random.key(0), jnp.array(X), 12)
    assert (points.shape, points.dtype) == ((12, d), dtype)
    random = [sum_of_squares(X, X[12 * i : 12 * (i + 1)]) for i in range(20)]
    assert sum_of_squares(X, points) < 0.75 * np.mean(random)
    assert sum_of_squares(X, points) < np.min(random)


def test_kmeans_starts_by_squared_distances():
    X, num = jnp.array([[0.0], [1.0], [3.0]]), 4000
    keys = jax.random.split(jax.random.key(0), num)
    points = jax.jit(jax.vmap(lambda key: kmeans_points(key, X, 2, num_steps=0)))(keys)
    # The sum of its values identifies each pair.
    sums = np.sum(np.asarray(points), axis=(1, 2))
    frequency = np.array([np.mean(sums == total) for total in (1.0, 3.0, 4.0)])
    expected = np.array([1 / 10 + 1 / 5, 9 / 10 + 9 / 13, 4 / 5 + 4 / 13]) / 3.0
    error = np.sqrt(expected * (1.0 - expected) / num)
    assert np.max(np.abs(frequency - expected) / error) < 4.0
    assert np.max(np.abs(1.0 / 3.0 - expected) / error) > 4.0  # all pairs equally likely


def test_kmeans_stops_where_lloyd_does(x64):
    X = rows(60, 2)
    points = np.asarray(kmeans(jax.random.key(0), jnp.array(X), 5, num_steps=100))
    owner = np.argmin(np.sum(np.square(X[:, None] - points[None]), axis=-1), axis=1)
    for i in range(5):
        np.testing.assert_allclose(points[i], X[owner == i].mean(axis=0), rtol=1e-12)


def test_kmeans_finds_separate_clusters(dtype):
    centers = np.array([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0], [50.0, 50.0]])
    X = np.concatenate([center + 0.1 * rows(30, 2, seed=i) for i, center in enumerate(centers)])
    points = kmeans(jax.random.key(0), jnp.array(X), 4)
    means = [X[30 * i : 30 * (i + 1)].mean(axis=0) for i in range(4)]
    order = np.lexsort(np.round(np.asarray(points), -1).T[::-1])
    expected = np.array([means[0], means[2], means[1], means[3]])
    np.testing.assert_allclose(points[order], expected, atol=1e-4)


def test_kmeans_with_as_many_points_as_rows(dtype):
    X = rows(20, 2)
    points = kmeans(jax.random.key(0), jnp.array(X), 20)
    assert distinct_rows(points) == 20
    assert sum_of_squares(X, points) < 1e-8


def test_kmeans_is_determined_by_its_key():
    X = jnp.array(rows(100, 2))
    points = kmeans(jax.random.key(0), X, 5)
    np.testing.assert_array_equal(points, kmeans(jax.random.key(0), X, 5))
    without_jit = kmeans_points(jax.random.key(0), X, 5)
    np.testing.assert_allclose(points, without_jit, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(points, kmeans(jax.random.key(1), X, 5))


def test_kmeans_with_duplicates(dtype):
    X = jnp.array(np.repeat(rows(3, 2), 10, axis=0))
    points = kmeans(jax.random.key(0), X, 8)
    assert points.shape == (8, 2)
    assert np.isfinite(points).all()
    # Each distinct row is a center.
    assert sum_of_squares(np.asarray(X), points) < 1e-8


def test_kmeans_draws_rows_where_there_are_many():
    X = rows(300, 2).astype(np.float32)
    few = np.asarray(kmeans(jax.random.key(0), X, 5, max_rows=20, num_steps=0))
    assert all((point == X).all(axis=1).any() for point in few)
    # With more points than `max_rows`, each of the rows drawn is a center.
    many = np.asarray(kmeans(jax.random.key(0), X, 25, max_rows=20))
    assert distinct_rows(many) == 25
    assert sum_of_squares(many, X) < 1e-8


def test_kmeans_traces_no_loop_over_points():
    X = jnp.zeros((200, 2))

    def num_equations(num_points):
        traced = jax.make_jaxpr(lambda key: kmeans_points(key, X, num_points))
        return len(traced(jax.random.key(0)).jaxpr.eqns)

    assert num_equations(100) == num_equations(10)


# Greedy pivots


def reference_pivots(K, num_points):
    """Pivoted Cholesky by its definition: the largest variance given the points before."""
    chosen: list[int] = []
    for _ in range(num_points):
        remaining = np.diagonal(K).copy()
        if chosen:
            block = K[np.ix_(chosen, chosen)]
            remaining -= np.sum(K[:, chosen].T * np.linalg.solve(block, K[chosen]), axis=0)
        remaining[chosen] = -np.inf
        chosen.append(int(np.argmax(remaining)))
    return chosen


@pytest.mark.parametrize(
    "kernel",
    [
        lambda: RBF(jnp.array([0.5, 1.0]), 2.0),
        lambda: Matern32(0.7) * 3.0 + Linear(0.5),
        lambda: Matern52(1.0).on((1,)),
    ],
    ids=["rbf", "not_stationary", "active_dims"],
)
def test_greedy_picks_are_those_of_pivoted_cholesky(kernel, x64):
    X = jnp.array(rows(80, 2))
    expected = reference_pivots(np.asarray(kernel()(X, X)), 15)
    np.testing.assert_array_equal(greedy(kernel(), X, 15), X[jnp.array(expected)])


def test_greedy_first_picks_agree_in_float32():
    X = jnp.array(rows(80, 2))
    kernel = Matern32(1.0) + Linear(0.5)
    expected = reference_pivots(np.asarray(kernel(X, X), np.float64), 8)
    points = greedy(kernel, X, 8)
    assert points.dtype == jnp.float32
    np.testing.assert_array_equal(points, X[jnp.array(expected)])


def test_greedy_takes_distinct_rows_however_smooth_the_kernel(dtype):
    # A few pivots leave rounding errors alone: the others must still be different rows, since equal
    # inducing points make K(Z, Z) singular.
    X = jnp.linspace(0.0, 1.0, 200)[:, None]
    assert distinct_rows(greedy(RBF(1.0), X, 60)) == 60


def test_greedy_points_of_an_invalid_kernel_are_nan():
    X = jnp.linspace(0.0, 1.0, 6)[:, None]
    assert jnp.all(jnp.isnan(jax.jit(lambda value: greedy_points(RBF(value), X, 2))(-1.0)))
    assert jnp.all(jnp.isnan(jax.jit(lambda value: greedy_points(RBF(1.0, value), X, 2))(-1.0)))


def test_greedy_with_all_rows(dtype):
    X = jnp.array(rows(12, 2))
    points = greedy(Matern32(1.0), X, 12)
    np.testing.assert_array_equal(np.sort(points, axis=0), np.sort(X, axis=0))


def test_greedy_with_duplicates(dtype):
    distinct = rows(6, 2)
    X = jnp.array(np.repeat(distinct, 5, axis=0))
    points = greedy(Matern32(1.0), X, 10)
    assert np.isfinite(points).all()
    # All distinct rows come before any second copy.
    assert distinct_rows(points[:6]) == 6


def test_greedy_under_jit(dtype):
    X = jnp.array(rows(50, 2))
    compiled = greedy(Matern32(0.8), X, 6)
    np.testing.assert_array_equal(compiled, greedy_points(Matern32(0.8), X, 6))


@pytest.mark.slow
def test_clusters_within_categories(dtype):
    """Even if rows of two categories are close; with few clusters, the nearest row's category."""
    random = np.random.default_rng(0)
    x, category = random.uniform(0.0, 100.0, 60), np.resize([0.0, 1.0, 2.0], 60)
    X = jnp.array(np.stack([x, category], axis=1))
    points = kmeans_points(jax.random.key(0), X, 12, categories=(1,))
    assert set(np.unique(points[:, 1])) == {0.0, 1.0, 2.0}
    for label in range(3):
        near = points[points[:, 1] == label][:, 0]
        owner = jnp.argmin(jnp.abs(x[category == label][:, None] - near), axis=1)
        means = [np.mean(x[category == label][owner == j]) for j in range(len(near))]
        np.testing.assert_allclose(near, means, rtol=1e-5)
    few = kmeans_points(jax.random.key(0), X, 2, categories=(1,))
    assert set(np.unique(few[:, 1])) <= {0.0, 1.0, 2.0}
