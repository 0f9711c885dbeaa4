"""Batches of rows, drawn at random, and descent along them with momentum."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.solvers.iteration import check_budget, descend, num_iterations
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.solver import AbstractSolver, Solution, System

_NUM_PROBED_BATCHES = 4
_NUM_POWER_ITERATIONS = 10


def required_key(key: Key[Array, ""] | None) -> Key[Array, ""]:
    """The key of a solver that draws its batches."""
    if key is None:
        raise ValueError("`key` must be given: the batches are drawn at random.")
    return key


def next_batch(
    key: Key[Array, ""], order: Int[Array, " n"], iteration: Int[Array, ""], size: int
) -> tuple[Int[Array, " n"], Int[Array, " {size}"]]:
    """The rows of an iteration: each pass visits rows without repetition, in an order of its own.

    Args:
        key: a typed JAX key, the same at each iteration.
        order: the order of the pass that the last iteration belonged to.
        iteration: iterations made so far.
        size: rows of a batch, at most n; where n is no multiple, a pass leaves some out.

    Returns:
        The order of this pass, and the batch.
    """
    n = order.shape[0]
    number, place = jnp.divmod(iteration, n // size)
    order = jax.lax.cond(
        place == 0,
        lambda: jax.random.permutation(jax.random.fold_in(key, number), n),
        lambda: order,
    )
    return order, jax.lax.dynamic_slice_in_dim(order, place * size, size)


def power_iteration(H: Float[Array, "b b"]) -> Float[Array, ""]:
    """The largest eigenvalue of a positive definite matrix, from below, in O(b^2)."""

    def power(_: Array, v: Array) -> Array:
        product = matmul(H, v)
        return product / jnp.linalg.norm(product)

    v = jax.lax.fori_loop(0, _NUM_POWER_ITERATIONS, power, jnp.ones(H.shape[0], H.dtype))
    return jnp.linalg.norm(matmul(H, v)) / jnp.linalg.norm(v)


class DescentState(NamedTuple):
    """What descent along batches keeps."""

    value: Float[Array, "n k"]
    iterate: Float[Array, "n k"]  # empty, shape (0, k), where the value is the iterate itself
    residual: Float[Array, "n k"]  # of each row at its last visit
    momentum: Float[Array, "n k"]
    order: Int[Array, " n"]  # in which this pass visits the rows


class AbstractBatchDescent(AbstractSolver):
    """Descent on v'Hv / 2 - b'v by batches of rows, with momentum.

    A subclass says where the gradient is evaluated, how the state moves and which rate is safe.
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

    @abc.abstractmethod
    def smooth_limit(self) -> float:
        """The largest rate for a deterministic gradient, in units of 1 / eigenvalue."""

    @abc.abstractmethod
    def start(self, system: System) -> Float[Array, "n k"]:
        """The first iterate, empty where the value is the iterate itself."""

    @abc.abstractmethod
    def point(self, state: DescentState) -> Float[Array, "n k"]:
        """Where the gradient is evaluated."""

    @abc.abstractmethod
    def move(self, state: DescentState, weight: float) -> DescentState:
        """The state after a step along its momentum; `weight` is that of an average over steps."""

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
        rate_key, batch_key = jax.random.split(required_key(key))
        n = operator.size
        size = min(self.batch_size, n)
        rate = self._rate(operator, rate_key, size)
        # Over a hundredth of all steps, and at most over an epoch.
        weight = max(100.0 / num_iterations(self.max_epochs, system, size / n), size / n)

        def advance(state: DescentState, iteration: Int[Array, ""]) -> DescentState:
            order, batch = next_batch(batch_key, state.order, iteration, size)
            residual = system.target[batch] - operator.rows_matmul(batch, self.point(state))
            momentum = (self.momentum * state.momentum).at[batch].add(rate * residual)
            residual = state.residual.at[batch].set(residual)
            state = state._replace(residual=residual, momentum=momentum, order=order)
            return self.move(state, min(1.0, weight))

        start = DescentState(
            system.value,
            self.start(system),
            system.residual,
            jnp.zeros_like(system.value),
            jnp.arange(n),
        )
        return descend(
            operator,
            system,
            start,
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

        def of_batch(key: Array) -> Array:
            rows = jax.random.choice(key, operator.size, (batch_size,), replace=False)
            return power_iteration(operator.block(rows, rows))

        largest = jnp.max(jax.lax.map(of_batch, jax.random.split(key, _NUM_PROBED_BATCHES)))
        # Smooth modes, shared by all rows, follow the average over batches. Modes of single rows
        # wait for their next visit while the momentum plays out, 1 / (1 - momentum) times a step.
        rough = (1.0 - self.momentum) / jnp.max(operator.diagonal())
        return jnp.minimum(self.smooth_limit() / largest, rough)
