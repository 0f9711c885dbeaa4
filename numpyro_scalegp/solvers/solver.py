"""The interface of a solver, and what all iterative ones share."""

import abc
import enum
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.solvers.operator import KernelOperator


class StopReason(enum.IntEnum):
    """Why a solver ended, as `Solution.reason` has it."""

    CONVERGED = 0  # the residuals are within the tolerance
    BUDGET = 1  # `max_epochs` ended first
    PRECISION = 2  # rounding errors leave nothing to gain: neither does a larger budget
    FAILED = 3  # H or B is not finite, or H not positive definite: the solution is NaN


class Solution(NamedTuple):
    """What a solver found, and how it went; a failure to converge is a value, not an error."""

    value: Float[Array, "n k"]  # V with H V ~ B
    residual: Float[Array, " k"]  # ||b - H v|| / ||b|| for each column, computed from v
    iterations: Int[Array, ""]  # steps of the solver
    epochs: Float[Array, ""]  # entries of H computed, in units of n^2
    converged: Bool[Array, ""]  # whether the residuals are within the tolerance
    reason: Int[Array, ""]  # one of `StopReason`
    # Where the value is random, its square is no estimate of the solution's square. For the first m
    # columns, sum_r shares_r v_r v_r' is one, with these vectors v_r; for the others, value twin'.
    shares: Float[Array, " r"] | None = None
    vectors: Float[Array, "r n m"] | None = None
    twin: Float[Array, "n l"] | None = None

    def squares(
        self, num_columns: int
    ) -> tuple[Float[Array, "r n {num_columns}"], Float[Array, "r n {num_columns}"]]:
        """Vectors l_r and r_r of the first columns with v v' = E[sum_r l_r r_r']."""
        if self.shares is None or self.vectors is None:
            value = self.value[None, :, :num_columns]
            return value, value
        vectors = self.vectors[:, :, :num_columns]
        return self.shares[:, None, None] * vectors, vectors


class Coefficients(NamedTuple):
    """The steps of probe columns that started at zero: a block Lanczos process of P^-1/2 H P^-1/2.

    Its block tridiagonal matrix is L D L', with the curvatures on the diagonal of D and the
    negative triangles below the unit diagonal of L. A function of the matrix is estimated from the
    first `stops[0]` steps, and corrected by `weights[i]` times what it changes by from
    `stops[i - 1]` to `stops[i]` steps.
    """

    curvature: Float[Array, "steps groups g g"]  # S'H S
    triangle: Float[Array, "steps groups g g"]  # to the next residuals' basis
    stops: Int[Array, " stages"]
    weights: Float[Array, " stages"]
    start: Float[Array, "groups g g"]  # the probes in terms of the first basis
    log_determinant: Float[Array, ""]  # log|P| of the preconditioner
    residual: Float[Array, " s"]  # of the probes at the end, relative
    is_cut: Bool[Array, ""]  # whether the weights leave out steps that would have changed it


