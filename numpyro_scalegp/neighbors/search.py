"""Nearest-neighbor search, coarse-to-fine orderings, and groups of points."""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, ArrayLike, Float, Int
from scipy.sparse import csr_array
from scipy.spatial import cKDTree

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.core.host import as_numpy

# Thinning uses this many neighbors of each point, and stops at this many points.
_NUM_LINKS = 8
_NUM_FARTHEST = 64
# Up to this many columns, a tree is faster than computing all distances.
_MAX_COLUMNS_OF_TREE = 16
# Up to this many columns, distances are computed from differences, not from a matrix product.
_MAX_COLUMNS_OF_DIFFERENCES = 4
# Candidates in addition to twice the number of neighbors.
_MORE = 8
# A point's group may merge with the groups of this many nearest neighbors.
_NUM_CANDIDATES = 8
# The cost of a group is this power of its size. A factorization has the exponent 3; a smaller one
# merges more groups, which conditions their members on more points.
_COST = 1.5
_MAX_ROUNDS = 32
# Pairs of groups whose unions are computed at a time, which a processor's cache holds.
_PAIRS_AT_A_TIME = 2**12
# Queries of a tree at a time, which limits the memory.
_QUERIES_AT_A_TIME = 2**20
# How much a limit may grow in a chunk of queries of one tree, and the neighbors that each query
# asks for, in units of those that it needs.
_GROWTH = 1.5
# The mean number of steps of a generation of rows, and the least number of rows of a step.
_STEPS_PER_GENERATION = 3
_LEAST_WIDTH = 8


def maxmin_order(X: Float[np.ndarray, "n d"]) -> Int[np.ndarray, " n"]:
    """A coarse-to-fine ordering, whose first points are far from each other.

    Up to a small factor, each point is the one farthest from all points before it. Thinning removes
    points level by level: the remaining points are farther apart than a radius, and each removed
    point is within the radius of a remaining one. Each level is ordered by the distance to the
    remaining points. Duplicate points come last. Deterministic; about O(n log n). In more than 16
    dimensions, where all points are about equally far apart, the order is random.

    References:
        Guinness (2018), Permutation and Grouping Methods for Sharpening Gaussian Process
        Approximations; for orderings by levels, Schaefer, Katzfuss and Owhadi (2021), Sparse
        Cholesky Factorization by Kullback-Leibler Minimization.
    """
    draws = np.random.default_rng(0)
    # Scaling by a power of two is exact, and keeps squares finite.
    X = np.ldexp(X, -int(np.frexp(np.max(np.abs(X), initial=0.0))[1]))
    is_first = np.zeros(len(X), bool)
    is_first[np.unique(X, axis=0, return_index=True)[1]] = True
    levels = [draws.permutation(np.flatnonzero(~is_first))]
    remaining = draws.permutation(np.flatnonzero(is_first))
    if X.shape[1] > _MAX_COLUMNS_OF_TREE:
        return np.concatenate([remaining, *levels])
    # Positions among the remaining points, in an order that makes a tree's queries fast.
    near = _order_of_leaves(X[remaining])
    tree = cKDTree(X[remaining[near]])
    while len(remaining) > _NUM_FARTHEST:
        distances, links = tree.query(tree.data, k=_NUM_LINKS, workers=-1)
        # Half of the points have a second neighbor within this radius.
        rows, ranks = np.nonzero(distances <= np.median(distances[:, 2]))
        columns = links[rows, ranks]
        # At distances that underflow, a point may not be its own first neighbor.
        is_link = rows != columns
        is_coarse = _independent(len(remaining), near[rows[is_link]], near[columns[is_link]])
        is_kept = is_coarse[near]
        fine, gaps = tree.data[~is_kept], np.empty(len(remaining))
        tree = cKDTree(tree.data[is_kept])
        gaps[near[~is_kept]] = tree.query(fine, workers=-1)[0]
        levels.append(remaining[~is_coarse][np.argsort(-gaps[~is_coarse], kind="stable")])
        remaining, near = remaining[is_coarse], (np.cumsum(is_coarse) - 1)[near[is_kept]]
    levels.append(remaining[_farthest_first(X[remaining])])
    return np.concatenate(levels[::-1])


def _independent(
    num: int, rows: Int[np.ndarray, " links"], columns: Int[np.ndarray, " links"]
) -> np.ndarray:
    """A mask of a maximal set of points without links, chosen greedily by index.

    No point may have a link to itself.
    """
    rows, columns = np.concatenate([rows, columns]), np.concatenate([columns, rows])
    is_chosen, is_excluded = np.zeros(num, bool), np.zeros(num, bool)
    while len(rows):
        least = np.full(num, num)
        np.minimum.at(least, rows, columns)
        is_chosen[rows[rows < least[rows]]] = True
        is_excluded[columns[is_chosen[rows]]] = True
        is_open = ~(is_chosen | is_excluded)
        is_active = is_open[rows] & is_open[columns]
        rows, columns = rows[is_active], columns[is_active]
    return ~is_excluded


