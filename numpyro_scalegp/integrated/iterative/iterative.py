"""The base class of the estimators that solve linear systems iteratively."""

import abc
import dataclasses
import functools
import math
import zlib
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt

from numpyro_scalegp.core import checks
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.integrated.iterative.estimate import (
    Estimate,
    differentiable,
    stopping_variance,
)
from numpyro_scalegp.integrated.iterative.lanczos import LogDeterminant, log_determinant
from numpyro_scalegp.integrated.iterative.solver_state import (
    Memory,
    Records,
    SolverState,
    Start,
    check_start,
    start_from_posterior,
)
from numpyro_scalegp.linear.auto_solver import AutoSolver
from numpyro_scalegp.linear.conjugate_gradients import ConjugateGradients
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.progress import watched
from numpyro_scalegp.linear.solver import (
    AbstractSolver,
    Options,
    Probes,
    Solution,
    StopReason,
    System,
    prepare,
    solved,
    warn_unless_converged,
)
from numpyro_scalegp.numerics.derivatives import refuse_derivatives
from numpyro_scalegp.processes.pathwise import PathwisePosterior
from numpyro_scalegp.programs import functions, stretches
from numpyro_scalegp.programs.comparison import begins_with
from numpyro_scalegp.programs.compiled import compiled

# Solves of fewer rows are one program, without a progress bar.
_LEAST_ROWS = 1000
_REFUSAL = (
    "the posterior of an iterative estimator has no derivatives with respect to hyperparameters or "
    "observations, only with respect to the new inputs: its solution is held fixed. "
    "Differentiate the posterior of `sgp.estimators.Cholesky()`, or wrap the arguments of "
    "`condition` in `jax.lax.stop_gradient`."
)


