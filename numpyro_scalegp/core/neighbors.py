"""Nearest neighbors, and orderings of points from coarse to fine."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int
from scipy.spatial import cKDTree

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.core.host import as_numpy

# Neighbors of each point that thinning looks at, and the number of points that is left.
_NUM_LINKS = 8
_NUM_FARTHEST = 64
# Columns up to which a tree is faster than all distances.
_MAX_COLUMNS_OF_TREE = 16
# Columns up to which distances come from differences, and not from a product.
_MAX_COLUMNS_OF_DIFFERENCES = 4
# Candidates beyond twice the neighbors that are wanted.
_MORE = 8
# Neighbors of each point, the nearest first, with whose groups its own may merge.
_NUM_CANDIDATES = 8
# What a set of points costs grows with this power of their number. A factorization has 3; less
# merges more, for the sake of what members then know of each other.
_COST = 1.5
_MAX_ROUNDS = 32
# Entries of the pairs of sets of which the unions are counted at a time.
_ENTRIES_AT_A_TIME = 2**24


def maxmin_order(X: Float[np.ndarray, "n d"]) -> Int[np.ndarray, " n"]:
    """An ordering from coarse to fine, in which first points are far from each other.

    A point is followed by the one farthest from all before it, up to a small factor: points are
    thinned level by level, so that those left are no closer than a radius, and those removed are no
    farther from them; then a level's points follow by their distance from those left. Rows that
    repeat others come last. The same for the same rows; about O(n log n). In more than 16 columns,
    where all points are about as far from each other, rows are in a random order.

    References:
        Guinness (2018), Permutation and Grouping Methods for Sharpening Gaussian Process
        Approximations; for orderings by levels, Schaefer, Katzfuss and Owhadi (2021), Sparse
        Cholesky Factorization by Kullback-Leibler Minimization.
    """
    draws = np.random.default_rng(0)
    # Exact, and no square of the largest entries is infinite.
    X = np.ldexp(X, -int(np.frexp(np.max(np.abs(X), initial=0.0))[1]))
    first = np.unique(X, axis=0, return_index=True)[1]
    levels = [draws.permutation(np.setdiff1d(np.arange(len(X)), first))]
    left = draws.permutation(first)
    if X.shape[1] > _MAX_COLUMNS_OF_TREE:
        return np.concatenate([left, *levels])
    while len(left) > _NUM_FARTHEST:
        points = X[left]
        distances, links = cKDTree(points).query(points, k=_NUM_LINKS, workers=-1)
        # As many have a second neighbor within this radius as have none.
        is_near = distances <= np.median(distances[:, 2])
        rows, ranks = np.nonzero(is_near)
        columns = links[rows, ranks]
        # A point need not be the first of those at a distance whose square is zero.
        kept = _independent(len(left), rows[rows != columns], columns[rows != columns])
        gaps = cKDTree(points[kept]).query(points[~kept], workers=-1)[0]
        levels.append(left[~kept][np.argsort(-gaps, kind="stable")])
        left = left[kept]
    levels.append(left[_farthest_first(X[left])])
    return np.concatenate(levels[::-1])


def _independent(
    num: int, rows: Int[np.ndarray, " links"], columns: Int[np.ndarray, " links"]
) -> np.ndarray:
    """Which points are in a maximal set without links, the first of linked ones first.

    No point may have a link to itself.
    """
    rows, columns = np.concatenate([rows, columns]), np.concatenate([columns, rows])
    kept, out = np.zeros(num, bool), np.zeros(num, bool)
    while len(rows):
        least = np.full(num, num)
        np.minimum.at(least, rows, columns)
        kept[rows[rows < least[rows]]] = True
        out[columns[kept[rows]]] = True
        open_ = ~(kept | out)
        some = open_[rows] & open_[columns]
        rows, columns = rows[some], columns[some]
    return ~out


def _farthest_first(X: Float[np.ndarray, "n d"]) -> Int[np.ndarray, " n"]:
    """Each point after the one farthest from all before it; first the one nearest to the mean."""
    gaps = np.full(len(X), np.inf)
    if not len(X):
        return np.zeros(0, int)
    order = [int(np.argmin(np.sum(np.square(X - X.mean(axis=0)), axis=1)))]
    while len(order) < len(X):
        gaps = np.minimum(gaps, np.sum(np.square(X - X[order[-1]]), axis=1))
        gaps[order] = -1.0
        order.append(int(np.argmax(gaps)))
    return np.array(order)


def coarse_to_fine(X: Float[Array, "n d"], num: int) -> Int[Array, " num"]:
    """Rows of which each is the one farthest from all before it, in O(n num d).

    The first is the one nearest to the mean. Distances are in units of the columns' deviations.

    References:
        Gonzalez (1985), Clustering to Minimize the Maximum Intercluster Distance.
    """
    scale = jnp.std(X, axis=0)
    X = (X - jnp.mean(X, axis=0)) / jnp.where(scale > 0.0, scale, 1.0)

    def step(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        gaps, row = state
        gaps = jnp.minimum(gaps, jnp.sum(jnp.square(X - X[row]), axis=1)).at[row].set(-1.0)
        return (gaps, jnp.argmax(gaps)), row

    first = jnp.argmin(jnp.sum(jnp.square(X), axis=1))
    start = jnp.full(len(X), jnp.inf, X.dtype), first
    return jax.lax.scan(step, start, None, length=num)[1]


class Groups(NamedTuple):
    """Groups of points, and all points that one of a group has as a neighbor, or is."""

    members: Int[np.ndarray, "g k"]  # in ascending order; n where there are fewer
    group: Int[np.ndarray, " n"]  # of each point


def grouped(near: Int[np.ndarray, "n m"], most: int, size: int) -> Groups:
    """Group points that share many of their neighbors.

    Pairs of groups merge while a neighbor of one point is a point of the other, and while that
    costs no more than both: each with the best of its pairs, all pairs that agree in one round.

    Args:
        near: neighbors of each of n points, of those before it, the nearest first; n in place of
            those that it lacks.
        most: how many points a group may have.
        size: how many points a group may have with all of their neighbors, at least m + 1.

    Returns:
        The groups, numbered from zero, in about O(n size log n).

    References:
        Guinness (2018), Permutation and Grouping Methods for Sharpening Gaussian Process
        Approximations, whose groups merge one after the other.
    """
    n, m = near.shape
    members = np.full((n, size), n, np.int32)
    members[:, :m], members[:, m] = near, np.arange(n)
    members[:, : m + 1].sort(axis=1)
    sizes, counts, group = np.sum(members < n, axis=1), np.ones(n, int), np.arange(n)
    found = near[:, :_NUM_CANDIDATES]
    pairs = np.stack([found[found < n], np.nonzero(found < n)[0]])
    joint = np.zeros(pairs.shape[1], int)  # zero where a union is not counted yet
    for _ in range(_MAX_ROUNDS if most > 1 else 0):
        left, right = pairs
        new = joint == 0
        joint[new] = _sizes_of_unions(members, left[new], right[new])
        gain = sizes[left] ** _COST + sizes[right] ** _COST - joint**_COST
        allowed = (joint <= size) & (counts[left] + counts[right] <= most) & (gain >= 0.0)
        pairs, joint, gain = pairs[:, allowed], joint[allowed], gain[allowed]
        if not len(gain):
            break
        left, right = pairs
        place = np.empty(len(gain), int)
        place[np.argsort(-gain, kind="stable")] = np.arange(len(gain))
        best = np.full(n, len(gain))
        np.minimum.at(best, left, place)
        np.minimum.at(best, right, place)
        agreed = (best[left] == place) & (best[right] == place)
        kept, gone = left[agreed], right[agreed]
        members[kept] = _unions(members, kept, gone)
        sizes[kept] = joint[agreed]
        counts[kept] += counts[gone]
        renamed = np.arange(n)
        renamed[gone] = kept
        group = renamed[group]
        has_changed = np.zeros(n, bool)
        has_changed[kept] = has_changed[gone] = True
        joint = np.where(has_changed[left] | has_changed[right], 0, joint)
        pairs = np.sort(renamed[pairs], axis=0)
        codes = pairs[0].astype(np.int64) * n + pairs[1]
        first = np.unique(codes, return_index=True)[1]
        first = first[pairs[0, first] != pairs[1, first]]
        pairs, joint = pairs[:, first], joint[first]
    kept, group = np.unique(group, return_inverse=True)
    return Groups(members[kept], group)


def _merged(members: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Members of both, sorted, with n in place of those that come twice."""
    both = np.concatenate([members[left], members[right]], axis=1)
    both.sort(axis=1)
    both[:, 1:][both[:, 1:] == both[:, :-1]] = len(members)
    return both


