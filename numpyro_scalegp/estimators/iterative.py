"""What the estimators that solve linear systems iteratively have in common."""

import abc
import math
import zlib
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt

from numpyro_scalegp.core import checks, functions
from numpyro_scalegp.core.comparison import begins_with
from numpyro_scalegp.core.derivatives import refuse_derivatives
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.estimators.estimate import (
    Estimate,
    differentiable,
    stopping_variance,
)
from numpyro_scalegp.estimators.estimator import AbstractEstimator
from numpyro_scalegp.estimators.lanczos import LogDeterminant, log_determinant
from numpyro_scalegp.estimators.solver_state import Memory, Records, SolverState
from numpyro_scalegp.estimators.starts import Start, check_start, from_posterior
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.posteriors.pathwise import PathwisePosterior
from numpyro_scalegp.solvers import (
    AbstractSolver,
    AutoSolver,
    ConjugateGradients,
    KernelOperator,
    Solution,
    StopReason,
)
from numpyro_scalegp.solvers.progress import watched
from numpyro_scalegp.solvers.solver import prepare, solved, warn_unless_converged

_FIXED = (
    "the posterior of an iterative estimator has derivatives in the inputs that it is evaluated "
    "at, and none in hyperparameters or observations: its solution is held fixed. Differentiate "
    "that of `sgp.estimators.Cholesky()`, or wrap the arguments of `condition` in "
    "`jax.lax.stop_gradient`."
)


