"""The interface of a solver, and what all iterative ones share."""

import abc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.operators import KernelOperator


class Solution(NamedTuple):
    """What a solver found, and how it went; a failure to converge is a value, not an error."""

    value: Float[Array, "n k"]  # V with H V ~ B
    residual: Float[Array, " k"]  # ||b - H v|| / ||b|| for each column
    iterations: Int[Array, ""]  # steps of the solver
    epochs: Float[Array, ""]  # entries of H computed, in units of n^2
    converged: Bool[Array, ""]  # whether the residuals are within the tolerance
    # Where the value is random, its square is no estimate of the solution's square. For the first m
    # columns, sum_r shares_r v_r v_r' is one, with these vectors v_r; for the others, value twin'.
    shares: Float[Array, " r"] | None = None
    vectors: Float[Array, "r n m"] | None = None
    twin: Float[Array, "n l"] | None = None

    def squares(
        self, num_columns: int
    ) -> tuple[Float[Array, "r n {num_columns}"], Float[Array, "r n {num_columns}"]]:
        """Vectors l_r and r_r of the first columns with v v' = E[sum_r l_r r_r']."""
        if self.shares is None or self.vectors is None:
            value = self.value[None, :, :num_columns]
            return value, value
        vectors = self.vectors[:, :, :num_columns]
        return self.shares[:, None, None] * vectors, vectors


class AbstractSolver(eqx.Module):
    """A way to solve H V = B for a block of right-hand sides.

    All columns share each evaluation of the kernel, so that 64 cost little more than 16. Nothing
    here is differentiated: gradients come from the estimators, which hold solutions fixed.
    """

    @property
    def to_tolerance(self) -> "AbstractSolver":
        """The solver for a posterior, where one good solution is wanted: itself."""
        return self

    @abc.abstractmethod
    def solve(
        self,
        operator: KernelOperator,
        B: Float[Array, "n k"],
        *,
        guess: Float[Array, "*candidates n k"] | None = None,
        key: Key[Array, ""] | None = None,
        num_averaged: int = 0,
    ) -> Solution:
        """Solve H V = B.

        Args:
            operator: the matrix H.
            B: right-hand sides, shape (n, k).
            guess: where to start, shape (n, k); None for zeros. Of several guesses, shape
                (p, n, k), each column starts at the linear combination of its own that minimises
                v'Hv / 2 - b'v. Any guess but None costs one epoch of the budget.
            key: a typed JAX key, for solvers that draw at random; others ignore it.
            num_averaged: how many of the last columns count together, by the mean of their relative
                residuals, as those of an estimator's probes do; every other column counts alone.

        Returns:
            A `Solution`; `converged` is False where the budget ended first, and values are NaN
            where H is not positive definite.

        Raises:
            ValueError: if `B` or `guess` has the wrong shape, or `num_averaged` is out of range.
        """


class Start(NamedTuple):
    """A linear system with normalised right-hand sides, and where its solution starts."""

    scale: Float[Array, " k"]  # norms of the right-hand sides
    value: Float[Array, "n k"]
    residual: Float[Array, "n k"]
    epochs: Float[Array, ""]  # what the initial residual has cost


def start(
    operator: KernelOperator,
    B: Float[Array, "n k"],
    guess: Float[Array, "*candidates n k"] | None,
) -> Start:
    """Normalise each right-hand side, and compute the residual of the initial guess."""
    if B.ndim != 2 or B.shape[0] != operator.size:
        raise ValueError(f"`B` must have shape ({operator.size}, k), got {B.shape}.")
    B = B.astype(operator.dtype)
    norm = jnp.linalg.norm(B, axis=0)
    scale = jnp.where(norm > 0, norm, 1.0)
    B = B / scale
    if guess is None:
        return Start(scale, jnp.zeros_like(B), B, jnp.zeros((), B.dtype))
    several = guess.ndim == 3
    checks.shape("guess", guess[0] if several else guess, B.shape, why="one start for each column")
    value = guess.astype(B.dtype) / scale
    if not several:
        return Start(scale, value, B - operator.matmul(value), jnp.ones((), B.dtype))
    return Start(scale, *_best_combination(operator, B, value), jnp.ones((), B.dtype))


