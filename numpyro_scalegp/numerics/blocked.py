"""Factorizations of small matrices on CPUs, with most of the work in matrix products.

LAPACK's threads keep spinning for a while after each call, and take the cores from the products
that follow: in an SVGP step with 512 points they cost more than everything else together. So
matrices up to `MAX_SIZE` are factorized in blocks for which LAPACK starts no threads.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.numerics import lapack

MAX_SIZE = 1024
# LAPACK starts threads at 1024 bytes per row.
_LAPACK_BYTES = 512
_BLOCK = 64


def cholesky(A: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The lower Cholesky factor of A, right-looking; its last entry is NaN if there is none."""
    n, block = A.shape[0], _LAPACK_BYTES // A.dtype.itemsize
    remaining, columns = A, []
    for start in range(0, n, block):
        size = min(block, n - start)
        L = lapack.cholesky(remaining[:size, :size])
        panel = _solve_right(remaining[size:, :size], L, triangular_inverse(L))
        columns.append(jnp.concatenate([jnp.zeros((start, size), A.dtype), L, panel]))
        remaining = remaining[size:, size:] - _product(panel, panel.T)
    return jnp.concatenate(columns, axis=1)


def _solve_right(
    A: Float[Array, "m k"], L: Float[Array, "k k"], inverse: Float[Array, "k k"]
) -> Float[Array, "m k"]:
    """A L^-T, from the inverse of L with one correction.

    Without the correction, errors of the panel spread to all later blocks: in single precision
    posterior means had ten times the error, and jitter was added to matrices that have a factor.
    """
    panel = _product(A, inverse.T)
    return panel + _product(A - _product(panel, L.T), inverse.T)


def triangular_inverse(L: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The inverse of a lower triangular L: invert the diagonal blocks, then merge them in pairs.

    Products of one size are batched, because each separate product adds to the compilation time.
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
    """The inverse of [[T, 0], [C, B]] from the inverses of T and B; B itself corrects rounding."""
    across = _product(corner, top)
    new_corner = -_product(bottom, across)
    if _is_double(new_corner):
        new_corner -= _product(bottom, across + _product(bottom_factor, new_corner))
    zeros = jnp.zeros((top.shape[0], bottom.shape[0]), top.dtype)
    return jnp.block([[top, zeros], [new_corner, bottom]])


def _product(A: Array, B: Array) -> Array:
    return jnp.matmul(A, B, precision="highest")


def _is_double(A: Array) -> bool:
    """Whether to correct blocks of an explicit inverse once.

    They lose twice as many digits as substitution. Compared to a covariance's jitter, this matters
    only in double precision.
    """
    return bool(jnp.finfo(A.dtype).bits == 64)


def _inverses(L: Float[Array, "b k k"]) -> Float[Array, "b k k"]:
    """The inverses of b lower triangular matrices, all at once, by forward substitution."""
    size = L.shape[1]
    identity = jnp.eye(size, dtype=L.dtype)
    take, put = jax.lax.dynamic_index_in_dim, jax.lax.dynamic_update_index_in_dim

    def row(i: Array, W: Array) -> Array:
        # Rows i, i + 1, ... of W are still zero, so the full row of L can multiply W.
        factors = take(L, i, axis=1, keepdims=False)
        product = jnp.einsum("bj,bjl->bl", factors, W, precision="highest")
        return put(W, (take(identity, i) - product) / take(factors, i, axis=1), i, axis=1)

    return jax.lax.fori_loop(0, size, row, jnp.zeros_like(L))
