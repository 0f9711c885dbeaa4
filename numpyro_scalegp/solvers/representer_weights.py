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
    residual: Float[Array, ""]  # of the whitened system, recomputed, relative to its right side
    iterations: Int[Array, ""]  # each evaluates the kernel for all pairs of a row and a point
    converged: Bool[Array, ""]


class _Run(NamedTuple):
    """Between runs of the recursion, each of which starts at the residual recomputed."""

    iteration: Int[Array, ""]
    value: Float[Array, " M"]
    residual: Float[Array, " M"]
    stalled: Bool[Array, ""]  # the last run did not halve it


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
        tolerance: residual at which the loop stops, relative to that of zero weights, or of `guess`
            where this has a smaller one.
        max_iterations: iterations at most.
        jitter: what K(Z, Z) gets on its diagonal, relative to its mean; None for 100 `eps`.

    Returns:
        The weights. `converged` says whether their residual, relative to that of zero weights, is
        at most `tolerance`: it is not where the iterations ended first, or rounding stands against
        it, as with little noise in float32.

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
        rhs = weigh_misfit(value, targets)
    else:
        at_rows, at_points = offset
        # Twice a'g(Z) is what the squared norm of the sum has besides.
        rhs = weigh_misfit(value, targets - at_rows) - whiten(jnp.where(active, at_points, 0.0))
    no_targets = jnp.zeros_like(targets)

    def residual_at(c: Array) -> Float[Array, " M"]:
        return rhs + weigh_misfit(c, no_targets) - c

    residual = rhs
    if guess is not None:
        value = matmul(L.T, jnp.where(active, guess, 0.0))
        residual = residual_at(value)
    scale = jnp.linalg.norm(rhs)
    least = 10.0 * jnp.finfo(L.dtype).eps
    # A guess that is nearly solved still gains.
    goal = jnp.maximum(tolerance * jnp.minimum(jnp.linalg.norm(residual), scale), least * scale)

    def iterate(state: _State) -> _State:
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

    def unsolved(state: _State | _Run) -> Array:
        return (jnp.linalg.norm(state.residual) > goal) & (state.iteration < max_iterations)

    def run(run: _Run) -> _Run:
        first = solve_both(C, run.residual)
        state = _State(run.iteration, run.value, run.residual, first, first)
        state = jax.lax.while_loop(unsolved, iterate, state)
        # What the recursion says of the residual drifts away from what it is.
        residual = residual_at(state.value)
        # Minus twice what is minimised: where rounding has the last word, it may fall.
        better = state.value.dot(rhs + residual) > run.value.dot(rhs + run.residual)
        value, residual = (
            jnp.where(better, new, old)
            for new, old in ((state.value, run.value), (residual, run.residual))
        )
        gained = jnp.linalg.norm(residual) < 0.5 * jnp.linalg.norm(run.residual)
        return _Run(state.iteration, value, residual, ~gained)

    start = _Run(jnp.zeros((), int), value, residual, jnp.zeros((), bool))
    end = jax.lax.while_loop(lambda now: unsolved(now) & ~now.stalled, run, start)
    relative = jnp.linalg.norm(end.residual) / jnp.where(scale == 0, 1.0, scale)
    converged = relative <= jnp.maximum(tolerance, least)
    return RepresenterWeights(unwhiten(end.value), relative, end.iteration, converged)
