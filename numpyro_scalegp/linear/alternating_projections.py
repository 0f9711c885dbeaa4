"""Alternating projections: exact solves of one block of rows after another."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.mesh import divided, map_shares
from numpyro_scalegp.linear.iteration import check_budget, descend
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.preconditioners import whitener
from numpyro_scalegp.linear.solver import AbstractSolver, Iterate, Solution, System
from numpyro_scalegp.numerics.linalg import matmul


def _in_blocks(rows: Array, size: int) -> Array:
    """Split rows into blocks of a size; the last block overlaps the one before it if needed."""
    num_full = len(rows) // size
    blocks = rows[: num_full * size].reshape(num_full, size, *rows.shape[1:])
    if len(rows) % size:
        blocks = jnp.concatenate([blocks, rows[None, -size:]])
    return blocks


def _whiteners(operator: KernelOperator, size: int) -> Float[Array, "blocks size size"]:
    """The whitener of each diagonal block, computed one after the other on each device."""
    kernel, mesh = operator.kernel, operator.mesh

    def of_block(rows: tuple[Array, Array]) -> Array:
        X, noise = rows
        return whitener(KernelOperator.from_checked(kernel, X, noise).rows(jnp.arange(size)), noise)

    def of_blocks(*rows: Array) -> Array:
        return jax.lax.map(of_block, rows)

    rows = divided([_in_blocks(array, size) for array in (operator.X, operator.noise())], mesh)
    return of_blocks(*rows) if mesh is None else map_shares(mesh, of_blocks, *rows)


class AlternatingProjections(AbstractSolver):
    """Block coordinate descent on v'Hv / 2 - b'v with exact solves, greedy in the choice of blocks.

    Each iteration takes the block of rows with the largest residual over all right-hand sides,
    solves for these rows exactly and updates all residuals, at a cost of `block_size` / n epochs.
    The diagonal blocks are factorized once per call. This solver benefits most from a good initial
    guess, and each iteration lowers the error, so it suits small budgets.

    Args:
        block_size: rows of a block, at most n. The last block overlaps the block before it if n is
            not a multiple of the block size.
        tolerance: see `ConjugateGradients`.
        max_epochs: budget of the iterations, in epochs: computations of all n^2 entries of H. At
            least one iteration is made. The final residual takes one more epoch.

    Raises:
        ValueError: if the block size is less than 1, the tolerance is not in [0, 1) or the budget
            is not positive.

    References:
        Wu et al. (2024), Large-Scale Gaussian Processes via Alternating Projection; Lin et al.
        (2024), algorithm 2. Time O(n block_size^2) to set up and O(n^2 (d + k)) an epoch, memory
        O(n (block_size + k)).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.AlternatingProjections(block_size=500, max_epochs=10)
    """

    block_size: int = eqx.field(static=True, converter=checks.plain, default=1000)
    tolerance: float = eqx.field(static=True, converter=checks.plain, default=1e-2)
    max_epochs: int | float = eqx.field(static=True, converter=checks.plain, default=100)

    def __check_init__(self) -> None:
        checks.count("block_size", self.block_size)
        check_budget(self.tolerance, self.max_epochs)

    def init(
        self, operator: KernelOperator, key: Key[Array, ""] | None
    ) -> Float[Array, "blocks size size"]:
        """The inverse factors of the diagonal blocks."""
        whiteners = _whiteners(operator, min(self.block_size, operator.size))
        # Computed block by block; then each device takes its rows of every block.
        return divided(whiteners, operator.mesh, axis=1)

    def run(self, whiteners: Float[Array, "blocks size size"], system: System) -> Solution:
        """Project on one block after another."""
        n, size = system.operator.size, whiteners.shape[-1]
        blocks = _in_blocks(jnp.arange(n), size)

        def project(state: Iterate, iteration: Int[Array, ""]) -> Iterate:
            squares = jnp.sum(jnp.square(state.residual), axis=1)
            chosen = jnp.argmax(jnp.sum(_in_blocks(squares, size), axis=1))
            rows, W = blocks[chosen], whiteners[chosen]
            change = matmul(W.T, matmul(W, state.residual[rows]))
            value = state.value.at[rows].add(change)
            return Iterate(
                value, state.residual - system.kernel_operator.columns_matmul(rows, change)
            )

        return descend(
            system,
            system.start,
            project,
            tolerance=self.tolerance,
            max_epochs=self.max_epochs,
            epochs_per_iteration=size / n,
        )
