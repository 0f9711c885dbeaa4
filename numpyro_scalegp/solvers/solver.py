"""The interface of a solver, and what all iterative ones share."""

import abc
import dataclasses
import enum
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.mesh import divided
from numpyro_scalegp.core.programs import compiled
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
    # Where the value v is random, vv' is no estimate of the solution's outer product. For the first
    # m columns, sum_r weights_r v_r v_r' is one, with these vectors v_r; for the others, v times an
    # independent estimate.
    weights: Float[Array, " r"] | None = None
    vectors: Float[Array, "r n m"] | None = None
    independent: Float[Array, "n l"] | None = None

    def outer_products(
        self, num_columns: int
    ) -> tuple[Float[Array, " r"], Float[Array, "r n {num_columns}"]]:
        """Weights w_r and vectors v_r of the first columns with v v' = E[sum_r w_r v_r v_r']."""
        if self.weights is None or self.vectors is None:
            return jnp.ones(1, self.value.dtype), self.value[None, :, :num_columns]
        return self.weights, self.vectors[:, :, :num_columns]

    def failed_where(self, failed: Bool[Array, ""]) -> "Solution":
        """The same, or a failure with NaN in all that a gradient is made of."""
        arrays = self.value, self.vectors, self.independent
        poisoned: Any = jax.tree.map(lambda array: jnp.where(failed, jnp.nan, array), arrays)
        value, vectors, independent = poisoned
        return self._replace(
            value=value,
            vectors=vectors,
            independent=independent,
            converged=self.converged & ~failed,
            reason=jnp.where(failed, StopReason.FAILED, self.reason).astype(int),
        )


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

    def with_budget(self, max_epochs: int | float | None) -> "AbstractSolver":
        """The solver with another `max_epochs`: itself for None, or where it has no budget."""
        if max_epochs is None or not hasattr(self, "max_epochs"):
            return self
        return dataclasses.replace(self, **{"max_epochs": max_epochs})

    @compiled
    def solve(
        self,
        operator: KernelOperator,
        B: Float[Array, "n k"],
        *,
        guess: Float[Array, "*candidates n k"] | None = None,
        key: Key[Array, ""] | None = None,
        num_averaged: int = 0,
        progress: Int[Array, ""] | None = None,
    ) -> Solution:
        """Solve H V = B.

        Args:
            operator: the matrix H.
            B: right-hand sides, shape (n, k).
            guess: where to start, shape (n, k); None for zeros. Of several guesses, shape
                (p, n, k), each column starts at the linear combination of its own that minimizes
                v'Hv / 2 - b'v. Any guess but None costs one epoch of the budget.
            key: a typed JAX key, for solvers that draw at random; others ignore it.
            num_averaged: how many of the last columns count together, by the mean of their relative
                residuals, as those of an estimator's probes do; every other column counts alone.
            progress: the number of a progress bar, which `GaussianProcess.condition` makes.

        Returns:
            A `Solution`; `converged` is False where it ended above the tolerance, `reason` is
            the cause, and values are NaN where H is not positive definite.

        Raises:
            ValueError: if `B` or `guess` has the wrong shape, `num_averaged` is out of range, or
                there is no `key` for a solver that needs one.
        """
        operator, system = prepare(operator, B, guess)
        return self.run(operator, system._replace(progress=progress), key, num_averaged)

    @abc.abstractmethod
    def run(
        self,
        operator: KernelOperator,
        system: "System",
        key: Key[Array, ""] | None,
        num_averaged: int,
    ) -> Solution:
        """Solve a system that was checked and normalized, as `prepare` does; see `solve`.

        `descend` has the loop for a solver that keeps a solution and its residual, and `finish`
        makes the `Solution`.
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
            The solution of `solve`, and the coefficients of the probe vectors; None from a solver
            that has none.
        """
        return self.run_with_probes(
            *prepare(operator, B, guess), probe_key, num_probes, key, num_averaged, paired
        )

    def run_with_probes(
        self,
        operator: KernelOperator,
        system: "System",
        probe_key: Key[Array, ""],
        num_probes: int,
        key: Key[Array, ""] | None,
        num_averaged: int,
        paired: bool,
    ) -> tuple[Solution, Coefficients | None]:
        """Solve a system that was checked and normalized; see `solve_with_probes`."""
        return self.run(operator, system, key, num_averaged), None


class System(NamedTuple):
    """A linear system with normalized right-hand sides, and where its solution starts."""

    scale: Float[Array, " k"]  # norms of the right-hand sides
    target: Float[Array, "n k"]
    value: Float[Array, "n k"]
    residual: Float[Array, "n k"]
    epochs: int  # what the initial residual has cost
    progress: Int[Array, ""] | None = None  # the number of a progress bar, to which a loop reports


