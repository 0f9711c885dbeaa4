"""Small matrices for many lanes at once: as entries if they are very small, as arrays otherwise.

A lane is one of the places in time at which a recursion works at the same moment. A matrix as
entries is a tuple of rows, tuples of arrays of shape `lanes`, with None for an entry that is always
zero: XLA compiles its algebra into a single loop over the lanes. As an array it has the shape
(s, s, *lanes). `Entries` and `Arrays` have the same functions.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from numpyro_scalegp.kernels.state_space import Blocks, array

# Up to this size the terms of products are added one by one; above, a matrix product is faster.
_MOST_TERMS = 16


class Entries:
    """Vectors and matrices as tuples of their entries."""

    @staticmethod
    def of(array: Float[Array, "s ..."]) -> Any:
        """The entries of a vector or a square matrix, whose lanes are the last axis."""
        return tuple(Entries.of(row) if row.ndim > 1 else row for row in array)

    @staticmethod
    def equal(x: Float[Array, " s"] | np.ndarray, lanes: int) -> Any:
        """The same vector in all lanes; a zero that is known is left out."""
        if isinstance(x, np.ndarray):
            return tuple(jnp.full(lanes, entry) if entry else None for entry in x)
        return tuple(jnp.broadcast_to(entry, (lanes,)) for entry in x)

    @staticmethod
    def from_blocks(blocks: Blocks) -> Any:
        """The block-diagonal matrix."""
        rows: list[Any] = []
        size = sum(len(block) for block in blocks)
        for block in blocks:
            before, after = len(rows), size - len(rows) - len(block)
            rows += [(None,) * before + tuple(row) + (None,) * after for row in block]
        return tuple(rows)

    @staticmethod
    def to_blocks(A: Any, like: Blocks) -> Blocks:
        """The blocks on the diagonal, each as entries or as an array as in `like`."""
        blocks, start = [], 0
        for block in like:
            places = range(start, start + len(block))
            entries = tuple(tuple(A[i][j] for j in places) for i in places)
            blocks.append(entries if isinstance(block, tuple) else array(entries))
            start += len(block)
        return tuple(blocks)

    @staticmethod
    def by_row(x: Any) -> Float[Array, "steps lanes k"]:
        """Vectors or packed matrices of all steps as an array with one of them in each row."""
        return jnp.stack(x, axis=-1)

    @staticmethod
    def vector(rows: Float[Array, "lanes s"]) -> Any:
        """The vectors in the rows of an array, in lanes."""
        return tuple(rows.T)

    @staticmethod
    def symmetric(rows: Float[Array, "lanes p"]) -> Any:
        """The packed symmetric matrices in the rows of an array, in lanes."""
        return Entries.unpack(tuple(rows.T))

    @staticmethod
    def zeros(size: int, like: Float[Array, " lanes"]) -> Any:
        """A vector of zeros."""
        return (jnp.zeros_like(like),) * size

    @staticmethod
    def identity(size: int, like: Float[Array, " lanes"]) -> Any:
        """The identity matrix, with zeros."""
        one, zero = jnp.ones_like(like), jnp.zeros_like(like)
        return tuple(tuple(one if i == j else zero for j in range(size)) for i in range(size))

    @staticmethod
    def full(A: Any, like: Float[Array, " lanes"]) -> Any:
        """The same with zeros in place of None."""
        if isinstance(A, tuple):
            return tuple(Entries.full(row, like) for row in A)
        return jnp.zeros_like(like) if A is None else A

    @staticmethod
    def add(*terms: Any) -> Any:
        """The sum of vectors or matrices."""
        if isinstance(terms[0], tuple):
            return tuple(Entries.add(*rows) for rows in zip(*terms, strict=True))
        return _sum(*terms)

    @staticmethod
    def scale(A: Any, factor: Float[Array, " lanes"] | float | None) -> Any:
        """A vector or matrix times a number for each lane."""
        if isinstance(A, tuple):
            return tuple(Entries.scale(row, factor) for row in A)
        return None if A is None or factor is None else factor * A

    @staticmethod
    def dot(x: Any, y: Any) -> Any:
        """The inner product of two vectors."""
        pairs = zip(x, y, strict=True)
        return _sum(*(None if a is None or b is None else a * b for a, b in pairs))

    @staticmethod
    def absolute_form(P: Any, x: Any) -> Any:
        """The sum of |x_i P_ij x_j|."""
        products = Entries.outer(x, x)
        return _sum(
            *(
                None if a is None or b is None else jnp.abs(a * b)
                for row, other in zip(P, products, strict=True)
                for a, b in zip(row, other, strict=True)
            )
        )

    @staticmethod
    def outer(x: Any, y: Any) -> Any:
        """The matrix of all products of entries."""
        return tuple(Entries.scale(y, a) for a in x)

    @staticmethod
    def transpose(A: Any) -> Any:
        """The transposed matrix."""
        return tuple(zip(*A, strict=True))

    @staticmethod
    def times(A: Any, x: Any) -> Any:
        """A matrix times a vector."""
        return tuple(Entries.dot(row, x) for row in A)

    @staticmethod
    def product(A: Any, B: Any) -> Any:
        """The product of two matrices."""
        columns = Entries.transpose(B)
        return tuple(tuple(Entries.dot(row, column) for column in columns) for row in A)

    @staticmethod
    def congruence(A: Any, P: Any) -> Any:
        """A P A' for a symmetric P."""
        return Entries.symmetric_product(Entries.product(A, P), Entries.transpose(A))

    @staticmethod
    def symmetric_product(A: Any, B: Any) -> Any:
        """A B, which is known to be symmetric."""
        columns = Entries.transpose(B)
        size = len(A)
        above = {(i, j): Entries.dot(A[i], columns[j]) for i in range(size) for j in range(i, size)}
        return tuple(tuple(above[min(i, j), max(i, j)] for j in range(size)) for i in range(size))

    @staticmethod
    def pack(P: Any) -> Any:
        """The entries of a symmetric matrix on and above its diagonal, to be stored."""
        return tuple(P[i][j] for i in range(len(P)) for j in range(i, len(P)))

    @staticmethod
    def unpack(packed: Any) -> Any:
        """The symmetric matrix of what `pack` returns."""
        size = int((2 * len(packed)) ** 0.5)
        places = [(i, j) for i in range(size) for j in range(i, size)]
        above = dict(zip(places, packed, strict=True))
        return tuple(tuple(above[min(i, j), max(i, j)] for j in range(size)) for i in range(size))

    @staticmethod
    def array(A: Any) -> Float[Array, "s s lanes"]:
        """A matrix as an array."""
        return array(A)

    @staticmethod
    def factor(P: Any) -> Any:
        """A lower triangular L with L L' = P, for a positive semidefinite P."""
        return _lower_factor(P)

    @staticmethod
    def given_information(P: Any, J: Any) -> Any:
        """(P^-1 + J)^-1 for positive semidefinite P and J: a covariance P, given a likelihood."""
        L, size = _lower_factor(P), len(P)
        M = Entries.product(Entries.transpose(L), Entries.product(J, L))
        M = tuple(
            tuple(M[i][j] + 1.0 if i == j else M[i][j] for j in range(size)) for i in range(size)
        )
        S = _lower_factor(M)
        # Y = S^-1 L', row by row.
        rows: list[Any] = []
        for i, row in enumerate(Entries.transpose(L)):
            for j, earlier in enumerate(rows):
                row = Entries.add(row, Entries.scale(earlier, -S[i][j]))
            rows.append(Entries.scale(row, 1.0 / S[i][i]))
        return Entries.symmetric_product(Entries.transpose(rows), tuple(rows))


