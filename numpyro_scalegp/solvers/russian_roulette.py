"""Conjugate gradients stopped at random, with weights that take the bias away."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.solvers.conjugate_gradients import (
    AbstractConjugateGradients,
    AbstractRecorder,
    ConjugateGradients,
    Settings,
    iterate_blocks,
)
from numpyro_scalegp.solvers.iteration import check_num_averaged, largest
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.preconditioners import AbstractPreconditioner, Identity
from numpyro_scalegp.solvers.solver import Coefficients, Solution, StopReason, System
from numpyro_scalegp.solvers.stopping import StoppingTime, decay_and_minimum

# The residual above which a run that rounding errors ended is no solution.
_TOLERANCE = 1e-2


class RussianRouletteCG(AbstractConjugateGradients):
    """Conjugate gradients with Russian roulette: unbiased solutions at a chosen expected cost.

    Conjugate gradients add one term an iteration, V = sum_j D_j. With a stopping index J,
    P(J = j) ~ exp(-decay j) from `min_iterations` to `max_iterations`, the sum over j <= J of
    D_j / P(J >= j) has mean V, whereas a solve cut short underfits. Once the residual is rounding
    error, the rest is zero and the run ends.

    In the gradient a solution v stands on both sides of a quadratic form, and the product of such a
    sum with itself is biased. So the products of the iterates are the terms of a sum of their own,
    vv' = sum_i (v_i v_i' - v_(i-1) v_(i-1)'), under the same index: `weights` and `vectors` of the
    solution. It takes iterates in memory, so J is rounded down to a checkpoint: every iteration at
    first, then fewer and fewer. Averaged columns (an estimator's probes) have, where both sides
    need them, an `independent` estimate from an index of its own instead.

    `residual` is that of the iterate without weights; `converged` is True, since nothing is cut
    off: the price of an early stop is variance. It is False where rounding errors ended the run at
    a relative residual above 0.01: then the rest of the sum is missing.

    The log-determinant of an estimator has room for 800 steps. Where a run goes on beyond them with
    probes that are not solved, the value's standard error is infinite.

    Args:
        decay: rate of P(J = j), not negative. The terms should fall faster than exp(-decay j).
        min_iterations: iterations that are always made.
        max_iterations: the number of terms, by default n, where the sum is complete.
        preconditioner: none by default. It makes the terms fall faster and changes no mean.
        group_size: right-hand sides that share a Krylov space; 1 for one each.

    Raises:
        ValueError: if an argument is out of its range.

    References:
        Potapczynski et al. (2021), Bias-Free Scalable Gaussian Processes via Randomized
        Truncations, section 4.1. There, two independent indices give the two sides of the quadratic
        form, and a third one the probes: the run goes on to the largest of three, and the variance
        is higher. For the iteration itself, see `ConjugateGradients`. Time
        O(E[J] n^2 (d / 2 + k)), memory O(n (k + rank + checkpoints m)) for m columns that are not
        averaged. `len(checkpoints(n))`, 49 at the defaults for n = 15,000, grows with log(n); each
        is a column more in an estimator's gradient.

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
        """The solver with a wanted E[J], of which four fifths are always made.

        Args:
            mean: wanted E[J] of one index, up to the rounding; where averaged columns have
                independent estimates (`Pathwise`), the run goes on to the larger of two.
            max_iterations: the number of terms.
            preconditioner: as of the class.
            group_size: as of the class.

        Raises:
            ValueError: if no such J has this mean.
        """
        checks.count("max_iterations", max_iterations)
        decay, minimum = decay_and_minimum(mean, max_iterations)
        return cls(decay, minimum, max_iterations, preconditioner, group_size)

    def checkpoints(self, n: int) -> tuple[int, ...]:
        """The iterations after which a run on n rows may end."""
        maximum = n if self.max_iterations is None else self.max_iterations
        points = [min(self.min_iterations, maximum)]
        # Close enough for the odds of getting to the next one to be high where J mostly falls.
        closest = max(1, min(round(0.25 / max(self.decay, 1e-9)), (maximum - points[0]) // 16))
        while points[-1] < maximum:
            apart = max(closest, (points[-1] - points[0]) // 6)
            points.append(min(maximum, points[-1] + apart))
        return tuple(points)

    def distribution(self, n: int) -> StoppingTime:
        """The distribution of J for n rows, rounded down to checkpoints."""
        points = self.checkpoints(n)
        unrounded = StoppingTime.exponential(self.decay, points[0], points[-1])
        survival = jnp.append(unrounded.survival[np.array(points) - 1], 0.0)
        table = jnp.zeros(points[-1], survival.dtype)
        return StoppingTime(table.at[np.array(points) - 1].set(survival[:-1] - survival[1:]))

    @property
    def to_tolerance(self) -> ConjugateGradients:
        """Plain conjugate gradients, which end with one good solution."""
        return ConjugateGradients(preconditioner=self._preconditioner, group_size=self.group_size)

    @property
    def _preconditioner(self) -> AbstractPreconditioner:
        return Identity() if self.preconditioner is None else self.preconditioner

    def run_with_probes(
        self,
        operator: KernelOperator,
        system: System,
        probe_key: Key[Array, ""],
        num_probes: int,
        key: Key[Array, ""] | None,
        num_averaged: int,
        paired: bool,
    ) -> tuple[Solution, Coefficients]:
        """Solve in the mean; see `solve_with_probes`.

        With `paired`, the run goes on to the larger of two indices.

        Raises:
            ValueError: if there is no `key`, or `num_averaged` is out of range.
        """
        if key is None:
            raise ValueError("`key` must be given: where to stop is drawn at random.")
        num_columns = system.target.shape[1]
        check_num_averaged(num_averaged, num_columns)
        n, num_kept = operator.size, num_columns - num_averaged
        distribution, points = self.distribution(n), np.array(self.checkpoints(n))
        stop = distribution.sample(key, (2 if paired and num_averaged else 1,))
        table = distribution.roulette_weights(stop).astype(operator.dtype)
        settings = Settings(
            self._preconditioner,
            self.group_size,
            _rounding(operator.dtype),
            distribution.num_terms,
            num_averaged,
            _Recorder(jnp.max(stop), table, self.checkpoints(n), num_kept),
        )
        solution, coefficients, (sums, kept) = iterate_blocks(
            operator, system, probe_key, num_probes, settings
        )
        # Once the rest is zero, later checkpoints are where the run ended.
        reached = (points <= solution.iterations)[:, None, None]
        vectors = jnp.where(reached, kept * system.scale[:num_kept], solution.value[:, :num_kept])
        # What changes from one checkpoint to the next is weighted; hence the weight of each of
        # them. Nothing changes after the end of the run: heavy weights of equal iterates would
        # leave nothing but rounding.
        over = np.append(-1, points[:-1]) >= solution.iterations
        entered = jnp.append(jnp.where(over, 0.0, table[0, points - 1]), 0.0)
        weights = entered[:-1] - entered[1:]
        value = jnp.einsum("r,rnk->nk", weights, vectors, precision="highest")
        averaged = sums[..., num_kept:] * system.scale[num_kept:]
        solution = solution._replace(
            value=jnp.concatenate([value, averaged[0]], axis=1),
            weights=weights,
            vectors=vectors,
            independent=averaged[-1],
        )
        coefficients = self._telescoped(coefficients, distribution, stop, n)
        return _judged(solution, num_averaged), coefficients

    def _telescoped(
        self,
        coefficients: Coefficients,
        distribution: StoppingTime,
        stop: Int[Array, " indices"],
        n: int,
    ) -> Coefficients:
        """Coefficients that weigh what the log-determinant changes by between some iterations.

        All iterations are there for it, so that the largest index counts. Each look takes
        eigenvectors: they are so far apart that the odds of getting from one to the next do not
        fall below about a half. A run that goes on beyond the steps that there is room for, before
        the probes are solved, is cut.
        """
        (num_steps, _, g, _), made = coefficients.curvature.shape, coefficients.stops[0]
        is_cut = (
            (num_steps < distribution.num_terms and num_steps * g < n)
            & (jnp.max(stop) > num_steps)
            & jnp.any(coefficients.residual > _rounding(coefficients.start.dtype))
        )
        first = min(self.min_iterations, num_steps)
        apart = max(1, min(round(0.7 / max(self.decay, 1e-9)), num_steps // 8))
        stops = np.append(np.arange(first, num_steps, apart), num_steps)
        # That of the largest index, without the loss of digits of 1 - (1 - P)^2.
        single = jnp.minimum(distribution.survival[stops - 1], 1.0)
        survival = -jnp.expm1(stop.size * jnp.log1p(-single))
        weights = jnp.where(stops <= jnp.max(stop), 1.0 / survival, 0.0)
        return coefficients._replace(
            stops=jnp.minimum(stops, made),
            weights=weights.astype(coefficients.start.dtype),
            is_cut=is_cut,
        )


class _Recorder(AbstractRecorder):
    """Sums of the moves weighted in several ways, and iterates at checkpoints."""

    stop: Int[Array, ""]
    weights: Float[Array, "sums steps"]
    checkpoints: tuple[int, ...]
    num_kept: int  # of the first columns of B

    def init(
        self, value: Float[Array, "n k"]
    ) -> tuple[Float[Array, "sums n k"], Float[Array, "checkpoints n kept"]]:
        """Every sum starts at the initial value."""
        sums = jnp.broadcast_to(value, (len(self.weights), *value.shape))
        shape = len(self.checkpoints), len(value), self.num_kept
        return sums, jnp.zeros(shape, value.dtype)

    def update(
        self,
        record: tuple[Array, Array],
        iteration: Int[Array, ""],
        move: Float[Array, "n k"],
        value: Float[Array, "n k"],
        moves: Bool[Array, ""],
    ) -> tuple[Float[Array, "sums n k"], Float[Array, "checkpoints n kept"]]:
        """Add to the sums, and keep the iterate."""
        sums, kept = record
        # Written on the way to the next checkpoint, too: what is there last is right.
        place = jnp.searchsorted(jnp.array(self.checkpoints), iteration + 1)
        place = jnp.where(moves, place, len(self.checkpoints))
        return (
            sums + self.weights[:, iteration][:, None, None] * move,
            kept.at[place].set(value[:, : self.num_kept]),
        )


def _judged(solution: Solution, num_averaged: int) -> Solution:
    """The solution with the reason that holds for a sum that is complete in the mean.

    Nothing is cut off, unless rounding errors ended the run far from the solution.
    """
    size = largest(solution.residual, num_averaged)
    precise = (solution.reason != StopReason.PRECISION) | (size <= _TOLERANCE)
    reason = jnp.where(precise, StopReason.CONVERGED, StopReason.PRECISION)
    judged = solution._replace(converged=reason == StopReason.CONVERGED, reason=reason)
    return judged.failed_where(solution.reason == StopReason.FAILED)


def _rounding(dtype: jnp.dtype) -> float:
    """The relative residual from which on the rest of a sum is rounding error."""
    return 10.0 * float(jnp.finfo(dtype).eps)
