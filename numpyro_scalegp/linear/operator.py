"""Linear operators, and the covariance of noisy observations, H = K(X, X) + noise, in blocks."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks, summary
from numpyro_scalegp.core.device import memory_share
from numpyro_scalegp.core.mesh import AnyMesh, divided, filled, map_shares, mesh_of, sum_shares
from numpyro_scalegp.kernels.distances import by_one_method
from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.linear import products, ring
from numpyro_scalegp.linear.products import kernel_matmul
from numpyro_scalegp.programs.compiled import compiled_unless_traced

# The bytes of kernel blocks on a CPU, or their share of an accelerator's memory.
_MEMORY_BUDGET = 2**28
_SHARE = 1 / 24


class AbstractOperator(eqx.Module):
    """A positive definite matrix known by its products with blocks of vectors."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of rows, n."""

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """The dtype of products."""

    @property
    def mesh(self) -> AnyMesh | None:
        """The devices that share the rows; None for a single device."""
        return None

    @abc.abstractmethod
    def diagonal(self) -> Float[Array, " n"]:
        """The diagonal, or an upper bound of it."""

    @abc.abstractmethod
    def matmul(self, V: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """Multiply with k vectors."""


class KernelOperator(AbstractOperator):
    """H = K(X, X) + diag(noise_variance), a linear operator on (n, k) blocks of vectors.

    Kernel entries are computed block by block and discarded after use: no n x n array is stored.
    Products use the symmetry of K, so that each pair of rows is evaluated once.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        noise_variance: noise variance, shape () or (n,).
        memory_budget: bytes that kernel blocks may take at a time; None for 2**28 on a CPU, and a
            24th of the memory of an accelerator.

    Raises:
        ValueError: if `X` is not a finite matrix, `noise_variance` has a wrong shape, or the budget
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
        memory_budget: int | None = None,
    ) -> None:
        self.kernel = as_single("kernel", kernel)
        rows = checks.inputs("X", X)
        self.kernel.check_inputs("X", rows)
        self.X = divided(rows, mesh_of(rows))
        self.noise_variance = checks.as_positive(noise_variance, "noise_variance", or_zero=True)
        checks.shape("noise_variance", self.noise_variance, (), self.X.shape[:1])
        checks.positive("noise_variance", self.noise_variance, or_zero=True)
        if memory_budget is None:
            memory_budget = memory_share(_SHARE, _MEMORY_BUDGET)
        self.memory_budget = checks.count("memory_budget", memory_budget)

    def __repr__(self) -> str:
        rows, noise = summary.counted_rows(self.X), summary.shown(self.noise_variance)
        return summary.one_line(self, [repr(self.kernel), rows, f"noise_variance={noise}"])

    @classmethod
    def from_checked(
        cls, kernel: AbstractKernel, X: Float[Array, "n d"], noise_variance: Float[Array, "..."]
    ) -> "KernelOperator":
        """Build the operator from checked arguments."""
        self = object.__new__(cls)
        X, memory_budget = divided(X, mesh_of(X)), memory_share(_SHARE, _MEMORY_BUDGET)
        values = kernel, X, noise_variance, memory_budget
        for field, value in zip(dataclasses.fields(cls), values, strict=True):
            object.__setattr__(self, field.name, value)
        return self

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
        return jax.eval_shape(lambda k, x: k.evaluate_diag(x), self.kernel, self.X[:1]).dtype

    @property
    def mesh(self) -> AnyMesh | None:
        """The devices that share the rows; None for a single device."""
        return mesh_of(self.X)

    @property
    def has_fast_products(self) -> bool:
        """Whether a product costs less than its n^2 entries, so that solvers by rows lose."""
        return False

    @property
    def block_size(self) -> int:
        """The number of rows of the square blocks in which products are computed."""
        num_devices = 1 if self.mesh is None else self.mesh.size
        share = -(-self.size // num_devices)
        return products.block_size(share, self.memory_budget, self.dtype.itemsize)

    def noise(self) -> Float[Array, " n"]:
        """The noise variance of each row, shape (n,)."""
        noise = jnp.broadcast_to(self.noise_variance.astype(self.dtype), (self.size,))
        return divided(noise, self.mesh)

    def diagonal(self) -> Float[Array, " n"]:
        """The diagonal of H, shape (n,), in O(n d)."""
        return self.kernel.evaluate_diag(self.X) + self.noise()

    @compiled_unless_traced
    def rows(self, index: Int[Array, " r"]) -> Float[Array, "r n"]:
        """The rows H[index], shape (r, n), in O(r n d) time and O(r n) memory."""
        return self.block(index, jnp.arange(self.size))

    @compiled_unless_traced
    def block(self, rows: Int[Array, " r"], columns: Int[Array, " c"]) -> Float[Array, "r c"]:
        """The entries `H[rows][:, columns]`, shape (r, c), with exact entries on the diagonal."""
        same = rows[:, None] % self.size == columns[None, :] % self.size
        gram = self.kernel.evaluate(self.X[rows], self.X[columns]).astype(self.dtype)
        return jnp.where(same, self.diagonal()[rows][:, None], gram)

    @compiled_unless_traced
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
        if (mesh := self.mesh) is None:
            product = self._by_one_method(
                lambda: products.symmetric_matmul(self.kernel, self.X, V, self.block_size)
            )
        else:
            product = ring.symmetric_matmul(mesh, self.kernel, self.X, V, self.block_size)
        return product + self.noise()[:, None] * V

    @compiled_unless_traced
    def rows_matmul(self, index: Int[Array, " r"], V: Float[Array, "n k"]) -> Float[Array, "r k"]:
        """Multiply the rows `index`, H[index] V: shape (r, k), in O(r n (d + k))."""
        V = self._vectors("V", V, self.size)
        rows = self.X[index]

        def of_columns(X: Array, V: Array) -> Array:
            return kernel_matmul(self.kernel, rows, X, V, self.memory_budget)

        if (mesh := self.mesh) is None:
            product = of_columns(self.X, V)
        else:
            # The padding repeats a row of X, so that the kernel stays in its domain.
            X = filled(mesh, self.X, repeat=True)
            product = sum_shares(mesh, of_columns, X, filled(mesh, V, repeat=False))
        return product + self.noise()[index][:, None] * V[index]

    @compiled_unless_traced
    def columns_matmul(
        self, index: Int[Array, " r"], W: Float[Array, "r k"]
    ) -> Float[Array, "n k"]:
        """Multiply the columns `index`, H[:, index] W: shape (n, k), in O(r n (d + k))."""
        W = self._vectors("W", W, index.shape[0])
        columns = self.X[index]

        def of_rows(X: Array) -> Array:
            return kernel_matmul(self.kernel, X, columns, W, self.memory_budget)

        mesh = self.mesh
        product = of_rows(self.X) if mesh is None else map_shares(mesh, of_rows, self.X)
        return product.at[index].add(self.noise()[index][:, None] * W)

    def _by_one_method(self, compute: Callable[[], Any]) -> Any:
        """See `by_one_method`, for blocks of K(X, X)."""
        return by_one_method(lambda: self.kernel.evaluate(self.X, self.X), compute)

    def _vectors(self, name: str, value: Float[Array, "n k"], rows: int) -> Float[Array, "n k"]:
        columns = value.shape[1] if value.ndim == 2 else 1
        checks.shape(name, value, (rows, columns), why="vectors are columns")
        return value.astype(self.dtype)

    @compiled_unless_traced
    def bilinear_gradient(self, U: Float[Array, "n k"], V: Float[Array, "n k"]) -> "KernelOperator":
        """The gradient of sum_c u_c'H v_c with respect to the kernel, X and the noise variance.

        Args:
            U: left vectors, shape (n, k), held fixed.
            V: right vectors, shape (n, k), held fixed.

        Returns:
            The derivatives, as an operator of the same structure; None where a leaf of the kernel
            is not a floating-point array. Time O(n^2 (d + k)), as for one or two products, and
            memory O(n (d + k)) and a few blocks: each pair of rows is evaluated once more, and
            differentiated block by block.

        Raises:
            ValueError: if U and V do not have n rows and equally many columns.
        """
        checks.shape("V", V, U.shape, why="a vector for each column of `U`")
        U, V = self._vectors("U", U, self.size), self._vectors("V", V, self.size)
        # H_ij = H_ji': one evaluation of a block serves both.
        sides = jnp.concatenate([U, V], axis=1), jnp.concatenate([V, U], axis=1)
        return self._symmetric_gradient(*sides)

    @compiled_unless_traced
    def quadratic_gradient(
        self, weights: Float[Array, " k"], V: Float[Array, "n k"]
    ) -> "KernelOperator":
        """The gradient of sum_c weights_c v_c'H v_c; see `bilinear_gradient`.

        Args:
            weights: shape (k,), held fixed.
            V: vectors, shape (n, k), held fixed.

        Returns:
            The same as `bilinear_gradient(weights * V, V)`, with half the work per pair of rows.

        Raises:
            ValueError: if V does not have n rows, or `weights` does not have one value for each
                column.
        """
        checks.shape("weights", weights, V.shape[1:], why="a weight for each column of `V`")
        V = self._vectors("V", V, self.size)
        return self._symmetric_gradient(2.0 * weights.astype(self.dtype) * V, V)

    def _symmetric_gradient(
        self, L: Float[Array, "n k"], R: Float[Array, "n k"]
    ) -> "KernelOperator":
        """The gradient of sum_c l_c'H r_c / 2, for vectors with a symmetric L R'."""
        sides = jax.lax.stop_gradient((L, R))
        if (mesh := self.mesh) is None:
            derivatives = self._by_one_method(
                lambda: products.symmetric_gradient(self.kernel, self.X, sides, self.block_size)
            )
        else:
            derivatives = ring.symmetric_gradient(mesh, self.kernel, self.X, sides, self.block_size)
        dnoise = (0.5 * jnp.sum(L * R, axis=1)).astype(self.noise_variance.dtype)
        if self.noise_variance.ndim == 0:
            dnoise = jnp.sum(dnoise)
        gradient = (derivatives.kernel, derivatives.rows, dnoise)
        return eqx.tree_at(lambda H: (H.kernel, H.X, H.noise_variance), self, gradient)