class AbstractSolver(eqx.Module):
    """A way to solve H V = B for a block of right-hand sides.

    All columns share each evaluation of the kernel, so that 64 cost little more than 16. Nothing
    here is differentiated: gradients come from the estimators, which hold solutions fixed.
    """

    @property
    def to_tolerance(self) -> "AbstractSolver":
        """The solver for a posterior, where one good solution is wanted: itself."""
        return self

    @abc.abstractmethod
    def solve(
        self,
        operator: KernelOperator,
        B: Float[Array, "n k"],
        *,
        guess: Float[Array, "*candidates n k"] | None = None,
        key: Key[Array, ""] | None = None,
        num_averaged: int = 0,
    ) -> Solution:
        """Solve H V = B.

        Args:
            operator: the matrix H.
            B: right-hand sides, shape (n, k).
            guess: where to start, shape (n, k); None for zeros. Of several guesses, shape
                (p, n, k), each column starts at the linear combination of its own that minimises
                v'Hv / 2 - b'v. Any guess but None costs one epoch of the budget.
            key: a typed JAX key, for solvers that draw at random; others ignore it.
            num_averaged: how many of the last columns count together, by the mean of their relative
                residuals, as those of an estimator's probes do; every other column counts alone.

        Returns:
            A `Solution`; `converged` is False where it ended above the tolerance, `reason` says
            why, and values are NaN where H is not positive definite.

        Raises:
            ValueError: if `B` or `guess` has the wrong shape, or `num_averaged` is out of range.
        """

    def solve_with_probes(
        self,
        operator: KernelOperator,
        B: Float[Array, "n k"],
        probe_key: Key[Array, ""],
        num_probes: int,
        *,
        guess: Float[Array, "*candidates n k"] | None = None,
        key: Key[Array, ""] | None = None,
        num_averaged: int = 0,
        paired: bool = True,
    ) -> tuple[Solution, Coefficients | None]:
        """Solve H V = B, where possible with extra columns that give the log-determinant of H.

        Args:
            operator: the matrix H.
            B: right-hand sides, shape (n, k).
            probe_key: a typed JAX key for the extra columns, the probe vectors z ~ N(0, P).
            num_probes: number of probe vectors.
            guess: as of `solve`.
            key: as of `solve`.
            num_averaged: as of `solve`.
            paired: whether the averaged columns of a random solution need an independent second
                estimate.

        Returns:
            The solution of `solve`, and the coefficients of the probe vectors; None, as here, from
            a solver that has none.
        """
        solution = self.solve(operator, B, guess=guess, key=key, num_averaged=num_averaged)
        return solution, None


class Start(NamedTuple):
    """A linear system with normalised right-hand sides, and where its solution starts."""

    scale: Float[Array, " k"]  # norms of the right-hand sides
    target: Float[Array, "n k"]
    value: Float[Array, "n k"]
    residual: Float[Array, "n k"]
    epochs: Float[Array, ""]  # what the initial residual has cost


def start(
    operator: KernelOperator,
    B: Float[Array, "n k"],
    guess: Float[Array, "*candidates n k"] | None,
) -> Start:
    """Normalise each right-hand side, and compute the residual of the initial guess."""
    checks.instance("operator", operator, KernelOperator)
    B = checks.as_float(B, "B")
    if B.ndim != 2 or B.shape[0] != operator.size:
        raise ValueError(f"`B` must have shape ({operator.size}, k), got {B.shape}.")
    B = B.astype(operator.dtype)
    norm = jnp.linalg.norm(B, axis=0)
    scale = jnp.where(norm > 0, norm, 1.0)
    B = B / scale
    if guess is None:
        return Start(scale, B, jnp.zeros_like(B), B, jnp.zeros((), B.dtype))
    guess = checks.as_float(guess, "guess")
    several = guess.ndim == 3
    checks.shape("guess", guess[0] if several else guess, B.shape, why="one start for each column")
    value = guess.astype(B.dtype) / scale
    if not several:
        return Start(scale, B, value, B - operator.matmul(value), jnp.ones((), B.dtype))
    return Start(scale, B, *_best_combination(operator, B, value), jnp.ones((), B.dtype))


def _best_combination(
    operator: KernelOperator, B: Float[Array, "n k"], candidates: Float[Array, "p n k"]
) -> tuple[Float[Array, "n k"], Float[Array, "n k"]]:
    """Minimise v'Hv / 2 - b'v over each column's candidates; returns the minimum, its residual."""
    p, n, k = candidates.shape
    # Successive solutions are nearly the same: their differences make a better basis.
    basis = jnp.concatenate([candidates[:1], candidates[:-1] - candidates[1:]])
    length = jnp.linalg.norm(basis, axis=1, keepdims=True)
    basis = basis / jnp.where(length > 0, length, 1.0)
    images = operator.matmul(jnp.moveaxis(basis, 0, 1).reshape(n, p * k)).reshape(n, p, k)
    gram = jnp.einsum("ink,njk->kij", basis, images, precision="highest")
    slope = jnp.einsum("ink,nk->ki", basis, B, precision="highest")
    # A candidate that repeats another one, or is zero, takes no part.
    scale = jnp.trace(gram, axis1=1, axis2=2)[:, None, None]
    ridge = jnp.where(scale > 0, 10.0 * p * jnp.finfo(gram.dtype).eps * scale, 1.0)
    weights = jnp.linalg.solve(gram + ridge * jnp.eye(p, dtype=gram.dtype), slope[..., None])[
        ..., 0
    ]
    value = jnp.einsum("ink,ki->nk", basis, weights, precision="highest")
    return value, B - jnp.einsum("nik,ki->nk", images, weights, precision="highest")


