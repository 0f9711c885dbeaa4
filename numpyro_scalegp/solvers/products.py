"""Products with kernel matrices whose entries are computed block by block, used and dropped."""

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core.chunks import map_rows, sum_rows
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.kernels import AbstractKernel

# Kernel entries live at once for each entry of a block: the block, its distances and what the
# reverse pass keeps.
_COPIES = 4


# On a CPU a block should stay in its caches; measured best at 500 to 640 rows, float32.
_MAX_ROWS_ON_CPU = 640


# Entries of a rectangular block that stay in a CPU's caches.
_MAX_ENTRIES_ON_CPU = 2**19


def block_size(num_rows: int, memory_budget: int, itemsize: int) -> int:
    """Rows of square blocks into which `num_rows` are cut, within a budget of bytes."""
    rows = math.isqrt(memory_budget // (_COPIES * itemsize))
    if jax.default_backend() == "cpu":
        rows = min(rows, _MAX_ROWS_ON_CPU)
    return _even_share(num_rows, rows)


def _even_share(size: int, at_most: int) -> int:
    """The parts' size where `size` rows are cut into as few equal ones as may be."""
    return -(-size // -(-size // max(1, at_most)))


class Gradient(NamedTuple):
    """Derivatives of sums of products l_i k(x_i, x_j) r_j."""

    kernel: Any  # in the kernel, None where a leaf of it is no floating-point array
    rows: Any  # of X, or of each of two matrices of inputs


class Blocks:
    """The rows of X in blocks of equal size; the last one is padded with its last row."""

    def __init__(self, X: Float[Array, "n d"], block_size: int) -> None:
        self.size = X.shape[0]
        self.shape = (-(-self.size // block_size), block_size)
        padding = jnp.broadcast_to(X[-1:], (self.shape[0] * block_size - self.size, X.shape[1]))
        self.X = jnp.concatenate([X, padding]).reshape(*self.shape, X.shape[1])

    def split(self, V: Float[Array, "n k"]) -> Float[Array, "num_blocks block k"]:
        """Split the rows of V like those of X; the padding is zero, so that it adds nothing."""
        padding = self.shape[0] * self.shape[1] - self.size
        return jnp.pad(V, ((0, padding), (0, 0))).reshape(*self.shape, V.shape[1])

    def join(self, blocks: Float[Array, "num_blocks block k"]) -> Float[Array, "n k"]:
        """The inverse of `split`."""
        return jax.lax.collapse(blocks, 0, 2)[: self.size]

    def pairs(self) -> tuple[Int[Array, " pairs"], Int[Array, " pairs"]]:
        """All pairs of two different blocks."""
        i, j = np.triu_indices(self.shape[0], 1)
        return jnp.asarray(i), jnp.asarray(j)

    def pairs_with(self, other: "Blocks") -> tuple[Int[Array, " pairs"], Int[Array, " pairs"]]:
        """All pairs of a block and one of the others."""
        i, j = np.indices((self.shape[0], other.shape[0]))
        return jnp.asarray(i.ravel()), jnp.asarray(j.ravel())


def symmetric_matmul(
    kernel: AbstractKernel, X: Float[Array, "n d"], V: Float[Array, "n k"], block_size: int
) -> Float[Array, "n k"]:
    """Multiply K(X, X) V, each pair of rows evaluated once: shape (n, k)."""
    blocks = Blocks(X, block_size)
    # Vectors lie in rows: so neither product of a block transposes it on the left, where that is
    # slow on a CPU.
    vectors = blocks.split(V).mT

    def diagonal(item: tuple[Array, Array]) -> Array:
        X, v = item
        return matmul(v, kernel.covariance(X).astype(V.dtype))

    def pair(product: Array, index: tuple[Array, Array]) -> tuple[Array, None]:
        i, j = index
        gram = kernel(blocks.X[i], blocks.X[j]).astype(V.dtype)
        product = product.at[i].add(matmul(vectors[j], gram.T))
        return product.at[j].add(matmul(vectors[i], gram)), None

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
    X, Z = (Blocks(one, _even_share(len(one), block_size)) for one in rows)
    V, W = (blocks.split(one).mT for blocks, one in zip((X, Z), vectors, strict=True))

    def pair(products: tuple, index: tuple[Array, Array]) -> tuple[tuple, None]:
        i, j = index
        of_X, of_Z = products
        gram = kernel(X.X[i], Z.X[j]).astype(V.dtype)
        of_X = of_X.at[i].add(matmul(W[j], gram.T))
        return (of_X, of_Z.at[j].add(matmul(V[i], gram))), None

    zeros = jnp.zeros_like(V), jnp.zeros_like(W)
    (of_X, of_Z), _ = jax.lax.scan(pair, zeros, X.pairs_with(Z))
    return X.join(of_X.mT), Z.join(of_Z.mT)


def symmetric_gradient(
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    sides: tuple[Float[Array, "n k"], Float[Array, "n k"]],
    block_size: int,
) -> Gradient:
    """The gradient of sum_c l_c'K r_c / 2, for vectors of which L R' is symmetric."""
    blocks = Blocks(X, block_size)
    left, right = (blocks.split(side) for side in sides)
    parameters, rest = eqx.partition(kernel, eqx.is_inexact_array)

    def of_diagonal(total: AbstractKernel, item: tuple[Array, ...]) -> tuple:
        X, lefts, rights = item

        def covariance(kernel: AbstractKernel, X: Array) -> Array:
            return eqx.combine(kernel, rest).covariance(X).astype(left.dtype)

        _, pullback = jax.vjp(covariance, parameters, X)
        dkernel, dX = pullback(0.5 * matmul(lefts, rights.T))
        return jax.tree.map(jnp.add, total, dkernel), dX

    def of_pair(totals: tuple, index: tuple[Array, Array]) -> tuple[tuple, None]:
        total, total_X = totals
        i, j = index
        dkernel, dXi, dXj = _pulled_back(
            kernel, (blocks.X[i], blocks.X[j]), matmul(left[i], right[j].T)
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
    X, Z = (Blocks(one, _even_share(len(one), block_size)) for one in rows)
    left, right = (blocks.split(one) for blocks, one in zip((X, Z), sides, strict=True))

    def of_pair(totals: tuple, index: tuple[Array, Array]) -> tuple[tuple, None]:
        i, j = index
        found = _pulled_back(kernel, (X.X[i], Z.X[j]), matmul(left[i], right[j].T))
        total, dX, dZ = totals
        total = jax.tree.map(jnp.add, total, found[0])
        return (total, dX.at[i].add(found[1]), dZ.at[j].add(found[2])), None

    parameters = eqx.filter(kernel, eqx.is_inexact_array)
    zeros = jax.tree.map(jnp.zeros_like, (parameters, X.X, Z.X))
    (total, dX, dZ), _ = jax.lax.scan(of_pair, zeros, X.pairs_with(Z))
    return Gradient(total, (X.join(dX), Z.join(dZ)))


def _pulled_back(
    kernel: AbstractKernel, rows: tuple[Array, Array], cotangent: Float[Array, "b c"]
) -> tuple[AbstractKernel, Array, Array]:
    """Derivatives of a block of kernel entries in the kernel and in both matrices of inputs."""
    parameters, rest = eqx.partition(kernel, eqx.is_inexact_array)

    def gram(kernel: AbstractKernel, Xi: Array, Xj: Array) -> Array:
        return eqx.combine(kernel, rest)(Xi, Xj).astype(cotangent.dtype)

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
    # Rows that fill the last block repeat the last one, with vectors of zeros.
    padding = -m % num_columns
    Z = jnp.concatenate([Z, jnp.broadcast_to(Z[-1:], (padding, *Z.shape[1:]))])
    V = jnp.pad(V, ((0, padding), (0, 0)))

    def block(rows: Array, columns: tuple[Array, Array]) -> Array:
        Z, V = columns
        return matmul(kernel(rows, Z).astype(V.dtype), V)

    def of_rows(rows: Array) -> Array:
        return sum_rows(functools.partial(block, rows), (Z, V), num_columns)

    return map_rows(of_rows, X, num_rows)
