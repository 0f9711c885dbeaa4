"""Mini-batches whose cost does not depend on the size of the data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, Int
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks, tables
from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.core.mesh import mesh_of
from numpyro_scalegp.core.shared_rows import rows_at


class _StratifiedDraw(Messenger):
    """Replaces how a plate of the given name draws its indices."""

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
    """A `numpyro.plate` that draws its indices in O(subsample_size), and takes rows by them.

    NumPyro's own permutes all `size` rows for each mini-batch. Handlers, guides and scaling treat
    both alike; entering the plate gives the indices.

    Args:
        name: name of the plate.
        size: number of rows of the data.
        subsample_size: rows of a mini-batch; None for all.
        dim: the batch dimension it takes, negative; None for the rightmost free one.

    Raises:
        TypeError: if `name` is no string, or a number no integer.
        ValueError: if `subsample_size` is not between 1 and `size`, or `dim` not negative.

    References:
        Draws: systematic stratified sampling, see `stratified_indices`.

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

    def take(self, data: Any, /, *others: Any) -> Any:
        """The rows of the mini-batch, within `with` and outside of it.

        Args:
            data: an array of JAX or NumPy with a leading axis of `size` rows, a data frame or a
                column of pandas or polars, a list of numbers or of such lists, a pytree of these,
                or None.
            *others: further ones.

        Returns:
            For one argument its rows, for several a tuple: None where an argument is None, and the
            arguments themselves where the plate takes all rows, with arrays of NumPy in place of
            tables and lists. Of arrays on a mesh the devices
            share the batch, whatever its size, and each takes its part from its own rows, but for
            the first and the last one; it holds the same rows as on one device.

        Raises:
            TypeError: if a table or list holds anything but numbers.
            ValueError: if a leading axis is not `size` long, or entries of a masked array are
                missing.
        """
        taken = tuple(
            self._checked(place, one) for place, one in enumerate((data, *others), start=1)
        )
        if self.subsample_size != self.size:
            # An array of NumPy cannot be indexed by traced indices.
            taken = _taken(jax.tree.map(jnp.asarray, taken), self._indices)
        return taken if others else taken[0]

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
