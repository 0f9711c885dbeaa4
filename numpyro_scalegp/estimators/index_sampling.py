"""Random subsets of a large range of indices, at the cost of the subset."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key


def stratified_indices(key: Key[Array, ""], size: int, num: int) -> Int[Array, " num"]:
    """Draw one index from each of `num` strata of equal length that make up 0 .. size - 1.

    Each index is expected num / size times, so that size / num times the sum over the indices drawn
    has the sum over all as its mean, with less variance than from independent draws.

    Args:
        key: a typed JAX key.
        size: number of indices to draw from.
        num: how many to draw, at most `size`.

    Returns:
        Indices in ascending order, shape (num,), in O(num). Where `num` does not divide `size`, an
        index may occur twice.

    Raises:
        ValueError: if `num` is not from 1 to `size`.
    """
    if not 1 <= num <= size:
        raise ValueError(f"`num` must be from 1 to `size`, here {size}, got {num}.")
    # In whole numbers as far as can be: float32 has too few digits for large sizes.
    length = size / num
    first = np.floor(np.arange(num) * length)
    within = jnp.asarray(np.arange(num) * length - first, float)
    offset = jnp.floor(within + length * jax.random.uniform(key, (num,))).astype(int)
    return jnp.minimum(jnp.asarray(first, int) + offset, size - 1)
