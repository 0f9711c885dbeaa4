"""Block Krylov spaces: groups of vectors that search together."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core.linalg import matmul, triangular_inverse
from numpyro_scalegp.solvers.preconditioners import PreconditionerFactor


def split(columns: Float[Array, "n k"], size: int) -> Float[Array, "groups n {size}"]:
    """Groups of columns; the last one is padded with zeros."""
    groups = -(-columns.shape[1] // size)
    padded = jnp.pad(columns, ((0, 0), (0, groups * size - columns.shape[1])))
    return jnp.moveaxis(padded.reshape(len(columns), groups, size), 1, 0)


def join(groups: Float[Array, "groups n g"]) -> Float[Array, "n k"]:
    """The inverse of `split`, padding included."""
    return jnp.moveaxis(groups, 0, 1).reshape(groups.shape[1], -1)


class Krylov(NamedTuple):
    """Groups of right-hand sides, each with a Krylov space of its own; residuals are Q C."""

    basis: Float[Array, "groups n g"]  # Q, with Q'P^-1 Q = I
    direction: Float[Array, "groups n g"]  # S
    triangle: Float[Array, "groups g g"]  # C


def from_residual(residual: Float[Array, "n k"], size: int, factor: PreconditionerFactor) -> Krylov:
    """Groups that search along their preconditioned residuals."""
    orthonormalize = jax.vmap(functools.partial(_orthonormalize, factor=factor))
    return Krylov(*orthonormalize(split(residual, size)))


def norms(krylov: Krylov) -> Float[Array, " k"]:
    """The norms of all residuals, those of padding included."""
    return jnp.linalg.norm(matmul(krylov.basis, krylov.triangle), axis=1).reshape(-1)


class Step(NamedTuple):
    """An iteration of each group."""

    krylov: Krylov
    move: Float[Array, "groups n g"]  # what the solutions move by
    works: Bool[Array, ""]
    curvature: Float[Array, "groups g g"]
    triangle: Float[Array, "groups g g"]


def advance(
    krylov: Krylov,
    product: Float[Array, "groups n g"],
    fresh: Float[Array, "groups n g"],
    restarts: Bool[Array, ""] | bool,
    *,
    factor: PreconditionerFactor,
    rounding: Float[Array, ""],
) -> Step:
    """One iteration of each group, given H S, or a start at the residuals `fresh`.

    The step minimizes over the span of S, so that errors never grow, whatever rounding or dependent
    columns do to the factors; S'Q, the identity in exact arithmetic, corrects that.

    It works unless rounding leaves no positive curvature: then the groups stay as they are. Where
    the product is not finite, or the curvature too negative for rounding, the next state is NaN.
    """

    def of_group(krylov: Krylov, product: Array, fresh: Array) -> tuple[Step, Array]:
        S, Q, T = krylov.direction, krylov.basis, krylov.triangle
        curvature = matmul(S.T, product)
        W = _inverse_factor(curvature)[1]
        step = matmul(matmul(W.T, W), matmul(S.T, Q))
        move = matmul(S, matmul(step, T))
        residual = jnp.where(restarts, fresh, Q - matmul(product, step))
        basis, preconditioned, triangle = _orthonormalize(residual, factor=factor)
        direction = preconditioned + jnp.where(restarts, 0.0, matmul(S, triangle.T))
        chained = jnp.where(restarts, triangle, matmul(triangle, T))
        lifted = _lifted_cholesky(curvature + rounding * matmul(S.T, S))
        positive = restarts | jnp.isfinite(lifted[-1, -1])
        works = jnp.all(jnp.isfinite(triangle))
        curvature = 0.5 * (curvature + curvature.T)
        new = Step(Krylov(basis, direction, chained), move, works, curvature, triangle)
        return new, jnp.all(jnp.isfinite(product)) & positive

    new, harmless = jax.vmap(of_group)(krylov, product, fresh)
    stays = ~jnp.all(new.works) & jnp.all(new.works | harmless)
    krylov = jax.tree.map(lambda a, b: jnp.where(stays, a, b), krylov, new.krylov)
    return new._replace(krylov=krylov, works=~stays)


def _orthonormalize(
    R: Float[Array, "n g"], *, factor: PreconditionerFactor
) -> tuple[Float[Array, "n g"], Float[Array, "n g"], Float[Array, "g g"]]:
    """R = Q C with Q'P^-1 Q = I, and P^-1 Q; by Cholesky factorizations, twice for accuracy."""
    C = jnp.eye(R.shape[1], dtype=R.dtype)
    Q, Z = R, factor.solve(R)
    for _ in range(2):
        L, W = _inverse_factor(matmul(Q.T, Z))
        Q, Z, C = matmul(Q, W.T), matmul(Z, W.T), matmul(L.T, C)
    return Q, Z, C


def _inverse_factor(G: Float[Array, "g g"]) -> tuple[Float[Array, "g g"], Float[Array, "g g"]]:
    """L and L^-1 with L L' ~ G, lifted by rounding so that dependent columns do no harm."""
    L = _lifted_cholesky(G)
    return L, triangular_inverse(L)


def _lifted_cholesky(G: Float[Array, "g g"]) -> Float[Array, "g g"]:
    g, limits = G.shape[0], jnp.finfo(G.dtype)
    lift = 10.0 * limits.eps * jnp.abs(jnp.trace(G)) + limits.tiny
    return jnp.linalg.cholesky(0.5 * (G + G.T) + lift * jnp.eye(g, dtype=G.dtype))
