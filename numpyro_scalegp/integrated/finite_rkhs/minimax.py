"""The log-determinant as the solution of a minimax problem."""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import (
    AbstractStateful,
    Batch,
    within_spread,
)
from numpyro_scalegp.integrated.finite_rkhs.variational import exponential_update
from numpyro_scalegp.numerics.linalg import matmul, triangular_outer

# Relative distance that A may be below the noise before the costly projection.
_SLACK = 0.05


class Saddle(NamedTuple):
    """The state of the minimization and the maximization."""

    W: Float[Array, "d d"]  # lower triangular, A^-1 = W'W
    multiplier: Float[Array, "d d"]  # -penalty sqrt(d) B, symmetric
    penalty: Float[Array, ""]
    num_batches: Int[Array, ""]


class Minimax(AbstractStateful):
    """log|F| = min over A of log|A| + penalty sqrt(d) |A - F|, with the norm written as a maximum.

    |A - F| = max <B, A - F> over |B| <= 1, which for a fixed B is a sum over observations. The
    estimate is an upper bound on log|F| only at the optimal B. The norms are Frobenius norms
    relative to A, |A^-1/2 (A - F) A^-1/2|, so that the penalty is exact, with its minimum at A = F,
    if `penalty` >= 1, for any features. (With the norm of the paper, |A - F| / |A|, it is exact
    only above about the condition number of F; below that, A decreases to the smallest value
    allowed.)

    A step updates A with one half of a batch and then B with the other half, and the gradient of
    the hyperparameters uses A and B from before the batch, so that products of estimates are
    unbiased. The halves are drawn at random from neighboring pairs of rows, so that batches may
    come in any order, such as the ascending order of `sgp.plate`. Projections enforce |B| <= 1 and
    A >= noise I. If B reaches its limit, the penalty is too small to hold A at F, and is increased.

    The gradient of log|F| is <Q, dF_batch> with Q = penalty sqrt(d) W'BW, A^-1 = W'W. In a steady
    state without active projections, tr(E[Q] F) = d, as for Q = F^-1; in single directions, E[Q]
    has errors of about the variance of A and B. The steps of A and B are smaller if batches differ
    much, as in `Variational`, since otherwise the constraint |B| <= 1 would always be active.

    Args:
        penalty: initial penalty, positive.
        growth: relative increase of the penalty in a step in which B reaches its limit; 0 for a
            constant penalty.
        step_size: largest step size of A, 0 < step_size <= 1.
        multiplier_step_size: step size of -penalty sqrt(d) B, which is I at A = F, positive.
        name: name of the NumPyro mutable site of the state.

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
        """The state with A = F and the optimal B for it."""
        eye = jnp.eye(F.shape[0], dtype=F.dtype)
        penalty = jnp.asarray(self.penalty, F.dtype)
        return Saddle(W, eye, penalty, jnp.asarray(num_batches, jnp.int32))

    def advance(self, batch: Batch, state: Saddle, spread: Float[ArrayLike, ""] = 0.0) -> Saddle:
        """A descent step of A with one half of the batch, an ascent step of B with the other half.

        Raises:
            ValueError: if the batch has a single row.
        """
        num, d = batch.features.shape
        if num < 2:
            raise ValueError("`Minimax` needs two rows or more in a batch, which it splits in two.")
        key = jax.random.fold_in(jax.random.key(0), state.num_batches)
        first, second = (batch._replace(features=half) for half in _halves(key, batch.features))
        eye = jnp.eye(d, dtype=state.W.dtype)

        # Half batches have twice the spread. Both step sizes are reduced by the same factor.
        step_size = within_spread(self.step_size, 2.0 * spread)
        multiplier_step_size = self.multiplier_step_size / self.step_size * step_size

        M = first.whitened_gram(state.W)
        product = matmul(state.multiplier, M)
        gradient = eye - 0.5 * (product + product.T)  # in log A
        W = exponential_update(state.W, gradient, step_size, num // 2)
        W = _at_least_noise(W, batch.noise_variance)

        multiplier = state.multiplier + multiplier_step_size * (second.whitened_gram(W) - eye)
        radius = state.penalty * math.sqrt(d)
        length = jnp.linalg.norm(multiplier)
        penalty = jnp.where(length > radius, 1.0 + self.growth, 1.0) * state.penalty
        multiplier *= jnp.minimum(1.0, radius / length)
        return Saddle(W, multiplier, penalty, state.num_batches + 1)

    def estimate(self, batch: Batch, state: Saddle) -> Float[Array, ""]:
        """log|A| - penalty sqrt(d) <B, W F W' - I>."""
        W = state.W
        excess = batch.whitened_gram(W) - jnp.eye(W.shape[0], dtype=W.dtype)
        log_determinant = -2.0 * jnp.sum(jnp.log(jnp.diagonal(W)))
        return log_determinant + jnp.sum(state.multiplier * excess)

    def trace(self, batch: Batch, state: Saddle) -> Float[Array, ""]:
        """tr(Q F) with Q = penalty sqrt(d) W'BW, the derivative of the estimate."""
        return jnp.sum(state.multiplier * batch.whitened_gram(state.W))


def _halves(
    key: Key[Array, ""], rows: Float[Array, "b d"]
) -> tuple[Float[Array, "b_1 d"], Float[Array, "b_2 d"]]:
    """One row of each pair of neighbors, drawn at random, and the other rows.

    Each half represents the batch in any order of the rows, and halves of a stratified batch are
    both stratified. If b is odd, a row at a random place, with no partner, is in the second half.
    """
    num = len(rows)
    start, side = jax.random.split(key)
    if num % 2:
        rows = jnp.roll(rows, jax.random.randint(start, (), 0, num), axis=0)
    pairs = rows[: num - num % 2].reshape(num // 2, 2, -1)
    takes_first = jax.random.bernoulli(side, shape=(num // 2, 1))
    first = jnp.where(takes_first, pairs[:, 0], pairs[:, 1])
    second = jnp.where(takes_first, pairs[:, 1], pairs[:, 0])
    return first, jnp.concatenate([second, rows[num - num % 2 :]])


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
        # Triangular again, by a Cholesky factor of A^-1 with its rows and columns reversed.
        return jnp.linalg.cholesky(matmul(W.T, W)[::-1, ::-1])[::-1, ::-1].T

    is_feasible = jnp.all(jnp.isfinite(jnp.linalg.cholesky((1.0 + _SLACK) * eye - ratio)))
    return jax.lax.cond(is_feasible, lambda W: W, project, W)
