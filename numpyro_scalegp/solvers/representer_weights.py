"""Weights of given basis functions that minimise a penalised sum of squares."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core import linalg
from numpyro_scalegp.core.chunks import rows_per_chunk, sum_rows
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.kernels import AbstractKernel


class RepresenterWeights(NamedTuple):
    """Weights a of the functions k(., z_i), and how the solve went."""

    value: Float[Array, " M"]
    residual: Float[Array, ""]  # of the whitened system, relative to that of the start
    iterations: Int[Array, ""]  # each evaluates the kernel for all pairs of a row and a point
    converged: Bool[Array, ""]


class _State(NamedTuple):
    iteration: Int[Array, ""]
    value: Float[Array, " M"]
    residual: Float[Array, " M"]
    preconditioned: Float[Array, " M"]
    direction: Float[Array, " M"]


@eqx.filter_jit
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
    """Minimise sum_i precision_i (t_i - k(x_i, Z) a)^2 + a'K(Z, Z) a over a.

    With `offset`, a function g that stays as it is, the minimum is that of k(., Z) a + g and of its
    own squared norm in place of both terms.

    Conjugate gradients on the system (I + B D B') c = B D t with B = L^-1 K(Z, X), K(Z, Z) = L L'
    and a = L'^-1 c, preconditioned by what it would be if the points were a random subset of the
    rows: B D B' ~ (tr D / M) L'L. That takes tens of iterations, more where points are few.

    Args:
        kernel: covariance function.
        points: Z, shape (M, d): for the preconditioner to be a good one, like random rows of X.
        X: inputs, shape (n, d).
        targets: t, shape (n,).
        precision: D, not negative, shape (n,).
        offset: g(X) and g(Z), shapes (n,) and (M,), of a function of the kernel's own space.
        guess: weights to start from, shape (M,), than which the result is never worse; None for
            zeros.
        active: which points take part, shape (M,); the others get weights of zero.
        tolerance: residual at which the loop stops, relative to that of the start.
        max_iterations: iterations at most.
        jitter: what K(Z, Z) gets on its diagonal, relative to its mean; None for 100 `eps`.

    Returns:
        The weights; `converged` is False where the iterations ended first.

    References:
        Rudi, Carratino and Rosasco (2017), FALKON: An Optimal Large Scale Kernel Method. Time
        O(iterations n M d + M^3), memory O(M^2 + n d), in chunks of rows.
    """
    K = linalg.add_jitter(kernel.covariance(points), jitter)
    M = len(K)
    active = jnp.ones(M, bool) if active is None else active
    # A unit block that is linked to nothing: its right-hand side is zero.
    K = jnp.where(active[:, None] & active, K, jnp.eye(M, dtype=K.dtype))
    L = linalg.factorise(K).tril
    per_point = jnp.sum(precision) / jnp.sum(active)
    inner = jnp.eye(M, dtype=L.dtype) + per_point * matmul(L.T, L)
    # Eigenvalues of one or more: there is nothing to warn of.
    C = linalg.factorise(inner, warn=False).tril
    chunk_size = rows_per_chunk(M)

    def solve_both(L: Array, b: Array) -> Array:
        return solve_triangular(L, solve_triangular(L, b, lower=True), lower=True, trans=1)

    whiten = functools.partial(solve_triangular, L, lower=True)
    unwhiten = functools.partial(solve_triangular, L, lower=True, trans=1)

    def weigh_misfit(c: Array, targets: Array) -> Float[Array, " M"]:
        """B D (t - B'c)."""
        a = unwhiten(c)

        def of_chunk(rows: tuple[Array, Array, Array]) -> Array:
            X, precision, targets = rows
            across = jnp.where(active, kernel(X, points), 0.0)
            return matmul(precision * (targets - matmul(across, a)), across)

        return whiten(sum_rows(of_chunk, (X, precision, targets), chunk_size))

    value = jnp.zeros(M, L.dtype)
    if offset is None:
        residual = weigh_misfit(value, targets)
    else:
        at_rows, at_points = offset
        residual = weigh_misfit(value, targets - at_rows)
        # Twice a'g(Z) is what the squared norm of the sum has besides.
        residual -= whiten(jnp.where(active, at_points, 0.0))
    rounding = 10.0 * jnp.finfo(L.dtype).eps * jnp.linalg.norm(residual)
    no_targets = jnp.zeros_like(targets)
    if guess is not None:
        value = matmul(L.T, jnp.where(active, guess, 0.0))
        residual += weigh_misfit(value, no_targets) - value
    first = solve_both(C, residual)
    norm = jnp.linalg.norm(residual)
    goal = jnp.maximum(tolerance * norm, rounding)

    def goes_on(state: _State) -> Array:
        unsolved = jnp.linalg.norm(state.residual) > goal
        return unsolved & (state.iteration < max_iterations)

    def step(state: _State) -> _State:
        image = state.direction - weigh_misfit(state.direction, no_targets)
        energy = state.residual.dot(state.preconditioned)
        length = energy / state.direction.dot(image)
        residual = state.residual - length * image
        preconditioned = solve_both(C, residual)
        turn = residual.dot(preconditioned) / energy
        return _State(
            state.iteration + 1,
            state.value + length * state.direction,
            residual,
            preconditioned,
            preconditioned + turn * state.direction,
        )

    start = _State(jnp.zeros((), int), value, residual, first, first)
    state = jax.lax.while_loop(goes_on, step, start)
    last = jnp.linalg.norm(state.residual)
    relative = last / jnp.where(norm > 0, norm, 1.0)
    return RepresenterWeights(unwhiten(state.value), relative, state.iteration, last <= goal)
