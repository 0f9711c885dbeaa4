"""Conjugate gradients stopped at random, with weights that remove the bias."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.truncated.stopping import StoppingTime, decay_and_minimum
from numpyro_scalegp.linear.conjugate_gradients import (
    ConjugateGradients,
    Recorder,
    iterate_blocks,
)
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.preconditioners import (
    AbstractPreconditioner,
    Identity,
    PreconditionerFactor,
)
from numpyro_scalegp.linear.solver import (
    AbstractSolver,
    Coefficients,
    Solution,
    StopReason,
    System,
)

# A run that stalls from rounding errors above this relative residual has not converged.
_TOLERANCE = 1e-2


class RussianRouletteCG(AbstractSolver):
    """Conjugate gradients with Russian roulette: unbiased solutions at a chosen expected cost.

    Iteration j of conjugate gradients adds a term D_j to the solution V = sum_j D_j. With a random
    stopping index J, with P(J = j) proportional to exp(-decay j) from `min_iterations` to
    `max_iterations`, the sum over j <= J of D_j / P(J >= j) has mean V, whereas truncating at a
    fixed iteration is biased. The run ends when the residual is at rounding error; the remaining
    terms are then zero.

    The gradient has quadratic forms in a solution v, and the product of the weighted sum with
    itself would be biased. So the outer products of the iterates v_i form a second sum,
    vv' = sum_i (v_i v_i' - v_(i-1) v_(i-1)'), truncated at the same index: `weights` and `vectors`
    of the solution. This sum needs the iterates in memory, so J is rounded down to one of the
    `checkpoints`, whose distances increase. Averaged columns (the probe vectors of an estimator)
    that occur in quadratic forms have a second, `independent` estimate with a separate index
    instead.

    `residual` is from the last, unweighted iterate. `converged` is True, since the expectation is
    not truncated: an early stop costs variance, not bias. It is False if rounding errors ended the
    run at a relative residual above 0.01, since the remaining terms are missing.

    For log|H|, at most 800 iterations are recorded. If a run needs more before the probe vectors
    are solved, the standard error of the estimator's value is infinite.

    Args:
        decay: rate of P(J = j), not negative. The terms should decrease faster than exp(-decay j).
        min_iterations: smallest number of iterations.
        max_iterations: the number of terms, by default n, where the sum is complete.
        preconditioner: none by default. It makes the terms decrease faster and leaves the means
            unchanged.
        group_size: number of right-hand sides that share a Krylov space; 1 for separate spaces.

    Raises:
        ValueError: if an argument is out of its range.

    References:
        Potapczynski et al. (2021), Bias-Free Scalable Gaussian Processes via Randomized
        Truncations, section 4.1. The paper uses two independent indices for the two sides of the
        quadratic form and a third for the probe vectors, so that its runs continue to the largest
        of three indices, and the variance is higher. For the iteration itself, see
        `ConjugateGradients`. Time O(E[J] n^2 (d / 2 + k)), memory O(n (k + rank + checkpoints m))
        for m columns that are not averaged. `len(checkpoints(n))`, 49 at the defaults for
        n = 15,000, grows with log(n); each checkpoint adds a column to an estimator's gradient.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.RussianRouletteCG(decay=0.05, min_iterations=80)
        >>> estimator = sgp.estimators.Hutchinson(solver, num_logdet_probes=0)
    """

    decay: int | float = eqx.field(static=True, converter=checks.plain, default=0.05)
    min_iterations: int = eqx.field(static=True, converter=checks.plain, default=80)
    max_iterations: int | None = eqx.field(static=True, converter=checks.plain, default=None)
    preconditioner: AbstractPreconditioner | None = None
    group_size: int = eqx.field(static=True, converter=checks.plain, default=128)

    def __check_init__(self) -> None:
        if self.preconditioner is not None:
            checks.instance("preconditioner", self.preconditioner, AbstractPreconditioner)
        checks.count("min_iterations", self.min_iterations)
        checks.count_or_none("max_iterations", self.max_iterations, self.min_iterations)
        maximum = self.min_iterations if self.max_iterations is None else self.max_iterations
        StoppingTime.exponential(self.decay, self.min_iterations, maximum)
        checks.count("group_size", self.group_size)

    @classmethod
    def with_mean(
        cls,
        mean: int | float,
        max_iterations: int,
        *,
        preconditioner: AbstractPreconditioner | None = None,
        group_size: int = 128,
    ) -> "RussianRouletteCG":
        """The solver with a specified E[J], and `min_iterations` four fifths of E[J].

        Args:
            mean: E[J] of one index, before rounding to checkpoints. If averaged columns have
                independent estimates (`Pathwise`), the run continues to the larger of two indices.
            max_iterations: the number of terms.
            preconditioner: see the class.
            group_size: see the class.

        Raises:
            ValueError: if no such J has this mean.
        """
        checks.count("max_iterations", max_iterations)
        decay, minimum = decay_and_minimum(mean, max_iterations)
        return cls(decay, minimum, max_iterations, preconditioner, group_size)

    def checkpoints(self, n: int) -> tuple[int, ...]:
        """The iterations after which a run on n observations may end."""
        maximum = n if self.max_iterations is None else self.max_iterations
        points = [min(self.min_iterations, maximum)]
        # Close spacing where most of the probability of J is, so that a run that reaches one
        # checkpoint probably reaches the next.
        min_spacing = max(1, min(round(0.25 / max(self.decay, 1e-9)), (maximum - points[0]) // 16))
        while points[-1] < maximum:
            spacing = max(min_spacing, (points[-1] - points[0]) // 6)
            points.append(min(maximum, points[-1] + spacing))
        return tuple(points)

    def distribution(self, n: int) -> StoppingTime:
        """The distribution of J for n observations, rounded down to checkpoints."""
        points = self.checkpoints(n)
        unrounded = StoppingTime.exponential(self.decay, points[0], points[-1])
        survival = jnp.append(unrounded.survival[np.array(points) - 1], 0.0)
        table = jnp.zeros(points[-1], survival.dtype)
        return StoppingTime(table.at[np.array(points) - 1].set(survival[:-1] - survival[1:]))

    @property
    def to_tolerance(self) -> ConjugateGradients:
        """Conjugate gradients without randomized truncation."""
        return ConjugateGradients(preconditioner=self._preconditioner, group_size=self.group_size)

    @property
    def _preconditioner(self) -> AbstractPreconditioner:
        return Identity() if self.preconditioner is None else self.preconditioner

    def init(self, operator: KernelOperator, key: Key[Array, ""] | None) -> PreconditionerFactor:
        """Factorize the preconditioner."""
        return self._preconditioner.factorize(operator)

    def run(self, factor: PreconditionerFactor, system: System) -> Solution:
        """Estimate the solution without bias.

        If averaged columns need a second estimate, the run ends at the larger of two indices.

        Raises:
            ValueError: if there is no `key`.
        """
        options = system.options
        if options.key is None:
            raise ValueError("`key` must be given: the stopping index is drawn at random.")
        n, num_recorded = system.operator.size, system.target.shape[1] - options.num_averaged
        distribution, points = self.distribution(n), np.array(self.checkpoints(n))
        stop = distribution.sample(
            options.key, (2 if options.paired and options.num_averaged else 1,)
        )
        table = distribution.roulette_weights(stop).astype(system.operator.dtype)
        solution, (sums, iterates) = iterate_blocks(
            factor,
            system,
            self.group_size,
            _rounding(system.operator.dtype),
            distribution.num_terms,
            _recorder(jnp.max(stop), table, points, system.start.value, num_recorded),
        )
        # Checkpoints that the run did not reach have its last iterate.
        reached = (points <= solution.iterations)[:, None, None]
        iterates = iterates * system.scale[:num_recorded]
        vectors = jnp.where(reached, iterates, solution.value[:, :num_recorded])
        # The roulette weights multiply differences of successive checkpoints; `weights` multiply
        # the checkpoints. Differences after the end of the run are zero: their large weights would
        # only amplify rounding errors.
        is_over = np.append(-1, points[:-1]) >= solution.iterations
        difference_weights = jnp.append(jnp.where(is_over, 0.0, table[0, points - 1]), 0.0)
        weights = difference_weights[:-1] - difference_weights[1:]
        value = jnp.einsum("r,rnk->nk", weights, vectors, precision="highest")
        averaged = sums[..., num_recorded:] * system.scale[num_recorded:]
        solution = solution._replace(
            value=jnp.concatenate([value, averaged[0]], axis=1),
            weights=weights,
            vectors=vectors,
            independent=averaged[-1],
        )
        if solution.coefficients is not None:
            coefficients = self._telescoped(solution.coefficients, distribution, stop, n)
            solution = solution._replace(coefficients=coefficients)
        return _with_reason(solution, system.largest(solution.residual))

    def _telescoped(
        self,
        coefficients: Coefficients,
        distribution: StoppingTime,
        stop: Int[Array, " indices"],
        n: int,
    ) -> Coefficients:
        """Coefficients with Russian-roulette weights for changes of the log-determinant.

        The stopping index of the log-determinant is the largest of the indices. Each stop costs an
        eigendecomposition, so stops are as far apart as possible with a probability of about a
        half or more of reaching the next. `is_cut` tells whether the run continued beyond the
        recorded steps before the probes were solved.
        """
        (num_steps, _, g, _), num_made = coefficients.curvature.shape, coefficients.stops[0]
        is_cut = (
            (num_steps < distribution.num_terms and num_steps * g < n)
            & (jnp.max(stop) > num_steps)
            & jnp.any(coefficients.residual > _rounding(coefficients.start.dtype))
        )
        first = min(self.min_iterations, num_steps)
        spacing = max(1, min(round(0.7 / max(self.decay, 1e-9)), num_steps // 8))
        stops = np.append(np.arange(first, num_steps, spacing), num_steps)
        # The survival of the largest index, without the cancellation in 1 - (1 - P)^2.
        single = jnp.minimum(distribution.survival[stops - 1], 1.0)
        survival = -jnp.expm1(stop.size * jnp.log1p(-single))
        weights = jnp.where(stops <= jnp.max(stop), 1.0 / survival, 0.0)
        return coefficients._replace(
            stops=jnp.minimum(stops, num_made),
            weights=weights.astype(coefficients.start.dtype),
            is_cut=is_cut,
        )


def _recorder(
    stop: Int[Array, ""],
    weights: Float[Array, "sums steps"],
    checkpoints: np.ndarray,
    value: Float[Array, "n k"],
    num_recorded: int,
) -> Recorder:
    """Record weighted sums of the updates, and the iterates at checkpoints.

    Args:
        stop: number of iterations.
        weights: weights of the updates in each sum.
        checkpoints: numbers of iterations.
        value: initial value of every sum.
        num_recorded: number of leading columns of the iterates to record.
    """

    def update(
        record: tuple[Array, Array], iteration: Array, move: Array, value: Array, moves: Array
    ) -> tuple[Array, Array]:
        sums, iterates = record
        # Iterations before a checkpoint write to its entry, too; the checkpoint writes last.
        index = jnp.searchsorted(jnp.array(checkpoints), iteration + 1)
        index = jnp.where(moves, index, len(checkpoints))
        sums += weights[:, iteration][:, None, None] * move
        return sums, iterates.at[index].set(value[:, :num_recorded])

    sums = jnp.broadcast_to(value, (len(weights), *value.shape))
    iterates = jnp.zeros((len(checkpoints), len(value), num_recorded), value.dtype)
    return Recorder(stop, (sums, iterates), update)


def _with_reason(solution: Solution, residual: Float[Array, ""]) -> Solution:
    """The solution marked converged, unless rounding errors ended the run far from the solution."""
    is_complete = (solution.reason != StopReason.PRECISION) | (residual <= _TOLERANCE)
    reason = jnp.where(is_complete, StopReason.CONVERGED, StopReason.PRECISION)
    marked = solution._replace(converged=reason == StopReason.CONVERGED, reason=reason)
    return marked.failed_where(solution.reason == StopReason.FAILED)


def _rounding(dtype: jnp.dtype) -> float:
    """The relative residual below which the remaining terms are rounding errors."""
    return 10.0 * float(jnp.finfo(dtype).eps)
