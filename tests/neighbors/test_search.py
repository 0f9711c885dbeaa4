"""Orderings, nearest neighbors and groups, against all distances."""

import functools

import jax
import numpy as np
import pytest

from numpyro_scalegp.neighbors import search
from tests.conformance import each


@each("columns", [(str(d), lambda d=d: d) for d in (1, 2, 6)])
def test_first_points_of_a_maxmin_order_are_far_from_each_other(columns):
    points = np.random.default_rng(1).uniform(size=(1500, columns()))
    order = search.maxmin_order(points)
    np.testing.assert_array_equal(np.sort(order), np.arange(1500))

    def small_gap(order, num):
        """A low quantile of the nearest-neighbor distances among the first points."""
        coarse = points[order[:num]]
        squared = np.sum(np.square(coarse[:, None] - coarse[None]), axis=2)
        gaps = np.min(squared + np.diag(np.full(num, np.inf)), axis=1)
        return np.sqrt(np.quantile(gaps, 0.1))

    exact = search._farthest_first(points)
    for num in (20, 100, 500, 1000):
        assert small_gap(order, num) > 0.7 * small_gap(exact, num)
        # A random order fails.
        assert small_gap(np.arange(1500), num) < 0.7 * small_gap(exact, num)


@pytest.mark.parametrize("kind", ["few near zero", "all scales", "large", "small", "none"])
def test_an_order_of_numbers_whose_squares_are_none(kind):
    """Squared differences underflow or overflow."""
    draws = np.random.default_rng(0).uniform(size=(200, 1))
    points = {
        "few near zero": np.concatenate([draws, [[1e-200], [2e-200], [3e-200]]]),
        "all scales": 10.0 ** (600.0 * draws - 300.0),
        "large": 1e170 * draws,
        "small": 1e-200 * draws,
        "none": draws[:0],
    }[kind]
    order = search.maxmin_order(points)
    np.testing.assert_array_equal(np.sort(order), np.arange(len(points)))
    if kind in ("large", "small"):
        scale = 2.0 ** round(np.log2(points.max()))
        np.testing.assert_array_equal(order, search.maxmin_order(points / scale))


def test_rows_that_repeat_others_come_last():
    points = np.repeat(np.random.default_rng(0).uniform(size=(100, 2)), 5, axis=0)
    order = search.maxmin_order(points)
    assert len(np.unique(points[order[:100]], axis=0)) == 100
    for same in (np.zeros((70, 2)), np.zeros((1, 3)), np.eye(3)[:2]):
        np.testing.assert_array_equal(np.sort(search.maxmin_order(same)), np.arange(len(same)))


@each("limits", [("all", lambda: None), ("before", lambda: np.arange(300))])
@each("num", [(str(num), lambda num=num: num) for num in (1, 7, 299)])
@each("columns", [(str(d), lambda d=d: d) for d in (3, 6)])
def test_nearest_points_are_those_of_all_distances(columns, num, limits, x64):
    points, num = np.random.default_rng(2).uniform(size=(300, columns())), num()
    allowed = np.full(300, 300) if limits() is None else limits()
    squared = np.sum(np.square(points[:, None] - points[None]), axis=2)
    squared[np.arange(300)[None] >= allowed[:, None]] = np.inf
    ranks = np.argsort(squared, axis=1)[:, :num]
    expected = np.where(np.isinf(np.take_along_axis(squared, ranks, axis=1)), 300, ranks)
    find = functools.partial(search.nearest, num=num, limits=limits())
    np.testing.assert_array_equal(find(points, points), expected)
    np.testing.assert_array_equal(jax.jit(find)(points, points), expected)


@each("most", [(str(most), lambda most=most: most) for most in (1, 3, 8)])
@each("columns", [(str(d), lambda d=d: d) for d in (1, 2, 6)])
def test_groups_are_of_points_that_share_neighbors(columns, most):
    n, m, size, most = 1000, 9, 22, most()
    points = np.random.default_rng(3).uniform(size=(n, columns()))
    near = np.asarray(search.nearest(points, points, m, np.arange(n)))
    members, group = search.grouped(near, most, size)
    counts = np.bincount(group)
    assert counts.min() > 0
    assert counts.max() <= most
    for i, group_members in enumerate(members):
        rows = np.nonzero(group == i)[0]
        union = np.unique(np.append(near[rows], rows))
        union = union[union < n]
        np.testing.assert_array_equal(
            group_members, np.append(union, np.full(size - len(union), n))
        )
    if most == 8:
        assert counts.mean() > {1: 4.0, 2: 3.0, 6: 1.5}[columns()]


def test_neighbors_in_clusters_far_apart():
    """In float32, where rounding of squared distances exceeds those within a cluster."""
    draws = np.random.default_rng(0)
    points = draws.uniform(size=(60, 2)) + 2e4 * (np.arange(60) % 2)[:, None]
    points = points.astype(np.float32)
    expected = search.nearest(points, points, 5)
    np.testing.assert_array_equal(
        jax.jit(functools.partial(search.nearest, num=5))(points, points), expected
    )


@pytest.mark.parametrize("columns", [6, 17])
@pytest.mark.parametrize("case", ["two groups", "one far row"])
def test_neighbors_of_rows_far_from_the_others(case, columns):
    """Where a matrix product loses the digits of small distances, traced or in many columns."""
    rng = np.random.default_rng(0)
    points = rng.uniform(size=(1000, columns)).astype(np.float32)
    if case == "two groups":
        points[:500, 0] += 1e4
    else:
        points[3] = 1e6
    queries = points[5::25] + np.float32(0.02)
    squared = np.sum(np.square(queries[:, None].astype(float) - points), axis=2)
    expected = np.sort(squared, axis=1)[:, :10]
    for find in (search.nearest, jax.jit(search.nearest, static_argnums=2)):
        near = np.asarray(find(points, queries, 10))
        actual = np.sort(np.take_along_axis(squared, near, axis=1))
        np.testing.assert_allclose(actual, expected, rtol=1e-3)


@pytest.mark.slow
def test_a_chain_of_rows_takes_steps_in_linear_time():
    n = 200_000  # quadratic work would take minutes
    near = np.stack([np.arange(-1, n - 1), np.arange(-2, n - 2)], axis=1)
    steps = search.in_steps(np.where(near < 0, n, near).astype(np.int32))
    np.testing.assert_array_equal(steps[steps < n], np.arange(n))
