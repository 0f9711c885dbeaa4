"""Random subsets of a large range of indices, at the cost of the subset."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key


def stratified_indices(key: Key[Array, ""], size: int, num: int) -> Int[Array, " num"]:
    """Draw `num` of `size` indices without replacement, in O(num).

    One index from each of `num` runs of nearly equal length, all shifted by one random offset
    modulo `size`: every index is drawn with the same probability, none twice. So size / num times
    the sum over the indices drawn has the sum over all as its mean, with less variance than from
    independent draws. Probabilities are equal to one part in 2^32 / size.

    Args:
        key: a typed JAX key.
        size: number of indices to draw from, below 2^31.
        num: how many to draw, at most `size`.

    Returns:
        Indices, shape (num,), int32, in ascending order. So with equal shares of the range for some
        devices, and of the indices, each index is in its device's share of the range, but for the
        first and the last one of each, which may be in the share before and after.

    Raises:
        ValueError: if `size` is not below 2^31 or `num` is not from 1 to `size`.
    """
    if not 1 <= size < 2**31:
        raise ValueError(f"`size` must be in 1..2^31 - 1, got {size}.")
    if not 1 <= num <= size:
        raise ValueError(f"`num` must be from 1 to `size`, here {size}, got {num}.")
    if num == size:
        return jnp.arange(size, dtype=jnp.int32)
    return _stratified(key, size, num)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _stratified(key: Array, size: int, num: int) -> Array:
    edges = np.arange(num + 1, dtype=np.int64) * size // num
    ranges = jnp.array(np.append(np.diff(edges), size), jnp.uint32)
    # One draw of random bits in all: each further one would add to the time of compilation.
    drawn = (jax.random.bits(key, (num + 1,), jnp.uint32) % ranges).astype(jnp.int32)
    within, shift = jnp.array(edges[:-1], jnp.int32) + drawn[:-1], drawn[-1]
    passes = within >= size - shift
    # Without the sum of two indices, which could pass 2^31.
    shifted = jnp.where(passes, within - (size - shift), within + shift)
    return jnp.roll(shifted, jnp.sum(passes))
