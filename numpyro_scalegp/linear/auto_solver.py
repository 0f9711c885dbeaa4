"""The default solver."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.linear.adasap import ADASAP
from numpyro_scalegp.linear.conjugate_gradients import ConjugateGradients
from numpyro_scalegp.linear.iteration import check_budget
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.preconditioners import PreconditionerFactor, RandomlyPivotedCholesky
from numpyro_scalegp.linear.solver import AbstractSolver, PreparedSolver, Solution, System
from numpyro_scalegp.programs.compiled import compiled

# Conjugate gradients run if the mean variance that the preconditioner leaves out is at most this
# multiple of the noise: benchmarks/evidence.py solvers.
_MAX_REMAINING = 10.0


class AutoSolver(AbstractSolver):
    """Conjugate gradients if the preconditioner is accurate enough, otherwise `ADASAP`.

    The preconditioner, a randomly pivoted Cholesky factor of K, leaves out part of the variance. If
    that part is at most ten times the noise, conjugate gradients take the least time. If it is
    larger, rounding errors can stall conjugate gradients far from the solution, while `ADASAP`
    makes progress. With probe vectors for the log-determinant, as in training, and on a grid, the
    solver is always conjugate gradients.

    Args:
        tolerance: see `ConjugateGradients`.
        max_epochs: see `ConjugateGradients`.

    Raises:
        ValueError: if the tolerance is not in [0, 1), or the budget not positive.

    References:
        See `ConjugateGradients`, `ADASAP` and `sgp.preconditioners.RandomlyPivotedCholesky`. A
        solve costs as much as the chosen solver, and one factor.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.AutoSolver(max_epochs=50)
    """

    tolerance: float = eqx.field(static=True, converter=checks.plain, default=1e-2)
    max_epochs: int | float = eqx.field(static=True, converter=checks.plain, default=100)

    def __check_init__(self) -> None:
        check_budget(self.tolerance, self.max_epochs)

    def init(self, operator: KernelOperator, key: Key[Array, ""] | None) -> PreconditionerFactor:
        """Factorize the preconditioner of conjugate gradients."""
        return RandomlyPivotedCholesky().factorize(operator)

    def chosen(self, operator: KernelOperator, key: Key[Array, ""] | None) -> AbstractSolver:
        """Choose on the host, so that a program holds one of the solvers."""
        if operator.has_fast_products:
            return self
        factor, is_accurate = self._factorized(operator)
        return PreparedSolver(self._conjugate_gradients, factor) if is_accurate else self._adasap

    @compiled
    def _factorized(self, operator: KernelOperator) -> tuple[PreconditionerFactor, Bool[Array, ""]]:
        factor = self.init(operator, None)
        return factor, _is_accurate(factor, operator)

    @property
    def _conjugate_gradients(self) -> ConjugateGradients:
        return ConjugateGradients(self.tolerance, self.max_epochs)

    @property
    def _adasap(self) -> ADASAP:
        return ADASAP(tolerance=self.tolerance, max_epochs=self.max_epochs)

    def run(self, factor: PreconditionerFactor, system: System) -> Solution:
        """Choose and solve.

        Raises:
            ValueError: if there is no `key`.
        """
        operator = system.kernel_operator
        if system.options.probes is not None or operator.has_fast_products:
            return self._conjugate_gradients.run(factor, system)
        return jax.lax.cond(
            _is_accurate(factor, operator),
            lambda: self._conjugate_gradients.run(factor, system),
            lambda: self._adasap.solve_system(system),
        )


def _is_accurate(factor: PreconditionerFactor, operator: KernelOperator) -> Bool[Array, ""]:
    """Whether conjugate gradients take less time than `ADASAP`."""
    low_rank_variance = jnp.sum(jnp.square(factor.low_rank), axis=0)
    remaining = jnp.mean(operator.kernel.evaluate_diag(operator.X) - low_rank_variance)
    return remaining <= _MAX_REMAINING * jnp.mean(operator.noise())
