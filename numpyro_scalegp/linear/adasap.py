"""Accelerated sketch-and-project: solves on random blocks of rows, with momentum."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.linear.batches import next_batch, required_key
from numpyro_scalegp.linear.iteration import check_budget, descend
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.preconditioners import PreconditionerFactor, nystrom_factor, whitener
from numpyro_scalegp.linear.solver import AbstractSolver, Solution, System
from numpyro_scalegp.numerics.linalg import matmul

_MIN_BLOCK = 500
_BLOCKS_PER_EPOCH = 100
_NUM_POWER_ITERATIONS = 10
# N in multiples of the number of blocks: with 1 the momentum diverges on smooth kernels.
_CAUTION = 4.0
# The largest N, with which there is almost no momentum.
_SLOWEST = 1e9
# A pass that multiplies the residual by more than this is undone.
_MOST_GROWTH = 10.0


class _Setup(NamedTuple):
    convexity: Float[Array, ""]
    sketch: Float[Array, "block rank"]  # rank 0 if blocks are solved exactly
    key: Key[Array, ""]


class _Checkpoint(NamedTuple):
    """The state before a pass."""

    value: Float[Array, "n k"]
    residual: Float[Array, "n k"]
    norm: Float[Array, ""]


class _State(NamedTuple):
    value: Float[Array, "n k"]
    anchor: Float[Array, "n k"]
    residual: Float[Array, "n k"]  # of each row at its last visit
    order: Int[Array, " n"]  # of the rows in this pass
    slowness: Float[Array, ""]  # N
    checkpoint: _Checkpoint


class ADASAP(AbstractSolver):
    """Accelerated sketch-and-project on random blocks of rows.

    Each iteration solves for the rows of one block with all other rows fixed:
    d = H[block, block]^-1 (b - H v)[block], at a cost of `block_size` / n epochs. With momentum,
    u <- (1 - c) u + c v + g d and, with this u, v <- a u + (1 - a) (v + d), where c = sqrt(m / N),
    g = 1 / sqrt(m N) and a = 1 / (1 + g N). Here m is the smallest noise over the mean variance,
    and N four times the number of blocks: with the paper's N, the number of blocks itself, the
    iterations diverge if blocks are few and the kernel is smooth. A pass that raises the residual
    doubles N and resets the momentum to zero; a pass that raises the residual tenfold is undone.

    Each pass draws new blocks: with a fixed partition the momentum would not speed up convergence.
    For blocks too large to factorize, `rank` approximates H[block, block]^-1 by P^-1 / l, with
    P = F'F + noise + `damping` s, F'F the Nystrom approximation of the block from `rank` random
    directions, s the smallest of its `rank` eigenvalues and l >= 1 the largest eigenvalue of P^-1
    H[block, block], from power iterations.

    Until the end, the residual is estimated as in `StochasticGradientDescent`. The noise of the
    steps vanishes at the solution, so the last iterate is as close to the solution as an average of
    iterates.

    Args:
        block_size: rows of a block, at most n; None for n / 100, at least 500.
        rank: rank of the approximation of a block; None to solve exactly.
        damping: damping of an approximate solve, a multiple of the smallest eigenvalue.
        tolerance: see `AlternatingProjections`.
        max_epochs: see `AlternatingProjections`.

    Raises:
        ValueError: if an argument is out of its range.

    References:
        Rathore, Frangella, Garg, Fazliani, Derezinski and Udell (2025), Turbocharging Gaussian
        Process Inference with Approximate Sketch-and-Project, algorithms 2 and 3, where the rank is
        100; on up to 10^5 observations exact solves of blocks take less time and far fewer epochs.
        Time O(n^2 (d + k)) an epoch and O(block_size^3) for each block, or O(block_size^2 rank);
        memory O(n k + block_size^2) and one block of rows.

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

    def init(self, operator: KernelOperator, key: Key[Array, ""] | None) -> _Setup:
        """Compute m, random directions to approximate the blocks, and a key.

        Raises:
            ValueError: if there is no `key`.
        """
        sketch_key, batch_key = jax.random.split(required_key(key))
        n = operator.size
        size = min(self.block_size or max(_MIN_BLOCK, -(-n // _BLOCKS_PER_EPOCH)), n)
        rank = size if self.rank is None else min(self.rank, size)
        # All blocks share one set of directions, since their rows are random.
        shape = size, 0 if rank == size else rank
        sketch, _ = jnp.linalg.qr(jax.random.normal(sketch_key, shape, operator.dtype))

        convexity = jnp.min(operator.noise()) / jnp.mean(operator.kernel.evaluate_diag(operator.X))
        return _Setup(convexity, sketch, batch_key)

    def run(self, setup: _Setup, system: System) -> Solution:
        """Solve for one block after another."""
        operator, n = system.kernel_operator, system.operator.size
        size, rank = setup.sketch.shape

        def advance(state: _State, iteration: Int[Array, ""]) -> _State:
            is_new_pass = iteration % (n // size) == 0
            state = jax.lax.cond(is_new_pass, _safeguarded, lambda state: state, state)
            g, a, c = _momentum(setup.convexity, state.slowness)
            order, rows = next_batch(setup.key, state.order, iteration, size)
            residual = system.target[rows] - operator.rows_matmul(rows, state.value)
            H, noise = operator.block(rows, rows), operator.noise()[rows]
            if rank:
                change = self._approximate(H, noise, setup.sketch, residual)
            else:
                W = whitener(H, noise)
                change = matmul(W.T, matmul(W, residual))
            anchor = (1.0 - c) * state.anchor + c * state.value
            value = a * anchor + (1.0 - a) * state.value
            return state._replace(
                value=value.at[rows].add((a * g + 1.0 - a) * change),
                anchor=anchor.at[rows].add(g * change),
                residual=state.residual.at[rows].set(residual),
                order=order,
            )

        value, residual = system.start
        # With an infinite norm, the start never counts as a raised residual.
        checkpoint = _Checkpoint(value, residual, jnp.full((), jnp.inf, value.dtype))
        slowness = jnp.asarray(_CAUTION * n / size, operator.dtype)
        return descend(
            system,
            _State(value, value, residual, jnp.arange(n), slowness, checkpoint),
            advance,
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
        """Approximate H^-1 times the residual, without exceeding it in the norm of H."""
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
    """The state before a pass, with less momentum if the last pass raised the residual."""
    norm, last = jnp.linalg.norm(state.residual), state.checkpoint

    def proceed() -> _State:
        return state._replace(checkpoint=_Checkpoint(state.value, state.residual, norm))

    def restart(value: Array, residual: Array, norm: Array) -> _State:
        slowness = jnp.minimum(2.0 * state.slowness, _SLOWEST)
        checkpoint = _Checkpoint(value, residual, norm)
        return _State(value, value, residual, state.order, slowness, checkpoint)

    # Comparisons with NaN are false; do not mistake that for a descent.
    return jax.lax.cond(
        norm <= last.norm,
        proceed,
        lambda: jax.lax.cond(
            norm <= _MOST_GROWTH * last.norm,
            lambda: restart(state.value, state.residual, norm),
            lambda: restart(*last),
        ),
    )


def _momentum(
    convexity: Float[Array, ""], slowness: Float[Array, ""]
) -> tuple[Array, Array, Array]:
    """The coefficients g, a and c of the momentum."""
    convexity = jnp.clip(convexity, jnp.finfo(slowness.dtype).eps, slowness)
    g = jax.lax.rsqrt(convexity * slowness)
    return g, 1.0 / (1.0 + g * slowness), jnp.sqrt(convexity / slowness)
