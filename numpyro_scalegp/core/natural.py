"""A normal distribution by its natural parameters, with natural gradients in place of gradients.

q(v) = N(m, C) beside the prior N(0, I): C^-1 = I + P and m = C b, so that b and P are what the
observations add to the prior's natural parameters. Along the gradient in the expectation parameters
E[v] and E[vv'], a step of size r in these is

    b <- (1 - r) b + r b',   P <- (1 - r) P + r P',

where b' and P' are what the likelihood, linearized at q, adds. Here the derivatives with respect to
b and P *are* that direction, so that gradient descent at rate r takes this step: of size one, for a
normal likelihood and all rows, to the optimum. At rates up to one P stays positive semidefinite.

References:
    Khan and Lin (2017), Conjugate-Computation Variational Inference; Salimbeni, Eleftheriadis and
    Hensman (2018), Natural Gradients in Practice; Adam, Chang, Khan and Solin (2021), Dual
    Parameterization of Sparse Variational Gaussian Processes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import linalg
from numpyro_scalegp.core.linalg import half, matmul
from numpyro_scalegp.core.whitening import (
    Whitening,
    as_one_type,
    moments_backward,
    moments_forward,
    whitened_divergence,
)

Normal = tuple[Array, Array]


@jax.custom_vjp
def normal_of(
    b: Float[Array, " M"], P: Float[Array, "M M"]
) -> tuple[Float[Array, " M"], Float[Array, "M M"], Float[Array, ""]]:
    """The mean, and a factor of the covariance (I + P)^-1, in O(M^3).

    Args:
        b: what is added to the prior's precision times mean, shape (M,).
        P: what is added to the prior's precision, symmetric, shape (M, M).

    Returns:
        m, shape (M,), S, lower triangular with S S' = C, shape (M, M), and what I + P got on its
        diagonal where it is not positive definite in this precision, as `linalg.lift` gives it.
    """
    return _normal_forward(b, P)[0]


def _normal_forward(
    b: Array, P: Array
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    precision = 0.5 * (P + P.T) + jnp.eye(len(b), dtype=P.dtype)
    # Of the reversed matrix, so that the inverse of the factor can be turned into a lower one.
    factor = linalg.factorize(precision[::-1, ::-1], warn=False)
    S = linalg.triangular_inverse(factor.tril)[::-1, ::-1].T
    m = matmul(S, matmul(S.T, b))
    return (m, S, linalg.lift(factor)), (m, S, factor.tril[::-1, ::-1].T)


def _normal_backward(
    residuals: tuple[Array, ...], cotangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    m, S, inverse = residuals
    d_m, d_S, _ = cotangents
    inner = half(matmul(S.T, jnp.tril(d_S)))
    d_C = 0.5 * matmul(matmul(inverse.T, inner + inner.T), inverse)
    return d_m - 2.0 * matmul(d_C, m), -2.0 * d_C


normal_of.defvjp(_normal_forward, _normal_backward)


@jax.custom_vjp
def without_derivatives(values: Any) -> Any:
    """The same values, to draw with.

    A likelihood's derivatives at a draw have noise, which may be larger than they are: of the signs
    that it changes, `natural_moments` would drop the negative ones, and covariances come out small.
    """
    return values


def _no_backward(*_: Any) -> Any:
    raise ValueError(
        "natural parameters have no derivatives through draws of their function: train with "
        "sgp.infer.QuadratureELBO, which draws none, or without `natural=True`."
    )


without_derivatives.defvjp(lambda values: (values, None), _no_backward)


@jax.custom_vjp
def scaled_derivatives(values: Any, scale: Float[Array, ""]) -> Any:
    """The same values, with derivatives divided by a scale that is not zero."""
    return values


def _scaled_backward(scale: Array, cotangents: Any) -> tuple[Any, Array]:
    divisor = jnp.where(scale == 0.0, 1.0, scale)
    divided = jax.tree.map(lambda one: (one / divisor).astype(one.dtype), cotangents)
    return divided, jnp.zeros_like(scale)


scaled_derivatives.defvjp(lambda values, scale: (values, scale), _scaled_backward)


def natural_moments(
    whitening: Whitening,
    K_ZX: Float[Array, "M n"],
    diagonal: Float[Array, " n"],
    b: Float[Array, " M"],
    P: Float[Array, "M M"],
    normal: tuple[Float[Array, " M"], Float[Array, "M M"]],
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """As `whitened_moments`, with the natural gradient by the sums that it is made of.

    With weights g and e for mean and variance, db = A g - 2 A diag(e) A'm and dP = -2 A diag(e) A',
    of which no rounding makes an indefinite step. Where e is negative, as it can be if the
    likelihood is not log-concave, zero is taken.

    Args:
        whitening: of the inducing values, with K_ZZ of shape (M, M).
        K_ZX: covariance of inducing values and f(X), shape (M, n).
        diagonal: prior variances of f(X), shape (n,).
        b: as of `normal_of`.
        P: as of `normal_of`.
        normal: the first two of `normal_of(b, P)`.

    Returns:
        Means, variances of the inducing values and unexplained variances, each of shape (n,).
    """
    normal = jax.lax.stop_gradient(normal)
    K_ZZ, W, _ = whitening
    parts = as_one_type((K_ZZ, K_ZX, diagonal, b, P, normal, W))
    mean, inside, unexplained = _moments(*parts)
    return mean, inside, unexplained


@jax.custom_vjp
def _moments(
    K_ZZ: Array, K_ZX: Array, diagonal: Array, b: Array, P: Array, normal: Normal, W: Array
) -> Float[Array, "3 n"]:
    return moments_forward(K_ZZ, K_ZX, diagonal, *normal, W)[0]


def _moments_forward(
    K_ZZ: Array, K_ZX: Array, diagonal: Array, b: Array, P: Array, normal: Normal, W: Array
) -> tuple[Float[Array, "3 n"], tuple[Array, ...]]:
    return moments_forward(K_ZZ, K_ZX, diagonal, *normal, W)


def _moments_backward(
    residuals: tuple[Array, ...], cotangents: Float[Array, "3 n"]
) -> tuple[Any, ...]:
    _, A, _, loc, S = residuals
    d_K_ZZ, d_K_ZX, d_diagonal, Ag, _, d_W = moments_backward(residuals, cotangents)
    weighted = 2.0 * A * jnp.maximum(cotangents[1], 0.0)[None, :]
    d_b = Ag - matmul(weighted, matmul(loc, A))
    nothing = jnp.zeros_like(loc), jnp.zeros_like(S)
    return d_K_ZZ, d_K_ZX, d_diagonal, d_b, -matmul(weighted, A.T), nothing, d_W


_moments.defvjp(_moments_forward, _moments_backward)


def natural_divergence(
    b: Float[Array, "*batch M"],
    P: Float[Array, "*batch M M"],
    normal: tuple[Float[Array, "*batch M"], Float[Array, "*batch M M"]],
) -> Float[Array, "*batch"]:
    """KL(N(m, C) || N(0, I)), whose natural gradient is b and P themselves."""
    return _divergence(b, P, jax.lax.stop_gradient(normal))


@jax.custom_vjp
def _divergence(b: Array, P: Array, normal: Normal) -> Array:
    return whitened_divergence(*normal)


def _divergence_forward(b: Array, P: Array, normal: Normal) -> tuple[Array, Any]:
    return _divergence(b, P, normal), (b, P, normal)


def _divergence_backward(residuals: Any, cotangent: Float[Array, "*batch"]) -> tuple[Any, ...]:
    b, P, normal = residuals
    d_b, d_P = cotangent[..., None] * b, cotangent[..., None, None] * P
    return d_b, d_P, jax.tree.map(jnp.zeros_like, normal)


_divergence.defvjp(_divergence_forward, _divergence_backward)
