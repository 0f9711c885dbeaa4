"""The moments of a whitened sparse GP, with a derivative of few products."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core.linalg import Factor, half, inverse_cholesky_given, matmul


def whitened_moments(
    K_ZZ: Float[Array, "M M"],
    K_ZX: Float[Array, "M n"],
    diagonal: Float[Array, " n"],
    loc: Float[Array, " M"],
    scale_tril: Float[Array, "M M"],
    factor: Factor,
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The mean and the variance of f(X) under a whitened q(v) = N(loc, S S').

    With K_ZZ = L L', W = L^-1 and A = W K_ZX: mean A'loc and variance
    max(k(x, x) - ||A||^2, 0) + ||S'A||^2. The derivative passes by the lift of what rounding made
    negative.

    The reverse rule needs, with weights v and g for variance and mean, the one matrix
    P = A diag(v) A' where differentiating line by line takes three products of that size:
    dS = 2 P S, dK_ZX = W'(loc g' + 2 (S S' - I) A diag(v)), dK_ZZ = -W' half(Q) W with
    Q = loc (A g)' + 2 (S S' - I) P. Reverse mode, and forward or reverse mode on top of it, work;
    forward mode alone does not.

    Args:
        K_ZZ: covariance of the inducing values, positive definite, shape (M, M).
        K_ZX: covariance with the values at X, shape (M, n).
        diagonal: k(x, x), shape (n,).
        loc: mean of v, shape (M,).
        scale_tril: S, shape (M, M).
        factor: `linalg.factorize(K_ZZ)`.

    Returns:
        Means and variances, each of shape (n,). Time O(n M^2 + M^3).
    """
    return _moments(K_ZZ, K_ZX, diagonal, loc, scale_tril, factor.tril)


@jax.custom_vjp
def _moments(
    K_ZZ: Array, K_ZX: Array, diagonal: Array, loc: Array, S: Array, L: Array
) -> tuple[Array, Array]:
    return _moments_forward(K_ZZ, K_ZX, diagonal, loc, S, L)[0]


def _moments_forward(
    K_ZZ: Array, K_ZX: Array, diagonal: Array, loc: Array, S: Array, L: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    W = inverse_cholesky_given(K_ZZ, L)
    A = matmul(W, K_ZX)
    unexplained = jnp.maximum(diagonal - jnp.sum(jnp.square(A), axis=0), 0.0)
    variance = unexplained + jnp.sum(jnp.square(matmul(S.T, A)), axis=0)
    return (matmul(loc, A), variance), (W, A, loc, S)


def _moments_backward(
    residuals: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, ...]:
    W, A, loc, S = residuals
    g, v = cotangents
    weighted = A * v[None, :]
    P = matmul(weighted, A.T)
    PS = matmul(P, S)
    excess = matmul(S, S.T) - jnp.eye(S.shape[0], dtype=S.dtype)
    Ag = matmul(A, g)
    d_K_ZX = 2.0 * matmul(matmul(W.T, excess), weighted) + jnp.outer(matmul(loc, W), g)
    Q = 2.0 * (matmul(S, PS.T) - P) + jnp.outer(loc, Ag)
    d_K_ZZ = -matmul(matmul(W.T, half(Q)), W)
    return d_K_ZZ, d_K_ZX, v, Ag, 2.0 * PS, jnp.zeros_like(W)


_moments.defvjp(_moments_forward, _moments_backward)
