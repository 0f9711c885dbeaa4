"""Mini-batches whose cost does not depend on the size of the data."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, Int
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks, tables
from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.core.mesh import AnyMesh, divided, filled, mesh_of, replicated, shares_of

T = TypeVar("T")


class _StratifiedDraw(Messenger):
    """Replaces how the plate with this name draws its indices."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "plate" and msg["name"] == self.name:
            msg["fn"] = _draw


def _draw(
    size: int, subsample_size: int | None, rng_key: Array | None = None
) -> Int[Array, " subsample_size"]:
    if subsample_size is None or subsample_size == size:
        return jnp.arange(size)
    if rng_key is None:
        raise ValueError("a plate with a `subsample_size` needs a random key: use handlers.seed.")
    # In JAX's default type, as kernels that exchange indices expect them (HMCECS).
    return stratified_indices(checks.as_key(rng_key), size, subsample_size).astype(int)


class plate(numpyro.plate):
    """A `numpyro.plate` that draws a mini-batch in O(subsample_size), and takes its rows.

    `numpyro.plate` permutes all `size` rows for each mini-batch. Handlers, guides and scaling treat
    both plates alike; entering either returns the indices.

    Args:
        name: name of the plate.
        size: number of rows of the data.
        subsample_size: number of rows of a mini-batch; None for all.
        dim: the batch dimension of the plate, negative; None for the rightmost free dimension.

    Raises:
        TypeError: if `name` is not a string, or another argument is not an integer.
        ValueError: if `subsample_size` is not between 1 and `size`, or `dim` is not negative.

    References:
        Systematic stratified sampling: one index from each of `subsample_size` nearly equal ranges,
        all shifted by one random offset modulo `size`, so that all rows have the same probability.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro_scalegp as sgp
        >>> X, y = jnp.ones((1_000_000, 2)), None
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     rows = sgp.plate("rows", len(X), subsample_size=4)
        ...     X_batch, y_batch = rows.take(X, y)
        ...     with rows as index:
        ...         print(X_batch.shape, y_batch, index.shape)
        (4, 2) None (4,)
    """

    def __init__(
        self, name: str, size: int, subsample_size: int | None = None, dim: int | None = None
    ) -> None:
        checks.instance("name", name, str, "a string")
        checks.count("size", size)
        if subsample_size is not None and checks.count("subsample_size", subsample_size) > size:
            raise ValueError(f"`subsample_size` must be in 1..{size}, got {subsample_size}.")
        if dim is not None and checks.integer("dim", dim) >= 0:
            raise ValueError(
                f"`dim` must be negative, got {dim}: batch dimensions count from the right, and -1 "
                "is the last one."
            )
        with _StratifiedDraw(name):
            super().__init__(name, size, subsample_size, dim)

    def take(self, data: Any, /, *more: Any) -> Any:
        """Take the rows of the mini-batch, inside or outside of the `with` statement.

        Args:
            data: an array of JAX or NumPy with a leading axis of `size` rows, a data frame or a
                column of pandas or polars, a list of numbers or of such lists, a pytree of these,
                or None.
            *more: further data of these kinds.

        Returns:
            The rows of one argument, or a tuple for several arguments; None stays None. A plate
            without subsampling returns the arguments themselves, with tables and lists as NumPy
            arrays. If the arrays are on a mesh, the mini-batch has the same rows as on one device
            and is divided over the devices. Each device takes its part of the mini-batch from its
            part of the data, except for the first and the last row, which may come from another
            device.

        Raises:
            TypeError: if a table or list holds anything but numbers.
            ValueError: if a leading axis is not `size` long, or entries of a masked array are
                missing.
        """
        taken = tuple(
            self._checked(place, rows) for place, rows in enumerate((data, *more), start=1)
        )
        if self.subsample_size != self.size:
            # A NumPy array cannot be indexed by traced indices.
            taken = _taken(jax.tree.map(jnp.asarray, taken), self._indices)
        return taken if more else taken[0]

    def _checked(self, place: int, data: Any) -> Any:
        name = f"argument {place} of take"

        def of_leaf(leaf: Any) -> Any:
            if np.shape(leaf)[:1] != (self.size,):
                raise ValueError(
                    f"`{name}` must have the {self.size} rows of the plate `{self.name}` as its "
                    f"leading axis, got shape {np.shape(leaf)}."
                )
            checks.not_masked(name, leaf)
            return leaf

        return jax.tree.map(of_leaf, tables.as_arrays(data, name))


