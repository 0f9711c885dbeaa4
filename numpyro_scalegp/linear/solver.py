"""The interface of a solver: a linear system, and its solution."""

import abc
import enum
import math
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.core.mesh import divided
from numpyro_scalegp.core.summary import OneLine
from numpyro_scalegp.linear.operator import AbstractOperator, KernelOperator
from numpyro_scalegp.programs.compiled import compiled

_OPERATORS = "one of `sgp.solvers` (`KernelOperator`)"


class StopReason(enum.IntEnum):
    """Why a solver stopped: the values of `Solution.reason`."""

    CONVERGED = 0  # the residuals are within the tolerance
    BUDGET = 1  # `max_epochs` ended first
    PRECISION = 2  # rounding errors prevent further progress, with any budget
    FAILED = 3  # H or B is not finite, or H not positive definite: the solution is NaN


class Coefficients(NamedTuple):
    """The steps for probe vectors that start at zero: a block Lanczos process of P^-1/2 H P^-1/2.

    Its block tridiagonal matrix is L D L', with the curvatures on the diagonal of D and the
    negative triangles below the unit diagonal of L. A function of the matrix is estimated from the
    first `stops[0]` steps, plus `weights[i]` times the change of the estimate from `stops[i - 1]`
    to `stops[i]` steps.
    """

    curvature: Float[Array, "steps groups g g"]  # S'H S
    triangle: Float[Array, "steps groups g g"]  # to the next residuals' basis
    stops: Int[Array, " stages"]
    weights: Float[Array, " stages"]
    start: Float[Array, "groups g g"]  # the probes in terms of the first basis
    log_determinant: Float[Array, ""]  # log|P| of the preconditioner
    residual: Float[Array, " s"]  # of the probes at the end, relative
    is_cut: Bool[Array, ""]  # whether the weights leave out steps that change the estimate


class Solution(NamedTuple):
    """The solution, its residuals and its cost; a failure to converge is a value, not an error."""

    value: Float[Array, "n k"]  # V with H V ~ B
    residual: Float[Array, " k"]  # ||b - H v|| / ||b|| for each column, computed from v
    iterations: Int[Array, ""]  # of the solver
    epochs: Float[Array, ""]  # entries of H computed, in units of n^2
    converged: Bool[Array, ""]  # whether the residuals are within the tolerance
    reason: Int[Array, ""]  # one of `StopReason`
    # If the value v is random, v v' is a biased estimate of the solution's outer product. For the
    # first m columns, sum_r weights_r v_r v_r' with these vectors v_r is unbiased; for the
    # other columns, v times the `independent` estimate is.
    weights: Float[Array, " r"] | None = None
    vectors: Float[Array, "r n m"] | None = None
    independent: Float[Array, "n l"] | None = None
    coefficients: Coefficients | None = None  # of probe vectors, from solvers that support them

    def outer_products(
        self, num_columns: int
    ) -> tuple[Float[Array, " r"], Float[Array, "r n {num_columns}"]]:
        """Weights w_r and vectors v_r of the first columns with v v' = E[sum_r w_r v_r v_r']."""
        if self.weights is None or self.vectors is None:
            return jnp.ones(1, self.value.dtype), self.value[None, :, :num_columns]
        return self.weights, self.vectors[:, :, :num_columns]

    def failed_where(self, failed: Bool[Array, ""]) -> "Solution":
        """This solution, marked failed where `failed`, with NaN in fields that gradients use."""
        arrays = self.value, self.vectors, self.independent
        with_nan: Any = jax.tree.map(lambda array: jnp.where(failed, jnp.nan, array), arrays)
        value, vectors, independent = with_nan
        return self._replace(
            value=value,
            vectors=vectors,
            independent=independent,
            converged=self.converged & ~failed,
            reason=jnp.where(failed, StopReason.FAILED, self.reason).astype(int),
        )