def prepare(
    operator: KernelOperator,
    B: Float[Array, "n k"],
    guess: Float[Array, "*candidates n k"] | None = None,
) -> tuple[KernelOperator, System]:
    """Normalize each right-hand side, and compute the residual of the initial guess."""
    checks.instance("operator", operator, KernelOperator)
    B = checks.as_float(B, "B")
    if B.ndim != 2 or B.shape[0] != operator.size:
        raise ValueError(f"`B` must have shape ({operator.size}, k), got {B.shape}.")
    operator, B, guess = jax.lax.stop_gradient((operator, B.astype(operator.dtype), guess))
    B = divided(B, operator.mesh)
    # The squares of large or small numbers would leave the range of the type.
    largest = jnp.max(jnp.abs(B), axis=0)
    B = B / jnp.where(largest > 0, largest, 1.0)
    norm = jnp.linalg.norm(B, axis=0)
    B, scale = B / jnp.where(norm > 0, norm, 1.0), jnp.where(norm > 0, largest * norm, 1.0)
    if guess is None:
        return operator, System(scale, B, divided(jnp.zeros_like(B), operator.mesh), B, 0)
    guess = checks.as_float(guess, "guess")
    several = guess.ndim == 3
    checks.shape("guess", guess[0] if several else guess, B.shape, why="one start for each column")
    value = divided(guess.astype(B.dtype) / scale, operator.mesh, axis=-2)
    if several:
        return operator, System(scale, B, *_best_combination(operator, B, value), 1)
    return operator, System(scale, B, value, B - operator.matmul(value), 1)


def _best_combination(
    operator: KernelOperator, B: Float[Array, "n k"], candidates: Float[Array, "p n k"]
) -> tuple[Float[Array, "n k"], Float[Array, "n k"]]:
    """Minimize v'Hv / 2 - b'v over each column's candidates; returns the minimum, its residual."""
    p, n, k = candidates.shape
    # Successive solutions are nearly the same: their differences make a better basis.
    basis = jnp.concatenate([candidates[:1], candidates[:-1] - candidates[1:]])
    length = jnp.linalg.norm(basis, axis=1, keepdims=True)
    basis = basis / jnp.where(length > 0, length, 1.0)
    products = operator.matmul(jnp.moveaxis(basis, 0, 1).reshape(n, p * k)).reshape(n, p, k)
    gram = jnp.einsum("ink,njk->kij", basis, products, precision="highest")
    linear = jnp.einsum("ink,nk->ki", basis, B, precision="highest")
    # A candidate that repeats another one, or is zero, takes no part.
    scale = jnp.trace(gram, axis1=1, axis2=2)[:, None, None]
    ridge = jnp.where(scale > 0, 10.0 * p * jnp.finfo(gram.dtype).eps * scale, 1.0)
    ridge = ridge * jnp.eye(p, dtype=gram.dtype)
    weights = jnp.linalg.solve(gram + ridge, linear[..., None])[..., 0]
    value = jnp.einsum("ink,ki->nk", basis, weights, precision="highest")
    return value, B - jnp.einsum("nik,ki->nk", products, weights, precision="highest")


class Course(NamedTuple):
    """How a loop went: its iterations, its epochs without those of the system, and its end."""

    iterations: Int[Array, ""]
    epochs: Float[Array, ""]
    reason: Int[Array, ""]


def finish(
    system: System, value: Float[Array, "n k"], norms: Float[Array, " k"], course: Course
) -> Solution:
    """Undo the normalization; a solve that failed has no entry that could pass for a result."""
    failed = course.reason == StopReason.FAILED
    return Solution(
        jnp.where(failed, jnp.nan, value * system.scale),
        norms,
        course.iterations,
        course.epochs + system.epochs,
        course.reason == StopReason.CONVERGED,
        course.reason,
    )


def solved(value: Float[Array, "n k"], residual: Float[Array, " k"]) -> Solution:
    """A solution that was there already, within the tolerance."""
    none, zero = jnp.zeros((), int), jnp.zeros((), value.dtype)
    reason = jnp.full((), StopReason.CONVERGED, int)
    return Solution(value, residual, none, zero, jnp.ones((), bool), reason)


_WARNINGS = {
    StopReason.BUDGET: (
        "a linear solve ended above its tolerance, and a result rests on it: the budget ended "
        "first. Raise the solver's `max_epochs`, go on with the posterior as `start=` of "
        "`condition`, give the `GaussianProcess` a `state=`, use a stronger preconditioner, or "
        "keep the noise variance from becoming very small (a prior does that). Residuals are in "
        "the posterior's `diagnostics` and the state's `history()`."
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


@jax.jit
def warn_unless_converged(solution: Solution) -> None:
    """Warn on the host, once under Python's default filter, that a result rests on bad solves."""
    jax.lax.cond(
        solution.converged, lambda: None, lambda: jax.debug.callback(_warn, solution.reason)
    )


def _warn(reason: ArrayLike) -> None:
    text = _WARNINGS.get(StopReason(int(np.asarray(reason))))
    if text is not None:  # under `jax.vmap` the callback runs for solves that converged, too
        warnings.warn(text, RuntimeWarning, stacklevel=1)
