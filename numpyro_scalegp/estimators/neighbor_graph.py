"""Orderings of rows, the nearest of those before each, and rows that share theirs."""

import functools
import hashlib
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from numpyro_scalegp.core import checks, neighbors

Ordering = Literal["maxmin", "random", "given"]
ORDERINGS = get_args(Ordering)
# Data sets of which the neighbors that were found stay in memory.
_NUM_KEPT = 8


class RowGroups(eqx.Module):
    """Rows in groups, each with all rows that are neighbors of one of them."""

    rows: Int[Array, "g k"]  # in the order of the graph; n where there are fewer
    places: Int[Array, "g o"]  # of the group's own among these; k where there are fewer
    slots: Int[Array, " n"]  # of each row among the places of all groups


class NeighborGraph(eqx.Module):
    """An ordering of rows, the nearest of those before each, and which rows share theirs."""

    order: Int[Array, " n"]
    nearest: Int[Array, "n m"]  # of each row; n where there are fewer
    fingerprint: UInt[Array, " 2"]  # of the rows
    groups: RowGroups

    @classmethod
    def found(
        cls,
        X: Float[Array, "n d"],
        units: Float[np.ndarray, "n k"],
        num: int,
        ordering: Ordering,
        most: int,
    ) -> "NeighborGraph":
        """The graph of some rows, on the host.

        Args:
            X: the rows.
            units: the same in units of distance.
            num: number of neighbors.
            ordering: of the rows.
            most: how many rows may share their neighbors.
        """
        order, near, *groups = map(jnp.asarray, _graph(_Known(units), num, ordering, most))
        return cls(order, near, fingerprint(X), RowGroups(*groups))

    def check(self, X: Float[Array, "n d"]) -> Float[Array, ""]:
        """Zero; NaN where X is traced, and not that of which the neighbors were found.

        Raises:
            ValueError: if X is known, and another.
        """
        is_same: Any = len(X) == len(self.order)
        if is_same:
            is_same = jnp.all(fingerprint(X) == self.fingerprint)
        if checks.is_concrete(is_same) and not is_same:
            raise ValueError(
                f"`X`, of shape {X.shape}, is not that of which the estimator has the "
                f"{len(self.order)} rows' neighbors: find those of this one by "
                "`estimator.find_neighbors(X, kernel)`."
            )
        return jnp.where(is_same, 0.0, jnp.nan).astype(X.dtype)


def fingerprint(X: Float[Array, "n d"]) -> UInt[Array, " 2"]:
    """Two sums over the bits of an array that other values and other orders have not."""
    X = jax.lax.stop_gradient(X) + jnp.zeros((), X.dtype)  # of -0.0 as of 0.0
    bits = jax.lax.bitcast_convert_type(X, jnp.uint32).ravel()
    weights = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435761) | jnp.uint32(1)
    other = (bits ^ (bits >> jnp.uint32(15))) * jnp.uint32(2246822519)
    mixed = jnp.stack([bits, other ^ (other >> jnp.uint32(13))])
    return jnp.sum(mixed * weights, axis=1, dtype=jnp.uint32)


class _Known:
    """An array by its values, as a key."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.digest = (array.shape, str(array.dtype), hashlib.blake2b(array.tobytes()).digest())

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self.digest == other.digest


@functools.lru_cache(_NUM_KEPT)
def _graph(known: _Known, num: int, ordering: Ordering, most: int) -> tuple[np.ndarray, ...]:
    """An order, the nearest rows before each row of an array, and the groups of `RowGroups`."""
    X = known.array.astype(np.float64)
    n = len(X)
    if ordering == "maxmin":
        order = neighbors.maxmin_order(X)
    else:
        order = np.arange(n) if ordering == "given" else np.random.default_rng(0).permutation(n)
    in_order = X[order]
    with jax.ensure_compile_time_eval():
        nearest = neighbors.nearest(in_order, in_order, min(num, n - 1), np.arange(n))
    found = np.asarray(nearest)
    # Room for twice the neighbors of a row.
    size = num + 1 if most == 1 else 2 * num + 4
    members, group = neighbors.grouped(found, most, min(n, size))
    counts = np.bincount(group)
    by_group = np.argsort(group, kind="stable")
    ranks = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.full((len(members), counts.max()), members.shape[1], np.int32)
    own = members[group[by_group]] == by_group[:, None]
    places[group[by_group], ranks] = np.argmax(own, axis=1)
    near = np.full(found.shape, n, np.int32)
    rows = np.append(order, n).astype(np.int32)
    near[order] = rows[found]
    slots = np.empty(n, np.int32)
    slots[order[by_group]] = group[by_group] * places.shape[1] + ranks
    return order, near, rows[members], places, slots
