"""Normal densities whose covariance is a Kronecker product and a diagonal, without the product.

Of a matrix R with n rows and p columns, the covariance of R[a, j] and R[b, l] is
H = K[a, b] B[j, l], with noise[j] added where both are the same entry. With D = diag(noise) and
D^-1/2 B D^-1/2 = U diag(lambda) U', the columns of R V for V = D^-1/2 U are independent, and the
i-th has the covariance lambda_i K + I: p factorizations of n x n matrices do the work of one of an
np x np matrix.

Eigenvectors have no derivative where eigenvalues are equal, such as the zeros of a B of low rank;
the density has one. So V and lambda are held fixed, and the derivatives are those of H, with
H^-1 = sum_i (lambda_i K + I)^-1 x v_i v_i'.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import lapack, linalg
from numpyro_scalegp.core.derivatives import lasting_jvp, refuse_derivatives
from numpyro_scalegp.core.linalg import matmul

_NO_THIRD_DERIVATIVES = (
    "the density of several outputs by its structure has first and second derivatives, and no "
    "third ones."
)


class Rotation(NamedTuple):
    """What makes the columns of R V independent, with variances lambda_i K + I."""

    vectors: Float[Array, "p p"]  # V, with V'BV = diag(lambda) and V'DV = I
    values: Float[Array, " p"]  # lambda, not negative


class _Factors(NamedTuple):
    vectors: Float[Array, "p p"]
    values: Float[Array, " p"]
    trils: Float[Array, "p n n"]  # of lambda_i K + I


class _Traces(NamedTuple):
    """What the gradient is made of."""

    weights: Float[Array, "n p"]  # A = H^-1 R
    inverses: Float[Array, "n n"]  # sum_i lambda_i P_i for P_i = (lambda_i K + I)^-1
    with_K: Float[Array, "p p"]  # sum_i tr(P_i K) v_i v_i'
    alone: Float[Array, "p p"]  # sum_i tr(P_i) v_i v_i'


def rotation(B: Float[Array, "p p"], noise: Float[Array, " p"]) -> Rotation:
    """The eigenvectors and -values of D^-1/2 B D^-1/2, without a derivative, in O(p^3)."""
    B, scale = jax.lax.stop_gradient((B, noise**-0.5))
    values, U = jnp.linalg.eigh(scale[:, None] * B * scale)
    return Rotation(scale[:, None] * U, jnp.maximum(values, 0.0))


def log_density(
    K: Float[Array, "n n"],
    B: Float[Array, "p p"],
    noise: Float[Array, " p"],
    R: Float[Array, "*batch n p"],
) -> Float[Array, "*batch"]:
    """The log density of each matrix R under N(0, K x B + I x diag(noise)).

    d log p = (a'dH a - tr(H^-1 dH)) / 2 - a'dR with a = H^-1 R. Forward and reverse mode, and
    second derivatives; a third one raises a TypeError.

    Returns:
        Log densities, in O(p n^3 + p^3) time and O(p n^2) memory.
    """
    vectors, values = rotation(B, noise)
    fixed_K = jax.lax.stop_gradient(K)
    eye = jnp.eye(len(K), dtype=K.dtype)

    def factorize(value: Array) -> Array:
        return linalg.factorize(value * fixed_K + eye, noise=jnp.ones((), K.dtype)).tril

    factors = _Factors(vectors, values, jax.lax.map(factorize, values))
    flat = R.reshape(-1, *R.shape[-2:])
    of_each = jax.vmap(lambda one: _log_density(K, B, noise, one, factors))
    return of_each(flat).reshape(R.shape[:-2])


@lasting_jvp
def _log_density(K: Array, B: Array, noise: Array, R: Array, factors: _Factors) -> Array:
    white = jax.vmap(lapack.solve_lower)(factors.trils, matmul(R, factors.vectors).T)
    log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(factors.trils, axis1=1, axis2=2)))
    log_det += len(K) * jnp.sum(jnp.log(noise))
    return -0.5 * (jnp.sum(jnp.square(white)) + log_det + R.size * math.log(2.0 * math.pi))


@_log_density.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    (K, B, noise, R, factors), (dK, dB, dnoise, dR, _) = primals, tangents
    A, inverses, with_K, alone = _traces(K, B, noise, R, factors)
    of_K = matmul(matmul(A, B), A.T) - inverses
    of_B = matmul(matmul(A.T, K), A) - with_K
    of_noise = jnp.sum(jnp.square(A), axis=0) - jnp.diagonal(alone)
    tangent = 0.5 * (jnp.sum(of_K * dK) + jnp.sum(of_B * dB) + jnp.sum(of_noise * dnoise))
    return _log_density(*primals), tangent - jnp.sum(A * dR)


@lasting_jvp
def _traces(K: Array, B: Array, noise: Array, R: Array, factors: _Factors) -> _Traces:
    def add(total: Array, item: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        L, value, row = item
        P = linalg.inverse_from_factor(L)
        return total + value * P, (matmul(P, row), jnp.sum(P * K), jnp.trace(P))

    V = factors.vectors
    items = factors.trils, factors.values, matmul(R, V).T
    inverses, (rows, with_K, alone) = jax.lax.scan(add, jnp.zeros_like(K), items)
    return _Traces(matmul(V, rows).T, inverses, matmul(V * with_K, V.T), matmul(V * alone, V.T))


@_traces.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[_Traces, _Traces]:
    """By d(H^-1) = -H^-1 dH H^-1, in the coordinates in which H is block diagonal.

    There dH has the blocks dK lambda_i where i = j, and K (v_i'dB v_j) + v_i'dD v_j for all i, j.
    """
    K, B, noise, R, factors = primals
    K, B, noise, R = refuse_derivatives(_NO_THIRD_DERIVATIVES, (K, B, noise, R))
    dK, dB, dnoise, dR, _ = tangents
    V, values, trils = factors
    found = _traces(K, B, noise, R, factors)
    A = found.weights
    P = jax.lax.map(linalg.inverse_from_factor, trils)
    PK = matmul(P, K)
    PdK = matmul(P, dK)
    of_B, of_noise = matmul(matmul(V.T, dB), V), matmul(V.T * dnoise, V)

    change = dR - matmul(matmul(dK, A), B) - matmul(matmul(K, A), dB) - A * dnoise
    weights = matmul(V, jnp.einsum("iab,bi->ia", P, matmul(change, V), precision="highest")).T

    def products(left: Array, right: Array) -> Array:
        return jnp.einsum("iab,jba->ij", left, right, precision="highest")

    def traces(left: Array, diagonal: Array) -> Array:
        # All P_i and K commute.
        blocks = of_B * products(left, PK) + of_noise * products(left, P)
        return matmul(matmul(V, jnp.diag(diagonal) - blocks), V.T)

    def same(left: Array, right: Array) -> Array:
        return jnp.einsum("iab,iba->i", left, right, precision="highest")

    with_K = traces(PK, jnp.trace(PdK, axis1=1, axis2=2) - values * same(PdK, PK))
    alone = traces(P, -values * same(PdK, P))
    own_B, own_noise = jnp.diagonal(of_B)[:, None, None], jnp.diagonal(of_noise)[:, None, None]
    each = values[:, None, None]
    block = each * PdK + own_B * PK + own_noise * P
    inverses = jnp.sum(own_B * P - each * matmul(block, P), axis=0)
    return found, _Traces(weights, inverses, with_K, alone)