class AbstractSolver(OneLine):
    """A method to solve H V = B for a block of right-hand sides.

    All right-hand sides share each evaluation of the kernel, so 64 cost little more than 16. Solves
    are not differentiated: gradients come from the estimators, which hold solutions fixed.
    """

    @property
    def to_tolerance(self) -> "AbstractSolver":
        """The solver for a posterior, which needs one accurate solution: by default this solver."""
        return self

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
            guess: initial guess, shape (n, k); None for zeros. With several guesses, shape
                (p, n, k), each column starts at the linear combination of its guesses that
                minimizes v'Hv / 2 - b'v. Any guess but None costs one epoch of the budget.
            key: a typed JAX key, for solvers that draw at random; others ignore it.
            num_averaged: number of last columns, such as an estimator's probe vectors, for which
                the mean of their relative residuals must be within the tolerance; every other
                column counts alone.

        Returns:
            A `Solution`. `converged` is False if a residual is above the tolerance, `reason` says
            why the solver stopped, and values are NaN if H is not positive definite.

        Raises:
            ValueError: if `B` or `guess` has the wrong shape, `num_averaged` is out of range, or
                there is no `key` for a solver that needs one.
        """
        chosen = self
        if checks.is_concrete((operator, key)):
            checks.instance("operator", operator, KernelOperator, _OPERATORS)
            chosen = self.chosen(operator, key)
        return chosen._solve(operator, B, guess, Options(key, num_averaged))

    @compiled
    def _solve(
        self, operator: KernelOperator, B: Array, guess: Array | None, options: "Options"
    ) -> Solution:
        return self.solve_system(prepare(operator, B, guess, options))

    def chosen(self, operator: KernelOperator, key: Key[Array, ""] | None) -> "AbstractSolver":
        """The solver that runs, for values that are known: by default this solver.

        A solver that chooses between others does so here, for a program with one of them.
        """
        return self

    def solve_system(self, system: "System") -> Solution:
        """Solve a system that `prepare` made."""
        return self.run(self.init(system.kernel_operator, system.options.key), system)

    def init(self, operator: KernelOperator, key: Key[Array, ""] | None) -> Any:
        """Compute what depends on H and the key alone, such as a factor or a step size."""
        return None

    @abc.abstractmethod
    def run(self, setup: Any, system: "System") -> Solution:
        """Solve a system, given what `init` returned.

        `descend` is the loop for a solver that updates a solution and its residual, and
        `System.solution` makes the `Solution`.
        """


class PreparedSolver(AbstractSolver):
    """A solver with the result of its `init` for one operator."""

    solver: AbstractSolver
    setup: Any

    def init(self, operator: KernelOperator, key: Key[Array, ""] | None) -> Any:
        """Return what `init` of the solver returned."""
        return self.setup

    def run(self, setup: Any, system: "System") -> Solution:
        """Solve a system with the same operator."""
        return self.solver.run(setup, system)


class Probes(eqx.Module):
    """Additional right-hand sides z ~ N(0, P), for the log-determinant of H."""

    key: Key[Array, ""]
    number: int = eqx.field(static=True)


class Options(eqx.Module):
    """Options of one solve."""

    key: Key[Array, ""] | None = None
    num_averaged: int = eqx.field(static=True, default=0)  # number of last columns
    max_epochs: int | float | None = eqx.field(
        static=True, default=None
    )  # in place of the solver's
    probes: Probes | None = None
    # Whether the averaged columns of a random solution need an independent second estimate.
    paired: bool = eqx.field(static=True, default=True)
    in_stretches: bool = eqx.field(static=True, default=False)  # see `iterate`


class Iterate(NamedTuple):
    """An approximate solution v with its residual b - H v."""

    value: Float[Array, "n k"]
    residual: Float[Array, "n k"]


class LoopOutcome(NamedTuple):
    """The iterations of a loop, its epochs without the initial residual, and why it ended."""

    iterations: Int[Array, ""]
    epochs: Float[Array, ""]
    reason: Int[Array, ""]


class System(eqx.Module):
    """H V = B with right-hand sides of norm one, an initial guess and options."""

    operator: AbstractOperator
    target: Float[Array, "n k"]
    start: Iterate
    scale: Float[Array, " k"]  # norms of the right-hand sides
    epochs: int = eqx.field(static=True)  # the cost of the initial residual
    options: Options

    @property
    def kernel_operator(self) -> KernelOperator:
        """The operator, for solvers that read its entries.

        Raises:
            TypeError: if it is known by its products alone.
        """
        operator: Any = self.operator
        return checks.instance("operator", operator, KernelOperator)

    def num_iterations(self, max_epochs: int | float, epochs_per_iteration: float = 1.0) -> int:
        """The iterations that a budget allows after the initial residual, at least one."""
        if self.options.max_epochs is not None:
            max_epochs = self.options.max_epochs
        budget = (max_epochs - self.epochs) / epochs_per_iteration + 1e-6
        return max(1, math.floor(min(budget, jnp.iinfo(jnp.int32).max)))

    def largest(self, norms: Float[Array, " k"]) -> Float[Array, ""]:
        """The largest residual: of a single column, or the mean of the averaged columns."""
        num_averaged = self.options.num_averaged
        num_single = norms.shape[0] - num_averaged
        single = jnp.max(norms[:num_single], initial=0.0)
        return jnp.maximum(single, jnp.mean(norms[num_single:])) if num_averaged else single

    def solution(
        self, value: Float[Array, "n k"], norms: Float[Array, " k"], outcome: LoopOutcome
    ) -> Solution:
        """Undo the normalization; all values are NaN if the solve failed."""
        failed = outcome.reason == StopReason.FAILED
        return Solution(
            jnp.where(failed, jnp.nan, value * self.scale),
            norms,
            outcome.iterations,
            outcome.epochs + self.epochs,
            outcome.reason == StopReason.CONVERGED,
            outcome.reason,
        )


def prepare(
    operator: AbstractOperator,
    B: Float[Array, "n k"],
    guess: Float[Array, "*candidates n k"] | None,
    options: Options,
) -> System:
    """Check and normalize each right-hand side, and compute the residual of the initial guess."""
    checks.instance("operator", operator, AbstractOperator, _OPERATORS)
    B = checks.as_float(B, "B")
    if B.ndim != 2 or B.shape[0] != operator.size:
        raise ValueError(f"`B` must have shape ({operator.size}, k), got {B.shape}.")
    if checks.count("num_averaged", options.num_averaged, 0) > B.shape[1]:
        raise ValueError(
            f"`num_averaged` must be from 0 to the number of columns, {B.shape[1]}, got "
            f"{options.num_averaged}."
        )
    operator, B, guess = jax.lax.stop_gradient((operator, B.astype(operator.dtype), guess))
    B, scale = normalized(divided(B, operator.mesh))
    if guess is None:
        start = Iterate(divided(jnp.zeros_like(B), operator.mesh), B)
        return System(operator, B, start, scale, 0, options)
    guess = checks.as_float(guess, "guess")
    has_candidates = guess.ndim == 3
    checks.shape(
        "guess", guess[0] if has_candidates else guess, B.shape, why="a guess for each column"
    )
    value = divided(guess.astype(B.dtype) / scale, operator.mesh, axis=-2)
    if has_candidates:
        start = _best_combination(operator, B, value)
    else:
        start = Iterate(value, B - operator.matmul(value))
    return System(operator, B, start, scale, 1, options)


def normalized(B: Float[Array, "n k"]) -> tuple[Float[Array, "n k"], Float[Array, " k"]]:
    """Columns scaled to norm one, and their norms; 1 for a column of zeros."""
    # Squares of large or small entries would overflow or underflow.
    largest = jnp.max(jnp.abs(B), axis=0)
    B = B / jnp.where(largest > 0, largest, 1.0)
    norm = jnp.linalg.norm(B, axis=0)
    return B / jnp.where(norm > 0, norm, 1.0), jnp.where(norm > 0, largest * norm, 1.0)


def _best_combination(
    operator: AbstractOperator, B: Float[Array, "n k"], candidates: Float[Array, "p n k"]
) -> Iterate:
    """Minimize v'Hv / 2 - b'v over the linear combinations of each column's candidates."""
    p, n, k = candidates.shape
    # Successive solutions are nearly the same: their differences make a better basis.
    basis = jnp.concatenate([candidates[:1], candidates[:-1] - candidates[1:]])
    length = jnp.linalg.norm(basis, axis=1, keepdims=True)
    basis = basis / jnp.where(length > 0, length, 1.0)
    products = operator.matmul(jnp.moveaxis(basis, 0, 1).reshape(n, p * k)).reshape(n, p, k)
    gram = jnp.einsum("ink,njk->kij", basis, products, precision="highest")
    linear = jnp.einsum("ink,nk->ki", basis, B, precision="highest")
    # The ridge removes candidates that are zero or repeat another candidate.
    scale = jnp.trace(gram, axis1=1, axis2=2)[:, None, None]
    ridge = jnp.where(scale > 0, 10.0 * p * jnp.finfo(gram.dtype).eps * scale, 1.0)
    ridge = ridge * jnp.eye(p, dtype=gram.dtype)
    weights = jnp.linalg.solve(gram + ridge, linear[..., None])[..., 0]
    value = jnp.einsum("ink,ki->nk", basis, weights, precision="highest")
    return Iterate(value, B - jnp.einsum("nik,ki->nk", products, weights, precision="highest"))


