"""Weights of kernel basis functions that minimize a penalized sum of squares."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core.chunks import rows_per_chunk, sum_rows
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.linear.iteration import iterate
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.compiled import compiled


class RepresenterWeights(NamedTuple):
    """Weights a of the functions k(., z_i), and how the solve went."""

    value: Float[Array, " M"]
    residual: Float[Array, ""]  # norm in the whitened system, relative to its right-hand side
    iterations: Int[Array, ""]  # each evaluates K(X, Z)
    converged: Bool[Array, ""]


class _State(NamedTuple):
    value: Float[Array, " M"]
    residual: Float[Array, " M"]
    preconditioned: Float[Array, " M"]
    direction: Float[Array, " M"]


@compiled
def representer_weights(
    kernel: AbstractKernel,
    points: Float[Array, "M d"],
    X: Float[Array, "n d"],
    targets: Float[Array, " n"],
    precision: Float[Array, " n"],
    *,
    offset: tuple[Float[Array, " n"], Float[Array, " M"]] | None = None,
    guess: Float[Array, " M"] | None = None,
    active: Bool[Array, " M"] | None = None,
    tolerance: float = 1e-3,
    max_iterations: int = 50,
    jitter: float | None = None,
) -> RepresenterWeights:
    """Minimize sum_i precision_i (t_i - k(x_i, Z) a)^2 + a'K(Z, Z) a over a.

    With `offset`, a fixed function g, k(., Z) a + g replaces k(., Z) a in the residuals and in the
    squared norm.

    Conjugate gradients on the system (I + B D B') c = B D t with B = L^-1 K(Z, X), K(Z, Z) = L L'
    and a = L'^-1 c, preconditioned as if the points were a random subset of the inputs: B D B' ~
    (tr D / M) L'L. It takes tens of iterations, more with few points.

    Args:
        kernel: covariance function.
        points: Z, shape (M, d); the preconditioner is good for points like random rows of X.
        X: inputs, shape (n, d).
        targets: t, shape (n,).
        precision: D, nonnegative, shape (n,).
        offset: g(X) and g(Z), shapes (n,) and (M,), for g in the kernel's RKHS.
        guess: initial guess of the weights, shape (M,); None for zeros. The result is never worse.
        active: which points to use, shape (M,); the weights of other points are zero.
        tolerance: residual at which the loop stops, relative to the smaller residual of zero
            weights and of `guess`.
        max_iterations: the largest number of iterations.
        jitter: added to the diagonal of K(Z, Z), relative to its mean; None for 300 `eps`.

    Returns:
        The weights. `converged` is whether their residual, relative to the residual of zero
        weights, is at most `tolerance`. It is False if the iterations ran out, or if rounding
        errors prevent convergence, as with little noise in float32.

    References:
        Rudi, Carratino and Rosasco (2017), FALKON: An Optimal Large Scale Kernel Method. Time
        O(iterations n M d + M^3), memory O(M^2 + n d), in chunks of rows.
    """
    whitened = _Whitened(kernel, points, X, precision, active, jitter)
    value = jnp.zeros(len(points), whitened.dtype)
    if offset is None:
        rhs = whitened.misfit(value, targets)
    else:
        at_rows, at_points = offset
        # The squared norm of the sum has the additional term 2 a'g(Z).
        rhs = whitened.misfit(value, targets - at_rows) - whitened.whiten(at_points)
    residual = rhs
    if guess is not None:
        value = whitened.coordinates(guess)
        residual = rhs - whitened.product(value)
    scale = jnp.linalg.norm(rhs)
    least = 10.0 * jnp.finfo(whitened.dtype).eps
    # Relative to the guess's residual, so that CG improves even a good guess.
    goal = jnp.maximum(tolerance * jnp.minimum(jnp.linalg.norm(residual), scale), least * scale)

    def step(state: _State, _: Array, check: Array) -> tuple[_State, Array]:
        vector = jnp.where(check, state.value, state.direction)
        product = whitened.product(vector)
        energy = state.residual.dot(state.preconditioned)
        length = jnp.where(check, 0.0, energy / state.direction.dot(product))
        residual = jnp.where(check, rhs - product, state.residual - length * product)
        preconditioned = whitened.precondition(residual)
        ratio = jnp.where(check, 0.0, residual.dot(preconditioned) / energy)
        direction = preconditioned + ratio * state.direction
        value = state.value + length * state.direction
        return _State(value, residual, preconditioned, direction), jnp.ones((), bool)

    first = whitened.precondition(residual)
    end, outcome = iterate(
        step,
        _State(value, residual, first, first),
        lambda state: jnp.linalg.norm(state.residual),
        max_iterations=max_iterations,
        tolerance=goal,
    )
    # Minus twice the objective, which rounding errors can make worse than at the guess.
    better = end.value.dot(rhs + end.residual) > value.dot(rhs + residual)
    value = jnp.where(better, end.value, value)
    size = jnp.linalg.norm(jnp.where(better, end.residual, residual))
    relative = size / jnp.where(scale == 0, 1.0, scale)
    converged = relative <= jnp.maximum(tolerance, least)
    return RepresenterWeights(whitened.weights(value), relative, outcome.iterations, converged)


class _Whitened:
    """The system's matrix I + B D B', and its preconditioner I + (tr D / M) L'L = C C'."""

    def __init__(
        self,
        kernel: AbstractKernel,
        points: Float[Array, "M d"],
        X: Float[Array, "n d"],
        precision: Float[Array, " n"],
        active: Bool[Array, " M"] | None,
        jitter: float | None,
    ) -> None:
        M = len(points)
        K = kernel.evaluate_covariance(points)
        jitter = 300.0 * float(jnp.finfo(K.dtype).eps) if jitter is None else jitter
        K = linalg.add_jitter(K, jitter)
        self.kernel, self.points, self.X, self.precision = kernel, points, X, precision
        self.active = jnp.ones(M, bool) if active is None else active
        # Inactive points form an identity block with a zero right-hand side.
        K = jnp.where(self.active[:, None] & self.active, K, jnp.eye(M, dtype=K.dtype))
        self.L, self.dtype = linalg.factorize(K).tril, K.dtype
        per_point = jnp.sum(precision) / jnp.sum(self.active)
        inner = jnp.eye(M, dtype=self.dtype) + per_point * matmul(self.L.T, self.L)
        # All eigenvalues are at least one, so that the factorization succeeds.
        self.C = linalg.factorize(inner, warn=False).tril

    def coordinates(self, weights: Float[Array, " M"]) -> Float[Array, " M"]:
        """The coordinates c = L'a."""
        return matmul(self.L.T, jnp.where(self.active, weights, 0.0))

    def weights(self, c: Float[Array, " M"]) -> Float[Array, " M"]:
        """The weights a = L'^-1 c."""
        return solve_triangular(self.L, c, lower=True, trans=1)

    def whiten(self, values: Float[Array, " M"]) -> Float[Array, " M"]:
        """The values at the points, multiplied by L^-1."""
        return solve_triangular(self.L, jnp.where(self.active, values, 0.0), lower=True)

    def misfit(self, c: Float[Array, " M"], targets: Float[Array, " n"]) -> Float[Array, " M"]:
        """B D (t - B'c)."""
        a = self.weights(c)

        def of_chunk(rows: tuple[Array, Array, Array]) -> Array:
            X, precision, targets = rows
            K_XZ = jnp.where(self.active, self.kernel.evaluate(X, self.points), 0.0)
            return matmul(precision * (targets - matmul(K_XZ, a)), K_XZ)

        rows = self.X, self.precision, targets
        return self.whiten(sum_rows(of_chunk, rows, rows_per_chunk(len(self.points))))

    def product(self, c: Float[Array, " M"]) -> Float[Array, " M"]:
        """(I + B D B') c."""
        return c - self.misfit(c, jnp.zeros_like(self.precision))

    def precondition(self, c: Float[Array, " M"]) -> Float[Array, " M"]:
        """C'^-1 C^-1 c."""
        return solve_triangular(
            self.C, solve_triangular(self.C, c, lower=True), lower=True, trans=1
        )