class Arrays:
    """Vectors and matrices as arrays with the lanes on the last axis."""

    @staticmethod
    def of(array: Float[Array, "s ..."]) -> Array:
        """The array itself."""
        return array

    @staticmethod
    def equal(x: Float[Array, " s"] | np.ndarray, lanes: int) -> Array:
        """The same vector in all lanes."""
        return jnp.broadcast_to(x[:, None], (len(x), lanes))

    @staticmethod
    def from_blocks(blocks: Blocks) -> Array:
        """The block-diagonal matrix."""
        arrays = [array(block) for block in blocks]
        size, start, rows = sum(map(len, arrays)), 0, []
        for block in arrays:
            around = ((0, 0), (start, size - start - len(block)), *[(0, 0)] * (block.ndim - 2))
            rows.append(jnp.pad(block, around))
            start += len(block)
        return jnp.concatenate(rows)

    @staticmethod
    def to_blocks(A: Array, like: Blocks) -> Blocks:
        """The blocks on the diagonal, each as entries or as an array as in `like`."""
        blocks, start = [], 0
        for block in like:
            end = start + len(block)
            diagonal = A[start:end, start:end]
            blocks.append(Entries.of(diagonal) if isinstance(block, tuple) else diagonal)
            start = end
        return tuple(blocks)

    @staticmethod
    def by_row(x: Float[Array, "steps ... lanes"]) -> Float[Array, "steps lanes k"]:
        """Vectors or matrices of all steps as an array with one of them in each row."""
        moved = jnp.moveaxis(x, -1, 1)
        return moved.reshape(*moved.shape[:2], -1)

    @staticmethod
    def vector(rows: Float[Array, "lanes s"]) -> Array:
        """The vectors in the rows of an array, in lanes."""
        return rows.T

    @staticmethod
    def symmetric(rows: Float[Array, "lanes p"]) -> Array:
        """The symmetric matrices in the rows of an array, in lanes."""
        size = math.isqrt(rows.shape[-1])
        return rows.T.reshape(size, size, -1)

    @staticmethod
    def zeros(size: int, like: Float[Array, " lanes"]) -> Array:
        """A vector of zeros."""
        return jnp.zeros((size, *like.shape), like.dtype)

    @staticmethod
    def identity(size: int, like: Float[Array, " lanes"]) -> Array:
        """The identity matrix."""
        eye = jnp.eye(size, dtype=like.dtype).reshape(size, size, *(1,) * like.ndim)
        return jnp.broadcast_to(eye, (size, size, *like.shape))

    @staticmethod
    def full(A: Array, like: Float[Array, " lanes"]) -> Array:
        """The matrix itself, for each lane."""
        return jnp.broadcast_to(A, (*A.shape[: A.ndim - like.ndim], *like.shape))

    @staticmethod
    def add(*terms: Array) -> Array:
        """The sum of vectors or matrices."""
        return functools.reduce(operator.add, terms)

    @staticmethod
    def scale(A: Array, factor: Float[Array, " lanes"] | float) -> Array:
        """A vector or matrix times a number for each lane."""
        return A * factor

    @staticmethod
    def dot(x: Array, y: Array) -> Array:
        """The inner product of two vectors."""
        return jnp.sum(x * y, axis=0)

    @staticmethod
    def absolute_form(P: Array, x: Array) -> Array:
        """The sum of |x_i P_ij x_j|."""
        return jnp.sum(jnp.abs(x[:, None] * P * x), axis=(0, 1))

    @staticmethod
    def outer(x: Array, y: Array) -> Array:
        """The matrix of all products of entries."""
        return x[:, None] * y

    @staticmethod
    def transpose(A: Array) -> Array:
        """The transposed matrix."""
        return jnp.swapaxes(A, 0, 1)

    @staticmethod
    def times(A: Array, x: Array) -> Array:
        """A matrix times a vector."""
        return jnp.sum(A * x, axis=1)

    @staticmethod
    def product(A: Array, B: Array) -> Array:
        """The product of two matrices."""
        if len(A) <= _MOST_TERMS:
            return functools.reduce(
                operator.add, [A[:, j, None] * B[None, j] for j in range(A.shape[1])]
            )
        return jnp.einsum("ij...,jk...->ik...", A, B, precision="highest")

    @staticmethod
    def congruence(A: Array, P: Array) -> Array:
        """A P A' for a symmetric P."""
        return Arrays.symmetric_product(Arrays.product(A, P), Arrays.transpose(A))

    @staticmethod
    def symmetric_product(A: Array, B: Array) -> Array:
        """A B, which is known to be symmetric."""
        P = Arrays.product(A, B)
        return 0.5 * (P + Arrays.transpose(P))

    @staticmethod
    def pack(P: Array) -> Array:
        """The matrix itself."""
        return P

    @staticmethod
    def unpack(packed: Array) -> Array:
        """The matrix itself."""
        return packed

    @staticmethod
    def array(A: Array) -> Float[Array, "s s lanes"]:
        """The matrix itself."""
        return A

    @staticmethod
    def factor(P: Array) -> Array:
        """A lower triangular L with L L' = P, for a positive semidefinite P."""
        return jax.vmap(_lower_factor_of_array, in_axes=-1, out_axes=-1)(P)

    @staticmethod
    def given_information(P: Array, J: Array) -> Array:
        """(P^-1 + J)^-1 for positive semidefinite P and J: a covariance P, given a likelihood."""

        def of_lane(P: Float[Array, "s s"], J: Float[Array, "s s"]) -> Float[Array, "s s"]:
            L = _lower_factor_of_array(P)
            M = jnp.eye(len(P), dtype=P.dtype) + L.T @ J @ L
            Y = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(M), L.T, lower=True)
            return Y.T @ Y

        return jax.vmap(of_lane, in_axes=-1, out_axes=-1)(P, J)


