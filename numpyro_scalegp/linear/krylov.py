"""Block Krylov spaces, which groups of right-hand sides share."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.linear.preconditioners import AbstractFactor
from numpyro_scalegp.numerics import lapack
from numpyro_scalegp.numerics.linalg import matmul, triangular_inverse


def split(columns: Float[Array, "n k"], size: int) -> Float[Array, "groups n {size}"]:
    """Split columns into groups; the last group is padded with zeros."""
    groups = -(-columns.shape[1] // size)
    padded = jnp.pad(columns, ((0, 0), (0, groups * size - columns.shape[1])))
    return jnp.moveaxis(padded.reshape(len(columns), groups, size), 1, 0)


def join(groups: Float[Array, "groups n g"]) -> Float[Array, "n k"]:
    """The inverse of `split`, padding included."""
    return jnp.moveaxis(groups, 0, 1).reshape(groups.shape[1], -1)


class Krylov(NamedTuple):
    """Groups of right-hand sides, each with a separate Krylov space; residuals are Q C."""

    basis: Float[Array, "groups n g"]  # Q, with Q'P^-1 Q = I
    direction: Float[Array, "groups n g"]  # S
    triangle: Float[Array, "groups g g"]  # C


def from_residual(residual: Float[Array, "n k"], size: int, factor: AbstractFactor) -> Krylov:
    """Start each group along its preconditioned residuals."""
    orthonormalize = jax.vmap(functools.partial(_orthonormalize, factor=factor))
    return Krylov(*orthonormalize(split(residual, size)))


def norms(krylov: Krylov) -> Float[Array, " k"]:
    """The norms of all residuals, padding included."""
    return jnp.linalg.norm(matmul(krylov.basis, krylov.triangle), axis=1).reshape(-1)


class Step(NamedTuple):
    """The result of one iteration of each group."""

    krylov: Krylov
    move: Float[Array, "groups n g"]  # the change of the solutions
    works: Bool[Array, ""]
    curvature: Float[Array, "groups g g"]
    triangle: Float[Array, "groups g g"]


def advance(
    krylov: Krylov,
    product: Float[Array, "groups n g"],
    true_residual: Float[Array, "groups n g"],
    restarts: Bool[Array, ""] | bool,
    *,
    factor: AbstractFactor,
    rounding: Float[Array, ""],
) -> Step:
    """One iteration of each group, given H S, or a restart at `true_residual`.

    The step minimizes over the span of S. So errors never grow, even if rounding or dependent
    columns spoil the factors; S'Q, the identity in exact arithmetic, corrects the step for that.

    A step works unless rounding leaves no positive curvature: then the groups stay unchanged. If
    the product is not finite, or the curvature more negative than rounding errors, the next state
    is NaN.
    """

    def of_group(krylov: Krylov, product: Array, true_residual: Array) -> tuple[Step, Array]:
        S, Q, T = krylov.direction, krylov.basis, krylov.triangle
        curvature = matmul(S.T, product)
        W = _inverse_factor(curvature)[1]
        coefficients = matmul(matmul(W.T, W), matmul(S.T, Q))
        move = matmul(S, matmul(coefficients, T))
        residual = jnp.where(restarts, true_residual, Q - matmul(product, coefficients))
        basis, preconditioned, triangle = _orthonormalize(residual, factor=factor)
        direction = preconditioned + jnp.where(restarts, 0.0, matmul(S, triangle.T))
        total_triangle = jnp.where(restarts, triangle, matmul(triangle, T))
        jittered = _jittered_cholesky(curvature + rounding * matmul(S.T, S))
        positive = restarts | jnp.isfinite(jittered[-1, -1])
        works = jnp.all(jnp.isfinite(triangle))
        curvature = 0.5 * (curvature + curvature.T)
        step = Step(Krylov(basis, direction, total_triangle), move, works, curvature, triangle)
        return step, jnp.all(jnp.isfinite(product)) & positive

    step, harmless = jax.vmap(of_group)(krylov, product, true_residual)
    stays = ~jnp.all(step.works) & jnp.all(step.works | harmless)
    krylov = jax.tree.map(lambda old, new: jnp.where(stays, old, new), krylov, step.krylov)
    return step._replace(krylov=krylov, works=~stays)


def _orthonormalize(
    R: Float[Array, "n g"], *, factor: AbstractFactor
) -> tuple[Float[Array, "n g"], Float[Array, "n g"], Float[Array, "g g"]]:
    """R = Q C with Q'P^-1 Q = I, and P^-1 Q; by Cholesky factorizations, twice for accuracy."""
    C = jnp.eye(R.shape[1], dtype=R.dtype)
    Q, Z = R, factor.solve(R)
    for _ in range(2):
        L, W = _inverse_factor(matmul(Q.T, Z))
        Q, Z, C = matmul(Q, W.T), matmul(Z, W.T), matmul(L.T, C)
    return Q, Z, C


def _inverse_factor(G: Float[Array, "g g"]) -> tuple[Float[Array, "g g"], Float[Array, "g g"]]:
    """L and L^-1 with L L' ~ G; jitter keeps dependent columns harmless."""
    L = _jittered_cholesky(G)
    return L, triangular_inverse(L)


def _jittered_cholesky(G: Float[Array, "g g"]) -> Float[Array, "g g"]:
    g, limits = G.shape[0], jnp.finfo(G.dtype)
    jitter = 10.0 * limits.eps * jnp.abs(jnp.trace(G)) + limits.tiny
    return lapack.cholesky(0.5 * (G + G.T) + jitter * jnp.eye(g, dtype=G.dtype))
