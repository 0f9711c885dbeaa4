"""Factorizations of small matrices on CPUs, with all large work in matrix products.

LAPACK's threads go on spinning for a while after each call and take the cores from the products
that follow: in an SVGP step with 512 points they cost more than all else together. So matrices up
to `MAX_SIZE` go through LAPACK, or through a loop of their own, in blocks too small for threads.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import lapack

MAX_SIZE = 1024
# LAPACK takes threads from 1024 bytes a row on.
_LAPACK_BYTES = 512
_BLOCK = 64


def cholesky(A: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The lower Cholesky factor of A, or NaN in its last entry, by the right-looking algorithm."""
    n, block = A.shape[0], _LAPACK_BYTES // A.dtype.itemsize
    rest, columns = A, []
    for start in range(0, n, block):
        size = min(block, n - start)
        L = lapack.cholesky(rest[:size, :size])
        panel = _solved(rest[size:, :size], L, triangular_inverse(L))
        columns.append(jnp.concatenate([jnp.zeros((start, size), A.dtype), L, panel]))
        rest = rest[size:, size:] - _product(panel, panel.T)
    return jnp.concatenate(columns, axis=1)


def _solved(
    A: Float[Array, "m k"], L: Float[Array, "k k"], inverse: Float[Array, "k k"]
) -> Float[Array, "m k"]:
    """A L^-T, from the inverse of L, corrected once.

    Without that, all that follows would rest on a factor of another matrix: in single precision
    posterior means were off by ten times as much, and jitter was added to matrices that have a
    factor.
    """
    panel = _product(A, inverse.T)
    return panel + _product(A - _product(panel, L.T), inverse.T)


def triangular_inverse(L: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The inverse of a lower triangular L: its diagonal blocks, then pairs of blocks merged.

    What can be done at once is: each product by itself would add to the time of compilation.
    """
    n = L.shape[0]
    num = 1 << (-(-n // _BLOCK) - 1).bit_length()
    size = -(-n // num)
    end = num * size
    if end > n:
        L = jnp.pad(L, (0, end - n)) + jnp.diag((jnp.arange(end) >= n).astype(L.dtype))
    inverses = _inverses(jnp.stack([L[i : i + size, i : i + size] for i in range(0, end, size)]))
    while size < end:
        two = 2 * size
        starts = range(0, end, two)
        corners = jnp.stack([L[i + size : i + two, i : i + size] for i in starts])
        factors = jnp.stack([L[i + size : i + two, i + size : i + two] for i in starts])
        inverses = jax.vmap(merge_inverses)(inverses[::2], inverses[1::2], corners, factors)
        size = two
    return inverses[0, :n, :n]


def merge_inverses(
    top: Float[Array, "h h"],
    bottom: Float[Array, "k k"],
    corner: Float[Array, "k h"],
    bottom_factor: Float[Array, "k k"],
) -> Float[Array, "n n"]:
    """The inverse of [[T, 0], [C, B]] from those of T and B, and from B for a correction."""
    across = _product(corner, top)
    found = -_product(bottom, across)
    if _is_double(found):
        found = found - _product(bottom, across + _product(bottom_factor, found))
    zeros = jnp.zeros((top.shape[0], bottom.shape[0]), top.dtype)
    return jnp.block([[top, zeros], [found, bottom]])


def _product(A: Array, B: Array) -> Array:
    return jnp.matmul(A, B, precision="highest")


def _is_double(A: Array) -> bool:
    """Whether blocks of an explicit inverse are corrected once.

    They lose the square of the digits that substitution does. Beside a covariance's jitter that
    matters in double precision.
    """
    return bool(jnp.finfo(A.dtype).bits == 64)


def _inverses(L: Float[Array, "b k k"]) -> Float[Array, "b k k"]:
    """The inverses of b lower triangular matrices, all at once, by forward substitution."""
    size = L.shape[1]
    identity = jnp.eye(size, dtype=L.dtype)
    take, put = jax.lax.dynamic_index_in_dim, jax.lax.dynamic_update_index_in_dim

    def row(i: Array, W: Array) -> Array:
        # Rows of W from i on are still zero, so the whole row of L may multiply them.
        factors = take(L, i, axis=1, keepdims=False)
        known = jnp.einsum("bj,bjl->bl", factors, W, precision="highest")
        return put(W, (take(identity, i) - known) / take(factors, i, axis=1), i, axis=1)

    return jax.lax.fori_loop(0, size, row, jnp.zeros_like(L))
