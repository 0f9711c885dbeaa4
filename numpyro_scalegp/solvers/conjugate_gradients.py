"""Conjugate gradients, preconditioned, for a block of right-hand sides."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.operators import KernelOperator
from numpyro_scalegp.preconditioners import AbstractPreconditioner, PivotedCholesky
from numpyro_scalegp.solvers.base import (
    AbstractSolver,
    Solution,
    check_budget,
    finish,
    largest_norm,
    num_iterations,
    start,
)

# Steps of the probes that are recorded: far more than a quadrature of log|H| needs.
_MAX_RECORDED = 200


class Coefficients(NamedTuple):
    """The step sizes of probe columns that started at zero: a Lanczos process of P^-1/2 H P^-1/2.

    Steps that were not made have `alpha` zero.
    """

    alpha: Float[Array, "steps s"]  # along the search directions
    beta: Float[Array, "steps s"]  # of the next direction on the last
    log_determinant: Float[Array, ""]  # log|P| of the preconditioner
    residual: Float[Array, " s"]  # of the probes at the end, relative


class _State(NamedTuple):
    iteration: Int[Array, ""]
    value: Float[Array, "n k"]
    residual: Float[Array, "n k"]
    direction: Float[Array, "n k"]
    product: Float[Array, " k"]  # r'P^-1 r
    alpha: Float[Array, "steps s"]
    beta: Float[Array, "steps s"]


class ConjugateGradients(AbstractSolver):
    """Preconditioned conjugate gradients.

    Each iteration multiplies H with all search directions, one epoch. It converges fast where the
    preconditioner leaves few large eigenvalues, and its coefficients give log|H| for nothing; it
    gains less than other solvers from a good guess, and from a budget too small to converge.

    Args:
        tolerance: relative residual ||b - H v|| / ||b|| at which a column counts as solved; the
            loop goes on until every column is.
        max_epochs: iterations at most.
        preconditioner: by default a pivoted Cholesky factor of rank 100.

    Raises:
        ValueError: if the tolerance is not in [0, 1) or the budget not positive.

    References:
        Hestenes and Stiefel (1952); Lin et al. (2024), Improving Linear System Solvers for
        Hyperparameter Optimisation in Iterative Gaussian Processes, algorithm 1, whose first
        direction should be the preconditioned residual and whose loop should go on while either
        residual is too large. Time O(iterations n^2 (d / 2 + k)), memory O(n (k + rank)).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.ConjugateGradients(tolerance=1e-3, max_epochs=50)
    """

    tolerance: float = eqx.field(static=True, default=1e-2)
    max_epochs: int | float = eqx.field(static=True, default=100)
    preconditioner: AbstractPreconditioner = PivotedCholesky(100)

    def __check_init__(self) -> None:
        check_budget(self.tolerance, self.max_epochs)

    def solve(
        self,
        operator: KernelOperator,
        B: Float[Array, "n k"],
        *,
        guess: Float[Array, "*candidates n k"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Solution:
        """Solve H V = B; see `AbstractSolver.solve`. No key is needed."""
        return self.solve_with_probes(operator, B, jax.random.key(0), 0, guess=guess)[0]

    def solve_with_probes(
        self,
        operator: KernelOperator,
        B: Float[Array, "n k"],
        key: Key[Array, ""],
        num_probes: int,
        *,
        guess: Float[Array, "*candidates n k"] | None = None,
    ) -> tuple[Solution, Coefficients]:
        """Solve H V = B while extra columns ride along, for the log-determinant of H.

        The probes are drawn from N(0, P) and start at zero, whatever the guess for B. They share
        the evaluations of the kernel and do not count for convergence.

        Args:
            operator: the matrix H.
            B: right-hand sides, shape (n, k); with k = 0 the probes count instead.
            key: a typed JAX key for the probes.
            num_probes: how many probes ride along.
            guess: where the solution of B starts, shape (n, k) or (p, n, k).

        Returns:
            The solution for B, and the coefficients of the probes.
        """
        operator, B, guess = jax.lax.stop_gradient((operator, B, guess))
        factor = self.preconditioner.factorise(operator)
        probes = factor.sample(key, num_probes)
        begin = start(operator, B, guess)
        riders = start(operator, probes, None)
        num_counted = B.shape[1]
        max_iterations = num_iterations(self.max_epochs, guess, 1.0)

        def goes_on(state: _State) -> Array:
            counted = state.residual[:, :num_counted] if num_counted else state.residual
            return (state.iteration < max_iterations) & (largest_norm(counted) > self.tolerance)

        def step(state: _State) -> _State:
            image = operator.matmul(state.direction)
            curvature = jnp.sum(state.direction * image, axis=0)
            alpha = _ratio(state.product, curvature)
            value = state.value + alpha * state.direction
            residual = state.residual - alpha * image
            preconditioned = factor.solve(residual)
            product = jnp.sum(residual * preconditioned, axis=0)
            beta = _ratio(product, state.product)
            return _State(
                state.iteration + 1,
                value,
                residual,
                preconditioned + beta * state.direction,
                product,
                state.alpha.at[state.iteration].set(alpha[num_counted:]),
                state.beta.at[state.iteration].set(beta[num_counted:]),
            )

        residual = jnp.concatenate([begin.residual, riders.residual], axis=1)
        direction = factor.solve(residual)
        nothing = jnp.zeros((min(max_iterations, _MAX_RECORDED), num_probes), residual.dtype)
        state = _State(
            jnp.zeros((), int),
            jnp.concatenate([begin.value, riders.value], axis=1),
            residual,
            direction,
            jnp.sum(residual * direction, axis=0),
            nothing,
            nothing,
        )
        state = jax.lax.while_loop(goes_on, step, state)
        epochs = state.iteration.astype(residual.dtype)
        value, residual = state.value[:, :num_counted], state.residual[:, :num_counted]
        solution = finish(begin, value, residual, state.iteration, epochs, self.tolerance)
        left = jnp.linalg.norm(state.residual[:, num_counted:], axis=0)
        return solution, Coefficients(state.alpha, state.beta, factor.log_determinant(), left)


def _ratio(numerator: Float[Array, " k"], denominator: Float[Array, " k"]) -> Float[Array, " k"]:
    """The quotient; zero where a column is solved exactly, so that it stays where it is."""
    solved = numerator == 0
    return jnp.where(solved, 0.0, numerator / jnp.where(solved, 1.0, denominator))
