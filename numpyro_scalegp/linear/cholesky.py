"""The direct solver, for small problems and for comparison."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.linear.iteration import check_budget
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.solver import (
    AbstractSolver,
    LoopOutcome,
    Solution,
    StopReason,
    System,
)
from numpyro_scalegp.numerics import linalg


class Cholesky(AbstractSolver):
    """A dense Cholesky factorization: O(n^3) time and O(n^2) memory, for any noise.

    Args:
        tolerance: relative residual at which a right-hand side counts as solved.

    Raises:
        ValueError: if the tolerance is not in [0, 1).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.Cholesky()
    """

    tolerance: float = eqx.field(static=True, converter=checks.plain, default=1e-2)

    def __check_init__(self) -> None:
        check_budget(self.tolerance, 1)

    def init(
        self, operator: KernelOperator, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, "n n"], Float[Array, "n n"]]:
        """H, and its Cholesky factor."""
        H = operator.rows(jnp.arange(operator.size))
        return H, linalg.factorize(H).tril

    def run(
        self, setup: tuple[Float[Array, "n n"], Float[Array, "n n"]], system: System
    ) -> Solution:
        """Solve with the factor; the initial guess is not used."""
        H, tril = setup
        value = jax.scipy.linalg.cho_solve((tril, True), system.target)
        norms = jnp.linalg.norm(system.target - linalg.matmul(H, value), axis=0)
        size = system.largest(norms)
        reason = jnp.where(size <= self.tolerance, StopReason.CONVERGED, StopReason.PRECISION)
        reason = jnp.where(jnp.isfinite(size), reason, StopReason.FAILED).astype(int)
        epochs = jnp.ones((), H.dtype)
        outcome = LoopOutcome(jnp.ones((), int), epochs, reason)
        return system.solution(value, norms, outcome)._replace(epochs=epochs)
