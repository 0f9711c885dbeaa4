"""The covariance of noisy observations, H = K(X, X) + noise, in blocks."""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.chunks import map_rows, sum_rows
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.kernel import as_single

# Kernel entries live at once for each entry of a block: the block, its distances and what the
# reverse pass keeps.
_COPIES = 4


# On a CPU a block should stay in its caches; measured best at 500 to 640 rows, float32.
_MAX_ROWS_ON_CPU = 640


# Entries of a rectangular block that stay in a CPU's caches.
_MAX_ENTRIES_ON_CPU = 2**19


class KernelOperator(eqx.Module):
    """H = K(X, X) + diag(noise_variance), as something that multiplies (n, k) blocks of vectors.

    Kernel entries are computed block by block, used and dropped: no n x n array exists at any time.
    Products use the symmetry of K, so that each pair of rows is evaluated once.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        noise_variance: shape () or (n,).
        memory_budget: bytes that kernel blocks may take at a time.

    Raises:
        ValueError: if `X` is not a finite matrix, `noise_variance` has another shape, or the budget
            is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> H = sgp.solvers.KernelOperator(sgp.kernels.RBF(0.3), X, 0.1)
        >>> H.matmul(jnp.ones((5, 2))).shape, H.rows(jnp.array([0, 3])).shape
        ((5, 2), (2, 5))
    """

    kernel: AbstractKernel
    X: Float[Array, "n d"]
    noise_variance: Float[Array, "..."]
    memory_budget: int = eqx.field(static=True)

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "n d"],
        noise_variance: Float[ArrayLike, "..."],
        *,
        memory_budget: int = 2**28,
    ) -> None:
        self.kernel = as_single("kernel", kernel)
        self.X = checks.inputs("X", X)
        self.noise_variance = checks.as_positive(noise_variance, "noise_variance", or_zero=True)
        checks.shape("noise_variance", self.noise_variance, (), self.X.shape[:1])
        checks.positive("noise_variance", self.noise_variance, or_zero=True)
        self.memory_budget = checks.count("memory_budget", memory_budget)

    @property
    def size(self) -> int:
        """The number of rows, n."""
        return self.X.shape[0]

    @property
    def dtype(self) -> jnp.dtype:
        """The common dtype of inputs, hyperparameters and noise."""
        return jnp.result_type(self._kernel_dtype, self.noise_variance)

    @property
    def _kernel_dtype(self) -> jnp.dtype:
        return jax.eval_shape(lambda k, x: k.diag(x), self.kernel, self.X[:1]).dtype

    @property
    def block_size(self) -> int:
        """Rows of the square blocks in which products are computed."""
        rows = math.isqrt(self.memory_budget // (_COPIES * self.dtype.itemsize))
        if jax.default_backend() == "cpu":
            rows = min(rows, _MAX_ROWS_ON_CPU)
        num_blocks = -(-self.size // max(1, rows))
        return -(-self.size // num_blocks)

    def noise(self) -> Float[Array, " n"]:
        """The noise variance of each row, shape (n,)."""
        return jnp.broadcast_to(self.noise_variance.astype(self.dtype), (self.size,))

    def diagonal(self) -> Float[Array, " n"]:
        """The diagonal of H, shape (n,), in O(n d)."""
        return self.kernel.diag(self.X) + self.noise()

    def rows(self, index: Int[Array, " r"]) -> Float[Array, "r n"]:
        """The rows H[index], shape (r, n), in O(r n d) time and O(r n) memory."""
        return self.block(index, jnp.arange(self.size))

    def block(self, rows: Int[Array, " r"], columns: Int[Array, " c"]) -> Float[Array, "r c"]:
        """The entries `H[rows][:, columns]`, shape (r, c), with exact entries on the diagonal."""
        same = rows[:, None] % self.size == columns[None, :] % self.size
        gram = self.kernel(self.X[rows], self.X[columns]).astype(self.dtype)
        return jnp.where(same, self.diagonal()[rows][:, None], gram)

    def matmul(self, V: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """Multiply, H V.

        Args:
            V: shape (n, k).

        Returns:
            Shape (n, k). Time O(n^2 (d / 2 + k)), memory O(n (d + k)) and one block.

        Raises:
            ValueError: if V does not have n rows.
        """
        V = self._vectors("V", V, self.size)
        blocks = _Blocks(self.X, self.block_size)
        # Vectors lie in rows: so neither product of a block transposes it on the left, where that
        # is slow on a CPU.
        vectors = blocks.split(V).mT

        def diagonal(item: tuple[Array, Array]) -> Array:
            X, v = item
            return matmul(v, self.kernel.covariance(X).astype(self.dtype))

        def pair(product: Array, index: tuple[Array, Array]) -> tuple[Array, None]:
            i, j = index
            gram = self.kernel(blocks.X[i], blocks.X[j]).astype(self.dtype)
            product = product.at[i].add(matmul(vectors[j], gram.T))
            return product.at[j].add(matmul(vectors[i], gram)), None

        product = jax.lax.map(diagonal, (blocks.X, vectors))
        product, _ = jax.lax.scan(pair, product, blocks.pairs())
        return blocks.join(product.mT) + self.noise()[:, None] * V

    def rows_matmul(self, index: Int[Array, " r"], V: Float[Array, "n k"]) -> Float[Array, "r k"]:
        """Multiply the rows `index`, H[index] V: shape (r, k), in O(r n (d + k))."""
        V = self._vectors("V", V, self.size)
        product = kernel_matmul(self.kernel, self.X[index], self.X, V, self.memory_budget)
        return product + self.noise()[index][:, None] * V[index]

    def columns_matmul(
        self, index: Int[Array, " r"], W: Float[Array, "r k"]
    ) -> Float[Array, "n k"]:
        """Multiply the columns `index`, H[:, index] W: shape (n, k), in O(r n (d + k))."""
        W = self._vectors("W", W, index.shape[0])
        product = kernel_matmul(self.kernel, self.X, self.X[index], W, self.memory_budget)
        return product.at[index].add(self.noise()[index][:, None] * W)

    def _vectors(self, name: str, value: Float[Array, "n k"], rows: int) -> Float[Array, "n k"]:
        columns = value.shape[1] if value.ndim == 2 else 1
        checks.shape(name, value, (rows, columns), why="vectors are columns")
        return value.astype(self.dtype)

    def bilinear_gradient(self, U: Float[Array, "n k"], V: Float[Array, "n k"]) -> "KernelOperator":
        """The gradient of sum_c u_c'H v_c with respect to the kernel, X and the noise variance.

        Args:
            U: left vectors, shape (n, k), held fixed.
            V: right vectors, shape (n, k), held fixed.

        Returns:
            The derivatives, as an operator of the same structure; None where a leaf of the kernel
            is not a floating-point array. Time O(n^2 (d + k)) like one or two products, memory
            O(n (d + k)) and a few blocks: every pair of rows is evaluated once more and
            differentiated on the spot.

        Raises:
            ValueError: if U and V do not have n rows and as many columns.
        """
        checks.shape("V", V, U.shape, why="a vector for each one in `U`")
        U, V = self._vectors("U", U, self.size), self._vectors("V", V, self.size)
        # H_ij and H_ji' are equal: one block multiplies both sides' weights.
        sides = jnp.concatenate([U, V], axis=1), jnp.concatenate([V, U], axis=1)
        return self._symmetric_gradient(*sides)

    def quadratic_gradient(
        self, weights: Float[Array, " k"], V: Float[Array, "n k"]
    ) -> "KernelOperator":
        """The gradient of sum_c weights_c v_c'H v_c; see `bilinear_gradient`.

        Args:
            weights: shape (k,), held fixed.
            V: vectors, shape (n, k), held fixed.

        Returns:
            What `bilinear_gradient(weights * V, V)` does, by half its work on each pair of rows.

        Raises:
            ValueError: if V does not have n rows, or there is not one weight for each column.
        """
        checks.shape("weights", weights, V.shape[1:], why="a weight for each column of `V`")
        V = self._vectors("V", V, self.size)
        return self._symmetric_gradient(2.0 * weights.astype(self.dtype) * V, V)

    def _symmetric_gradient(
        self, L: Float[Array, "n k"], R: Float[Array, "n k"]
    ) -> "KernelOperator":
        """The gradient of sum_c l_c'H r_c / 2, for vectors of which L R' is symmetric."""
        L, R = jax.lax.stop_gradient((L, R))
        kernel, rest = eqx.partition(self.kernel, eqx.is_inexact_array)
        blocks = _Blocks(self.X, self.block_size)
        left, right = blocks.split(L), blocks.split(R)

        def of_diagonal(total: AbstractKernel, item: tuple[Array, ...]) -> tuple:
            X, lefts, rights = item

            def covariance(kernel: AbstractKernel, X: Array) -> Array:
                return eqx.combine(kernel, rest).covariance(X).astype(self.dtype)

            _, pullback = jax.vjp(covariance, kernel, X)
            dkernel, dX = pullback(0.5 * matmul(lefts, rights.T))
            return jax.tree.map(jnp.add, total, dkernel), dX

        def of_pair(totals: tuple, index: tuple[Array, Array]) -> tuple[tuple, None]:
            total, total_X = totals
            i, j = index

            def gram(kernel: AbstractKernel, Xi: Array, Xj: Array) -> Array:
                return eqx.combine(kernel, rest)(Xi, Xj).astype(self.dtype)

            _, pullback = jax.vjp(gram, kernel, blocks.X[i], blocks.X[j])
            dkernel, dXi, dXj = pullback(matmul(left[i], right[j].T))
            total = jax.tree.map(jnp.add, total, dkernel)
            return (total, total_X.at[i].add(dXi).at[j].add(dXj)), None

        zeros = jax.tree.map(jnp.zeros_like, kernel)
        totals: Any = jax.lax.scan(of_diagonal, zeros, (blocks.X, left, right))
        (total, dX), _ = jax.lax.scan(of_pair, totals, blocks.pairs())
        dnoise = (0.5 * jnp.sum(L * R, axis=1)).astype(self.noise_variance.dtype)
        if self.noise_variance.ndim == 0:
            dnoise = jnp.sum(dnoise)
        gradient = (total, blocks.join(dX), dnoise)
        return eqx.tree_at(lambda H: (H.kernel, H.X, H.noise_variance), self, gradient)


class _Blocks:
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


def _even_share(size: int, at_most: int) -> int:
    """The parts' size where `size` rows are cut into as few equal ones as may be."""
    return -(-size // -(-size // max(1, at_most)))


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
