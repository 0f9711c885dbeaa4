"""Accelerated sketch-and-project: randomly drawn blocks of rows, solved for with momentum."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.solvers.batches import next_batch, required_key
from numpyro_scalegp.solvers.blocks import whitener
from numpyro_scalegp.solvers.iteration import check_budget, descend
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.preconditioners import PreconditionerFactor, nystrom_factor
from numpyro_scalegp.solvers.solver import AbstractSolver, Solution, System

_MIN_BLOCK = 500
_BLOCKS_PER_EPOCH = 100
_NUM_POWER_ITERATIONS = 10
# Multiple of the number of blocks: with 1 the momentum diverges on smooth kernels.
_CAUTION = 4.0
# From here on there is no momentum to speak of.
_SLOWEST = 1e9
# Growth of the residual from which on a pass is taken back.
_MOST_GROWTH = 10.0


class _Before(NamedTuple):
    value: Float[Array, "n k"]
    residual: Float[Array, "n k"]
    norm: Float[Array, ""]


class _State(NamedTuple):
    value: Float[Array, "n k"]
    anchor: Float[Array, "n k"]
    residual: Float[Array, "n k"]  # of each row at its last visit
    order: Int[Array, " n"]  # in which this pass visits the rows
    slowness: Float[Array, ""]  # N
    before: _Before  # this pass


class ADASAP(AbstractSolver):
    """Sketch-and-project on random blocks of rows, accelerated.

    Each iteration solves for the rows of one block, given the others: d = H[block, block]^-1
    (b - H v)[block], block / n of an epoch. With momentum that is v <- a u' + (1 - a) (v + d) and
    u <- u' + g d, where u' = (1 - c) u + c v, c = sqrt(m / N), g = 1 / sqrt(m N) and
    a = 1 / (1 + g N), with m the smallest noise over the mean variance and N four times the number
    of blocks: the paper's N, that number itself, lets the steps grow without bound where blocks are
    few and the kernel is smooth. After a pass that has raised the residual, N is twice as large
    and the momentum starts anew; a pass that has raised it tenfold is taken back.

    The blocks are drawn anew in each pass, which is what the speed rests on: a fixed partition
    gains nothing from the momentum. With `rank`, H[block, block]^-1 is approximated, for blocks
    that are too large to factorize: by P^-1 / l with P = F'F + noise + `damping` s, F'F the
    Nystrom approximation of the block from `rank` random directions, s its smallest eigenvalue
    and l >= 1 the largest eigenvalue of P^-1 H[block, block], from power iterations.

    The residual on the way is as of `StochasticGradientDescent`. The steps' noise vanishes at the
    solution: no average of iterates would be nearer to it than the last.

    Args:
        block_size: rows of a block; None for n / 100, at least 500. At most n are used.
        rank: of the approximation of a block; None to solve exactly.
        damping: of an approximate solve, a multiple of the smallest eigenvalue.
        tolerance: as of `AlternatingProjections`.
        max_epochs: as of `AlternatingProjections`.

    Raises:
        ValueError: if an argument is out of its range.

    References:
        Rathore, Frangella, Garg, Fazliani, Derezinski and Udell (2025), Turbocharging Gaussian
        Process Inference with Approximate Sketch-and-Project, algorithms 2 and 3, where the rank is
        100; on up to 10^5 rows exact blocks take less time and far fewer epochs. Time
        O(n^2 (d + k)) an epoch and O(block_size^3) for each block, or O(block_size^2 rank); memory
        O(n k + block_size^2) and one block of rows.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.ADASAP(max_epochs=50)
    """

    block_size: int | None = eqx.field(static=True, converter=checks.plain, default=None)
    rank: int | None = eqx.field(static=True, converter=checks.plain, default=None)
    damping: float = eqx.field(static=True, converter=checks.plain, default=1.0)
    tolerance: float = eqx.field(static=True, converter=checks.plain, default=1e-2)
    max_epochs: int | float = eqx.field(static=True, converter=checks.plain, default=100)

    def __check_init__(self) -> None:
        for name in ("block_size", "rank"):
            if getattr(self, name) is not None:
                checks.count(name, getattr(self, name))
        checks.number("damping", self.damping, "[0, inf)")
        check_budget(self.tolerance, self.max_epochs)

    def run(
        self,
        operator: KernelOperator,
        system: System,
        key: Key[Array, ""] | None,
        num_averaged: int,
    ) -> Solution:
        """Solve for one block after another; see `AbstractSolver.run`.

        Raises:
            ValueError: if there is no `key`.
        """
        sketch_key, batch_key = jax.random.split(required_key(key))
        n = operator.size
        size = self.block_size or max(_MIN_BLOCK, -(-n // _BLOCKS_PER_EPOCH))
        size = min(size, n)
        rank = size if self.rank is None else min(self.rank, size)
        is_exact = rank == size
        # One set of directions serves all blocks, whose rows are random.
        shape = size, 0 if is_exact else rank
        sketch, _ = jnp.linalg.qr(jax.random.normal(sketch_key, shape, operator.dtype))
        convexity = _convexity(operator)

        def advance(state: _State, iteration: Int[Array, ""]) -> _State:
            is_new_pass = iteration % (n // size) == 0
            state = jax.lax.cond(is_new_pass, _safeguarded, lambda state: state, state)
            longer, toward, kept = _momentum(convexity, state.slowness)
            order, rows = next_batch(batch_key, state.order, iteration, size)
            residual = system.target[rows] - operator.rows_matmul(rows, state.value)
            H = operator.block(rows, rows)
            if is_exact:
                W = whitener(H, operator.noise()[rows])
                change = matmul(W.T, matmul(W, residual))
            else:
                change = self._approximate(H, operator.noise()[rows], sketch, residual)
            anchor = (1.0 - kept) * state.anchor + kept * state.value
            value = toward * anchor + (1.0 - toward) * state.value
            return state._replace(
                value=value.at[rows].add((toward * longer + 1.0 - toward) * change),
                anchor=anchor.at[rows].add(longer * change),
                residual=state.residual.at[rows].set(residual),
                order=order,
            )

        # Before the first pass there is nothing that it could have raised.
        unknown = jnp.full((), jnp.inf, system.value.dtype)
        before = _Before(system.value, system.residual, unknown)
        slowness = jnp.asarray(_CAUTION * n / size, operator.dtype)
        return descend(
            operator,
            system,
            _State(system.value, system.value, system.residual, jnp.arange(n), slowness, before),
            advance,
            num_averaged=num_averaged,
            tolerance=self.tolerance,
            max_epochs=self.max_epochs,
            epochs_per_iteration=size / n,
        )

    def _approximate(
        self,
        H: Float[Array, "b b"],
        noise: Float[Array, " b"],
        sketch: Float[Array, "b rank"],
        residual: Float[Array, "b k"],
    ) -> Float[Array, "b k"]:
        """H^-1 times the residual, about, and never more than that in H's own norm."""
        F = nystrom_factor(sketch, matmul(H, sketch) - noise[:, None] * sketch)
        smallest = jnp.linalg.eigvalsh(matmul(F, F.T))[0]
        factor = PreconditionerFactor(F, noise + self.damping * jnp.maximum(smallest, 0.0))

        def power(_: Array, v: Array) -> Array:
            product = factor.solve(matmul(H, v))
            return product / jnp.linalg.norm(product)

        start = jnp.ones((H.shape[0], 1), H.dtype)
        v = jax.lax.fori_loop(0, _NUM_POWER_ITERATIONS, power, start)
        Hv = matmul(H, v)
        largest = jnp.sum(Hv * factor.solve(Hv)) / jnp.sum(v * Hv)
        return factor.solve(residual) / jnp.maximum(largest, 1.0)


