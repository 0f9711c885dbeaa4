"""Rows, taken by their numbers from arrays that the devices of a mesh share."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from numpyro_scalegp.core.mesh import AnyMesh, divided, filled, shares_of, whole

T = TypeVar("T")


def rows_at(mesh: AnyMesh, tree: T, index: Int[Array, " b"]) -> T:
    """Some rows of arrays on a mesh, divided over its p devices.

    Args:
        mesh: the devices.
        tree: a pytree of arrays with a leading axis of n rows.
        index: which ones, from 0 to n - 1. Of ascending ones that are spread evenly, as
            `stratified_indices` makes them, 2 p rows are sent; of others b, and none where n is no
            multiple of p, since each device has all rows then.

    Returns:
        A pytree of arrays with a leading axis of b rows.
    """
    num, wanted = len(index), filled(mesh, index, repeat=True)
    size = jax.tree.leaves(tree)[0].shape[0]
    if size % mesh.size:
        places = divided(wanted, mesh)
        found = jax.tree.map(lambda leaf: leaf[places], tree)
    else:
        parts = whole(wanted.reshape(mesh.size, -1), mesh)
        found = _from_shares(mesh, tree, parts, size // mesh.size)
    return jax.tree.map(lambda leaf: divided(leaf[:num], mesh), found)


def _from_shares(mesh: AnyMesh, tree: T, wanted: Int[Array, "p w"], size: int) -> T:
    """The rows that each device wants, one after the other, from shares of `size` rows."""
    device = jnp.arange(mesh.size, dtype=wanted.dtype)[:, None]
    shares = shares_of(mesh, tree)

    def at_home(wanted: Int[Array, "p v"]) -> T:
        """Of the rows wanted of each device those that it has, and zeros in place of others."""
        place = divided(wanted - size * device, mesh)

        def of_share(rows: Array, place: Array) -> Array:
            is_here = ((place >= 0) & (place < size)).reshape(-1, *[1] * (rows.ndim - 1))
            return jnp.where(is_here, _as_number(rows[jnp.clip(place, 0, size - 1)]), 0)

        return jax.tree.map(lambda rows: divided(jax.vmap(of_share)(rows, place), mesh), shares)

    def anywhere(wanted: Int[Array, "p v"]) -> T:
        """The rows wanted of each device, of which all get all."""
        of_all = at_home(jnp.broadcast_to(wanted.reshape(-1), (mesh.size, wanted.size)))

        def of_leaf(held: Array) -> Array:
            total = jnp.sum(held, axis=0, dtype=held.dtype)
            return total.reshape(*wanted.shape, *total.shape[1:])

        return jax.tree.map(of_leaf, of_all)

    def from_near() -> T:
        ends, inner = anywhere(wanted[:, np.array([0, -1])]), at_home(wanted[:, 1:-1])

        def between(ends: Array, inner: Array) -> Array:
            return jnp.concatenate([ends[:, :1], inner, ends[:, 1:]], axis=1)

        return jax.tree.map(between, ends, inner)

    if wanted.shape[1] <= 2:
        found = anywhere(wanted)
    else:
        are_near = jnp.all((wanted // size == device)[:, 1:-1])
        found = jax.lax.cond(are_near, from_near, lambda: anywhere(wanted))
    return jax.tree.map(
        lambda one, rows: jax.lax.collapse(divided(one, mesh), 0, 2).astype(rows.dtype), found, tree
    )


def _as_number(array: Array) -> Array:
    """What can be added up; False and True as zero and one."""
    return array.astype(jnp.uint8) if array.dtype == bool else array
