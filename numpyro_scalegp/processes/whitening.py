"""The moments of a whitened sparse GP, with a reverse rule of few matrix products."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import half, matmul


class Whitening(NamedTuple):
    """A covariance K = L L' of inducing values, and the inverse factor that whitens them."""

    covariance: Float[Array, "... M M"]
    inverse: Float[Array, "... M M"]  # W = L^-1
    jitter: Float[Array, "..."]  # added to the diagonal to factorize K; NaN if that failed
    factor: Float[Array, "... M M"] | None = None  # L, where it is known

    @classmethod
    def of(cls, K: Float[Array, "M M"]) -> "Whitening":
        """Factorize a covariance and invert the factor, in O(M^3)."""
        factor = linalg.factorize(K, warn=False)
        inverse = linalg.inverse_cholesky_given(K, factor.tril)
        L = linalg.cholesky_given(K, factor.tril)
        return cls(K, inverse, linalg.added_jitter(factor), L)


def whitened_moments(
    whitening: Whitening,
    K_ZX: Float[Array, "M n"],
    diagonal: Float[Array, " n"],
    loc: Float[Array, " M"],
    scale_tril: Float[Array, "M M"],
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """The mean and both parts of the variance of f(X) under a whitened q(v) = N(loc, S S').

    With K_ZZ = L L', W = L^-1 and A = W K_ZX: mean A'loc, variance ||S'A||^2 of the inducing
    values, and variance max(k(x, x) - ||A||^2, 0) that they leave unexplained. The derivative
    ignores the maximum.

    The reverse rule takes four products of the size of W K_ZX. With cotangents g, e and u of the
    mean and the two parts, D = 2 (S S'A diag(e) - A diag(u)): dS = 2 A diag(e) (S'A)',
    dK_ZX = W'(loc g' + D), dK_ZZ = -W' half(Q) W with Q = loc (A g)' + D A'. Reverse mode, and
    forward or reverse mode on top of it, work; forward mode alone does not.

    Args:
        whitening: whitening of the inducing values, with K_ZZ of shape (M, M).
        K_ZX: covariance of the inducing values with f(X), shape (M, n).
        diagonal: k(x, x), shape (n,).
        loc: mean of v, shape (M,).
        scale_tril: S, shape (M, M).

    Returns:
        Means, variances of the inducing values and unexplained variances, each of shape (n,). Time
        O(n M^2), and O(M^3) for the derivative with respect to K_ZZ.
    """
    K_ZZ, W, *_ = whitening
    arrays = as_one_type((K_ZZ, K_ZX, diagonal, loc, scale_tril, W))
    mean, from_values, unexplained = _moments(*arrays)
    return mean, from_values, unexplained


def as_one_type(arrays: PyTree) -> PyTree:
    """Cast arrays to their common type, which reverse rules need.

    The inputs, and so the parameters of a guide, may be in float32 and the kernel in float64.
    """
    dtype = jnp.result_type(*jax.tree.leaves(arrays))
    return jax.tree.map(lambda array: array.astype(dtype), arrays)


# One array, not three: under `vmap` over several outputs, the cotangents of a moment that all
# outputs share are summed, and the reverse rule would then count the sum for each output.
@jax.custom_vjp
def _moments(
    K_ZZ: Array, K_ZX: Array, diagonal: Array, loc: Array, S: Array, W: Array
) -> Float[Array, "3 n"]:
    return moments_forward(K_ZZ, K_ZX, diagonal, loc, S, W)[0]


def moments_forward(
    K_ZZ: Array, K_ZX: Array, diagonal: Array, loc: Array, S: Array, W: Array
) -> tuple[Float[Array, "3 n"], tuple[Array, ...]]:
    """The three moments as rows, and the residuals for the reverse rule."""
    A = matmul(W, K_ZX)
    SA = linalg.transposed_matmul(S, A)
    unexplained = jnp.maximum(diagonal - jnp.sum(jnp.square(A), axis=0), 0.0)
    moments = jnp.stack([matmul(loc, A), jnp.sum(jnp.square(SA), axis=0), unexplained])
    return moments, (W, A, SA, loc, S)


def moments_backward(
    residuals: tuple[Array, ...], cotangents: Float[Array, "3 n"]
) -> tuple[Array | None, ...]:
    """The reverse rule; the cotangent of K_ZZ includes the dependence of W on K_ZZ."""
    W, A, SA, loc, S = residuals
    g, e, u = cotangents
    weighted = SA * e[None, :]
    D = 2.0 * (matmul(S, weighted) - A * u[None, :])
    Ag = matmul(A, g)
    Q = matmul(D, A.T) + jnp.outer(loc, Ag)
    d_K_ZX = matmul(W.T, D) + jnp.outer(matmul(loc, W), g)
    d_K_ZZ = -matmul(matmul(W.T, half(Q)), W)
    return d_K_ZZ, d_K_ZX, u, Ag, 2.0 * matmul(A, weighted.T), None


_moments.defvjp(moments_forward, moments_backward)


def whitened_divergence(
    loc: Float[Array, "*batch M"], scale_tril: Float[Array, "*batch M M"]
) -> Float[Array, "*batch"]:
    """KL(N(loc, S S') || N(0, I)), in O(M^2)."""
    diagonal = jnp.diagonal(scale_tril, axis1=-2, axis2=-1)
    trace = jnp.sum(jnp.square(scale_tril), axis=(-2, -1)) + jnp.sum(jnp.square(loc), axis=-1)
    return 0.5 * (trace - loc.shape[-1]) - jnp.sum(jnp.log(diagonal), axis=-1)
