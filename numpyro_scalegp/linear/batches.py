"""Descent by random batches of rows, with momentum."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.linear.iteration import check_budget, descend
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.solver import AbstractSolver, Solution, System
from numpyro_scalegp.numerics.linalg import matmul

_NUM_PROBED_BATCHES = 4
_NUM_POWER_ITERATIONS = 10


def required_key(key: Key[Array, ""] | None) -> Key[Array, ""]:
    """Return the key, or raise if there is none."""
    if key is None:
        raise ValueError("`key` must be given: the batches are drawn at random.")
    return key


def next_batch(
    key: Key[Array, ""], order: Int[Array, " n"], iteration: Int[Array, ""], size: int
) -> tuple[Int[Array, " n"], Int[Array, " {size}"]]:
    """The rows of an iteration: each pass visits the rows once, in a new random order.

    Args:
        key: a typed JAX key, the same at each iteration.
        order: the order of the pass that the last iteration belonged to.
        iteration: iterations made so far.
        size: rows of a batch, at most n; if n is not a multiple, a pass leaves out the last rows.

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
    """The state of descent by batches."""

    value: Float[Array, "n k"]
    iterate: Float[Array, "n k"]  # empty, shape (0, k), if the value is the iterate
    residual: Float[Array, "n k"]  # of each row at its last visit
    momentum: Float[Array, "n k"]
    order: Int[Array, " n"]  # of the rows in this pass


class AbstractBatchDescent(AbstractSolver):
    """Descent on v'Hv / 2 - b'v by batches of rows, with momentum.

    Subclasses define where the gradient is evaluated, how the state moves and which rate is safe.
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
    def first_iterate(self, value: Float[Array, "n k"]) -> Float[Array, "rows k"]:
        """The first iterate, empty if the value is the iterate."""

    @abc.abstractmethod
    def point(self, state: DescentState) -> Float[Array, "n k"]:
        """Where the gradient is evaluated."""

    @abc.abstractmethod
    def move(self, state: DescentState, weight: float) -> DescentState:
        """The state after a step along its momentum; an average gives it the weight `weight`."""

    def init(
        self, operator: KernelOperator, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], Key[Array, ""]]:
        """Compute the learning rate, and a key for the batches.

        Raises:
            ValueError: if there is no `key`.
        """
        rate_key, batch_key = jax.random.split(required_key(key))
        return self._rate(operator, rate_key), batch_key

    def run(self, setup: tuple[Float[Array, ""], Key[Array, ""]], system: System) -> Solution:
        """Descend by batches."""
        (rate, key), operator, n = setup, system.kernel_operator, system.operator.size
        size = min(self.batch_size, n)
        # The average is over a hundredth of all steps, and at most over an epoch.
        weight = max(100.0 / system.num_iterations(self.max_epochs, size / n), size / n)

        def advance(state: DescentState, iteration: Int[Array, ""]) -> DescentState:
            order, batch = next_batch(key, state.order, iteration, size)
            residual = system.target[batch] - operator.rows_matmul(batch, self.point(state))
            momentum = (self.momentum * state.momentum).at[batch].add(rate * residual)
            residual = state.residual.at[batch].set(residual)
            state = state._replace(residual=residual, momentum=momentum, order=order)
            return self.move(state, min(1.0, weight))

        value, residual = system.start
        start = DescentState(
            value, self.first_iterate(value), residual, jnp.zeros_like(value), jnp.arange(n)
        )
        return descend(
            system,
            start,
            advance,
            tolerance=self.tolerance,
            max_epochs=self.max_epochs,
            epochs_per_iteration=size / n,
        )

    def _rate(self, operator: KernelOperator, key: Key[Array, ""]) -> Float[Array, ""]:
        if self.learning_rate is not None:
            return jnp.asarray(self.learning_rate, operator.dtype)

        n = operator.size

        def of_batch(key: Array) -> Array:
            rows = jax.random.choice(key, n, (min(self.batch_size, n),), replace=False)
            return power_iteration(operator.block(rows, rows))

        largest = jnp.max(jax.lax.map(of_batch, jax.random.split(key, _NUM_PROBED_BATCHES)))
        # Smooth modes, shared by all rows, see the gradient averaged over batches. The mode of a
        # single row moves by 1 / (1 - momentum) times its step before the row is visited again.
        single_row_rate = (1.0 - self.momentum) / jnp.max(operator.diagonal())
        return jnp.minimum(self.smooth_limit() / largest, single_row_rate)
