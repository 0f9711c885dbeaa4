"""The scaled log marginal likelihood of each mini-batch, a biased baseline."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.features.linear_model import warn_of_few_digits
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import AbstractLogDeterminant, Batch
from numpyro_scalegp.numerics.linalg import (
    factorize,
    gaussian_log_density,
    inverse_cholesky,
    matmul,
)

# Largest rounding error of F, relative to the noise, without a warning. It may be as large as 1,
# since errors of w and W enter the bound only by their squares.
_FEW_DIGITS = 1.0


class MiniBatch(AbstractLogDeterminant):
    """n / b times the log marginal likelihood of the batch alone: a biased baseline.

    Observations of different batches are treated as independent, and `weights` has no effect, since
    the weights are integrated out in each batch.

    References:
        Chen et al. (2020), Stochastic Gradient Descent in Correlated Settings: A Study on Gaussian
        Processes. Time O(b d min(b, d)) for each step. The smaller of the b x b and d x d matrices
        is factorized, which is also more accurate when the noise is small; a warning is issued if
        rounding errors are too large.
    """

    def log_prob(
        self, batch: Batch, weights: Float[Array, " d"], y: Float[Array, "*batch b"], state: Any
    ) -> Float[Array, "*batch"]:
        """The batch's log N(y; 0, Phi Phi' + noise I), times n / b."""
        num, d = batch.features.shape
        if num <= d:
            H = batch.covariance()
            return batch.scale * gaussian_log_density(H, y, factorize(H))
        rows = y.astype(jnp.result_type(y, batch.features)).reshape(-1, num)
        density = jax.vmap(_log_density, in_axes=(None, None, 0))
        densities = density(batch.features, batch.noise_variance, rows)
        return batch.scale * densities.reshape(y.shape[:-1])


@jax.custom_jvp
def _log_density(
    Phi: Float[Array, "b d"], noise: Float[Array, ""], y: Float[Array, " b"]
) -> Float[Array, ""]:
    """Log N(y; 0, Phi Phi' + noise I), in O(b d^2 + d^3).

    Computed as the maximum of a lower bound. Its derivative is the derivative of the bound at fixed
    w and W, which avoids cancellation.
    """
    return _bound(Phi, noise, y, *_optimum(Phi, noise, y))


@_log_density.defjvp
def _(
    primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    w, W = _optimum(*primals)
    _, tangent = jax.jvp(lambda Phi, noise, y: _bound(Phi, noise, y, w, W), primals, tangents)
    return _log_density(*primals), tangent


def _optimum(Phi: Array, noise: Array, y: Array) -> tuple[Array, Array]:
    """The optimal weights w = F^-1 Phi'y, and W with F^-1 = W'W."""
    F = matmul(Phi.T, Phi) + noise * jnp.eye(Phi.shape[1], dtype=Phi.dtype)
    warn_of_few_digits(F, jax.lax.stop_gradient(noise), _FEW_DIGITS)
    W = inverse_cholesky(F)
    apply = lambda v: matmul(W.T, matmul(W, v))  # noqa: E731
    w = apply(matmul(Phi.T, y))
    return w + apply(matmul(Phi.T, y - matmul(Phi, w)) - noise * w), W


def _bound(Phi: Array, noise: Array, y: Array, w: Array, W: Array) -> Array:
    """-1/2 of |y - Phi w|^2 / noise + |w|^2 + log|A| + tr(A^-1 F) - d + (b - d) log noise + const.

    With A^-1 = W'W; a lower bound, tight at the optimum.
    """
    num, d = Phi.shape
    fit = jnp.sum(jnp.square(y - matmul(Phi, w))) / noise + jnp.sum(jnp.square(w))
    trace = jnp.sum(jnp.square(matmul(Phi, W.T))) + noise * jnp.sum(jnp.square(W))
    volume = trace - d - 2.0 * jnp.sum(jnp.log(jnp.diagonal(W))) + (num - d) * jnp.log(noise)
    return -0.5 * (fit + volume + num * math.log(2.0 * math.pi))
