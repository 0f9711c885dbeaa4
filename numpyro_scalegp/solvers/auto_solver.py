"""The solver where none was chosen."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.solvers.adasap import ADASAP
from numpyro_scalegp.solvers.conjugate_gradients import (
    AbstractConjugateGradients,
    ConjugateGradients,
)
from numpyro_scalegp.solvers.iteration import check_budget
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.preconditioners import (
    AbstractPreconditioner,
    PreconditionerFactor,
    RandomlyPivotedCholesky,
)
from numpyro_scalegp.solvers.solver import Coefficients, Solution, System

# What the preconditioner may leave of the mean variance for conjugate gradients, in units of the
# noise: benchmarks/evidence.py solvers.
_MOST_LEFT = 10.0


class AutoSolver(AbstractConjugateGradients):
    """Conjugate gradients where their preconditioner says enough, or `ADASAP`.

    A randomly pivoted Cholesky factor of K leaves some of the variance: with n, the noise and what
    memory allows, that is what the number of iterations depends on. Where it is less than ten times
    the noise, conjugate gradients take the least time; where it is more, rounding errors may end
    them far from the solution, and `ADASAP` gets on. Together with probes for the log-determinant,
    in training, it is conjugate gradients anyway.

    Args:
        tolerance: as of `ConjugateGradients`.
        max_epochs: as of `ConjugateGradients`.

    Raises:
        ValueError: if the tolerance is not in [0, 1), or the budget not positive.

    References:
        As of `ConjugateGradients`, `ADASAP` and `sgp.preconditioners.RandomlyPivotedCholesky`,
        whose costs it has: of one solver and one factor.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.AutoSolver(max_epochs=50)
    """

    tolerance: float = eqx.field(static=True, converter=checks.plain, default=1e-2)
    max_epochs: int | float = eqx.field(static=True, converter=checks.plain, default=100)

    def __check_init__(self) -> None:
        check_budget(self.tolerance, self.max_epochs)

    def run(
        self,
        operator: KernelOperator,
        system: System,
        key: Key[Array, ""] | None,
        num_averaged: int,
    ) -> Solution:
        """Choose and solve; see `AbstractSolver.run`.

        Raises:
            ValueError: if there is no `key`.
        """
        factor = RandomlyPivotedCholesky().factorize(operator)
        explained = jnp.sum(jnp.square(factor.low_rank), axis=0)
        left = jnp.mean(operator.kernel.diag(operator.X) - explained)
        gradients = self._gradients(_Given(factor))
        descent = ADASAP(tolerance=self.tolerance, max_epochs=self.max_epochs)
        return jax.lax.cond(
            left <= _MOST_LEFT * jnp.mean(operator.noise()),
            lambda: gradients.run(operator, system, key, num_averaged),
            lambda: descent.run(operator, system, key, num_averaged),
        )

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
        """Solve by conjugate gradients; see `solve_with_probes`."""
        solver = self._gradients(RandomlyPivotedCholesky())
        return solver.run_with_probes(
            operator, system, probe_key, num_probes, key, num_averaged, paired
        )

    def _gradients(self, preconditioner: AbstractPreconditioner) -> ConjugateGradients:
        return ConjugateGradients(self.tolerance, self.max_epochs, preconditioner)


class _Given(AbstractPreconditioner):
    """A factor that was computed already."""

    factor: PreconditionerFactor

    def factorize(self, operator: KernelOperator) -> PreconditionerFactor:
        """Return the factor."""
        return self.factor