def _best_combination(
    operator: KernelOperator, B: Float[Array, "n k"], candidates: Float[Array, "p n k"]
) -> tuple[Float[Array, "n k"], Float[Array, "n k"]]:
    """Minimise v'Hv / 2 - b'v over each column's candidates; returns the minimum, its residual."""
    p, n, k = candidates.shape
    # Successive solutions are nearly the same: their differences make a better basis.
    basis = jnp.concatenate([candidates[:1], candidates[:-1] - candidates[1:]])
    length = jnp.linalg.norm(basis, axis=1, keepdims=True)
    basis = basis / jnp.where(length > 0, length, 1.0)
    images = operator.matmul(jnp.moveaxis(basis, 0, 1).reshape(n, p * k)).reshape(n, p, k)
    gram = jnp.einsum("ink,njk->kij", basis, images, precision="highest")
    slope = jnp.einsum("ink,nk->ki", basis, B, precision="highest")
    # A candidate that repeats another one, or is zero, takes no part.
    scale = jnp.trace(gram, axis1=1, axis2=2)[:, None, None]
    ridge = jnp.where(scale > 0, 10.0 * p * jnp.finfo(gram.dtype).eps * scale, 1.0)
    weights = jnp.linalg.solve(gram + ridge * jnp.eye(p, dtype=gram.dtype), slope[..., None])[
        ..., 0
    ]
    value = jnp.einsum("ink,ki->nk", basis, weights, precision="highest")
    return value, B - jnp.einsum("nik,ki->nk", images, weights, precision="highest")


def num_iterations(max_epochs: int | float, guess: Array | None, per_epoch: float) -> int:
    """The iterations that a budget allows, at least one; the residual of a guess is one epoch."""
    left = max_epochs - (0 if guess is None else 1)
    return max(1, math.floor(left * per_epoch + 1e-6))


def finish(
    begin: Start,
    value: Float[Array, "n k"],
    residual: Float[Array, "n k"],
    iterations: Int[Array, ""],
    epochs: Float[Array, ""],
    tolerance: float,
    num_averaged: int,
) -> Solution:
    """Undo the normalisation and judge the residuals."""
    norms = jnp.linalg.norm(residual, axis=0)
    converged = largest(norms, num_averaged) <= tolerance
    return Solution(value * begin.scale, norms, iterations, epochs + begin.epochs, converged)


def largest(norms: Float[Array, " k"], num_averaged: int) -> Float[Array, ""]:
    """The largest residual that counts: one column's, or the mean of the last `num_averaged`."""
    check_num_averaged(num_averaged, norms.shape[0])
    single = norms.shape[0] - num_averaged
    alone = jnp.max(norms[:single], initial=0.0)
    return jnp.maximum(alone, jnp.mean(norms[single:])) if num_averaged else alone


def iterate(
    step: Callable[[Any], Any],
    state: Any,
    begin: Start,
    *,
    max_iterations: int,
    epochs_per_iteration: float,
    tolerance: float,
    num_averaged: int,
) -> Solution:
    """Step until the residuals are within the tolerance, or the budget ends.

    The state has fields `iteration`, `value` and `residual`, whatever else it has.
    """

    def goes_on(state: Any) -> Array:
        unsolved = largest(jnp.linalg.norm(state.residual, axis=0), num_averaged) > tolerance
        return (state.iteration < max_iterations) & unsolved

    state = jax.lax.while_loop(goes_on, step, state)
    epochs = state.iteration.astype(state.value.dtype) * epochs_per_iteration
    return finish(
        begin, state.value, state.residual, state.iteration, epochs, tolerance, num_averaged
    )


def check_num_averaged(num_averaged: int, num_columns: int) -> None:
    """Raise unless so many of the columns can be averaged."""
    if not 0 <= num_averaged <= num_columns:
        raise ValueError(
            f"`num_averaged` must be from 0 to the number of columns, {num_columns}, got "
            f"{num_averaged}."
        )


def check_budget(tolerance: float, max_epochs: int | float) -> None:
    """Raise unless the tolerance is in [0, 1) and the budget positive."""
    if not 0.0 <= tolerance < 1.0:
        raise ValueError(
            f"`tolerance` must be in [0, 1), got {tolerance}: it bounds ||b - H v|| / ||b||, and "
            "from 1 on zero would pass for a solution."
        )
    if not max_epochs > 0:
        raise ValueError(f"`max_epochs` must be positive, got {max_epochs}.")