def _farthest_first(X: Float[np.ndarray, "n d"]) -> Int[np.ndarray, " n"]:
    """Order points by the greedy farthest-first rule, from the one nearest to the mean."""
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
    """Rows in greedy farthest-first order, from the row nearest to the mean, in O(n num d).

    Distances are in units of the columns' standard deviations.

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
    """Groups of points, and the union of each group's points and their neighbors."""

    members: Int[np.ndarray, "g k"]  # the union, in ascending order; n for padding
    group: Int[np.ndarray, " n"]  # of each point


def grouped(near: Int[np.ndarray, "n m"], most: int, size: int) -> Groups:
    """Group points that share many of their neighbors.

    Two groups are a candidate pair if one has a point among the other's neighbors. A pair merges if
    the merged group costs no more than the two groups. In each round, a pair merges if it is the
    best pair of both groups.

    Args:
        near: for each of n points its neighbors among the points before, the nearest first; n for
            padding.
        most: the largest number of points in a group.
        size: the largest number of points and neighbors of a group, at least m + 1.

    Returns:
        The groups, numbered from zero, in about O(n size log n).

    References:
        Guinness (2018), Permutation and Grouping Methods for Sharpening Gaussian Process
        Approximations, which merges groups one at a time.
    """
    n, m = near.shape
    members = np.full((n, size), n, np.int32)
    members[:, :m], members[:, m] = near, np.arange(n)
    members[:, : m + 1].sort(axis=1)
    sizes, counts, group = np.sum(members < n, axis=1), np.ones(n, int), np.arange(n)
    candidates = near[:, :_NUM_CANDIDATES]
    pairs = np.stack([candidates[candidates < n], np.nonzero(candidates < n)[0]])
    joint = np.zeros(pairs.shape[1], int)  # sizes of unions; zero if not computed yet
    for _ in range(_MAX_ROUNDS if most > 1 else 0):
        left, right = pairs
        new = joint == 0
        joint[new] = _sizes_of_unions(members[:, : sizes.max()], left[new], right[new])
        gain = sizes[left] ** _COST + sizes[right] ** _COST - joint**_COST
        allowed = (joint <= size) & (counts[left] + counts[right] <= most) & (gain >= 0.0)
        pairs, joint, gain = pairs[:, allowed], joint[allowed], gain[allowed]
        if not len(gain):
            break
        # The best pairs of both groups, and of equally good ones the first.
        most_gain = np.zeros(n)
        for side in pairs:
            np.maximum.at(most_gain, side, gain)
        agreed = np.flatnonzero(np.all(most_gain[pairs] == gain, axis=0))
        first = np.full(n, len(gain))
        for side in pairs[:, agreed]:
            np.minimum.at(first, side, agreed)
        agreed = agreed[np.all(first[pairs[:, agreed]] == agreed, axis=0)]
        into, merged = pairs[:, agreed]
        members[into] = _unions(members, into, merged)
        sizes[into] = joint[agreed]
        counts[into] += counts[merged]
        renamed = np.arange(n)
        renamed[merged] = into
        group = renamed[group]
        has_changed = np.zeros(n, bool)
        has_changed[into] = has_changed[merged] = True
        joint = np.where(has_changed[pairs].any(axis=0), 0, joint)
        pairs = np.sort(renamed[pairs], axis=0)
        codes = pairs[0].astype(np.int64) * n + pairs[1]
        first = np.unique(codes, return_index=True)[1]
        first = first[pairs[0, first] != pairs[1, first]]
        pairs, joint = pairs[:, first], joint[first]
    groups, group = np.unique(group, return_inverse=True)
    return Groups(members[groups], group)


