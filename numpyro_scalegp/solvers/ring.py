"""Sums over all pairs of rows that the devices of a mesh share, by passing the rows round.

Each device holds the rows of its share. They go round in a ring, half the way: so every two shares
meet at one device or, where they are at opposite ends of the ring, at both, each of which does half
of the work. What a visiting share gets out of a meeting travels with it, and goes home at the end.
No array of all rows is ever in one place, and each pair of rows is evaluated once.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core.mesh import (
    AnyMesh,
    filled,
    on_shares,
    shifted,
    summed,
    with_more_rows,
)
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.solvers import products

# Inputs and vectors of some rows.
Share = tuple[Array, Any]
# What two shares make together: a sum over their pairs, and what each of the rows of either gets.
Meeting = Callable[[Share, Share], tuple[Any, Array, Array]]


@eqx.filter_jit
def symmetric_matmul(
    mesh: AnyMesh,
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    V: Float[Array, "n k"],
    block_size: int,
) -> Float[Array, "n k"]:
    """As of `products`; each device sends n (d / 2 + k) numbers."""

    def of_share(kernel: AbstractKernel, X: Array, V: Array, place: Array) -> Array:
        def meet(mine: Share, visiting: Share) -> tuple[None, Array, Array]:
            rows, vectors = zip(mine, visiting, strict=True)
            return None, *products.mutual_matmul(kernel, rows, vectors, block_size)

        _, others = _meet_all(mesh, meet, (X, V), place[0])
        return products.symmetric_matmul(kernel, X, V, block_size) + others

    return on_shares(mesh, of_share, kernel, *_filled(mesh, X, V), _places(mesh))[: X.shape[0]]


@eqx.filter_jit
def symmetric_gradient(
    mesh: AnyMesh,
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    sides: tuple[Float[Array, "n k"], Float[Array, "n k"]],
    block_size: int,
) -> products.Gradient:
    """As of `products`; each device sends n (d + k / 2) numbers."""

    def of_share(
        kernel: AbstractKernel, X: Array, sides: tuple[Array, Array], place: Array
    ) -> products.Gradient:
        def meet(mine: Share, visiting: Share) -> tuple[AbstractKernel, Array, Array]:
            (X, (left, _)), (Z, (_, right)) = mine, visiting
            found = products.mutual_gradient(kernel, (X, Z), (left, right), block_size)
            return found.kernel, *found.rows

        own = products.symmetric_gradient(kernel, X, sides, block_size)
        total, others = _meet_all(mesh, meet, (X, sides), place[0])
        dkernel = summed(mesh, jax.tree.map(jnp.add, own.kernel, total))
        return products.Gradient(dkernel, own.rows + others)

    out = products.Gradient(P(), P(mesh.axis_names))
    found = on_shares(mesh, of_share, kernel, *_filled(mesh, X, sides), _places(mesh), out=out)
    return found._replace(rows=found.rows[: X.shape[0]])


def _filled(mesh: AnyMesh, X: Array, vectors: Any) -> Share:
    """The rows in a number that all devices can share, with vectors of zeros for those added."""
    return filled(mesh, X, repeat=True), filled(mesh, vectors, repeat=False)


def _places(mesh: AnyMesh) -> Int[Array, " devices"]:
    """The place of each device in the ring."""
    # As an argument: `jax.lax.axis_index` fails within `jax.ensure_compile_time_eval`.
    return jnp.arange(mesh.size)


def _meet_all(mesh: AnyMesh, meet: Meeting, mine: Share, place: Array) -> tuple[Any, Array]:
    """The sum over this device's meetings, and what its own rows get from all those they are in."""
    distance = mesh.size // 2

    def one(state: tuple, _: None) -> tuple[tuple, None]:
        visiting, so_far = state
        found, here, there = meet(mine, visiting)
        # The next visitor need not wait for what this one takes along.
        visiting, (total, own, carried) = shifted(mesh, visiting, 1), so_far
        total = jax.tree.map(jnp.add, total, found)
        return (visiting, (total, own + here, shifted(mesh, carried + there, 1))), None

    visiting = shifted(mesh, mine, 1)
    so_far = jax.tree.map(
        lambda shape: jnp.zeros(shape.shape, shape.dtype), jax.eval_shape(meet, mine, visiting)
    )
    (visiting, so_far), _ = jax.lax.scan(one, (visiting, so_far), length=distance - 1)
    if mesh.size % 2:
        last = meet(mine, visiting)
    else:
        last = _meet_by_halves(meet, mine, visiting, place >= distance)
    total, own, carried = jax.tree.map(jnp.add, so_far, last)
    return total, own + shifted(mesh, carried, -distance)


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
