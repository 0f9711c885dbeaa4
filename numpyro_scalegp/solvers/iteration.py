"""The loop of an iterative solver: when it ends, what it has cost, and where it starts again."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.progress import report
from numpyro_scalegp.solvers.solver import Course, Solution, StopReason, System, finish


def num_iterations(max_epochs: int | float, system: System, epochs_per_iteration: float) -> int:
    """The iterations that a budget allows after the initial residual, at least one."""
    budget = (max_epochs - system.epochs) / epochs_per_iteration + 1e-6
    return max(1, math.floor(min(budget, jnp.iinfo(jnp.int32).max)))


def largest(norms: Float[Array, " k"], num_averaged: int) -> Float[Array, ""]:
    """The largest residual that counts: one column's, or the mean of the last `num_averaged`."""
    check_num_averaged(num_averaged, norms.shape[0])
    single = norms.shape[0] - num_averaged
    alone = jnp.max(norms[:single], initial=0.0)
    return jnp.maximum(alone, jnp.mean(norms[single:])) if num_averaged else alone


class _Loop(NamedTuple):
    state: Any
    iteration: Int[Array, ""]
    checks: Int[Array, ""]
    size: Float[Array, ""]  # of the residuals, as the state has them
    checked: Bool[Array, ""]  # whether they were computed from the solution
    reference: Float[Array, ""]  # their size when they were computed last
    stuck: Bool[Array, ""]  # no further iteration works, or none would gain anything


def iterate(
    step: Callable[[Any, Int[Array, ""], Bool[Array, ""]], tuple[Any, Bool[Array, ""]]],
    state: Any,
    size_of: Callable[[Any], Float[Array, ""]],
    *,
    max_iterations: int | Int[Array, ""],
    epochs_per_iteration: float,
    tolerance: float | Float[Array, ""],
    can_check: bool = True,
    progress: Int[Array, ""] | None = None,
) -> tuple[Any, Course]:
    """Iterate until the residuals are within the tolerance, or nothing is left to do.

    The residual of a recursion drifts away from the true one with rounding errors. So
    wherever it would end, the residual is computed from the solution, in one more epoch. If that is
    above the tolerance after all, the iteration starts again from there, as long as at least half
    of what it claims is true; otherwise it is at the limit of the precision.

    Args:
        step: maps the state, the number of iterations made and whether to compute the residual from
            the solution, in place of an iteration, to the next state and whether that worked; an
            iteration that did not work leaves the state as it was.
        state: where to start, with residuals that are computed from the solution.
        size_of: the largest residual of a state, NaN where it has failed.
        max_iterations: iterations at most.
        epochs_per_iteration: what one costs.
        tolerance: what the size is to get down to.
        can_check: whether there is a solution to compute residuals from.
        progress: the number of a progress bar, which is told of every epoch.

    Returns:
        The last state and how it went.
    """

    def ends(loop: _Loop) -> Array:
        # After a false claim the goal is half the tolerance, lest the next one is a near miss.
        halved = ~loop.checked & (loop.checks > 0)
        claims = loop.size <= jnp.where(halved, 0.5, 1.0) * tolerance
        return claims | (loop.iteration >= max_iterations) | loop.stuck

    def goes_on(loop: _Loop) -> Array:
        # No comparison with NaN may be taken for a solution.
        return jnp.isfinite(loop.size) & ~(ends(loop) & loop.checked)

    def epochs_of(loop: _Loop) -> Float[Array, ""]:
        dtype = loop.size.dtype
        return epochs_per_iteration * loop.iteration.astype(dtype) + loop.checks.astype(dtype)

    def tell(loop: _Loop) -> None:
        if progress is not None:
            budget = epochs_per_iteration * jnp.asarray(max_iterations, float)
            report(progress, epochs_of(loop), loop.size, budget, tolerance)

    def body(loop: _Loop) -> _Loop:
        check = ends(loop) & can_check
        state, works = step(loop.state, loop.iteration, check)
        size = size_of(state)
        claimed, gained = loop.reference - loop.size, loop.reference - size
        stalled = gained <= jnp.maximum(0.5 * claimed, 0.0)
        after = _Loop(
            state,
            loop.iteration + (~check & works).astype(int),
            loop.checks + check.astype(int),
            size,
            check | (not can_check),
            jnp.where(check, size, loop.reference),
            jnp.where(check, stalled, ~works),
        )
        if progress is not None:
            is_next = jnp.floor(epochs_of(after)) > jnp.floor(epochs_of(loop))
            jax.lax.cond(is_next, lambda: tell(after), lambda: None)
        return after

    size, zero, no = size_of(state), jnp.zeros((), int), jnp.zeros((), bool)
    loop = _Loop(state, zero, zero, size, ~no, size, no)
    tell(loop)
    loop = jax.lax.while_loop(goes_on, body, loop)
    spent = loop.iteration >= max_iterations
    reason = jnp.where(spent, StopReason.BUDGET, StopReason.PRECISION)
    reason = jnp.where(loop.size <= tolerance, StopReason.CONVERGED, reason)
    reason = jnp.where(jnp.isfinite(loop.size), reason, StopReason.FAILED)
    return loop.state, Course(loop.iteration, epochs_of(loop), reason.astype(int))


def descend(
    operator: KernelOperator,
    system: System,
    state: Any,
    advance: Callable[[Any, Int[Array, ""]], Any],
    *,
    num_averaged: int,
    tolerance: float,
    max_epochs: int | float,
    epochs_per_iteration: float = 1.0,
) -> Solution:
    """Advance a state that has a `value` and its `residual` until that is within the tolerance.

    Args:
        operator: the matrix H.
        system: what to solve.
        state: where to start, a named tuple with `value` and `residual`, such as the system itself.
        advance: maps the state and the number of iterations made to the next state.
        num_averaged: as of `AbstractSolver.solve`.
        tolerance: relative residual to get down to.
        max_epochs: work of the iterations at most.
        epochs_per_iteration: what one costs.
    """

    def compute(state: Any, iteration: Int[Array, ""]) -> Any:
        return state._replace(residual=system.target - operator.matmul(state.value))

    def step(state: Any, iteration: Array, check: Array) -> tuple[Any, Bool[Array, ""]]:
        return jax.lax.cond(check, compute, advance, state, iteration), jnp.ones((), bool)

    def norms(state: Any) -> Float[Array, " k"]:
        return jnp.linalg.norm(state.residual, axis=0)

    state, course = iterate(
        step,
        state,
        lambda state: largest(norms(state), num_averaged),
        max_iterations=num_iterations(max_epochs, system, epochs_per_iteration),
        epochs_per_iteration=epochs_per_iteration,
        tolerance=tolerance,
        progress=system.progress,
    )
    return finish(system, state.value, norms(state), course)


def check_num_averaged(num_averaged: int, num_columns: int) -> None:
    """Raise unless there are `num_averaged` columns."""
    if checks.count("num_averaged", num_averaged, 0) > num_columns:
        raise ValueError(
            f"`num_averaged` must be from 0 to the number of columns, {num_columns}, got "
            f"{num_averaged}."
        )


def check_budget(tolerance: float, max_epochs: int | float) -> None:
    """Raise unless the tolerance is in [0, 1) and the budget positive."""
    # It bounds ||b - H v|| / ||b||: from 1 on zero would pass for a solution.
    checks.number("tolerance", tolerance, "[0, 1)")
    checks.number("max_epochs", max_epochs, "(0, inf]")
