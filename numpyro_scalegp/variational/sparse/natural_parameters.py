"""Gaussian sites on inducing values, with natural gradients in place of gradients.

Let the inducing values u have the prior N(0, K). The sites exp(u'b - u'P u / 2) stand for the
likelihood: q(u) is proportional to the prior times the sites, with precision K^-1 + P and mean
(K^-1 + P)^-1 b. A natural-gradient step of size r, along the gradient in the expectation parameters
E[u] and E[uu'], is

    b <- (1 - r) b + r b',   P <- (1 - r) P + r P',

where b' and P' are what the likelihood, linearized at q, adds: for a normal likelihood with
variance s the sums of a_i y_i / s and a_i a_i' / s over observations, where a_i = K^-1 k(Z, x_i)
interpolates f(x_i) from u. Here the derivatives with respect to b and P *are* the direction of this
step, so that gradient descent at rate r takes it. For a normal likelihood and all observations, a
step of size one reaches the optimum. At rates up to one, P stays positive semidefinite.

The sites stay as they are when the hyperparameters move, and q(u) follows through K: it is what the
same observations say under other hyperparameters, if the a_i stay as they are. They do not depend
on the kernel's variance, and little on its lengthscales where the inducing points are dense.
Sites on whitened values L^-1 u, or on K^-1 u, would depend on both. So derivatives with respect to
K, which are ordinary, include the dependence of q(u) on K.

Where inducing points are so close that K is almost singular, b and P are large, and wrong as soon
as the points move. So they are stored for the values c = L_r^-1 u, where L_r is the factor of K at
reference hyperparameters: at these, c are the whitened values.

With a mean function m of the prior, u are the values without it, and the sites are on those with
it, L_r^-1 (u + m(Z)): then q(u) follows a level, too.

References:
    Khan and Lin (2017), Conjugate-Computation Variational Inference; Salimbeni, Eleftheriadis and
    Hensman (2018), Natural Gradients in Practice; Adam, Chang, Khan and Solin (2021), Dual
    Parameterization of Sparse Variational Gaussian Processes, whose sites are on K^-1 u.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import half, matmul
from numpyro_scalegp.processes.whitening import (
    Whitening,
    as_one_type,
    moments_backward,
    moments_forward,
    whitened_divergence,
)

Normal = tuple[Array, Array]


class WhitenedSites(NamedTuple):
    """The normal distribution of whitened values v = L^-1 u, K = L L', given the prior and sites.

    Derivatives of `loc` and `scale_tril` with respect to the sites are natural gradients. `held`
    has the same values and no such derivatives.
    """

    loc: Float[Array, "*batch M"]
    scale_tril: Float[Array, "*batch M M"]  # S, lower triangular, with covariance S S'
    added_jitter: Float[Array, "*batch"]  # to the diagonal of the precision, if it is not positive
    held: Normal
    to_reference: Float[Array, "*batch M M"] | None  # R, with v = R c; None for c = v
    natural: Normal  # b and P of the sites on c


def whitened_sites(
    b: Float[Array, " M"],
    P: Float[Array, "M M"],
    whitening: Whitening,
    reference: Whitening | None = None,
    mean: Float[Array, " M"] | None = None,
) -> WhitenedSites:
    """The normal distribution N((I + G'P G)^-1 G'b, (I + G'P G)^-1) of v, c = G v, in O(M^3).

    With a mean m, b stands here for b - P L_r^-1 m.

    Args:
        b: what the sites on c add to the prior's precision times mean, shape (M,).
        P: what the sites on c add to the prior's precision, symmetric, shape (M, M).
        whitening: of the inducing values, with K of shape (M, M) and its factor.
        reference: of the inducing values at the reference hyperparameters; None for `whitening`.
        mean: m(Z), the prior's mean at the inducing points, shape (M,); None for zero.
    """
    whitening, reference, b, P, mean = as_one_type((whitening, reference, b, P, mean))
    natural, (b, P), R = (b, P), jax.lax.stop_gradient((b, P)), None
    if mean is not None:
        shift = matmul((reference or whitening).inverse, mean)
        natural, b = _centered(*natural, jax.lax.stop_gradient(shift)), b - matmul(P, shift)
    if reference is None:
        normal, inverse, jitter = _normal_of(b, P)
    else:
        factors = [(w.covariance, w.inverse, w.factor) for w in (whitening, reference)]
        normal, inverse, R, jitter = _followed(*factors, b, P)
    loc, scale_tril = _with_natural_gradients(normal, inverse, R, *natural)
    return WhitenedSites(loc, scale_tril, jitter, normal, R, natural)


@jax.custom_vjp
def _centered(b: Array, P: Array, shift: Array) -> Normal:
    """The sites on c, given sites on c + shift; their derivatives are natural gradients."""
    return b - matmul(P, shift), P


def _centered_forward(b: Array, P: Array, shift: Array) -> tuple[Normal, Array]:
    return _centered(b, P, shift), shift


def _centered_backward(shift: Array, cotangents: Normal) -> tuple[Array, Array, None]:
    d_b, d_P = cotangents
    return d_b + matmul(d_P, shift), d_P, None


_centered.defvjp(_centered_forward, _centered_backward)


def _normal_of(b: Array, P: Array) -> tuple[Normal, Array, Array]:
    """The mean and S of v, S^-1 and the added jitter, given sites on v."""
    precision = (0.5 * (P + P.T) + jnp.eye(len(b), dtype=P.dtype))[::-1, ::-1]
    # Of the reversed matrix, so that the inverse of its factor gives a lower triangular S.
    factor = linalg.factorize(precision, warn=False)
    S = linalg.inverse_cholesky_given(precision, factor.tril)[::-1, ::-1].T
    inverse = factor.tril[::-1, ::-1].T
    return (matmul(S, matmul(S.T, b)), S), inverse, linalg.added_jitter(factor)


Factors = tuple[Array, Array, Array]  # K, L^-1 and L


@jax.custom_vjp
def _followed(
    prior: Factors, reference: Factors, b: Array, P: Array
) -> tuple[Normal, Array, Array, Array]:
    """The mean and S of v, S^-1, R and the added jitter, given sites on c.

    Derivatives with respect to both covariances, which include the dependence of their factors on
    them, are at fixed P.
    """
    return _followed_forward(prior, reference, b, P)[0]


def _followed_forward(
    prior: Factors, reference: Factors, b: Array, P: Array
) -> tuple[tuple[Normal, Array, Array, Array], tuple[Array, ...]]:
    (_, W, L), (_, W_r, L_r) = prior, reference
    G, R = linalg.triangular_product(W_r, L), linalg.triangular_product(W, L_r)
    PG = matmul(0.5 * (P + P.T), G)
    (m, S), inverse, jitter = _normal_of(matmul(b, G), matmul(G.T, PG))
    return ((m, S), inverse, R, jitter), (W, W_r, G, b, PG, m, S)


def _followed_backward(
    residuals: tuple[Array, ...], cotangents: tuple[Any, ...]
) -> tuple[Any, ...]:
    # With C = S S', b and P of v: dC = -C dP C and dm = C db + dC b.
    W, W_r, G, b, PG, m, S = residuals
    (d_m, d_S), *_ = cotangents
    inner = half(matmul(S.T, jnp.tril(d_S)))
    d_b = matmul(S, matmul(S.T, d_m))
    outer = jnp.outer(d_b, m)
    d_P = -0.5 * (matmul(matmul(S, inner + inner.T), S.T) + outer + outer.T)
    d_G = jnp.outer(b, d_b) + 2.0 * matmul(PG, d_P)  # G = L_r^-1 L
    d_K = matmul(matmul(W.T, half(matmul(G.T, d_G))), W)
    d_K_r = -matmul(matmul(W_r.T, half(matmul(d_G, G.T))), W_r)
    return (d_K, None, None), (d_K_r, None, None), matmul(G, d_b), None


_followed.defvjp(_followed_forward, _followed_backward)


@jax.custom_vjp
def _with_natural_gradients(
    held: Normal, inverse: Array, R: Array | None, b: Array, P: Array
) -> Normal:
    """The same mean and S, with natural gradients with respect to the sites on c, v = R c."""
    return held


def _natural_forward(
    held: Normal, inverse: Array, R: Array | None, b: Array, P: Array
) -> tuple[Normal, tuple[Any, ...]]:
    return held, (held, inverse, R)


def _natural_backward(residuals: tuple[Any, ...], cotangents: Normal) -> tuple[Any, ...]:
    (m, S), inverse, R = residuals
    d_m, d_S = cotangents
    inner = half(matmul(S.T, jnp.tril(d_S)))
    d_C = 0.5 * matmul(matmul(inverse.T, inner + inner.T), inverse)
    d_b, d_P = d_m - 2.0 * matmul(d_C, m), -2.0 * d_C
    if R is not None:
        d_b, d_P = matmul(d_b, R), matmul(matmul(R.T, d_P), R)
    return cotangents, None, None, d_b, d_P


_with_natural_gradients.defvjp(_natural_forward, _natural_backward)


def natural_moments(
    whitening: Whitening,
    K_ZX: Float[Array, "M n"],
    diagonal: Float[Array, " n"],
    b: Float[Array, " M"],
    P: Float[Array, "M M"],
    held: tuple[Float[Array, " M"], Float[Array, "M M"]],
    to_reference: Float[Array, "M M"] | None = None,
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """The moments of `whitened_moments`, with natural gradients as sums over X.

    With cotangents g of the mean m'A and e of the variance, and f(X) = D'c + ... for D = R'A:
    db = D g - 2 D diag(e) A'm and dP = -2 D diag(e) D', which is semidefinite despite rounding
    errors. Negative e, possible if the likelihood is not log-concave, are replaced by zero.

    Args:
        whitening: of the inducing values, with K of shape (M, M).
        K_ZX: covariance of inducing values and f(X), shape (M, n).
        diagonal: prior variances of f(X), shape (n,).
        b: of the sites on c, as in `WhitenedSites.natural`.
        P: as b.
        held: as in `WhitenedSites`.
        to_reference: R, as in `WhitenedSites`.

    Returns:
        Means, variances from the inducing values and unexplained variances, each of shape (n,).
    """
    K, W, *_ = whitening
    arguments = as_one_type((K, K_ZX, diagonal, (b, P), held, W, to_reference))
    mean, variance, unexplained = _moments(*arguments)
    return mean, variance, unexplained


@jax.custom_vjp
def _moments(
    K: Array, K_ZX: Array, diagonal: Array, sites: Normal, held: Normal, W: Array, R: Array | None
) -> Float[Array, "3 n"]:
    return moments_forward(K, K_ZX, diagonal, *held, W)[0]


def _moments_forward(
    K: Array, K_ZX: Array, diagonal: Array, sites: Normal, held: Normal, W: Array, R: Array | None
) -> tuple[Float[Array, "3 n"], tuple[Any, ...]]:
    moments, residuals = moments_forward(K, K_ZX, diagonal, *held, W)
    return moments, (residuals, R)


def _moments_backward(
    residuals: tuple[Any, ...], cotangents: Float[Array, "3 n"]
) -> tuple[Any, ...]:
    whitened, R = residuals
    _, A, _, loc, _ = whitened
    d_K, d_K_ZX, d_diagonal, d_loc, d_S, d_W = moments_backward(whitened, cotangents)
    D = A if R is None else matmul(R.T, A)
    weighted = 2.0 * D * jnp.maximum(cotangents[1], 0.0)[None, :]
    d_b = matmul(D, cotangents[0]) - matmul(weighted, matmul(loc, A))
    d_sites = d_b, -matmul(weighted, D.T)
    return d_K, d_K_ZX, d_diagonal, d_sites, (d_loc, d_S), d_W, None


_moments.defvjp(_moments_forward, _moments_backward)


def natural_divergence(
    b: Float[Array, "*batch M"],
    P: Float[Array, "*batch M M"],
    held: tuple[Float[Array, "*batch M"], Float[Array, "*batch M M"]],
) -> Float[Array, "*batch"]:
    """KL(N(m, S S') || N(0, I)) of `held`, whose natural gradient is b and P."""
    return _divergence(*as_one_type((b, P, held)))


@jax.custom_vjp
def _divergence(b: Array, P: Array, held: Normal) -> Array:
    return whitened_divergence(*held)


def _divergence_forward(b: Array, P: Array, held: Normal) -> tuple[Array, Any]:
    return whitened_divergence(*held), (b, P, held)


def _divergence_backward(residuals: Any, cotangent: Float[Array, "*batch"]) -> tuple[Any, ...]:
    b, P, held = residuals
    vector, matrix = cotangent[..., None], cotangent[..., None, None]
    d_held = jax.vjp(whitened_divergence, *held)[1](cotangent)
    return vector * b, matrix * P, d_held


_divergence.defvjp(_divergence_forward, _divergence_backward)
