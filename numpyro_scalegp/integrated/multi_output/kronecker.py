"""Normal densities whose covariance is a Kronecker product plus a diagonal, by its structure.

The covariance H of an (n, p) matrix R is K[a, b] B[j, l] between R[a, j] and R[b, l], plus noise[j]
if these are the same entry. With D = diag(noise) and D^-1/2 B D^-1/2 = U diag(lambda) U', the
columns of R V for V = D^-1/2 U are independent, and column i has the covariance lambda_i K + I:
p factorizations of n x n matrices replace one factorization of an np x np matrix.

Eigenvectors have no derivative if eigenvalues are equal, such as the zeros of a B of low rank,
though the density has one. So V and lambda are held fixed, and the derivatives are computed from H,
with H^-1 = sum_i (lambda_i K + I)^-1 x v_i v_i'.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.numerics import lapack, linalg
from numpyro_scalegp.numerics.derivatives import custom_jvp_all_orders, refuse_derivatives
from numpyro_scalegp.numerics.linalg import matmul

_NO_THIRD_DERIVATIVES = (
    "the structured density of several outputs has no third derivatives, only first and second "
    "derivatives."
)


class Rotation(NamedTuple):
    """The V for which the columns of R V are independent, with covariances lambda_i K + I."""

    vectors: Float[Array, "p p"]  # V, with V'BV = diag(lambda) and V'DV = I
    values: Float[Array, " p"]  # lambda, not negative


class _Factors(NamedTuple):
    vectors: Float[Array, "p p"]
    values: Float[Array, " p"]
    trils: Float[Array, "p n n"]  # of lambda_i K + I


class _Traces(NamedTuple):
    """The terms of the gradient, with P_i = (lambda_i K + I)^-1."""

    weights: Float[Array, "n p"]  # A = H^-1 R
    inverses: Float[Array, "n n"]  # sum_i lambda_i P_i
    K_traces: Float[Array, "p p"]  # sum_i tr(P_i K) v_i v_i'
    traces: Float[Array, "p p"]  # sum_i tr(P_i) v_i v_i'


def rotation(B: Float[Array, "p p"], noise: Float[Array, " p"]) -> Rotation:
    """The `Rotation`, from an eigendecomposition without a derivative, in O(p^3)."""
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

    d log p = (a'dH a - tr(H^-1 dH)) / 2 - a'dR with a = H^-1 R. It has first and second derivatives
    in forward and reverse mode; third derivatives raise a TypeError.

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
    densities = jax.vmap(lambda residual: _log_density(K, B, noise, residual, factors))(flat)
    return densities.reshape(R.shape[:-2])


@custom_jvp_all_orders
def _log_density(K: Array, B: Array, noise: Array, R: Array, factors: _Factors) -> Array:
    white = jax.vmap(lapack.solve_lower)(factors.trils, matmul(R, factors.vectors).T)
    log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(factors.trils, axis1=1, axis2=2)))
    log_det += len(K) * jnp.sum(jnp.log(noise))
    return -0.5 * (jnp.sum(jnp.square(white)) + log_det + R.size * math.log(2.0 * math.pi))


@_log_density.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    (K, B, noise, R, factors), (dK, dB, dnoise, dR, _) = primals, tangents
    A, inverses, K_traces, traces = _traces(K, B, noise, R, factors)
    of_K = matmul(matmul(A, B), A.T) - inverses
    of_B = matmul(matmul(A.T, K), A) - K_traces
    of_noise = jnp.sum(jnp.square(A), axis=0) - jnp.diagonal(traces)
    tangent = 0.5 * (jnp.sum(of_K * dK) + jnp.sum(of_B * dB) + jnp.sum(of_noise * dnoise))
    return _log_density(*primals), tangent - jnp.sum(A * dR)


@custom_jvp_all_orders
def _traces(K: Array, B: Array, noise: Array, R: Array, factors: _Factors) -> _Traces:
    def add(total: Array, item: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        L, value, row = item
        P = linalg.inverse_from_factor(L)
        return total + value * P, (matmul(P, row), jnp.sum(P * K), jnp.trace(P))

    V = factors.vectors
    items = factors.trils, factors.values, matmul(R, V).T
    inverses, (rows, K_traces, traces) = jax.lax.scan(add, jnp.zeros_like(K), items)
    return _Traces(matmul(V, rows).T, inverses, matmul(V * K_traces, V.T), matmul(V * traces, V.T))


@_traces.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[_Traces, _Traces]:
    """The rule from d(H^-1) = -H^-1 dH H^-1, in the coordinates in which H is block diagonal.

    In these, block (i, j) of dH is K (v_i'dB v_j) + v_i'dD v_j, plus dK lambda_i if i = j.
    """
    K, B, noise, R, factors = primals
    K, B, noise, R = refuse_derivatives(_NO_THIRD_DERIVATIVES, (K, B, noise, R))
    dK, dB, dnoise, dR, _ = tangents
    V, values, trils = factors
    value = _traces(K, B, noise, R, factors)
    A = value.weights
    P = jax.lax.map(linalg.inverse_from_factor, trils)
    PK = matmul(P, K)
    PdK = matmul(P, dK)
    of_B, of_noise = matmul(matmul(V.T, dB), V), matmul(V.T * dnoise, V)

    change = dR - matmul(matmul(dK, A), B) - matmul(matmul(K, A), dB) - A * dnoise
    weights = matmul(V, jnp.einsum("iab,bi->ia", P, matmul(change, V), precision="highest")).T

    def products(left: Array, right: Array) -> Array:
        return jnp.einsum("iab,jba->ij", left, right, precision="highest")

    def rotated_back(left: Array, diagonal: Array) -> Array:
        # All P_i and K commute.
        blocks = of_B * products(left, PK) + of_noise * products(left, P)
        return matmul(matmul(V, jnp.diag(diagonal) - blocks), V.T)

    def product_traces(left: Array, right: Array) -> Array:
        return jnp.einsum("iab,iba->i", left, right, precision="highest")

    PdK_traces = jnp.trace(PdK, axis1=1, axis2=2)
    K_traces = rotated_back(PK, PdK_traces - values * product_traces(PdK, PK))
    traces = rotated_back(P, -values * product_traces(PdK, P))
    B_diagonal = jnp.diagonal(of_B)[:, None, None]
    noise_diagonal = jnp.diagonal(of_noise)[:, None, None]
    scale = values[:, None, None]
    block = scale * PdK + B_diagonal * PK + noise_diagonal * P
    inverses = jnp.sum(B_diagonal * P - scale * matmul(block, P), axis=0)
    return value, _Traces(weights, inverses, K_traces, traces)