def _in_parallel(function: Callable[[slice], np.ndarray], num: int) -> np.ndarray:
    """Concatenate a function of slices of `num` rows; NumPy computes without Python's lock."""
    chunks = [slice(i, i + _PAIRS_AT_A_TIME) for i in range(0, max(num, 1), _PAIRS_AT_A_TIME)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.concatenate(list(pool.map(function, chunks)))


def _sorted_members(members: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The members of two groups, with duplicates."""
    union = np.concatenate([members[left], members[right]], axis=1)
    union.sort(axis=1)
    return union


def _sizes_of_unions(members: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    def of_chunk(chunk: slice) -> np.ndarray:
        union = _sorted_members(members, left[chunk], right[chunk])
        is_new = (union[:, 1:] != union[:, :-1]) & (union[:, 1:] < len(members))
        return 1 + np.count_nonzero(is_new, axis=1)

    return _in_parallel(of_chunk, len(left))


def _unions(members: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    def of_chunk(chunk: slice) -> np.ndarray:
        union = _sorted_members(members, left[chunk], right[chunk])
        union[:, 1:][union[:, 1:] == union[:, :-1]] = len(members)
        union.sort(axis=1)
        return union[:, : members.shape[1]]

    return _in_parallel(of_chunk, len(left))


def in_steps(near: Int[np.ndarray, "n m"]) -> Int[np.ndarray, "steps w"]:
    """Rows in steps, so that the neighbors of a row are in earlier steps; n for padding.

    The rows of a step can be processed in parallel. A step has one width for all, so that the rows
    of a generation, whose longest chains of neighbors are of one length, may take several steps.

    Args:
        near: for each row, other rows; n for padding. No row may depend on itself through others.
    """
    n = len(near)
    is_row = near < n
    num_missing = is_row.sum(axis=1)
    parents, starts = near[is_row], np.append(0, np.cumsum(num_missing))
    by_parent = csr_array((np.ones(len(parents), bool), parents, starts), (n, n)).tocsc()
    children, ends = by_parent.indices, by_parent.indptr[1:]
    generations = [np.flatnonzero(num_missing == 0)]
    num_placed = len(generations[0])
    while num_placed < n:
        counts = ends[generations[-1]] - np.where(generations[-1] > 0, ends[generations[-1] - 1], 0)
        starts = ends[generations[-1]] - counts
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        reached = children[np.repeat(starts, counts) + offsets]
        np.subtract.at(num_missing, reached, 1)
        ready = np.unique(reached[num_missing[reached] == 0])
        assert len(ready), f"{n - num_placed} rows depend on themselves"
        generations.append(ready)
        num_placed += len(ready)
    width = max(_LEAST_WIDTH, 2 ** round(math.log2(n / (_STEPS_PER_GENERATION * len(generations)))))
    steps = []
    for generation in generations:
        padded = np.full(-(-len(generation) // width) * width, n, np.int32)
        padded[: len(generation)] = generation
        steps.append(padded.reshape(-1, width))
    return np.concatenate(steps)


def nearest(
    points: Float[ArrayLike, "n d"],
    queries: Float[ArrayLike, "q d"],
    num: int,
    limits: Int[ArrayLike, " q"] | None = None,
) -> Int[Array, "q num"]:
    """The points nearest to each query.

    Args:
        points: shape (n, d).
        queries: shape (q, d).
        num: number of neighbors, at most n.
        limits: concrete, nondecreasing integers; a query with limit l searches among the first l
            points. None for all points.

    Returns:
        Indices of points, the nearest first; n for padding. The search uses trees on the host, in
        O((n + q) log n), if the arrays are concrete and have up to 16 columns; otherwise it
        computes all distances, in O(n q d).
    """
    (n, d), num_queries = jnp.shape(points), jnp.shape(queries)[0]
    if is_symbolic_dim(num_queries):
        fixed = jax.lax.stop_gradient((jnp.asarray(points), jnp.asarray(queries)))
        return _by_distances(*fixed, num, jnp.full(num_queries, n))
    allowed = np.full(num_queries, n) if limits is None else as_numpy(limits)
    if checks.is_concrete((points, queries)) and d <= _MAX_COLUMNS_OF_TREE:
        X, Xs = (as_numpy(array).astype(np.float64) for array in (points, queries))
        return jnp.asarray(_by_trees(X, Xs, num, allowed), jnp.int32)
    # Neighbor indices are not differentiable.
    points, queries = jax.lax.stop_gradient((jnp.asarray(points), jnp.asarray(queries)))
    neighbors = []
    for chunk, most in _chunks(allowed, num, n):
        size = max(num, most)
        near = _by_distances(points[:size], queries[chunk], num, jnp.asarray(allowed[chunk]))
        neighbors.append(jnp.where(near < size, near, n))
    return jnp.concatenate(neighbors) if neighbors else jnp.zeros((0, num), jnp.int32)


def _chunks(
    limits: Int[np.ndarray, " q"], num: int, n: int, growth: float = 2.0
) -> Iterator[tuple[slice, int]]:
    """Slices of queries with similar limits, within a factor, and the largest limit of each."""
    start = 0
    while start < len(limits):
        size = min(n, max(int(growth * int(limits[start])), 2 * num))
        end = int(np.searchsorted(limits, size, side="right"))
        yield slice(start, end), int(limits[end - 1])
        start = end


def _by_trees(
    points: Float[np.ndarray, "n d"],
    queries: Float[np.ndarray, "q d"],
    num: int,
    limits: Int[np.ndarray, " q"],
) -> Int[np.ndarray, "q num"]:
    n, neighbors = len(points), np.full((len(queries), num), len(points), np.int32)
    by_place = _order_of_leaves(points)
    for chunk, size in _chunks(limits, num, n, _GROWTH):
        # The points of a tree, and its queries, are near each other in memory if they are in space.
        indices = by_place[by_place < size]
        tree, rows = cKDTree(points[indices]), chunk.start + _order_of_leaves(queries[chunk])
        least = num if limits[chunk.start] == size else math.ceil(_GROWTH * num)
        for start in range(0, len(rows), _QUERIES_AT_A_TIME):
            remaining, k = rows[start : start + _QUERIES_AT_A_TIME], min(size, least)
            while len(remaining) and k:
                near = indices[tree.query(queries[remaining], k=[*range(1, k + 1)], workers=-1)[1]]
                allowed = near < limits[remaining, None]
                done = (allowed.sum(axis=1) >= np.minimum(limits[remaining], num)) | (k == size)
                ranks = np.argsort(~allowed[done], axis=1, kind="stable")[:, :num]
                best = np.take_along_axis(np.where(allowed[done], near[done], n), ranks, axis=1)
                neighbors[remaining[done], : best.shape[1]] = best
                remaining, k = remaining[~done], min(size, 2 * k)
    return neighbors


def _order_of_leaves(points: Float[np.ndarray, "n d"]) -> Int[np.ndarray, " n"]:
    """An ordering whose consecutive points are near each other."""
    return cKDTree(points, balanced_tree=False, compact_nodes=False).indices


def _by_distances(
    points: Float[Array, "n d"], queries: Float[Array, "q d"], num: int, limits: Int[Array, " q"]
) -> Int[Array, "q num"]:
    n = len(points)
    center = jnp.mean(points, axis=0)
    points, queries = points - center, queries - center
    squares = jnp.sum(jnp.square(points), axis=1)

    def of_chunk(chunk: tuple[Array, Array]) -> Array:
        queries, limits = chunk
        is_allowed = jnp.arange(n) < limits[:, None]
        if points.shape[1] <= _MAX_COLUMNS_OF_DIFFERENCES:
            return by_differences(queries, is_allowed)
        product = jnp.matmul(queries, points.T, precision="highest")
        closeness = 2.0 * product - squares  # minus a squared distance, up to a constant per query
        closeness = jnp.where(is_allowed, closeness, -jnp.inf)
        values, index = jax.lax.top_k(closeness, min(n, 2 * num + _MORE))
        # The product is inaccurate for small distances, so differences rank more candidates.
        squared = jnp.sum(jnp.square(points[index] - queries[:, None]), axis=2)
        squared = jnp.where(values > -jnp.inf, squared, jnp.inf)
        ranks = jnp.argsort(squared, axis=1)[:, :num]
        farthest = jnp.take_along_axis(squared, ranks[:, -1:], axis=1)[:, 0]
        near = jnp.take_along_axis(jnp.where(values > -jnp.inf, index, n), ranks, axis=1)
        if values.shape[1] == n:
            return near
        # All others are farther than the candidates by the product, up to its rounding error.
        norm = jnp.sum(jnp.square(queries), axis=1)
        error = 4.0 * jnp.finfo(points.dtype).eps * (norm + jnp.max(squares))
        is_complete = jnp.isinf(values[:, -1]) | (farthest + error <= norm - values[:, -1])
        return jax.lax.cond(
            jnp.all(is_complete), lambda: near, lambda: by_differences(queries, is_allowed)
        )

    def by_differences(queries: Array, is_allowed: Array) -> Array:
        def add(j: Any, total: Array) -> Array:
            return total + jnp.square(queries[:, j, None] - points[:, j])

        zeros, d = jnp.zeros((queries.shape[0], n), points.dtype), points.shape[1]
        is_short = d <= _MAX_COLUMNS_OF_DIFFERENCES
        squared = jax.lax.fori_loop(0, d, add, zeros, unroll=max(d, 1) if is_short else 1)
        values, index = jax.lax.top_k(jnp.where(is_allowed, -squared, -jnp.inf), num)
        return jnp.where(values > -jnp.inf, index, n)

    return map_rows(of_chunk, (queries, limits), rows_per_chunk(n))
