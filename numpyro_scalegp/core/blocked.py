"""Factorizations of small matrices on CPUs, with all large work in matrix products.

LAPACK's threads go on spinning for a while after each call and take the cores from the products
that follow: in an SVGP step with 512 points they cost more than all else together. So matrices up
to `MAX_SIZE` go through LAPACK, or through a loop of their own, in blocks too small for threads.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_SIZE = 1024
_BLOCK = 64

# Products with explicit inverses lose the square of the digits that substitution does. Beside a
# covariance's jitter that matters in double precision, where they are corrected once: in an inverse
# where entries of the factor exceed diagonal ones by this ratio.
_LARGE_RATIO = 1e4


def cholesky(A: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The lower Cholesky factor of A, or NaN in its last entry, by the right-looking algorithm."""
    n = A.shape[0]
    rest, columns = A, []
    for start in range(0, n, _BLOCK):
        size = min(_BLOCK, n - start)
        L = jnp.linalg.cholesky(rest[:size, :size])
        panel = _solved(rest[size:, :size], L, _inverses(L[None])[0])
        columns.append(jnp.concatenate([jnp.zeros((start, size), A.dtype), L, panel]))
        rest = rest[size:, size:] - _product(panel, panel.T)
    return jnp.concatenate(columns, axis=1)


def _solved(
    A: Float[Array, "m k"], L: Float[Array, "k k"], inverse: Float[Array, "k k"]
) -> Float[Array, "m k"]:
    """A L^-T, from the inverse of L."""
    found = _product(A, inverse.T)
    return found + _product(A - _product(found, L.T), inverse.T) if _is_double(A) else found


def triangular_inverse(L: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The inverse of a lower triangular L: its diagonal blocks, then pairs of blocks merged."""
    n = L.shape[0]
    num = -(-n // _BLOCK)
    padding = num * _BLOCK - n
    padded = jnp.pad(L, (0, padding))
    padded = padded + jnp.diag((jnp.arange(num * _BLOCK) >= n).astype(L.dtype))
    blocks = padded.reshape(num, _BLOCK, num, _BLOCK)
    diagonal = _inverses(blocks[jnp.arange(num), :, jnp.arange(num)])

    def merge(low: int, high: int) -> Array:
        if high - low == 1:
            return diagonal[low]
        middle = (low + high) // 2
        rows = slice(middle * _BLOCK, high * _BLOCK)
        columns = slice(low * _BLOCK, middle * _BLOCK)
        inverses = merge(low, middle), merge(middle, high)
        return merge_inverses(*inverses, padded[rows, columns], padded[rows, rows])

    return merge(0, num)[:n, :n]


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
        diagonal = jnp.concatenate([jnp.diagonal(top), jnp.diagonal(bottom)])
        found = jax.lax.cond(
            jnp.max(jnp.abs(corner)) * jnp.max(diagonal) > _LARGE_RATIO,
            lambda: found - _product(bottom, across + _product(bottom_factor, found)),
            lambda: found,
        )
    zeros = jnp.zeros((top.shape[0], bottom.shape[0]), top.dtype)
    return jnp.block([[top, zeros], [found, bottom]])


def _product(A: Array, B: Array) -> Array:
    return jnp.matmul(A, B, precision="highest")


def _is_double(A: Array) -> bool:
    return bool(jnp.finfo(A.dtype).bits == 64)


def _inverses(L: Float[Array, "b k k"]) -> Float[Array, "b k k"]:
    """The inverses of b lower triangular matrices, all at once, by forward substitution."""
    size = L.shape[1]
    identity = jnp.eye(size, dtype=L.dtype)

    def row(i: Array, W: Array) -> Array:
        # Rows of W from i on are still zero, so the whole row of L may multiply them.
        known = jnp.einsum("bj,bjl->bl", L[:, i], W, precision="highest")
        return W.at[:, i].set((identity[i] - known) / L[:, i, i][:, None])

    return jax.lax.fori_loop(0, size, row, jnp.zeros_like(L))