def _lower_factor_of_array(P: Float[Array, "s s"]) -> Float[Array, "s s"]:
    # Scaled to a unit diagonal, with jitter of the size of rounding errors.
    diagonal = jnp.diagonal(P)
    is_positive = diagonal > 0.0
    scale = jnp.sqrt(jnp.where(is_positive, diagonal, 1.0))
    jitter = 4.0 * len(P) * jnp.finfo(P.dtype).eps
    correlation = P / jnp.outer(scale, scale) + jitter * jnp.eye(len(P), dtype=P.dtype)
    # A variable without variance, or with a negative one by rounding, is independent of all others.
    both = is_positive[:, None] & is_positive
    correlation = jnp.where(both, correlation, jnp.eye(len(P), dtype=P.dtype))
    scale = jnp.where(is_positive, scale, 0.0)
    return scale[:, None] * jnp.linalg.cholesky(correlation)


def _sum(*terms: Any) -> Any:
    terms = tuple(term for term in terms if term is not None)
    return functools.reduce(operator.add, terms) if terms else None


def _lower_factor(P: Any) -> Any:
    """The Cholesky factor of a positive semidefinite matrix, with zeros for a pivot of zero."""
    size = len(P)
    zero = jnp.zeros_like(P[0][0])
    L = [[zero] * size for _ in range(size)]
    for j in range(size):
        pivot = P[j][j] - sum((L[j][k] * L[j][k] for k in range(j)), zero)
        is_positive = pivot > 0.0
        root = jnp.sqrt(jnp.where(is_positive, pivot, 1.0))
        L[j][j] = jnp.where(is_positive, root, 0.0)
        for i in range(j + 1, size):
            rest = P[i][j] - sum((L[i][k] * L[j][k] for k in range(j)), zero)
            L[i][j] = jnp.where(is_positive, rest / root, 0.0)
    return tuple(map(tuple, L))
