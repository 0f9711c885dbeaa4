"""Sums over all pairs of rows on a mesh, by passing shares of the rows around a ring of devices.

Each device holds a share of the rows. Copies of the shares travel halfway around the ring, so that
each two shares meet at one device or, at opposite ends of the ring, at both, each of which does
half of the work. The sums for a visiting share travel with it, and return at the end. No device
holds all rows, and each pair of rows is evaluated once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core.mesh import AnyMesh, divided, filled, on_each, shares_of, with_more_rows
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.linear import products

# Inputs and vectors of a share of the rows.
Share = tuple[Array, Any]
# Maps two shares to a sum over their pairs of rows, and a sum for each row of either share.
Meeting = Callable[[Share, Share], tuple[Any, Array, Array]]


def symmetric_matmul(
    mesh: AnyMesh,
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    V: Float[Array, "n k"],
    block_size: int,
) -> Float[Array, "n k"]:
    """See `products.symmetric_matmul`; each device sends n (d / 2 + k) numbers."""

    def meet(local: Share, visiting: Share) -> tuple[None, Array, Array]:
        rows, vectors = zip(local, visiting, strict=True)
        return None, *products.mutual_matmul(kernel, rows, vectors, block_size)

    def within(X: Array, V: Array) -> Array:
        return products.symmetric_matmul(kernel, X, V, block_size)

    local = _shares(mesh, X, V)
    product = on_each(mesh, within, *local) + _meet_all(mesh, meet, local)[1]
    return jax.lax.collapse(product, 0, 2)[: X.shape[0]]


def symmetric_gradient(
    mesh: AnyMesh,
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    sides: tuple[Float[Array, "n k"], Float[Array, "n k"]],
    block_size: int,
) -> products.Gradient:
    """See `products.symmetric_gradient`; each device sends n (d + k / 2) numbers."""

    def meet(local: Share, visiting: Share) -> tuple[AbstractKernel, Array, Array]:
        (X, (left, _)), (Z, (_, right)) = local, visiting
        gradient = products.mutual_gradient(kernel, (X, Z), (left, right), block_size)
        return gradient.kernel, *gradient.rows

    def within(X: Array, sides: tuple[Array, Array]) -> products.Gradient:
        return products.symmetric_gradient(kernel, X, sides, block_size)

    local = _shares(mesh, X, sides)
    gradient = on_each(mesh, within, *local)
    dkernel, dX = _meet_all(mesh, meet, local)
    dkernel = jax.tree.map(lambda a, b: jnp.sum(a + b, axis=0), gradient.kernel, dkernel)
    return products.Gradient(dkernel, jax.lax.collapse(gradient.rows + dX, 0, 2)[: X.shape[0]])


def _shares(mesh: AnyMesh, X: Array, vectors: Any) -> Share:
    """The rows of each device along a leading axis, with vectors of zeros for padding rows."""
    rows = filled(mesh, X, repeat=True), filled(mesh, vectors, repeat=False)
    return shares_of(mesh, rows)


def _meet_all(mesh: AnyMesh, meet: Meeting, local: Share) -> tuple[Any, Array]:
    """For each device, the sum over its meetings, and the sums for its rows over all meetings."""
    distance = mesh.size // 2

    def shifted(tree: Any, by: int) -> Any:
        return divided(jax.tree.map(lambda leaf: jnp.roll(leaf, by, axis=0), tree), mesh)

    def meet_next(state: tuple, _: None) -> tuple[tuple, None]:
        visiting, (total, home, carried) = state
        pair_sum, here, there = on_each(mesh, meet, local, visiting)
        # Shifted separately, so that the next visitor does not wait for the sums of this one.
        visiting, carried = shifted(visiting, 1), shifted(carried + there, 1)
        return (visiting, (jax.tree.map(jnp.add, total, pair_sum), home + here, carried)), None

    visiting = shifted(local, 1)
    sums = jax.tree.map(
        lambda shape: jnp.zeros(shape.shape, shape.dtype),
        jax.eval_shape(jax.vmap(meet), local, visiting),
    )
    sums = divided(sums, mesh)
    (visiting, sums), _ = jax.lax.scan(meet_next, (visiting, sums), length=distance - 1)
    if mesh.size % 2:
        last = on_each(mesh, meet, local, visiting)
    else:
        by_halves = functools.partial(_meet_by_halves, meet)
        last = on_each(mesh, by_halves, local, visiting, jnp.arange(mesh.size) >= distance)
    total, home, carried = jax.tree.map(jnp.add, sums, last)
    return total, home + shifted(carried, -distance)


def _meet_by_halves(meet: Meeting, local: Share, visiting: Share, crosswise: Array) -> tuple:
    """Two of the four meetings of the halves of two shares: first with first, or crosswise."""
    num = local[0].shape[0]
    half = -(-num // 2)

    def halves(share: Share, swap: Array | bool) -> Share:
        X, vectors = share
        X = with_more_rows(X, 2 * half - num, repeat=True)
        vectors = jax.tree.map(
            lambda array: with_more_rows(array, 2 * half - num, repeat=False), vectors
        )

        def split(array: Array) -> Array:
            return _swapped(array.reshape(2, half, *array.shape[1:]), swap)

        return jax.tree.map(split, (X, vectors))

    totals, *of_rows = jax.lax.map(
        lambda pair: meet(*pair), (halves(local, False), halves(visiting, crosswise))
    )
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), totals)
    here, there = of_rows[0], _swapped(of_rows[1], crosswise)
    return total, *(jax.lax.collapse(rows, 0, 2)[:num] for rows in (here, there))


def _swapped(halves: Array, swap: Array | bool) -> Array:
    return jnp.where(swap, halves[::-1], halves)
