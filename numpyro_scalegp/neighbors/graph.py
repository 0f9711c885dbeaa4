"""Orderings of rows, the nearest neighbors before each row, and groups that share neighbors."""

import functools
import hashlib
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from numpyro_scalegp.core import checks
from numpyro_scalegp.neighbors import search

Ordering = Literal["maxmin", "random", "given"]
ORDERINGS = get_args(Ordering)
# The number of graphs in the cache.
_CACHE_SIZE = 8


class RowGroups(eqx.Module):
    """Groups of rows that share neighbors."""

    rows: Int[Array, "g k"]  # members and their neighbors, in the graph's order; n for padding
    places: Int[Array, "g o"]  # where the members are among `rows`; k for padding
    slots: Int[Array, " n"]  # of each row, its index in the flattened `places`


class NeighborGraph(eqx.Module):
    """An ordering of rows, the nearest neighbors before each row, and groups that share them."""

    order: Int[Array, " n"]
    nearest: Int[Array, "n m"]  # neighbors of each row; n for padding
    fingerprint: UInt[Array, " 2"]  # of the inputs
    groups: RowGroups
    # Rows in steps, each after the steps of its neighbors; n for padding.
    steps: Int[Array, "steps w"]

    @classmethod
    def build(
        cls,
        X: Float[Array, "n d"],
        units: Float[np.ndarray, "n k"],
        num: int,
        ordering: Ordering,
        group_size: int,
    ) -> "NeighborGraph":
        """Find the neighbors of inputs, on the host.

        Args:
            X: the inputs.
            units: the inputs in units of distance.
            num: number of neighbors.
            ordering: ordering of the rows.
            group_size: the largest number of rows that share their neighbors.
        """
        graph = _graph(_HashedArray(units), num, ordering, group_size)
        order, near, steps, *groups = map(jnp.asarray, graph)
        return cls(order, near, fingerprint(X), RowGroups(*groups), steps)

    def check(self, X: Float[Array, "n d"]) -> Float[Array, ""]:
        """Zero if X has the inputs of this graph, and NaN if a traced X has not.

        Raises:
            ValueError: if a concrete X has other inputs.
        """
        is_same: Any = len(X) == len(self.order)
        if is_same:
            is_same = jnp.all(fingerprint(X) == self.fingerprint)
        if checks.is_concrete(is_same) and not is_same:
            raise ValueError(
                f"`X`, of shape {X.shape}, is not the `X` whose neighbors the estimator has, with "
                f"{len(self.order)} rows: find the neighbors of this one by "
                "`estimator.find_neighbors(X, kernel)`."
            )
        return jnp.where(is_same, 0.0, jnp.nan).astype(X.dtype)


def fingerprint(X: Float[Array, "n d"]) -> UInt[Array, " 2"]:
    """A hash of an array's values and their order: two weighted sums over the bits."""
    X = jax.lax.stop_gradient(X) + jnp.zeros((), X.dtype)  # -0.0 becomes 0.0
    bits = jax.lax.bitcast_convert_type(X, jnp.uint32).ravel()
    weights = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435761) | jnp.uint32(1)
    mixed = (bits ^ (bits >> jnp.uint32(15))) * jnp.uint32(2246822519)
    words = jnp.stack([bits, mixed ^ (mixed >> jnp.uint32(13))])
    return jnp.sum(words * weights, axis=1, dtype=jnp.uint32)


class _HashedArray:
    """An array that hashes and compares by value, as a cache key."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.digest = (array.shape, str(array.dtype), hashlib.blake2b(array.tobytes()).digest())

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, array: object) -> bool:
        return isinstance(array, _HashedArray) and self.digest == array.digest


@functools.lru_cache(_CACHE_SIZE)
def _graph(
    inputs: _HashedArray, num: int, ordering: Ordering, group_size: int
) -> tuple[np.ndarray, ...]:
    """An ordering, the nearest rows before each row, the steps, and the fields of `RowGroups`."""
    X = inputs.array.astype(np.float64)
    n = len(X)
    if ordering == "maxmin":
        order = search.maxmin_order(X)
    else:
        order = np.arange(n) if ordering == "given" else np.random.default_rng(0).permutation(n)
    in_order = X[order]
    with jax.ensure_compile_time_eval():
        nearest = search.nearest(in_order, in_order, min(num, n - 1), np.arange(n))
    nearest_places = np.asarray(nearest)
    # A group has up to about twice the neighbors of a row.
    size = num + 1 if group_size == 1 else 2 * num + 4
    members, group = search.grouped(nearest_places, group_size, min(n, size))
    counts = np.bincount(group)
    by_group = np.argsort(group, kind="stable")
    ranks = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.full((len(members), counts.max()), members.shape[1], np.int32)
    is_row = members[group[by_group]] == by_group[:, None]
    places[group[by_group], ranks] = np.argmax(is_row, axis=1)
    near = np.full(nearest_places.shape, n, np.int32)
    rows = np.append(order, n).astype(np.int32)
    near[order] = rows[nearest_places]
    slots = np.empty(n, np.int32)
    slots[order[by_group]] = group[by_group] * places.shape[1] + ranks
    return order, near, search.in_steps(near), rows[members], places, slots
