"""The covariance of noisy observations at cells of a grid, by a matrix for each axis."""

import dataclasses
import functools
import math
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.numerics.axes import along, along_all, unfolded
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.compiled import compiled_unless_traced


class GridOperator(KernelOperator):
    """H = M (sum of K_1 x ... x K_d) M' + diag(noise_variance), M the selection of observed cells.

    A product with k vectors costs O(N k sum_j n_j) for N cells of the grid. Single rows and blocks,
    as in pivoted factorizations, come from the kernel. Derivatives belong to the covariance
    matrices, and `kernel` and `X` have none.

    References:
        Lin et al. (2025), Scalable Gaussian Processes with Latent Kronecker Structure.
    """

    covariances: tuple[tuple[Float[Array, "_n_j _n_j"], ...], ...]  # of each axis, for each term
    cells: Int[Array, " n"] | None  # the rows' cells, in the order of `ravel`; None for all cells
    observed: Bool[Array, " n"] | None  # None if all rows are

    @classmethod
    def of_grid(
        cls,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        noise_variance: Float[Array, "..."],
        covariances: tuple[tuple[Float[Array, "_n_j _n_j"], ...], ...],
        cells: Int[Array, " n"] | None,
        observed: Bool[Array, " n"] | None,
    ) -> "GridOperator":
        """Build the operator from checked arguments, with X and the noise of the rows."""
        base = KernelOperator.from_checked(kernel, X, noise_variance)
        self = object.__new__(cls)
        values = [getattr(base, field.name) for field in dataclasses.fields(KernelOperator)]
        fields = dataclasses.fields(cls)
        for field, value in zip(fields, [*values, covariances, cells, observed], strict=True):
            object.__setattr__(self, field.name, value)
        return self

    @property
    def has_fast_products(self) -> bool:
        """True."""
        return True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the grid."""
        return tuple(map(len, self.covariances[0]))

    def _on_grid(self, V: Float[Array, "n k"]) -> Float[Array, "*shape_and_k"]:
        """Vectors on the grid, with zeros in cells that are not observed."""
        if self.observed is not None:
            V = jnp.where(self.observed[:, None], V, 0.0)
        if self.cells is not None:
            num_cells = math.prod(self.shape)
            V = jnp.zeros((num_cells, V.shape[1]), V.dtype).at[self.cells].set(V)
        return V.reshape(*self.shape, -1)

    def _at_cells(self, R: Float[Array, "*shape_and_k"]) -> Float[Array, "n k"]:
        flat = R.reshape(-1, R.shape[-1])
        if self.observed is not None:
            flat = jnp.where(self.observed[:, None], flat, 0.0)
        return flat if self.cells is None else flat[self.cells]

    @compiled_unless_traced
    def matmul(self, V: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """Multiply, H V; see `KernelOperator.matmul`."""
        V = self._vectors("V", V, self.size)
        on_grid = self._on_grid(V)
        products = (along_all(matrices, on_grid) for matrices in self.covariances)
        return self._at_cells(functools.reduce(operator.add, products)) + self.noise()[:, None] * V

    def _symmetric_gradient(self, L: Float[Array, "n k"], R: Float[Array, "n k"]) -> "GridOperator":
        """The gradient of sum_c l_c'H r_c / 2, for vectors with a symmetric L R'."""
        L, R = jax.lax.stop_gradient((L, R))
        left, right = self._on_grid(L), self._on_grid(R)

        def of_axis(matrices: tuple[Array, ...], axis: int) -> Array:
            product = right
            for j, K in enumerate(matrices):
                product = product if j == axis else along(K, product, j)
            return 0.5 * matmul(unfolded(left, axis), unfolded(product, axis).T)

        covariances = tuple(
            tuple(of_axis(matrices, j) for j in range(len(matrices)))
            for matrices in self.covariances
        )
        dnoise = 0.5 * jnp.sum(L * R, axis=1)
        if self.noise_variance.ndim == 0:
            dnoise = jnp.sum(dnoise)
        zeros = jax.tree.map(jnp.zeros_like, eqx.filter((self.kernel, self.X), eqx.is_array))
        return eqx.tree_at(
            lambda H: (H.kernel, H.X, H.noise_variance, H.covariances),
            self,
            (*zeros, dnoise.astype(self.noise_variance.dtype), covariances),
        )
