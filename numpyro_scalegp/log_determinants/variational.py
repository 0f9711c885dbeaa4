"""The log-determinant as the minimum of a bound."""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import half, matmul, triangular_product
from numpyro_scalegp.log_determinants.log_determinant import (
    AbstractStateful,
    Batch,
    at_step,
    within_spread,
)

# Relative changes of A in a step, in the spectral norm, at most: by typical batches, and by any.
_TYPICAL_STEP, _LONGEST_STEP = 0.5, 1.0


def slowly_decaying(step: Int[Array, ""]) -> Float[Array, ""]:
    """0.05 at first, half of it after 3,000 steps, a tenth after 100,000: O(step^-1/2)."""
    return 0.05 / jnp.sqrt(1.0 + step / 1000.0)


class Whitening(NamedTuple):
    """The state: a lower triangular W with a positive diagonal, A^-1 = W'W."""

    W: Float[Array, "d d"]
    step: Int[Array, ""]


class Variational(AbstractStateful):
    """log|F| = min over A of log|A| + tr(A^-1 F) - d, minimized along with all else.

    With A^-1 = W'W and W lower triangular, the bound and its gradients from mini-batches have no
    bias, whatever W is; at W F W' = I it is log|F|. The whole then is the evidence lower bound of a
    normal distribution of the weights with mean `weights` and covariance noise W'W. W follows the
    negative gradient in coordinates of its own, W <- (I - step_size half(W F W' - I)) W, in which
    the curvature is the same in all directions: so one step size suits any features, and nothing is
    factorized.

    Unbiased is the gradient of log|F| where the mean of A^-1 is F^-1. The trace of their product is
    right whatever the rows are: the diagonal of log W moves by step_size / 2 (I - W F W'), whose
    mean is zero in a steady state. Single directions are off by about A's variance relative to F,
    which is a tenth at most: steps are such that step_size times the spread between batches is at
    most 0.2 (see `sgp.infer.log_determinant_diagnostics`). So with Gaussian rows A averages
    over 5 d of them or more, and over up to all rows where a few are far longer than others. It is
    biased where hyperparameters change faster than that.

    Args:
        step_size: 0 < step_size <= 1, or a schedule, a function of the step: by default
            0.05 (1 + step / 1000)^(-1/2). Steps are smaller where batches differ much.
        name: the NumPyro mutable site of the state.

    Raises:
        ValueError: if `step_size` is not in (0, 1].

    References:
        The bound: Boyd and Vandenberghe (2004), Convex Optimization, section 3.3.1 (the conjugate
        of -log|A|). The coordinates: Lin et al. (2021), Tractable Structured Natural-Gradient
        Descent Using Local Parameterizations. Time O(b d^2 + d^3) for each step, all of it in
        matrix products.
    """

    step_size: float | Callable[[Array], ArrayLike] = eqx.field(
        static=True, default=slowly_decaying
    )
    name: str = eqx.field(static=True, default="log_determinant")

    def __check_init__(self) -> None:
        checks.rate("step_size", self.step_size, "(0, 1]")

    def start_from(
        self, F: Float[Array, "d d"], W: Float[Array, "d d"], num_batches: int
    ) -> Whitening:
        """The state whose bound is tight at F."""
        return Whitening(W, jnp.zeros((), jnp.int32))

    def advance(
        self, batch: Batch, state: Whitening, spread: Float[ArrayLike, ""] = 0.0
    ) -> Whitening:
        """One step down the batch's bound."""
        eye = jnp.eye(state.W.shape[0], dtype=state.W.dtype)
        rate = within_spread(at_step(self.step_size, state.step), spread)
        W = multiplied(state.W, eye - batch.whitened_gram(state.W), rate, len(batch.features))
        return Whitening(W, state.step + 1)


def multiplied(
    W: Float[Array, "d d"],
    direction: Float[Array, "d d"],
    rate: Float[ArrayLike, ""],
    num_rows: int,
) -> Float[Array, "d d"]:
    """exp(rate half(direction)) W for a symmetric direction, from a batch of `num_rows` rows.

    The exponential is that of the diagonal, and of first order beside it.

    The rate is at most what typical batches allow, for which W F W' has eigenvalues of up to
    (1 + (d / b)^(1/2))^2 (Marchenko-Pastur). Batches that are far from typical are cut as well,
    which alone depends on the batch, and keeps the diagonal positive.
    """
    typical = _TYPICAL_STEP / (1.0 + math.sqrt(len(W) / num_rows)) ** 2
    longest = jnp.minimum(typical, _LONGEST_STEP / _spectral_norm(direction))
    rate = jnp.minimum(jnp.asarray(rate).astype(W.dtype), longest)
    logarithm = rate * half(direction)
    diagonal = jnp.diagonal(logarithm)
    return W + triangular_product(logarithm + jnp.diag(jnp.expm1(diagonal) - diagonal), W)


def _spectral_norm(S: Float[Array, "d d"]) -> Float[Array, ""]:
    """Of a symmetric matrix, from below, and at least as large as its longest column: O(d^2).

    Two steps of a power iteration, which start from that column.
    """
    tiny = jnp.finfo(S.dtype).tiny  # of a zero matrix the norm is 0
    lengths = jnp.linalg.norm(S, axis=0)
    column = S[:, jnp.argmax(lengths)] / jnp.maximum(jnp.max(lengths), tiny)
    product = matmul(S, column)
    return jnp.linalg.norm(matmul(S, product)) / jnp.maximum(jnp.linalg.norm(product), tiny)
