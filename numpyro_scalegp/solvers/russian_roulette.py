"""Conjugate gradients stopped at random, with weights that take the bias away."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.operators import KernelOperator
from numpyro_scalegp.preconditioners import AbstractPreconditioner, Identity
from numpyro_scalegp.solvers.base import AbstractSolver, Solution
from numpyro_scalegp.solvers.conjugate_gradients import Coefficients, ConjugateGradients, run
from numpyro_scalegp.truncation import StoppingLaw, decay_and_minimum


class RussianRouletteCG(AbstractSolver):
    """Conjugate gradients with Russian roulette: unbiased solutions at a chosen expected cost.

    Conjugate gradients add one term an iteration, V = sum_j D_j. With a stopping index J of law
    P(J = j) ~ exp(-decay j) from `min_iterations` to `max_iterations`, the sum over j <= J of
    D_j / P(J >= j) has mean V, whereas a solve cut short underfits. `value` is such a sum; `twin`,
    from the same run but an index of its own, makes the product of both unbiased for the quadratic
    forms in which a solution stands on both sides. Averaged columns (an estimator's probes) have a
    third index. Once the residual is rounding error, the rest is zero and the run ends.

    `residual` is that of the sum without weights; `converged` is True, since nothing is cut off:
    the price of an early stop is variance.

    Args:
        decay: rate of the law, not negative. The terms should fall faster than exp(-decay j).
        min_iterations: iterations that are always made.
        max_iterations: the number of terms, by default n, where the sum is complete.
        preconditioner: none by default. It makes the terms fall faster and changes no mean.
        group_size: right-hand sides that share a Krylov space; 1 for one each.

    Raises:
        ValueError: if an argument is out of its range.

    References:
        Potapczynski et al. (2021), Bias-Free Scalable Gaussian Processes via Randomized
        Truncations, section 4.1; for the iteration itself, see `ConjugateGradients`. Time
        O(E[max J] n^2 (d / 2 + k)), memory O(n (k + rank)).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.RussianRouletteCG(decay=0.05, min_iterations=80)
        >>> estimator = sgp.estimators.Hutchinson(solver, num_logdet_probes=0)
    """

    decay: int | float = eqx.field(static=True, default=0.05)
    min_iterations: int = eqx.field(static=True, default=80)
    max_iterations: int | None = eqx.field(static=True, default=None)
    preconditioner: AbstractPreconditioner | None = None
    group_size: int = eqx.field(static=True, default=128)

    def __check_init__(self) -> None:
        maximum = self.min_iterations if self.max_iterations is None else self.max_iterations
        StoppingLaw.exponential(self.decay, self.min_iterations, maximum)
        if self.group_size < 1:
            raise ValueError(f"`group_size` must be at least 1, got {self.group_size}.")

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
            mean: wanted E[J]; a run of three indices goes on to their largest.
            max_iterations: the number of terms.
            preconditioner: as of the class.
            group_size: as of the class.

        Raises:
            ValueError: if no law has this mean.
        """
        decay, minimum = decay_and_minimum(mean, max_iterations)
        return cls(decay, minimum, max_iterations, preconditioner, group_size)

    def law(self, n: int) -> StoppingLaw:
        """The law of J for n rows."""
        maximum = n if self.max_iterations is None else self.max_iterations
        return StoppingLaw.exponential(self.decay, min(self.min_iterations, maximum), maximum)

    @property
    def to_tolerance(self) -> ConjugateGradients:
        """Plain conjugate gradients, which end with one good solution."""
        return ConjugateGradients(preconditioner=self._preconditioner, group_size=self.group_size)

    @property
    def _preconditioner(self) -> AbstractPreconditioner:
        return Identity() if self.preconditioner is None else self.preconditioner

    def solve(
        self,
        operator: KernelOperator,
        B: Float[Array, "n k"],
        *,
        guess: Float[Array, "*candidates n k"] | None = None,
        key: Key[Array, ""] | None = None,
        num_averaged: int = 0,
    ) -> Solution:
        """Solve H V = B in the mean, twice; see `AbstractSolver.solve`.

        Raises:
            ValueError: if there is no `key`.
        """
        return self.solve_with_probes(
            operator, B, jax.random.key(0), 0, guess=guess, key=key, num_averaged=num_averaged
        )[0]

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
    ) -> tuple[Solution, Coefficients]:
        """Solve while probes for the log-determinant ride along; see `ConjugateGradients`.

        Raises:
            ValueError: if there is no `key`.
        """
        if key is None:
            raise ValueError("`key` must be given: where to stop is drawn at random.")
        law = self.law(operator.size)
        stop = law.sample(key, (3,))
        first, second, third = law.roulette_weights(stop).astype(operator.dtype)
        averaged = jnp.arange(B.shape[1]) >= B.shape[1] - num_averaged

        def weights(iteration: Int[Array, ""]) -> Float[Array, "copies k"]:
            # The averaged columns' twins share the first index with the data: each product of a
            # value and its twin has two independent ones.
            value = jnp.where(averaged, third[iteration], first[iteration])
            twin = jnp.where(averaged, first[iteration], second[iteration])
            return jnp.stack([value, twin])

        copies, solution, coefficients = run(
            operator,
            B,
            probe_key,
            num_probes,
            guess=guess,
            num_averaged=num_averaged,
            preconditioner=self._preconditioner,
            group_size=self.group_size,
            tolerance=10.0 * float(jnp.finfo(operator.dtype).eps),
            max_iterations=law.num_terms,
            stop=jnp.max(stop),
            weights=weights,
        )
        finite = jnp.all(jnp.isfinite(solution.residual))
        stops, stage_weights = self._stages(law, jnp.max(stop), len(coefficients.curvature))
        coefficients = coefficients._replace(
            stops=jnp.minimum(stops, solution.iterations),
            weights=stage_weights.astype(operator.dtype),
        )
        return solution._replace(twin=copies[1], converged=finite), coefficients

    def _stages(
        self, law: StoppingLaw, stop: Int[Array, ""], num_steps: int
    ) -> tuple[Int[Array, " stages"], Float[Array, " stages"]]:
        """Where the log-determinant is looked at, and weights of its changes from there to there.

        All iterations are there for it, so that the largest of the three indices counts. Each look
        takes eigenvectors: they are so far apart that the odds of getting from one to the next do
        not fall below about a half.
        """
        first = min(self.min_iterations, num_steps)
        apart = max(1, min(round(0.7 / self.decay), num_steps) if self.decay else num_steps // 8)
        stops = jnp.append(jnp.arange(first, num_steps, apart), num_steps)
        survival = 1.0 - (1.0 - law.survival) ** 3
        return stops, jnp.where(stops <= stop, 1.0 / survival[stops - 1], 0.0)
