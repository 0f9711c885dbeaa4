"""The log marginal likelihood of a GP whose kernel is an inner product of p features."""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core.chunks import rows_per_chunk, sum_rows
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul

# Warn if rounding errors of A, relative to its smallest eigenvalue, are larger: derivatives of a
# density are then off by 1 %, and soon its value by more than one.
_FEW_DIGITS = 0.01
# Warn if the error of a posterior mean, in posterior standard deviations, is larger.
_LARGE_ERROR = 0.1


class Statistics(NamedTuple):
    """Sufficient statistics of y = Phi w + e, e ~ N(0, D), for m data vectors y."""

    gram: Float[Array, "p p"]  # Phi'D^-1 Phi
    moments: Float[Array, "p m"]  # Phi'D^-1 y
    squares: Float[Array, " m"]  # y'D^-1 y


class Weights(NamedTuple):
    """The posterior of the weights, N(mean, W'W)."""

    mean: Float[Array, " p"]
    whitening: Float[Array, "p p"]  # W = L^-1 with L L' = I + Phi'D^-1 Phi
    jitter: Float[Array, ""]  # that the factorization added


def statistics(
    features: Callable[[Float[Array, "chunk d"]], Float[Array, "chunk p"]],
    num_features: int,
    X: Float[Array, "n d"],
    noise: Float[Array, " n"],
    residual: Float[Array, "n m"],
) -> Statistics:
    """Sum the statistics of all rows in chunks, in O(n p^2) and memory O(p^2 + chunk p)."""

    def of_chunk(rows: tuple[Array, Array, Array]) -> Statistics:
        X, precision, y = rows
        return statistics_of(features(X), precision, y)

    return sum_rows(of_chunk, (X, 1.0 / noise, residual), rows_per_chunk(num_features))


def statistics_of(
    Phi: Float[Array, "n p"], precision: Float[Array, " n"], residual: Float[Array, "n m"]
) -> Statistics:
    """The statistics of rows with these features and noise precisions; they add up."""
    weighted = (precision[:, None] * Phi).T
    squares = jnp.sum(precision[:, None] * jnp.square(residual), axis=0)
    return Statistics(matmul(weighted, Phi), matmul(weighted, residual), squares)


def posterior(statistics: Statistics, *, warn: bool = False) -> Weights:
    """The posterior of the weights given a single data vector, in O(p^3).

    Args:
        statistics: statistics of the rows.
        warn: whether to warn where rounding errors exceed the posterior uncertainty, if the mean is
            not `refined`.
    """
    precision = _precision(statistics)
    if warn:
        warn_of_few_digits(precision, 1.0, _FEW_DIGITS)
    factor = linalg.factorize(precision)
    W = linalg.inverse_cholesky_given(precision, factor.tril)
    return Weights(matmul(W.T, matmul(W, statistics.moments[:, 0])), W, factor.jitter)


def refined(
    weights: Weights,
    features: Callable[[Float[Array, "chunk d"]], Float[Array, "chunk p"]],
    X: Float[Array, "n d"],
    noise: Float[Array, " n"],
    residual: Float[Array, " n"],
) -> Weights:
    """Refine the mean of the weights by two more passes over the rows, in O(n p + p^2).

    With little noise, Phi'D^-1 Phi in single precision is too inaccurate for the mean; the
    residuals y - Phi w are accurate. Warns if two passes are not enough.
    """
    W = weights.whitening

    def step(w: Array, _: None) -> tuple[Array, Array]:
        def of_chunk(rows: tuple[Array, Array, Array]) -> Array:
            X, precision, y = rows
            Phi = features(X)
            return matmul(Phi.T, precision * (y - matmul(Phi, w)))

        gradient = sum_rows(of_chunk, (X, 1.0 / noise, residual), rows_per_chunk(w.size)) - w
        white = matmul(W, gradient)
        return w + matmul(W.T, white), jnp.linalg.norm(jax.lax.stop_gradient(white))

    mean, moves = jax.lax.scan(step, weights.mean, length=2)
    # A third pass would reduce the change by the same factor again.
    next_move = jnp.square(moves[1]) / jnp.maximum(moves[0], jnp.finfo(moves.dtype).tiny)
    call_where(next_move > _LARGE_ERROR, _warn_of_mean)
    return weights._replace(mean=mean)


def _precision(statistics: Statistics) -> Float[Array, "p p"]:
    gram = statistics.gram
    return gram + jnp.eye(len(gram), dtype=gram.dtype)


def log_densities(statistics: Statistics, noise: Float[Array, " n"]) -> Float[Array, " m"]:
    """Log N(y; 0, Phi Phi' + D) for each data vector.

    With A = I + Phi'D^-1 Phi and b = Phi'D^-1 y, the quadratic form is y'D^-1 y - b'A^-1 b and the
    log-determinant log|A| + log|D|. Time O(p^3). Warns where rounding errors of A exceed the
    posterior uncertainty.
    """
    return log_densities_given(statistics, jnp.sum(jnp.log(noise)), noise.size)


def log_densities_given(
    statistics: Statistics, log_noise: Float[Array, ""], num: int
) -> Float[Array, " m"]:
    """The result of `log_densities`, from log|D| and the number of rows."""
    A = _precision(statistics)
    warn_of_few_digits(A, 1.0, _FEW_DIGITS)
    W = linalg.inverse_cholesky(A)
    fitted = jnp.sum(jnp.square(matmul(W, statistics.moments)), axis=0)
    log_determinant = log_noise - 2.0 * jnp.sum(jnp.log(jnp.diagonal(W)))
    constant = num * math.log(2.0 * math.pi)
    return -0.5 * (statistics.squares - fitted + log_determinant + constant)


def warn_of_few_digits(A: Float[Array, "p p"], least: Float[ArrayLike, ""], limit: float) -> None:
    """Warn where rounding errors of A are more than `limit` times its `least` eigenvalue."""
    few = jnp.finfo(A.dtype).eps * jnp.linalg.norm(jax.lax.stop_gradient(A)) > limit * least
    call_where(few, _warn_of_rounding)


def _warn_of_rounding() -> None:
    warnings.warn(
        "the log marginal likelihood or the posterior of features has few digits left in this "
        "precision: the data determine some weights much better than others. Work in float64 "
        "(numpyro.enable_x64()), raise the noise variance, or, for random features, take "
        "`sgp.estimators.Pathwise`.",
        RuntimeWarning,
        stacklevel=1,
    )


def _warn_of_mean() -> None:
    warnings.warn(
        "the posterior mean of features is off by a part of its standard deviation in this "
        "precision: the data determine some weights much better than others. Work in float64 "
        "(numpyro.enable_x64()), or raise the noise variance.",
        RuntimeWarning,
        stacklevel=1,
    )
