"""Mini-batches whose cost does not depend on the size of the data."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, Int, Key
from numpyro.primitives import Messenger


class _StratifiedDraw(Messenger):
    """Replaces how a plate of the given name draws its indices."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "plate" and msg["name"] == self.name:
            msg["fn"] = stratified_indices


def stratified_indices(
    size: int, subsample_size: int | None, rng_key: Key[Array, ""] | None = None
) -> Int[Array, " subsample_size"]:
    """Draw `subsample_size` of `size` indices without replacement, in O(subsample_size).

    One index from each of `subsample_size` runs of nearly equal length, all shifted by one random
    offset modulo `size`: every index is drawn with the same probability, none twice.

    Args:
        size: number of rows, below 2^31.
        subsample_size: number of indices; None or `size` for all of them in order.
        rng_key: a typed JAX key.

    Returns:
        Indices, shape (subsample_size,), int32.

    Raises:
        ValueError: if `size` is not below 2^31, `subsample_size` is not between 1 and `size`, or
            there is no key.
    """
    if not 1 <= size < 2**31:
        raise ValueError(f"`size` must be in 1..2^31 - 1, got {size}.")
    if subsample_size is None or subsample_size == size:
        return jnp.arange(size, dtype=jnp.int32)
    if not 1 <= subsample_size <= size:
        raise ValueError(f"`subsample_size` must be in 1..{size}, got {subsample_size}.")
    if rng_key is None:
        raise ValueError("a plate with a `subsample_size` needs a random key: use handlers.seed.")
    edges = np.arange(subsample_size + 1, dtype=np.int64) * size // subsample_size
    within_key, shift_key = jax.random.split(rng_key)
    widths = jnp.array(np.diff(edges), jnp.int32)
    within = jax.random.randint(within_key, (subsample_size,), 0, widths, jnp.int32)
    shift = jax.random.randint(shift_key, (), 0, size, jnp.int32)
    # Without the sum of two indices, which could pass 2^31.
    drawn = jnp.array(edges[:-1], jnp.int32) + within
    return jnp.where(drawn >= size - shift, drawn - (size - shift), drawn + shift)


def plate(
    name: str, size: int, subsample_size: int | None = None, dim: int | None = None
) -> numpyro.plate:
    """A `numpyro.plate` that draws its indices in O(subsample_size).

    NumPyro's own permutes all `size` rows for each mini-batch. Handlers, guides and scaling treat
    both alike.

    Args:
        name: name of the plate.
        size: number of rows of the data.
        subsample_size: rows of a mini-batch; None for all.
        dim: the batch dimension it takes, negative; None for the rightmost free one.

    Returns:
        The plate; entering it gives the indices.

    Raises:
        ValueError: if `subsample_size` is not between 1 and `size`.

    References:
        Draws: systematic stratified sampling, see `stratified_indices`.

    Example:
        >>> import jax
        >>> import numpyro
        >>> import numpyro_scalegp as sgp
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     with sgp.plate("rows", 1_000_000, subsample_size=4) as index:
        ...         print(index.shape)
        (4,)
    """
    if subsample_size is not None and not 1 <= subsample_size <= size:
        raise ValueError(f"`subsample_size` must be in 1..{size}, got {subsample_size}.")
    with _StratifiedDraw(name):
        return numpyro.plate(name, size, subsample_size, dim)