class AbstractIterative(AbstractEstimator):
    """log p(y) and its gradient from solves of H [v, u_1 .. u_s] = [y, b_1 .. b_s].

    log p(y) = -(y'v + log|H| + n log 2 pi) / 2, with gradient
    v'dH v / 2 - tr(H^-1 dH) / 2 - v'dy, where tr(H^-1 dH) = E[u_j'dH b_j], or E[u_j'dH u_j] where
    the b_j are draws from N(0, H). Solutions are held fixed and the quadratic forms
    differentiated block by block, so that nothing is differentiated through a solver.
    """

    is_stochastic: ClassVar[bool] = True
    takes_turns: ClassVar[bool] = True
    # Whether the probes' solutions are those of posterior samples: then they stand on both sides of
    # the trace's quadratic forms.
    stores_samples: ClassVar[bool] = False

    solver: AbstractSolver = AutoSolver()
    num_probes: int = eqx.field(static=True, converter=checks.plain, default=64)
    num_features: int = eqx.field(static=True, converter=checks.plain, default=2000)
    num_logdet_probes: int = eqx.field(
        static=True, converter=checks.plain, default=16, kw_only=True
    )
    logdet_epochs: int = eqx.field(static=True, converter=checks.plain, default=30, kw_only=True)
    fresh_probes: bool = eqx.field(static=True, converter=checks.plain, default=False, kw_only=True)
    num_solutions: int = eqx.field(static=True, converter=checks.plain, default=2, kw_only=True)
    num_records: int = eqx.field(static=True, converter=checks.plain, default=10_000, kw_only=True)

    def __check_init__(self) -> None:
        checks.instance("solver", self.solver, AbstractSolver)
        checks.count("num_probes", self.num_probes)
        checks.count("num_features", self.num_features, 2, even=True)
        checks.count("num_logdet_probes", self.num_logdet_probes, 0)
        checks.count("logdet_epochs", self.logdet_epochs)
        checks.instance("fresh_probes", self.fresh_probes, bool, "True or False")
        checks.count("num_solutions", self.num_solutions)
        checks.count("num_records", self.num_records)

    def check_frozen_key(self) -> None:
        """Warn of one frozen draw, and raise for a value without its log-determinant.

        Raises:
            ValueError: if `num_logdet_probes` is 0.
        """
        if self.num_logdet_probes == 0:
            raise ValueError(
                f"`num_logdet_probes=0` of `{type(self).__name__}` leaves the log-determinant out "
                "of the value, which serves `SVI` with optax, where the gradient alone counts. "
                "NUTS, HMC and other users of a potential energy would sample from another "
                "density, and line searches such as that of `numpyro.optim.Minimize` would "
                "minimize it: take `estimator=sgp.estimators.Cholesky()` there."
            )
        super().check_frozen_key()

    @abc.abstractmethod
    def targets(
        self, operator: KernelOperator, key: Key[Array, ""]
    ) -> Float[Array, "n num_probes"]:
        """The probes' right-hand sides b_j."""

    @compiled
    def estimate(
        self,
        operator: KernelOperator,
        residual: Float[Array, "n m"],
        *,
        key: Key[Array, ""],
        guess: Float[Array, "*candidates n k"] | None = None,
        solver_key: Key[Array, ""] | None = None,
    ) -> Estimate:
        """Estimate log N(y; 0, H) for each column y of `residual`, without a derivative.

        Args:
            operator: H.
            residual: observations minus the mean, shape (n, m).
            key: a typed JAX key for the probes.
            guess: where the solutions start, shape (n, m + num_probes) or, for the best
                combination of several, (p, n, m + num_probes).
            solver_key: a typed JAX key for the solver's own draws, by default from `key`.

        Returns:
            An `Estimate`.
        """
        operator, residual, guess = jax.lax.stop_gradient((operator, residual, guess))
        probe_key, logdet_key, own_key = jax.random.split(key, 3)
        solver_key = own_key if solver_key is None else solver_key
        targets = self.targets(operator, probe_key).astype(operator.dtype)
        residual = residual.astype(operator.dtype)
        B = jnp.concatenate([residual, targets], axis=1)
        solution, logdet = self._solve(operator, B, guess, logdet_key, solver_key)
        m = residual.shape[1]
        fit = jnp.sum(residual * solution.value[:, :m], axis=0)
        value = -0.5 * (fit + logdet.value + operator.size * math.log(2.0 * math.pi))
        # What stops at random adds to the errors: in both terms, and not independently.
        stopping = jnp.sqrt(stopping_variance(solution, residual)) + logdet.stopping_error
        error = 0.5 * jnp.hypot(logdet.standard_error, jnp.max(stopping))
        failed = ~jnp.all(jnp.isfinite(value)) | (solution.reason == StopReason.FAILED)
        solution = solution.failed_where(failed)
        solutions = solution.value[:, m:]
        # Of solutions that are random, the other side takes a second estimate.
        right = solution.independent if self.stores_samples else targets
        value, error = (jnp.where(failed, jnp.nan, found) for found in (value, error))
        return Estimate(value, error, solution, solutions, right)

    def _solve(
        self,
        operator: KernelOperator,
        B: Float[Array, "n k"],
        guess: Float[Array, "*candidates n k"] | None,
        logdet_key: Key[Array, ""],
        solver_key: Key[Array, ""],
    ) -> tuple[Solution, LogDeterminant]:
        num_probes = self.num_logdet_probes
        solution, coefficients = self.solver.solve_with_probes(
            operator,
            B,
            logdet_key,
            num_probes,
            guess=guess,
            key=solver_key,
            num_averaged=self.num_probes,
            paired=self.stores_samples,
        )
        if num_probes == 0:
            zero = jnp.zeros((), operator.dtype)
            return solution, LogDeterminant(zero, jnp.full_like(zero, jnp.inf), zero)
        if coefficients is None:
            lanczos = ConjugateGradients(max_epochs=self.logdet_epochs)
            run, coefficients = lanczos.run_with_probes(
                *prepare(operator, B[:, :0]), logdet_key, num_probes, None, 0, False
            )
            solution = solution._replace(epochs=solution.epochs + run.epochs)
        return solution, log_determinant(coefficients, operator.size, num_probes)

    def log_prob(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"], **options: Any
    ) -> Float[Array, "*batch"]:
        """The log density of `residual` under N(0, H); see `AbstractEstimator.log_prob`.

        Raises:
            ValueError: if there is neither a key nor a state, or the state has another shape.
            TypeError: in forward-mode differentiation, and in second derivatives.
        """
        return self.evaluate(operator, residual, **options)[0]

    def evaluate(
        self,
        operator: KernelOperator,
        residual: Float[Array, "*batch n"],
        *,
        key: Key[Array, ""] | None = None,
        state: SolverState | None = None,
    ) -> tuple[Float[Array, "*batch"], Solution]:
        """What `log_prob` returns, with its gradient, and the solution that it rests on."""
        rows = residual.reshape(-1, residual.shape[-1]).astype(operator.dtype)
        probe_key, guess, solver_key = key, None, None
        if state is not None:
            if rows.shape[0] != 1:
                raise ValueError(
                    f"`y` must have shape ({rows.shape[1]},) where a solver state is used, got "
                    f"{residual.shape}."
                )
            memory = state.read((operator.size, 1 + self.num_probes))
            guess = self._of_same_probes(memory)
            if not self.fresh_probes:
                probe_key = memory.key()
                # The solver's own draws need not be the same again.
                solver_key = jax.random.fold_in(jax.random.fold_in(probe_key, 1), memory.step)
        probe_key = self.required_key(probe_key)
        found = self.estimate(operator, rows.T, key=probe_key, guess=guess, solver_key=solver_key)
        if state is None:
            warn_unless_converged(found.solution)
        else:
            solution = found.solution
            record = Records(
                solution.residual[0],
                jnp.mean(solution.residual[1:]),
                solution.epochs,
                solution.converged,
                found.standard_error,
            )
            state.write(operator, self._fingerprint(), solution.value, rows[0], record, key)
        value = differentiable(found, operator, rows)
        return value.reshape(residual.shape[:-1]), found.solution

    def prepare(
        self, state: SolverState, operator: KernelOperator, key: Key[Array, ""] | None
    ) -> None:
        """Give a state its shape, if it is empty; see `SolverState.prepare`."""
        state.prepare(
            operator,
            key,
            num_columns=1 + self.num_probes,
            num_solutions=self.num_solutions,
            num_records=self.num_records,
        )

    def condition(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: functions.RowsFunction,
        *,
        key: Key[Array, ""] | None = None,
        state: SolverState | None = None,
        num_samples: int | None = None,
        max_epochs: int | float | None = None,
        start: PathwisePosterior | None = None,
        progress_bar: bool = True,
    ) -> PathwisePosterior:
        """Solve H [v, u_1 .. u_s] = [y - m(X), xi_1 .. xi_s] for pathwise posterior samples.

        A solution that belongs to these very hyperparameters, inputs, observations and draws, and
        is within the solver's tolerance, is taken as it is, be it that of `start`, of the state's
        last posterior or of its last step; any other is where the solve starts, with zeros for rows
        that were appended to its own. A solution above its tolerance warns once. By default s is
        `num_probes`, or that of `start`, and the budget the solver's own; see
        `AbstractEstimator.condition`.

        Raises:
            ValueError: if there is neither a key nor a state nor a start, or the inputs do not
                begin with those of the start.
            TypeError: where the posterior is differentiated in hyperparameters or observations.
        """
        if start is not None:
            check_start(start, operator.X)
            key = start.draws.key if key is None else key
        elif state is not None and not (self.fresh_probes and key is not None):
            key = state.memory.key()
        probe_key, _, solver_key = jax.random.split(self.required_key(key), 3)
        if start is not None and num_samples in (None, start.num_samples):
            draws = start.draws
        else:
            count = self.num_probes if num_samples is None else num_samples
            draws = PriorDraws.from_key(probe_key, count, self.num_features, operator.X)
        solver = self.solver.to_tolerance.with_budget(max_epochs)
        H, residual = refuse_derivatives(_FIXED, (operator, y - mean_function(operator.X)))
        system = H, residual.astype(H.dtype), draws
        begin = self._start(system, state, start, getattr(solver, "tolerance", 0.0))
        solution = watched(
            lambda progress: self._solution(solver, *system, solver_key, begin, progress),
            operator.size,
            progress_bar=progress_bar and checks.is_concrete((system, solver_key, begin)),
        )
        warn_unless_converged(solution)
        posterior = PathwisePosterior(
            kernel=operator.kernel,
            X=operator.X,
            y=y,
            noise_variance=operator.noise_variance,
            mean_function=mean_function,
            solver=self.solver,
            solution=solution,
            draws=draws,
        )
        if state is not None:
            state.keep(posterior)
        return posterior

    @compiled
    def _solution(
        self,
        solver: AbstractSolver,
        operator: KernelOperator,
        target: Float[Array, " n"],
        draws: PriorDraws,
        solver_key: Key[Array, ""],
        start: Start | None,
        progress: Int[Array, ""] | None,
    ) -> Solution:
        """The solution that is there, if it is the one for all this, or another solve."""

        def solve(guess: Array | None) -> Solution:
            xi = draws.observations(operator.kernel, operator.X, operator.noise())
            B = jnp.concatenate([target[:, None], xi.astype(operator.dtype)], axis=1)
            return solver.solve(
                operator,
                B,
                guess=guess,
                key=solver_key,
                num_averaged=draws.num_draws,
                progress=progress,
            )

        if start is None:
            return solve(None)
        return jax.lax.cond(start.is_solution, lambda: start.last, lambda: solve(start.candidates))

    def _start(
        self,
        system: tuple[KernelOperator, Float[Array, " n"], PriorDraws],
        state: SolverState | None,
        start: PathwisePosterior | None,
        tolerance: float,
    ) -> Start | None:
        """Where a posterior's solve starts: `start`, the state's last posterior, or its memory."""
        if start is not None:
            return from_posterior(start, *system, tolerance)
        if state is None:
            return None
        found = self._start_from_memory(state, *system, tolerance)
        last = state.posterior
        if last is None or not begins_with(system[0].X, last.X):
            return found
        begin = from_posterior(last, *system, tolerance)
        return begin._replace(candidates=found.candidates.at[0].set(begin.candidates[0]))

    def _start_from_memory(
        self,
        state: SolverState,
        operator: KernelOperator,
        target: Float[Array, " n"],
        draws: PriorDraws,
        tolerance: float,
    ) -> Start:
        if state.memory.X.shape[0] < operator.size:
            state = state.with_rows(operator.X)
        memory = state.read((operator.size, 1 + self.num_probes), last=True)
        has_samples = self.stores_samples and self.solver.to_tolerance is self.solver
        if not has_samples or self.fresh_probes or draws.num_draws != self.num_probes:
            value = jnp.zeros((operator.size, 1 + draws.num_draws), operator.dtype)
            value = value.at[:, 0].set(memory.solutions[0, :, 0])
            residual = jnp.full(1 + draws.num_draws, jnp.inf, value.dtype)
            return Start(value[None], jnp.zeros((), bool), solved(value, residual))
        candidates = self._of_same_probes(memory).astype(operator.dtype)
        same, last = state.last(operator, target)
        same &= memory.estimator == self._fingerprint()
        same &= jnp.max(last.residual[:2]) <= tolerance
        return Start(candidates, same, last)

    @compiled
    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, H) by random features, in O(n num_features) a draw."""
        draws = PriorDraws.from_key(key, num_samples, self.num_features, operator.X)
        return draws.observations(operator.kernel, operator.X, operator.noise()).T

    def _of_same_probes(self, memory: Memory) -> Float[Array, "p n k"]:
        """The data's columns, and the others if they belong to the probes in use."""
        is_data = jnp.arange(memory.solutions.shape[2]) == 0
        same_probes = memory.estimator == self._fingerprint()
        kept = is_data if self.fresh_probes else is_data | same_probes
        return jnp.where(kept, memory.solutions, 0.0)

    def _fingerprint(self) -> UInt[Array, ""]:
        """What the probes' columns depend on, besides a key, the operator and the tolerance."""
        kind = type(self)
        # A solution that is random is none for a posterior, whatever residual its record has.
        is_random = self.solver.to_tolerance is not self.solver
        parts = kind.__module__, kind.__qualname__, self.num_probes, self.num_features, is_random
        return jnp.asarray(zlib.crc32(repr(parts).encode()), jnp.uint32)