def _safeguarded(state: _State) -> _State:
    """The state before a pass, with less momentum where the last one has raised the residual."""
    norm, before = jnp.linalg.norm(state.residual), state.before

    def go_on() -> _State:
        return state._replace(before=_Before(state.value, state.residual, norm))

    def calm(value: Array, residual: Array, norm: Array) -> _State:
        slowness = jnp.minimum(2.0 * state.slowness, _SLOWEST)
        return _State(value, value, residual, state.order, slowness, _Before(value, residual, norm))

    # No comparison with NaN may be taken for a descent.
    return jax.lax.cond(
        norm <= before.norm,
        go_on,
        lambda: jax.lax.cond(
            norm <= _MOST_GROWTH * before.norm,
            lambda: calm(state.value, state.residual, norm),
            lambda: calm(*before),
        ),
    )


def _convexity(operator: KernelOperator) -> Float[Array, ""]:
    """The smallest noise over the mean variance."""
    noise, variance = operator.noise(), operator.kernel.diag(operator.X)
    return jnp.min(noise) / jnp.mean(variance)


def _momentum(
    convexity: Float[Array, ""], slowness: Float[Array, ""]
) -> tuple[Array, Array, Array]:
    """The anchor's step, its part in the value, and the value's in the anchor."""
    convexity = jnp.clip(convexity, jnp.finfo(slowness.dtype).eps, slowness)
    longer = jax.lax.rsqrt(convexity * slowness)
    return longer, 1.0 / (1.0 + longer * slowness), jnp.sqrt(convexity / slowness)
