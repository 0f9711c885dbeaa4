"""Stochastic gradient descent with momentum on batches of rows."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.solvers.iteration import check_budget, descend
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.solver import AbstractSolver, Solution, System

_NUM_PROBED_BATCHES = 4
_NUM_POWER_ITERATIONS = 10


class _State(NamedTuple):
    value: Float[Array, "n k"]
    residual: Float[Array, "n k"]
    momentum: Float[Array, "n k"]
    order: Int[Array, " n"]  # in which this pass visits the rows


class StochasticGradientDescent(AbstractSolver):
    """Gradient descent on v'Hv / 2 - b'v by batches of rows, with momentum.

    Each iteration computes the gradient's rows of one batch, g = (H v - b)[batch], and moves
    m <- momentum m - learning_rate g, v <- v + m: batch / n of an epoch. The gradient's noise
    vanishes at the solution, so that a constant rate converges.

    On the way the residual is kept row by row from each row's last visit: an estimate that lags
    behind, mostly from above. The one that is reported is computed from the solution.

    Args:
        batch_size: rows of a batch; at most n are used.
        learning_rate: None for the smaller of (1 + momentum) / lambda and (1 - momentum) / h, with
            lambda the largest eigenvalue of a batch's own block of H, from power iterations on a
            few batches at each call, and h the largest entry on the diagonal of H.
        momentum: in [0, 1).
        tolerance: as of `AlternatingProjections`.
        max_epochs: as of `AlternatingProjections`.

    Raises:
        ValueError: if an argument is out of its range.

    References:
        Lin et al. (2023), Sampling from Gaussian Process Posteriors using Stochastic Gradient
        Descent; Lin et al. (2024), algorithm 3, whose residual should start at b - H v. Time
        O(n^2 (d + k)) an epoch, memory O(n k) and one batch of rows.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.StochasticGradientDescent(batch_size=200, max_epochs=20)
    """

    batch_size: int = eqx.field(static=True, converter=checks.plain, default=500)
    learning_rate: float | None = eqx.field(static=True, converter=checks.plain, default=None)
    momentum: float = eqx.field(static=True, converter=checks.plain, default=0.9)
    tolerance: float = eqx.field(static=True, converter=checks.plain, default=1e-2)
    max_epochs: int | float = eqx.field(static=True, converter=checks.plain, default=100)

    def __check_init__(self) -> None:
        checks.count("batch_size", self.batch_size)
        if self.learning_rate is not None:
            checks.number("learning_rate", self.learning_rate, "(0, inf)")
        checks.number("momentum", self.momentum, "[0, 1)")
        check_budget(self.tolerance, self.max_epochs)

    def run(
        self,
        operator: KernelOperator,
        system: System,
        key: Key[Array, ""] | None,
        num_averaged: int,
    ) -> Solution:
        """Descend by batches; see `AbstractSolver.run`.

        Raises:
            ValueError: if there is no `key`.
        """
        if key is None:
            raise ValueError("`key` must be given: the batches are drawn at random.")
        rate_key, batch_key = jax.random.split(key)
        n = operator.size
        size = min(self.batch_size, n)
        batches_per_epoch = n // size
        rate = self._rate(operator, rate_key, size)

        def advance(state: _State, iteration: Int[Array, ""]) -> _State:
            # Each pass visits rows without repetition, in an order of its own.
            number, place = jnp.divmod(iteration, batches_per_epoch)
            order = jax.lax.cond(
                place == 0,
                lambda: jax.random.permutation(jax.random.fold_in(batch_key, number), n),
                lambda: state.order,
            )
            batch = jax.lax.dynamic_slice_in_dim(order, place * size, size)
            residual = system.target[batch] - operator.rows_matmul(batch, state.value)
            momentum = self.momentum * state.momentum
            momentum = momentum.at[batch].add(rate * residual)
            return _State(
                state.value + momentum,
                state.residual.at[batch].set(residual),
                momentum,
                order,
            )

        zeros = jnp.zeros_like(system.value)
        return descend(
            operator,
            system,
            _State(system.value, system.residual, zeros, jnp.arange(n)),
            advance,
            num_averaged=num_averaged,
            tolerance=self.tolerance,
            max_epochs=self.max_epochs,
            epochs_per_iteration=size / n,
        )

    def _rate(
        self, operator: KernelOperator, key: Key[Array, ""], batch_size: int
    ) -> Float[Array, ""]:
        if self.learning_rate is not None:
            return jnp.asarray(self.learning_rate, operator.dtype)
        # Smooth modes, shared by all rows, follow the average over batches, where heavy-ball
        # momentum allows (2 + 2 momentum) / eigenvalue. Modes of single rows wait for their next
        # visit while the momentum plays out, 1 / (1 - momentum) times a step.
        smooth = (1.0 + self.momentum) / _largest_eigenvalue(operator, key, batch_size)
        rough = (1.0 - self.momentum) / jnp.max(operator.diagonal())
        return jnp.minimum(smooth, rough)


def _largest_eigenvalue(
    operator: KernelOperator, key: Key[Array, ""], batch_size: int
) -> Float[Array, ""]:
    """The largest eigenvalue of a batch's block of H: the largest found on a few batches."""

    def of_batch(key: Array) -> Array:
        rows = jax.random.choice(key, operator.size, (batch_size,), replace=False)
        H = operator.block(rows, rows)

        def power(_: Array, v: Array) -> Array:
            product = matmul(H, v)
            return product / jnp.linalg.norm(product)

        v = jax.lax.fori_loop(0, _NUM_POWER_ITERATIONS, power, jnp.ones(batch_size, H.dtype))
        return jnp.linalg.norm(matmul(H, v)) / jnp.linalg.norm(v)

    return jnp.max(jax.lax.map(of_batch, jax.random.split(key, _NUM_PROBED_BATCHES)))
