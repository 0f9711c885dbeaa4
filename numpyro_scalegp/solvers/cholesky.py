"""The direct solver, for small problems and as a yardstick."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from numpyro_scalegp.core import checks, linalg
from numpyro_scalegp.solvers.iteration import check_budget, largest
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.solver import (
    AbstractSolver,
    Course,
    Solution,
    StopReason,
    System,
    finish,
)


class Cholesky(AbstractSolver):
    """A dense Cholesky factorization: O(n^3) time and O(n^2) memory, whatever the noise is.

    Args:
        tolerance: relative residual up to which a column counts as solved.

    Raises:
        ValueError: if the tolerance is not in [0, 1).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.Cholesky()
    """

    tolerance: float = eqx.field(static=True, converter=checks.plain, default=1e-2)

    def __check_init__(self) -> None:
        check_budget(self.tolerance, 1)

    def run(
        self,
        operator: KernelOperator,
        system: System,
        key: Key[Array, ""] | None,
        num_averaged: int,
    ) -> Solution:
        """Solve by a factorization of H; see `AbstractSolver.run`."""
        H = operator.rows(jnp.arange(operator.size))
        value = jax.scipy.linalg.cho_solve((linalg.factorize(H).tril, True), system.target)
        residual = system.target - linalg.matmul(H, value)
        norms = jnp.linalg.norm(residual, axis=0)
        size = largest(norms, num_averaged)
        reason = jnp.where(size <= self.tolerance, StopReason.CONVERGED, StopReason.PRECISION)
        reason = jnp.where(jnp.isfinite(size), reason, StopReason.FAILED).astype(int)
        course = Course(jnp.ones((), int), jnp.ones((), H.dtype), reason)
        # The guess is not used.
        return finish(system._replace(epochs=0), value, norms, course)
