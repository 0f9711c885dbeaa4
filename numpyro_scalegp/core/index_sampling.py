"""Random subsets of a large range of indices, at a cost proportional to the subset."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key


def stratified_indices(key: Key[Array, ""], size: int, num: int) -> Int[Array, " num"]:
    """Draw `num` of `size` indices without replacement, in O(num).

    The range is split into `num` strata of nearly equal length. One index is drawn from each, and
    all are shifted by one random offset modulo `size`, so that every index has the same inclusion
    probability and none is drawn twice. Hence size / num times a sum over the drawn indices is
    unbiased for the sum over all, with less variance than from independent draws. The
    probabilities are equal up to a relative difference of size / 2^32.

    Args:
        key: a typed JAX key.
        size: number of indices to draw from, below 2^31.
        num: number of indices to draw, at most `size`.

    Returns:
        Indices, shape (num,), int32, in ascending order. If devices hold equal shares of the range
        and of the indices, the indices of each device are in its share of the range, except for the
        first and the last, which may be in the share before and after it.

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
    # One draw of random bits for all, because each draw adds to the compilation time.
    drawn = (jax.random.bits(key, (num + 1,), jnp.uint32) % ranges).astype(jnp.int32)
    within, shift = jnp.array(edges[:-1], jnp.int32) + drawn[:-1], drawn[-1]
    wraps = within >= size - shift
    # Not (within + shift) % size, which could overflow.
    shifted = jnp.where(wraps, within - (size - shift), within + shift)
    return jnp.roll(shifted, jnp.sum(wraps))