def solved(value: Float[Array, "n k"], residual: Float[Array, " k"]) -> Solution:
    """A stored solution that is within the tolerance."""
    no_iterations, zero = jnp.zeros((), int), jnp.zeros((), value.dtype)
    reason = jnp.full((), StopReason.CONVERGED, int)
    return Solution(value, residual, no_iterations, zero, jnp.ones((), bool), reason)


_WARNINGS = {
    StopReason.BUDGET: (
        "a linear solve ended above its tolerance, and a result depends on it: the budget ended "
        "first. Raise the solver's `max_epochs`, resume with the posterior as `start=` of "
        "`condition`, give the `GaussianProcess` a `state=`, use a stronger preconditioner, or "
        "keep the noise variance from becoming very small (a prior does that). Residuals are in "
        "the posterior's `diagnostics` and the state's `history()`."
    ),
    StopReason.PRECISION: (
        "a linear solve ended above its tolerance, and a result depends on it: rounding errors "
        "prevent further progress, with any budget. Keep the noise variance from becoming very "
        "small (a prior does that), remove duplicate rows, use a stronger preconditioner, raise "
        "the solver's `tolerance` to what it can reach, or work in float64. Residuals are in the "
        "posterior's `diagnostics` and the state's `history()`."
    ),
    StopReason.FAILED: (
        "a linear solve failed: the covariance matrix is not positive definite or not finite, or "
        "the observations are not finite, and the result is NaN. Check them for NaN; it is "
        "harmless if an optimizer or a sampler only tried such hyperparameters."
    ),
}


def warn_unless_converged(solution: Solution) -> None:
    """Warn on the host that a result depends on a solve that did not converge."""
    call_where(~solution.converged, _warn, solution.reason)


def _warn(reason: ArrayLike) -> None:
    warnings.warn(_WARNINGS[StopReason(int(np.asarray(reason)))], RuntimeWarning, stacklevel=1)
