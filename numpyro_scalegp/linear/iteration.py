"""The loop of an iterative solver: its end, its cost and its restarts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.linear.solver import LoopOutcome, Solution, StopReason, System
from numpyro_scalegp.programs import stretches


class _Loop(NamedTuple):
    state: Any
    iteration: Int[Array, ""]
    checks: Int[Array, ""]
    size: Float[Array, ""]  # of the residuals in the state
    checked: Bool[Array, ""]  # whether these were computed from the solution
    reference: Float[Array, ""]  # the last size that was computed from the solution
    stuck: Bool[Array, ""]  # whether further iterations do not work or make no progress


def iterate(
    step: Callable[[Any, Int[Array, ""], Bool[Array, ""]], tuple[Any, Bool[Array, ""]]],
    state: Any,
    size_of: Callable[[Any], Float[Array, ""]],
    *,
    max_iterations: int | Int[Array, ""],
    tolerance: float | Float[Array, ""],
    epochs_per_iteration: float = 1.0,
    can_check: bool = True,
    in_stretches: bool = False,
) -> tuple[Any, LoopOutcome]:
    """Iterate until the residuals are within the tolerance, or no further progress is possible.

    Rounding errors make the residual of a recursion drift away from the true residual. So before
    the loop ends, the residual is computed from the solution, in one more epoch. If it is above the
    tolerance, the iteration restarts from it, as long as at least half of the claimed decrease is
    true; otherwise the solution is at the limit of the precision.

    Args:
        step: maps the state, the number of iterations made and whether to compute the residual from
            the solution, instead of an iteration, to the next state and whether that worked. An
            iteration that does not work leaves the state unchanged.
        state: the initial state, with residuals computed from the solution.
        size_of: the largest residual of a state, NaN if it has failed.
        max_iterations: maximum number of iterations.
        tolerance: the size to reach.
        epochs_per_iteration: the cost of an iteration.
        can_check: whether there is a solution to compute residuals from.
        in_stretches: whether `stretches.run` may stop between iterations, to report.

    Returns:
        The last state, and the outcome of the loop.
    """

    def ends(loop: _Loop) -> Array:
        # After a false claim, aim at half the tolerance: the next claim is then no near miss.
        halved = ~loop.checked & (loop.checks > 0)
        claims = loop.size <= jnp.where(halved, 0.5, 1.0) * tolerance
        return claims | (loop.iteration >= max_iterations) | loop.stuck

    def continues(loop: _Loop) -> Array:
        # Comparisons with NaN are false; do not mistake that for convergence.
        return jnp.isfinite(loop.size) & ~(ends(loop) & loop.checked)

    def epochs_of(loop: _Loop) -> Float[Array, ""]:
        dtype = loop.size.dtype
        return epochs_per_iteration * loop.iteration.astype(dtype) + loop.checks.astype(dtype)

    def measure(loop: _Loop) -> Float[Array, "4"]:
        budget = epochs_per_iteration * jnp.asarray(max_iterations, float)
        measures = epochs_of(loop), loop.size, budget, jnp.asarray(tolerance)
        return jnp.stack([measure.astype(loop.size.dtype) for measure in measures])

    def body(loop: _Loop) -> _Loop:
        check = ends(loop) & can_check
        state, works = step(loop.state, loop.iteration, check)
        size = size_of(state)
        claimed, gained = loop.reference - loop.size, loop.reference - size
        stalled = gained <= jnp.maximum(0.5 * claimed, 0.0)
        return _Loop(
            state,
            loop.iteration + (~check & works).astype(int),
            loop.checks + check.astype(int),
            size,
            check | (not can_check),
            jnp.where(check, size, loop.reference),
            jnp.where(check, stalled, ~works),
        )

    size, zero, false = size_of(state), jnp.zeros((), int), jnp.zeros((), bool)
    loop = _Loop(state, zero, zero, size, ~false, size, false)
    if in_stretches:
        loop = stretches.while_loop(continues, body, loop, measure)
    else:
        loop = jax.lax.while_loop(continues, body, loop)
    spent = loop.iteration >= max_iterations
    reason = jnp.where(spent, StopReason.BUDGET, StopReason.PRECISION)
    reason = jnp.where(loop.size <= tolerance, StopReason.CONVERGED, reason)
    reason = jnp.where(jnp.isfinite(loop.size), reason, StopReason.FAILED)
    return loop.state, LoopOutcome(loop.iteration, epochs_of(loop), reason.astype(int))


def descend(
    system: System,
    state: Any,
    advance: Callable[[Any, Int[Array, ""]], Any],
    *,
    tolerance: float,
    max_epochs: int | float,
    epochs_per_iteration: float = 1.0,
) -> Solution:
    """Advance a state until its `residual` is within the tolerance.

    Args:
        system: the system to solve.
        state: the initial state, a named tuple with `value` and `residual`, such as `system.start`.
        advance: maps the state, and the number of iterations so far, to the next state.
        tolerance: relative residual to reach.
        max_epochs: the solver's budget.
        epochs_per_iteration: the cost of an iteration.
    """

    def compute(state: Any, iteration: Int[Array, ""]) -> Any:
        return state._replace(residual=system.target - system.operator.matmul(state.value))

    def step(state: Any, iteration: Array, check: Array) -> tuple[Any, Bool[Array, ""]]:
        return jax.lax.cond(check, compute, advance, state, iteration), jnp.ones((), bool)

    def norms(state: Any) -> Float[Array, " k"]:
        return jnp.linalg.norm(state.residual, axis=0)

    state, outcome = iterate(
        step,
        state,
        lambda state: system.largest(norms(state)),
        max_iterations=system.num_iterations(max_epochs, epochs_per_iteration),
        epochs_per_iteration=epochs_per_iteration,
        tolerance=tolerance,
        in_stretches=system.options.in_stretches,
    )
    return system.solution(state.value, norms(state), outcome)


def check_budget(tolerance: float, max_epochs: int | float) -> None:
    """Raise unless the tolerance is in [0, 1) and the budget positive."""
    # The tolerance bounds ||b - H v|| / ||b||: with 1 or more, v = 0 would count as a solution.
    checks.number("tolerance", tolerance, "[0, 1)")
    checks.number("max_epochs", max_epochs, "(0, inf]")