class AbstractIterative(AbstractEstimator):
    """log p(y) and its gradient from solves of H [v, u_1 .. u_s] = [y, b_1 .. b_s].

    log p(y) = -(y'v + log|H| + n log 2 pi) / 2, with gradient
    v'dH v / 2 - tr(H^-1 dH) / 2 - v'dy, where tr(H^-1 dH) = E[u_j'dH b_j], or E[u_j'dH u_j] if
    the b_j are draws from N(0, H). The gradient holds the solutions fixed and differentiates the
    quadratic forms block by block; it does not differentiate through a solver.
    """

    is_stochastic: ClassVar[bool] = True
    takes_turns: ClassVar[bool] = True
    # Whether the b_j are draws from N(0, H), so that their solutions give posterior samples and
    # stand on both sides of the quadratic forms in the trace.
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
        """Warn about the frozen draw; raise if the value has no log-determinant.

        Raises:
            ValueError: if `num_logdet_probes` is 0.
        """
        if self.num_logdet_probes == 0:
            raise ValueError(
                f"`num_logdet_probes=0` of `{type(self).__name__}` omits the log-determinant from "
                "the value, which suits only `SVI` with optax, since that uses only the gradient. "
                "NUTS, HMC and other users of a potential energy would sample from a wrong "
                "density, and the line search of `numpyro.optim.Minimize` would minimize it: use "
                "`estimator=sgp.estimators.Cholesky()`."
            )
        super().check_frozen_key()

    @abc.abstractmethod
    def targets(
        self, operator: KernelOperator, key: Key[Array, ""]
    ) -> Float[Array, "n num_probes"]:
        """The right-hand sides b_j of the probes."""

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
            guess: initial guess, shape (n, m + num_probes); or p guesses, shape
                (p, n, m + num_probes), whose best linear combination the solver starts from.
            solver_key: a typed JAX key for the solver's draws, by default derived from `key`.
        """
        operator, residual, guess = jax.lax.stop_gradient((operator, residual, guess))
        probe_key, logdet_key, default_key = jax.random.split(key, 3)
        solver_key = default_key if solver_key is None else solver_key
        targets = self.targets(operator, probe_key).astype(operator.dtype)
        residual = residual.astype(operator.dtype)
        B = jnp.concatenate([residual, targets], axis=1)
        probes = Probes(logdet_key, self.num_logdet_probes)
        options = Options(solver_key, self.num_probes, probes=probes, paired=self.stores_samples)
        solution, logdet = self._solve(prepare(operator, B, guess, options), probes)
        m = residual.shape[1]
        fit = jnp.sum(residual * solution.value[:, :m], axis=0)
        value = -0.5 * (fit + logdet.value + operator.size * math.log(2.0 * math.pi))
        # A random stopping index adds correlated errors to both terms.
        stopping = jnp.sqrt(stopping_variance(solution, residual)) + logdet.stopping_error
        error = 0.5 * jnp.hypot(logdet.standard_error, jnp.max(stopping))
        failed = ~jnp.all(jnp.isfinite(value)) | (solution.reason == StopReason.FAILED)
        solution = solution.failed_where(failed)
        solutions = solution.value[:, m:]
        # With random solutions, the right side needs an independent estimate.
        right = solution.independent if self.stores_samples else targets
        value, error = (jnp.where(failed, jnp.nan, term) for term in (value, error))
        return Estimate(value, error, solution, solutions, right)

    def _solve(self, system: System, probes: Probes) -> tuple[Solution, LogDeterminant]:
        """The solution and log|H|, from a separate Lanczos process if the solver has none."""
        solution, operator = self.solver.solve_system(system), system.operator
        if probes.number == 0:
            zero = jnp.zeros((), operator.dtype)
            return solution, LogDeterminant(zero, jnp.full_like(zero, jnp.inf), zero)
        coefficients: Any = solution.coefficients
        if coefficients is None:
            lanczos = ConjugateGradients(max_epochs=self.logdet_epochs)
            B = system.target[:, :0]
            run = lanczos.solve_system(prepare(operator, B, None, Options(probes=probes)))
            coefficients = run.coefficients
            solution = solution._replace(epochs=solution.epochs + run.epochs)
        solution = solution._replace(coefficients=None)
        return solution, log_determinant(coefficients, operator.size, probes.number)

    def log_prob(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"], **options: Any
    ) -> Float[Array, "*batch"]:
        """The log density of `residual` under N(0, H); see `AbstractEstimator.log_prob`.

        Raises:
            ValueError: if there is neither a key nor a state, or the state has a different shape.
            TypeError: for forward-mode or second derivatives.
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
        """The result of `log_prob`, with its gradient, and the linear solve behind it."""
        rows = residual.reshape(-1, residual.shape[-1]).astype(operator.dtype)
        probe_key, guess, solver_key = key, None, None
        if state is not None:
            if rows.shape[0] != 1:
                raise ValueError(
                    f"`y` must have shape ({rows.shape[1]},) where a solver state is used, got "
                    f"{residual.shape}."
                )
            memory = state.read((operator.size, 1 + self.num_probes))
            guess = self._warm_start(memory)
            if not self.fresh_probes:
                probe_key = memory.key()
                # The probes are fixed; the solver still draws afresh at each step.
                solver_key = jax.random.fold_in(jax.random.fold_in(probe_key, 1), memory.step)
        probe_key = self.required_key(probe_key)
        estimate = self.estimate(
            operator, rows.T, key=probe_key, guess=guess, solver_key=solver_key
        )
        solution = estimate.solution
        if state is None:
            warn_unless_converged(solution)
        else:
            record = Records(
                solution.residual[0],
                jnp.mean(solution.residual[1:]),
                solution.epochs,
                solution.converged,
                estimate.standard_error,
            )
            state.write(operator, self._fingerprint(), solution.value, rows[0], record, key)
        value = differentiable(estimate, operator, rows)
        return value.reshape(residual.shape[:-1]), solution

    def prepare(
        self, state: SolverState, operator: KernelOperator, key: Key[Array, ""] | None
    ) -> None:
        """Initialize the state if it is empty; see `SolverState.prepare`."""
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

        The solve starts from the solution of `start`, of the state's last posterior or of the
        state's last step, with zeros for appended rows. It is skipped if that solution is for the
        same hyperparameters, inputs, observations and draws, and within the solver's tolerance. A
        solution above the tolerance warns once. By default s is `num_probes`, or the number of
        samples of `start`, and the budget is the solver's; see `AbstractEstimator.condition`.

        Raises:
            ValueError: if there is no key, state or start, or if the first rows of the inputs are
                not the inputs of `start`.
            TypeError: if the posterior is differentiated with respect to hyperparameters or
                observations.
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
        solver = self.solver.to_tolerance
        H, residual = refuse_derivatives(_REFUSAL, (operator, y - mean_function(operator.X)))
        system = H, residual.astype(H.dtype), draws
        initial = self._start(system, state, start, getattr(solver, "tolerance", 0.0))
        args = (*system, solver_key, initial, checks.plain(max_epochs))
        if checks.is_concrete((system, solver_key, initial)):
            solution = self._solution_on_host(solver, args, progress_bar=progress_bar)
        else:
            solution = self._solution(solver, *args)
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

    def _solution_on_host(
        self, solver: AbstractSolver, args: tuple[Any, ...], *, progress_bar: bool
    ) -> Solution:
        """`_solution` with all decisions on the host, and a progress bar."""
        operator, target, draws, solver_key, start, max_epochs = args
        if start is not None and start.is_solution:
            return start.last
        guess = None if start is None else start.candidates
        chosen = solver.chosen(operator, solver_key)
        options = Options(solver_key, draws.num_draws, max_epochs)
        if operator.size < _LEAST_ROWS:
            return self._solved(chosen, operator, target, draws, guess, options)
        options = dataclasses.replace(options, in_stretches=True)
        args = chosen, operator, target, draws, guess, options
        run = functools.partial(stretches.run, self._solved, args)
        return watched(run) if progress_bar else run(None)

    @compiled
    def _solved(
        self,
        solver: AbstractSolver,
        operator: KernelOperator,
        target: Float[Array, " n"],
        draws: PriorDraws,
        guess: Float[Array, "p n k"] | None,
        options: Options,
    ) -> Solution:
        xi = draws.observations(operator.kernel, operator.X, operator.noise())
        B = jnp.concatenate([target[:, None], xi.astype(operator.dtype)], axis=1)
        return solver.solve_system(prepare(operator, B, guess, options))

    @compiled
    def _solution(
        self,
        solver: AbstractSolver,
        operator: KernelOperator,
        target: Float[Array, " n"],
        draws: PriorDraws,
        solver_key: Key[Array, ""],
        start: Start | None,
        max_epochs: int | float | None,
    ) -> Solution:
        """The solution of `start` if it solves this system, otherwise the result of a solve."""
        options = Options(solver_key, draws.num_draws, max_epochs)
        solve = functools.partial(self._solved, solver, operator, target, draws, options=options)
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
        """The start of a solve: from `start`, the state's last posterior, or the state's memory."""
        if start is not None:
            return start_from_posterior(start, *system, tolerance)
        if state is None:
            return None
        from_memory = self._start_from_memory(state, *system, tolerance)
        last = state.posterior
        if last is None or not begins_with(system[0].X, last.X):
            return from_memory
        from_last = start_from_posterior(last, *system, tolerance)
        candidates = from_memory.candidates.at[0].set(from_last.candidates[0])
        return from_last._replace(candidates=candidates)

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
        candidates = self._warm_start(memory).astype(operator.dtype)
        is_solution, last = state.last(operator, target)
        is_solution &= memory.estimator == self._fingerprint()
        is_solution &= jnp.max(last.residual[:2]) <= tolerance
        return Start(candidates, is_solution, last)

    @compiled
    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, H) by random features, in O(n num_features) per draw."""
        draws = PriorDraws.from_key(key, num_samples, self.num_features, operator.X)
        return draws.observations(operator.kernel, operator.X, operator.noise()).T

    def _warm_start(self, memory: Memory) -> Float[Array, "p n k"]:
        """The last solutions, with zeros for probes that are not the current ones."""
        is_data = jnp.arange(memory.solutions.shape[2]) == 0
        same_probes = memory.estimator == self._fingerprint()
        is_usable = is_data if self.fresh_probes else is_data | same_probes
        return jnp.where(is_usable, memory.solutions, 0.0)

    def _fingerprint(self) -> UInt[Array, ""]:
        """A hash of the settings, besides key, operator and tolerance, that set the solutions."""
        kind = type(self)
        # A random solution does not serve as a posterior, regardless of its recorded residual.
        is_random = self.solver.to_tolerance is not self.solver
        settings = kind.__module__, kind.__qualname__, self.num_probes, self.num_features, is_random
        return jnp.asarray(zlib.crc32(repr(settings).encode()), jnp.uint32)