@jax.jit
def _taken(data: Any, index: Int[Array, " m"]) -> Any:
    if (mesh := mesh_of(data)) is not None:
        return rows_at(mesh, data, index)
    return jax.tree.map(lambda rows: rows[index], data)


def rows_at(mesh: AnyMesh, tree: T, index: Int[Array, " b"]) -> T:
    """The rows `index` of arrays on a mesh, divided over its p devices.

    Args:
        mesh: the devices.
        tree: a pytree of arrays with a leading axis of n rows.
        index: indices from 0 to n - 1. If they ascend and are spread evenly, as from
            `stratified_indices`, the devices send 2 p rows, otherwise b. They send none if n is not
            a multiple of p, since each device then has all rows.

    Returns:
        A pytree of arrays with a leading axis of b rows.
    """
    num, index = len(index), filled(mesh, index, repeat=True)
    size = jax.tree.leaves(tree)[0].shape[0]
    if size % mesh.size:
        index = divided(index, mesh)
        taken = jax.tree.map(lambda leaf: leaf[index], tree)
    else:
        index = replicated(index.reshape(mesh.size, -1), mesh)
        taken = _from_shares(mesh, tree, index, size // mesh.size)
    return jax.tree.map(lambda leaf: divided(leaf[:num], mesh), taken)


def _from_shares(mesh: AnyMesh, tree: T, index: Int[Array, "p w"], size: int) -> T:
    """The rows `index` for each device, one device after the other, from shares of `size` rows."""
    device = jnp.arange(mesh.size, dtype=index.dtype)[:, None]
    shares = shares_of(mesh, tree)

    def local_rows(index: Int[Array, "p v"]) -> T:
        """For each device, the rows `index` that it holds, and zeros in place of other rows."""
        place = divided(index - size * device, mesh)

        def of_share(rows: Array, place: Array) -> Array:
            is_here = ((place >= 0) & (place < size)).reshape(-1, *[1] * (rows.ndim - 1))
            return jnp.where(is_here, _as_number(rows[jnp.clip(place, 0, size - 1)]), 0)

        return jax.tree.map(lambda rows: divided(jax.vmap(of_share)(rows, place), mesh), shares)

    def global_rows(index: Int[Array, "p v"]) -> T:
        """The rows `index` for each device, sent to all devices."""
        local = local_rows(jnp.broadcast_to(index.reshape(-1), (mesh.size, index.size)))

        def of_leaf(rows: Array) -> Array:
            total = jnp.sum(rows, axis=0, dtype=rows.dtype)
            return total.reshape(*index.shape, *total.shape[1:])

        return jax.tree.map(of_leaf, local)

    def mostly_local_rows() -> T:
        ends, inner = global_rows(index[:, np.array([0, -1])]), local_rows(index[:, 1:-1])

        def between(ends: Array, inner: Array) -> Array:
            return jnp.concatenate([ends[:, :1], inner, ends[:, 1:]], axis=1)

        return jax.tree.map(between, ends, inner)

    if index.shape[1] <= 2:
        taken = global_rows(index)
    else:
        are_local = jnp.all((index // size == device)[:, 1:-1])
        taken = jax.lax.cond(are_local, mostly_local_rows, lambda: global_rows(index))

    def joined(rows: Array, like: Array) -> Array:
        return jax.lax.collapse(divided(rows, mesh), 0, 2).astype(like.dtype)

    return jax.tree.map(joined, taken, tree)


def _as_number(array: Array) -> Array:
    """Booleans as zero and one, so that they can be summed."""
    return array.astype(jnp.uint8) if array.dtype == bool else array