def _sizes_of_unions(members: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    found, num = np.empty(len(left), int), max(1, _ENTRIES_AT_A_TIME // (2 * members.shape[1]))
    for start in range(0, len(left), num):
        some = slice(start, start + num)
        found[some] = np.sum(_merged(members, left[some], right[some]) < len(members), axis=1)
    return found


def _unions(members: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    both = _merged(members, left, right)
    both.sort(axis=1)
    return both[:, : members.shape[1]]


def nearest(
    points: Float[ArrayLike, "n d"],
    queries: Float[ArrayLike, "q d"],
    num: int,
    limits: Int[ArrayLike, " q"] | None = None,
) -> Int[Array, "q num"]:
    """The nearest of some points to each query.

    Args:
        points: shape (n, d).
        queries: shape (q, d).
        num: number of neighbors, at most n.
        limits: how many of the points, the first ones, each query may have; not falling, of which
            the host sees the values. None for all.

    Returns:
        Indices of points, the nearest first, and n in place of those that a query lacks. By trees
        on the host where all is known and the columns are few, in O((n + q) log n); otherwise from
        all distances, in O(n q d).
    """
    (n, d), num_queries = jnp.shape(points), jnp.shape(queries)[0]
    allowed = np.full(num_queries, n) if limits is None else as_numpy(limits)
    if checks.is_concrete((points, queries)) and d <= _MAX_COLUMNS_OF_TREE:
        known, wanted = (as_numpy(one).astype(np.float64) for one in (points, queries))
        return jnp.asarray(_by_trees(known, wanted, num, allowed), jnp.int32)
    # Who is near has no derivative.
    points, queries = jax.lax.stop_gradient((jnp.asarray(points), jnp.asarray(queries)))
    found = []
    for some, most in _parts(allowed, num, n):
        size = max(num, most)
        near = _by_distances(points[:size], queries[some], num, jnp.asarray(allowed[some]))
        found.append(jnp.where(near < size, near, n))
    return jnp.concatenate(found) if found else jnp.zeros((0, num), jnp.int32)


def _parts(limits: Int[np.ndarray, " q"], num: int, n: int) -> Iterator[tuple[slice, int]]:
    """Queries that may have at least half of the first points, and how many points these are."""
    start = 0
    while start < len(limits):
        size = min(n, max(2 * int(limits[start]), 2 * num))
        end = int(np.searchsorted(limits, size, side="right"))
        yield slice(start, end), int(limits[end - 1])
        start = end


def _by_trees(
    points: Float[np.ndarray, "n d"],
    queries: Float[np.ndarray, "q d"],
    num: int,
    limits: Int[np.ndarray, " q"],
) -> Int[np.ndarray, "q num"]:
    n, found = len(points), np.full((len(queries), num), len(points))
    for some, size in _parts(limits, num, n):
        tree, rows = cKDTree(points[:size]), np.arange(some.start, some.stop)
        k = min(size, num if limits[some.start] == size else 2 * num)
        while len(rows) and k:
            near = tree.query(queries[rows], k=[*range(1, k + 1)], workers=-1)[1]
            allowed = near < limits[rows, None]
            done = (allowed.sum(axis=1) >= np.minimum(limits[rows], num)) | (k == size)
            ranks = np.argsort(~allowed[done], axis=1, kind="stable")[:, :num]
            best = np.take_along_axis(np.where(allowed[done], near[done], n), ranks, axis=1)
            found[rows[done], : best.shape[1]] = best
            rows, k = rows[~done], min(size, 2 * k)
    return found


def _by_distances(
    points: Float[Array, "n d"], queries: Float[Array, "q d"], num: int, limits: Int[Array, " q"]
) -> Int[Array, "q num"]:
    n = len(points)
    center = jnp.mean(points, axis=0)
    points, queries = points - center, queries - center
    squares = jnp.sum(jnp.square(points), axis=1)

    def of_chunk(rows: tuple[Array, Array]) -> Array:
        some, allowed = rows
        is_allowed = jnp.arange(n) < allowed[:, None]
        if points.shape[1] <= _MAX_COLUMNS_OF_DIFFERENCES:
            gaps = [jnp.square(some[:, j, None] - points[:, j]) for j in range(points.shape[1])]
            closeness = jnp.where(is_allowed, -functools.reduce(jnp.add, gaps), -jnp.inf)
            values, index = jax.lax.top_k(closeness, num)
            return jnp.where(values > -jnp.inf, index, n)
        product = jnp.matmul(some, points.T, precision="highest")
        closeness = 2.0 * product - squares  # what all of a query's distances share is left out
        closeness = jnp.where(is_allowed, closeness, -jnp.inf)
        values, index = jax.lax.top_k(closeness, min(n, 2 * num + _MORE))
        # A product has too few digits for small distances: of twice as many, the nearest.
        squared = jnp.sum(jnp.square(points[index] - some[:, None]), axis=2)
        ranks = jnp.argsort(jnp.where(values > -jnp.inf, squared, jnp.inf), axis=1)[:, :num]
        index = jnp.where(values > -jnp.inf, index, n)
        return jnp.take_along_axis(index, ranks, axis=1)

    return map_rows(of_chunk, (queries, limits), rows_per_chunk(n))
