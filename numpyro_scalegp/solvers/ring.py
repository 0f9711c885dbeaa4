"""Sums over all pairs of rows that the devices of a mesh share, by passing the rows round.

Each device holds the rows of its share. They go round in a ring, half the way: so every two shares
meet at one device or, where they are at opposite ends of the ring, at both, each of which does half
of the work. What a visiting share gets out of a meeting travels with it, and goes home at the end.
No array of all rows is ever in one place, and each pair of rows is evaluated once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core.mesh import (
    AnyMesh,
    divided,
    filled,
    on_each,
    shares_of,
    with_more_rows,
)
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.solvers import products

# Inputs and vectors of some rows.
Share = tuple[Array, Any]
# What two shares make together: a sum over their pairs, and what each of the rows of either gets.
Meeting = Callable[[Share, Share], tuple[Any, Array, Array]]


def symmetric_matmul(
    mesh: AnyMesh,
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    V: Float[Array, "n k"],
    block_size: int,
) -> Float[Array, "n k"]:
    """As of `products`; each device sends n (d / 2 + k) numbers."""

    def meet(mine: Share, visiting: Share) -> tuple[None, Array, Array]:
        rows, vectors = zip(mine, visiting, strict=True)
        return None, *products.mutual_matmul(kernel, rows, vectors, block_size)

    def alone(X: Array, V: Array) -> Array:
        return products.symmetric_matmul(kernel, X, V, block_size)

    mine = _shares(mesh, X, V)
    own = on_each(mesh, alone, *mine) + _meet_all(mesh, meet, mine)[1]
    return jax.lax.collapse(own, 0, 2)[: X.shape[0]]


def symmetric_gradient(
    mesh: AnyMesh,
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    sides: tuple[Float[Array, "n k"], Float[Array, "n k"]],
    block_size: int,
) -> products.Gradient:
    """As of `products`; each device sends n (d + k / 2) numbers."""

    def meet(mine: Share, visiting: Share) -> tuple[AbstractKernel, Array, Array]:
        (X, (left, _)), (Z, (_, right)) = mine, visiting
        found = products.mutual_gradient(kernel, (X, Z), (left, right), block_size)
        return found.kernel, *found.rows

    def alone(X: Array, sides: tuple[Array, Array]) -> products.Gradient:
        return products.symmetric_gradient(kernel, X, sides, block_size)

    mine = _shares(mesh, X, sides)
    own = on_each(mesh, alone, *mine)
    total, others = _meet_all(mesh, meet, mine)
    dkernel = jax.tree.map(lambda a, b: jnp.sum(a + b, axis=0), own.kernel, total)
    return products.Gradient(dkernel, jax.lax.collapse(own.rows + others, 0, 2)[: X.shape[0]])


def _shares(mesh: AnyMesh, X: Array, vectors: Any) -> Share:
    """The rows of each device along a leading axis, with vectors of zeros where rows are added."""
    rows = filled(mesh, X, repeat=True), filled(mesh, vectors, repeat=False)
    return shares_of(mesh, rows)


def _meet_all(mesh: AnyMesh, meet: Meeting, mine: Share) -> tuple[Any, Array]:
    """The sum over each device's meetings, and what its rows get from all those they are in."""
    distance = mesh.size // 2

    def shifted(tree: Any, by: int) -> Any:
        return divided(jax.tree.map(lambda leaf: jnp.roll(leaf, by, axis=0), tree), mesh)

    def one(state: tuple, _: None) -> tuple[tuple, None]:
        visiting, (total, own, carried) = state
        found, here, there = on_each(mesh, meet, mine, visiting)
        # The next visitor need not wait for what this one takes along.
        visiting, carried = shifted(visiting, 1), shifted(carried + there, 1)
        return (visiting, (jax.tree.map(jnp.add, total, found), own + here, carried)), None

    visiting = shifted(mine, 1)
    so_far = jax.tree.map(
        lambda shape: jnp.zeros(shape.shape, shape.dtype),
        jax.eval_shape(jax.vmap(meet), mine, visiting),
    )
    so_far = divided(so_far, mesh)
    (visiting, so_far), _ = jax.lax.scan(one, (visiting, so_far), length=distance - 1)
    if mesh.size % 2:
        last = on_each(mesh, meet, mine, visiting)
    else:
        by_halves = functools.partial(_meet_by_halves, meet)
        last = on_each(mesh, by_halves, mine, visiting, jnp.arange(mesh.size) >= distance)
    total, own, carried = jax.tree.map(jnp.add, so_far, last)
    return total, own + shifted(carried, -distance)


def _meet_by_halves(meet: Meeting, mine: Share, visiting: Share, crosswise: Array) -> tuple:
    """Two of the four meetings of either's halves: like with like, or crosswise."""
    num = mine[0].shape[0]
    half = -(-num // 2)

    def halves(share: Share, swap: Array | bool) -> Share:
        X, vectors = share
        X = with_more_rows(X, 2 * half - num, repeat=True)
        vectors = jax.tree.map(
            lambda one: with_more_rows(one, 2 * half - num, repeat=False), vectors
        )
        return jax.tree.map(
            lambda one: _swapped(one.reshape(2, half, *one.shape[1:]), swap), (X, vectors)
        )

    totals, *of_rows = jax.lax.map(
        lambda pair: meet(*pair), (halves(mine, False), halves(visiting, crosswise))
    )
    total = jax.tree.map(lambda one: jnp.sum(one, axis=0), totals)
    here, there = of_rows[0], _swapped(of_rows[1], crosswise)
    return total, *(jax.lax.collapse(one, 0, 2)[:num] for one in (here, there))


def _swapped(halves: Array, swap: Array | bool) -> Array:
    return jnp.where(swap, halves[::-1], halves)
