"""Alternating projections: exact solves of one block of rows after another."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.mesh import divided, map_shares
from numpyro_scalegp.solvers.blocks import whitener
from numpyro_scalegp.solvers.iteration import check_budget, descend
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.solver import AbstractSolver, Solution, System


def _in_blocks(rows: Array, size: int) -> Array:
    """Rows in blocks of a size, the last of which begins earlier where it is no divisor."""
    num_whole = len(rows) // size
    blocks = rows[: num_whole * size].reshape(num_whole, size, *rows.shape[1:])
    if len(rows) % size:
        blocks = jnp.concatenate([blocks, rows[None, -size:]])
    return blocks


def _whiteners(operator: KernelOperator, size: int) -> Float[Array, "blocks size size"]:
    """That of each diagonal block, made one after the other, on a mesh each device's own."""
    kernel, mesh = operator.kernel, operator.mesh

    def of_block(rows: tuple[Array, Array]) -> Array:
        X, noise = rows
        return whitener(KernelOperator(kernel, X, noise).rows(jnp.arange(size)), noise)

    def of_some(*rows: Array) -> Array:
        return jax.lax.map(of_block, rows)

    rows = divided([_in_blocks(one, size) for one in (operator.X, operator.noise())], mesh)
    return of_some(*rows) if mesh is None else map_shares(mesh, of_some, *rows)


class _State(NamedTuple):
    value: Float[Array, "n k"]
    residual: Float[Array, "n k"]


class AlternatingProjections(AbstractSolver):
    """Block coordinate descent on v'Hv / 2 - b'v with exact solves, greedy in the choice of blocks.

    Each iteration takes the block of rows with the largest residual over all columns, solves for
    those rows exactly and updates all residuals: block / n of an epoch. The factors of the diagonal
    blocks are computed once a call. It gains most from a good guess, and every bit of work lowers
    the error, so that it suits small budgets.

    Args:
        block_size: rows of a block; at most n are used. The last block overlaps the one before it
            where n is no multiple.
        tolerance: as of `ConjugateGradients`.
        max_epochs: work of the iterations at most, in units of n^2 entries of H; at least one is
            made. To compute the residual at the end takes one more.

    Raises:
        ValueError: if the block size is less than 1, the tolerance not in [0, 1) or the budget not
            positive.

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

    def run(
        self,
        operator: KernelOperator,
        system: System,
        key: Key[Array, ""] | None,
        num_averaged: int,
    ) -> Solution:
        """Project on one block after another; see `AbstractSolver.run`."""
        n = operator.size
        size = min(self.block_size, n)
        blocks = _in_blocks(jnp.arange(n), size)

        # Made block by block; then each device takes its rows of all of them.
        whiteners = divided(_whiteners(operator, size), operator.mesh, axis=1)

        def project(state: _State, iteration: Int[Array, ""]) -> _State:
            squares = jnp.sum(jnp.square(state.residual), axis=1)
            chosen = jnp.argmax(jnp.sum(_in_blocks(squares, size), axis=1))
            rows, W = blocks[chosen], whiteners[chosen]
            change = matmul(W.T, matmul(W, state.residual[rows]))
            value = state.value.at[rows].add(change)
            return _State(value, state.residual - operator.columns_matmul(rows, change))

        return descend(
            operator,
            system,
            _State(system.value, system.residual),
            project,
            num_averaged=num_averaged,
            tolerance=self.tolerance,
            max_epochs=self.max_epochs,
            epochs_per_iteration=size / n,
        )
