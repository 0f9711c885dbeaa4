"""Products with kernel matrices whose entries are computed block by block and not stored."""

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core.chunks import map_rows, sum_rows
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics.linalg import large_matmul

# Arrays of the size of a block that exist at a time: the block, its distances and what the reverse
# pass stores.
_COPIES = 4
# On a CPU a block should fit into the caches; 500 to 640 rows were fastest in float32.
_MAX_ROWS_ON_CPU = 640
# Rows of several blocks are a multiple of the width of an accelerator's tiles.
_TILE = 128
# The most entries of a rectangular block that fit into a CPU's caches.
_MAX_ENTRIES_ON_CPU = 2**19


def block_size(num_rows: int, memory_budget: int, itemsize: int) -> int:
    """Rows of the square blocks into which `num_rows` are split, within a budget of bytes."""
    rows = math.isqrt(memory_budget // (_COPIES * itemsize))
    if jax.default_backend() == "cpu":
        return _even_share(num_rows, min(rows, _MAX_ROWS_ON_CPU))
    size = _even_share(num_rows, rows)
    return -(-size // _TILE) * _TILE if num_rows > rows else size


def _even_share(size: int, at_most: int) -> int:
    """The block size that splits `size` rows into the fewest equal blocks."""
    return -(-size // -(-size // max(1, at_most)))


class Gradient(NamedTuple):
    """Derivatives of sums of products l_i k(x_i, x_j) r_j."""

    kernel: Any  # with respect to the kernel; None for leaves that are not floating-point arrays
    rows: Any  # with respect to X, or to each of two matrices of inputs


class Blocks:
    """The rows of X in blocks of equal size; the last one is padded with its last row."""

    def __init__(self, X: Float[Array, "n d"], block_size: int) -> None:
        self.size = X.shape[0]
        self.shape = (-(-self.size // block_size), block_size)
        padding = jnp.broadcast_to(X[-1:], (self.shape[0] * block_size - self.size, X.shape[1]))
        self.X = jnp.concatenate([X, padding]).reshape(*self.shape, X.shape[1])

    def split(self, V: Float[Array, "n k"]) -> Float[Array, "num_blocks block k"]:
        """Split the rows of V like X; the padding is zero, so that it adds nothing."""
        padding = self.shape[0] * self.shape[1] - self.size
        return jnp.pad(V, ((0, padding), (0, 0))).reshape(*self.shape, V.shape[1])

    def join(self, blocks: Float[Array, "num_blocks block k"]) -> Float[Array, "n k"]:
        """The inverse of `split`."""
        return jax.lax.collapse(blocks, 0, 2)[: self.size]

    def pairs(self) -> tuple[Int[Array, " pairs"], Int[Array, " pairs"]]:
        """All pairs of two different blocks."""
        i, j = np.triu_indices(self.shape[0], 1)
        return jnp.asarray(i), jnp.asarray(j)

    def pairs_with(self, blocks: "Blocks") -> tuple[Int[Array, " pairs"], Int[Array, " pairs"]]:
        """All pairs of a block in `self` and a block in `blocks`."""
        i, j = np.indices((self.shape[0], blocks.shape[0]))
        return jnp.asarray(i.ravel()), jnp.asarray(j.ravel())


def symmetric_matmul(
    kernel: AbstractKernel, X: Float[Array, "n d"], V: Float[Array, "n k"], block_size: int
) -> Float[Array, "n k"]:
    """Multiply K(X, X) V, each pair of rows evaluated once: shape (n, k)."""
    blocks = Blocks(X, block_size)
    # The vectors are rows, so that no product transposes a left factor: that is slow on a CPU.
    vectors = blocks.split(V).mT

    def diagonal(item: tuple[Array, Array]) -> Array:
        X, v = item
        return large_matmul(v, kernel.evaluate_covariance(X).astype(V.dtype))

    def pair(product: Array, index: tuple[Array, Array]) -> tuple[Array, None]:
        i, j = index
        gram = kernel.evaluate(blocks.X[i], blocks.X[j]).astype(V.dtype)
        product = product.at[i].add(large_matmul(vectors[j], gram.T))
        return product.at[j].add(large_matmul(vectors[i], gram)), None

    product = jax.lax.map(diagonal, (blocks.X, vectors))
    product, _ = jax.lax.scan(pair, product, blocks.pairs())
    return blocks.join(product.mT)


def mutual_matmul(
    kernel: AbstractKernel,
    rows: tuple[Float[Array, "n d"], Float[Array, "m d"]],
    vectors: tuple[Float[Array, "n k"], Float[Array, "m k"]],
    block_size: int,
) -> tuple[Float[Array, "n k"], Float[Array, "m k"]]:
    """Multiply K(X, Z) W and K(Z, X) V, for rows X, Z with vectors V, W, from the same blocks."""
    X, Z = (Blocks(inputs, _even_share(len(inputs), block_size)) for inputs in rows)
    V, W = X.split(vectors[0]).mT, Z.split(vectors[1]).mT

    def pair(products: tuple, index: tuple[Array, Array]) -> tuple[tuple, None]:
        i, j = index
        of_X, of_Z = products
        gram = kernel.evaluate(X.X[i], Z.X[j]).astype(V.dtype)
        of_X = of_X.at[i].add(large_matmul(W[j], gram.T))
        return (of_X, of_Z.at[j].add(large_matmul(V[i], gram))), None

    zeros = jnp.zeros_like(V), jnp.zeros_like(W)
    (of_X, of_Z), _ = jax.lax.scan(pair, zeros, X.pairs_with(Z))
    return X.join(of_X.mT), Z.join(of_Z.mT)


def symmetric_gradient(
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    sides: tuple[Float[Array, "n k"], Float[Array, "n k"]],
    block_size: int,
) -> Gradient:
    """The gradient of sum_c l_c'K r_c / 2, for vectors with a symmetric L R'."""
    blocks = Blocks(X, block_size)
    left, right = (blocks.split(side) for side in sides)
    parameters, static = eqx.partition(kernel, eqx.is_inexact_array)

    def of_diagonal(total: AbstractKernel, item: tuple[Array, ...]) -> tuple:
        X, lefts, rights = item

        def covariance(kernel: AbstractKernel, X: Array) -> Array:
            return eqx.combine(kernel, static).evaluate_covariance(X).astype(left.dtype)

        _, pullback = jax.vjp(covariance, parameters, X)
        dkernel, dX = pullback(0.5 * large_matmul(lefts, rights.T))
        return jax.tree.map(jnp.add, total, dkernel), dX

    def of_pair(totals: tuple, index: tuple[Array, Array]) -> tuple[tuple, None]:
        total, total_X = totals
        i, j = index
        dkernel, dXi, dXj = _pulled_back(
            kernel, (blocks.X[i], blocks.X[j]), large_matmul(left[i], right[j].T)
        )
        total = jax.tree.map(jnp.add, total, dkernel)
        return (total, total_X.at[i].add(dXi).at[j].add(dXj)), None

    zeros = jax.tree.map(jnp.zeros_like, parameters)
    totals: Any = jax.lax.scan(of_diagonal, zeros, (blocks.X, left, right))
    (total, dX), _ = jax.lax.scan(of_pair, totals, blocks.pairs())
    return Gradient(total, blocks.join(dX))


def mutual_gradient(
    kernel: AbstractKernel,
    rows: tuple[Float[Array, "n d"], Float[Array, "m d"]],
    sides: tuple[Float[Array, "n k"], Float[Array, "m k"]],
    block_size: int,
) -> Gradient:
    """The gradient of sum_c l_c'K(X, Z) r_c, for rows X with vectors L and Z with R."""
    X, Z = (Blocks(inputs, _even_share(len(inputs), block_size)) for inputs in rows)
    left, right = X.split(sides[0]), Z.split(sides[1])

    def of_pair(totals: tuple, index: tuple[Array, Array]) -> tuple[tuple, None]:
        i, j = index
        dkernel, dXi, dZj = _pulled_back(
            kernel, (X.X[i], Z.X[j]), large_matmul(left[i], right[j].T)
        )
        total, dX, dZ = totals
        total = jax.tree.map(jnp.add, total, dkernel)
        return (total, dX.at[i].add(dXi), dZ.at[j].add(dZj)), None

    parameters = eqx.filter(kernel, eqx.is_inexact_array)
    zeros = jax.tree.map(jnp.zeros_like, (parameters, X.X, Z.X))
    (total, dX, dZ), _ = jax.lax.scan(of_pair, zeros, X.pairs_with(Z))
    return Gradient(total, (X.join(dX), Z.join(dZ)))


def _pulled_back(
    kernel: AbstractKernel, rows: tuple[Array, Array], cotangent: Float[Array, "b c"]
) -> tuple[AbstractKernel, Array, Array]:
    """Cotangents of the kernel and of both matrices of inputs for a block of kernel entries."""
    parameters, static = eqx.partition(kernel, eqx.is_inexact_array)

    def gram(kernel: AbstractKernel, Xi: Array, Xj: Array) -> Array:
        return eqx.combine(kernel, static).evaluate(Xi, Xj).astype(cotangent.dtype)

    return jax.vjp(gram, parameters, *rows)[1](cotangent)


def kernel_matmul(
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    Z: Float[Array, "m d"],
    V: Float[Array, "m k"],
    memory_budget: int = 2**28,
) -> Float[Array, "n k"]:
    """Multiply K(X, Z) V, in blocks that fit the memory budget and, on a CPU, its caches.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        Z: inputs, shape (m, d).
        V: shape (m, k).
        memory_budget: bytes that a block of kernel entries may take.

    Returns:
        Shape (n, k), in O(n m (d + k)) time.
    """
    entries = memory_budget // (_COPIES * V.dtype.itemsize)
    if jax.default_backend() == "cpu":
        entries = min(entries, _MAX_ENTRIES_ON_CPU)
    n, m = X.shape[0], Z.shape[0]
    num_rows = _even_share(n, max(math.isqrt(entries), entries // m))
    num_columns = _even_share(m, entries // num_rows)
    # The last block is padded with the last row, and with vectors of zeros.
    padding = -m % num_columns
    Z = jnp.concatenate([Z, jnp.broadcast_to(Z[-1:], (padding, *Z.shape[1:]))])
    V = jnp.pad(V, ((0, padding), (0, 0)))

    def block(rows: Array, columns: tuple[Array, Array]) -> Array:
        Z, V = columns
        return large_matmul(kernel.evaluate(rows, Z).astype(V.dtype), V)

    def of_rows(rows: Array) -> Array:
        return sum_rows(functools.partial(block, rows), (Z, V), num_columns)

    return map_rows(of_rows, X, num_rows)