def num_iterations(max_epochs: int | float, guess: Array | None, per_epoch: float) -> int:
    """The iterations that a budget allows, at least one; the residual of a guess is one epoch."""
    left = max_epochs - (0 if guess is None else 1)
    return max(1, math.floor(left * per_epoch + 1e-6))


class Course(NamedTuple):
    """How a loop went: its iterations, its epochs without those of the start, and its end."""

    iterations: Int[Array, ""]
    epochs: Float[Array, ""]
    reason: Int[Array, ""]


def finish(
    begin: Start, value: Float[Array, "n k"], norms: Float[Array, " k"], course: Course
) -> Solution:
    """Undo the normalisation; a solve that failed has no entry that could pass for a result."""
    failed = course.reason == StopReason.FAILED
    return Solution(
        jnp.where(failed, jnp.nan, value * begin.scale),
        norms,
        course.iterations,
        course.epochs + begin.epochs,
        course.reason == StopReason.CONVERGED,
        course.reason,
    )


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
    tolerance: float,
    can_check: bool = True,
) -> tuple[Any, Course]:
    """Iterate until the residuals are within the tolerance, or nothing is left to do.

    What a recursion says of its residual drifts away from the truth with rounding errors. So
    wherever it would end, the residual is computed from the solution, in one more epoch. If that is
    above the tolerance after all, the iteration starts afresh from there, as long as at least half
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

    size, zero, no = size_of(state), jnp.zeros((), int), jnp.zeros((), bool)
    loop = _Loop(state, zero, zero, size, ~no, size, no)
    loop = jax.lax.while_loop(goes_on, body, loop)
    spent = loop.iteration >= max_iterations
    reason = jnp.where(spent, StopReason.BUDGET, StopReason.PRECISION)
    reason = jnp.where(loop.size <= tolerance, StopReason.CONVERGED, reason)
    reason = jnp.where(jnp.isfinite(loop.size), reason, StopReason.FAILED)
    epochs = epochs_per_iteration * loop.iteration.astype(size.dtype)
    epochs += loop.checks.astype(size.dtype)
    return loop.state, Course(loop.iteration, epochs, reason.astype(int))


def check_num_averaged(num_averaged: int, num_columns: int) -> None:
    """Raise unless so many of the columns can be averaged."""
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


_WARNINGS = {
    StopReason.BUDGET: (
        "a linear solve ended above its tolerance, and a result rests on it: the budget ended "
        "first. Raise the solver's `max_epochs`, start from a `sgp.solver_state`, use a stronger "
        "preconditioner, or keep the noise variance from becoming very small (a prior does that). "
        "Residuals are in the posterior's `diagnostics` and the state's `history()`."
    ),
    StopReason.PRECISION: (
        "a linear solve ended above its tolerance, and a result rests on it: rounding errors leave "
        "no more to gain, whatever the budget. Keep the noise variance from becoming very small (a "
        "prior does that), remove duplicate rows, use a stronger preconditioner, raise the "
        "solver's `tolerance` to what it can reach, or work in float64. Residuals are in the "
        "posterior's `diagnostics` and the state's `history()`."
    ),
    StopReason.FAILED: (
        "a linear solve failed: the covariance matrix is not positive definite or not finite, or "
        "the observations are not finite, and the result is NaN. Check them for NaN; an optimizer "
        "or a sampler that only tried such hyperparameters needs nothing mended."
    ),
}


def warn_unless_converged(solution: Solution) -> None:
    """Warn on the host, once under Python's default filter, that a result rests on bad solves."""
    jax.lax.cond(
        solution.converged, lambda: None, lambda: jax.debug.callback(_warn, solution.reason)
    )


def _warn(reason: ArrayLike) -> None:
    text = _WARNINGS.get(StopReason(int(np.asarray(reason))))
    if text is not None:  # under `jax.vmap` the callback runs for solves that converged, too
        warnings.warn(text, RuntimeWarning, stacklevel=1)
