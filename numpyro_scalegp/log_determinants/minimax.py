"""The log-determinant as a minimum and a maximum."""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul, triangular_outer
from numpyro_scalegp.log_determinants.log_determinant import AbstractStateful, Batch, within_spread
from numpyro_scalegp.log_determinants.variational import multiplied

# How far below the noise A may be before it is projected: projections take a decomposition.
_SLACK = 0.05


class Saddle(NamedTuple):
    """The state of both sides."""

    W: Float[Array, "d d"]  # lower triangular, A^-1 = W'W
    multiplier: Float[Array, "d d"]  # -penalty sqrt(d) B, symmetric
    penalty: Float[Array, ""]


class Minimax(AbstractStateful):
    """log|F| as the minimum over A of log|A| + penalty sqrt(d) |A - F|, the norm as a maximum.

    The estimate is above log|F| for the best B alone, not for any: it is no bound.

    |A - F| = max <B, A - F> over |B| <= 1, and for a fixed B all is a sum over rows. The norms are
    Frobenius norms relative to A, |A^-1/2 (A - F) A^-1/2|: so the penalty is exact, with its
    minimum at A = F, from `penalty` = 1 on, whatever the features are. (In the norm of the paper,
    |A - F| / |A|, it is exact from about the condition number of F on; below, A falls to the
    smallest that is allowed.)

    A step updates A by one half of a batch and then B by the other half, and the hyperparameters'
    gradient takes both as they were before the batch: so no mean of a product is taken for a
    product of means. |B| <= 1 and A >= noise I are kept by projections. Where B reaches its limit,
    the penalty does not hold A at F, and rises.

    The gradient of log|F| is <Q, dF_batch> with Q = penalty sqrt(d) W'BW, A^-1 = W'W. In a steady
    state in which no projection acts, tr(E[Q] F) = d, as it must be; single directions are off by
    about the variance of A and B. Both sides take smaller steps where batches differ much,
    as those of `Variational` do, since otherwise |B| <= 1 acts all the time.

    Args:
        penalty: where the penalty starts, positive.
        growth: the relative increase in a step in which B reaches its limit; 0 keeps it.
        step_size: of A, 0 < step_size <= 1, at most.
        multiplier_step_size: of -penalty sqrt(d) B, which is I where A = F, positive.
        name: the NumPyro mutable site of the state.

    Raises:
        ValueError: if an argument is out of range.

    References:
        Shoham and Avron (2025), Unbiased Stochastic Optimization for Gaussian Processes on Finite
        Dimensional RKHS, section 3.1. Time O(b d^2 + d^3) for each step.
    """

    penalty: float = eqx.field(static=True, converter=checks.plain, default=1.0)
    growth: float = eqx.field(static=True, converter=checks.plain, default=0.01)
    step_size: float = eqx.field(static=True, converter=checks.plain, default=0.05)
    multiplier_step_size: float = eqx.field(static=True, converter=checks.plain, default=0.01)
    name: str = eqx.field(static=True, default="log_determinant")

    def __check_init__(self) -> None:
        checks.number("penalty", self.penalty, "(0, inf)")
        checks.number("growth", self.growth, "[0, inf)")
        checks.number("step_size", self.step_size, "(0, 1]")
        checks.number("multiplier_step_size", self.multiplier_step_size, "(0, inf)")

    def start_from(
        self, F: Float[Array, "d d"], W: Float[Array, "d d"], num_batches: int
    ) -> Saddle:
        """The state with A = F and the B that holds it there; a step keeps |B| <= 1."""
        eye = jnp.eye(F.shape[0], dtype=F.dtype)
        penalty = jnp.asarray(self.penalty, F.dtype)
        return Saddle(W, eye, penalty)

    def advance(self, batch: Batch, state: Saddle, spread: Float[ArrayLike, ""] = 0.0) -> Saddle:
        """A step of A down, by the first half of the rows, and one of B up, by the others.

        Raises:
            ValueError: if the batch has a single row.
        """
        num, d = batch.features.shape
        if num < 2:
            raise ValueError("`Minimax` needs two rows or more in a batch, for its two sides.")
        first = batch._replace(features=batch.features[: num // 2])
        second = batch._replace(features=batch.features[num // 2 :])
        eye = jnp.eye(d, dtype=state.W.dtype)

        # Halves of a batch differ twice as much. Both sides become slower by the same factor.
        step_size = within_spread(self.step_size, 2.0 * spread)
        multiplier_step_size = self.multiplier_step_size / self.step_size * step_size

        M = first.whitened_gram(state.W)
        product = matmul(state.multiplier, M)
        gradient = eye - 0.5 * (product + product.T)  # in log A
        W = multiplied(state.W, gradient, step_size, num // 2)
        W = _at_least_noise(W, batch.noise_variance)

        raised = state.multiplier + multiplier_step_size * (second.whitened_gram(W) - eye)
        radius = state.penalty * math.sqrt(d)
        length = jnp.linalg.norm(raised)
        penalty = jnp.where(length > radius, 1.0 + self.growth, 1.0) * state.penalty
        return Saddle(W, raised * jnp.minimum(1.0, radius / length), penalty)

    def estimate(self, batch: Batch, state: Saddle) -> Float[Array, ""]:
        """log|A| - penalty sqrt(d) <B, W F W' - I>."""
        W = state.W
        excess = batch.whitened_gram(W) - jnp.eye(W.shape[0], dtype=W.dtype)
        log_determinant = -2.0 * jnp.sum(jnp.log(jnp.diagonal(W)))
        return log_determinant + jnp.sum(state.multiplier * excess)

    def trace(self, batch: Batch, state: Saddle) -> Float[Array, ""]:
        """tr(Q F) with Q = penalty sqrt(d) W'BW, the derivative of the estimate."""
        return jnp.sum(state.multiplier * batch.whitened_gram(state.W))


def _at_least_noise(
    W: Float[Array, "d d"], noise_variance: Float[Array, ""]
) -> Float[Array, "d d"]:
    """Project A = (W'W)^-1 onto A >= noise I, in the norm relative to A."""
    eye = jnp.eye(W.shape[0], dtype=W.dtype)
    ratio = noise_variance * triangular_outer(W)

    def project(W: Array) -> Array:
        values, vectors = jnp.linalg.eigh(ratio)
        shrink = jax.lax.rsqrt(jnp.maximum(values, 1.0))
        W = matmul(vectors.T * shrink[:, None], W)
        # Triangular again: a Cholesky factor of A^-1 with its rows and columns turned around.
        return jnp.linalg.cholesky(matmul(W.T, W)[::-1, ::-1])[::-1, ::-1].T

    inside = jnp.all(jnp.isfinite(jnp.linalg.cholesky((1.0 + _SLACK) * eye - ratio)))
    return jax.lax.cond(inside, lambda W: W, project, W)
