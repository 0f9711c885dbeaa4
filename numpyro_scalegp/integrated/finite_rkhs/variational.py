"""The log-determinant as the minimum of an upper bound."""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import (
    AbstractStateful,
    Batch,
    at_step,
    within_spread,
)
from numpyro_scalegp.numerics.linalg import half, matmul, triangular_product

# Largest relative change of A in one step, in the spectral norm, by a typical and by any batch.
_TYPICAL_STEP, _LONGEST_STEP = 0.5, 1.0


def slowly_decaying(step: Int[Array, ""]) -> Float[Array, ""]:
    """0.05 at first, half of it after 3,000 steps, a tenth after 100,000 steps: O(step^-1/2)."""
    return 0.05 / jnp.sqrt(1.0 + step / 1000.0)


class Whitening(NamedTuple):
    """The state: a lower triangular W with a positive diagonal, A^-1 = W'W."""

    W: Float[Array, "d d"]
    step: Int[Array, ""]


class Variational(AbstractStateful):
    """log|F| = min over A of log|A| + tr(A^-1 F) - d, minimized together with the model's loss.

    With A^-1 = W'W and W lower triangular, mini-batch estimates of the bound and its gradients are
    unbiased for any W; at W F W' = I the bound is log|F|. The complete objective is then the
    evidence lower bound of a normal distribution of the weights with mean `weights` and covariance
    noise W'W. W descends in local coordinates, W <- (I - step_size half(W F W' - I)) W, in which
    the curvature is the same in all directions: one step size suits any features, and there is
    no factorization.

    The gradient of log|F| is unbiased if the mean of A^-1 is F^-1. The mean of tr(A^-1 F) is
    correct for any features: the diagonal of log W changes by step_size / 2 (I - W F W'), whose
    mean is zero in a steady state. In single directions, A^-1 has errors of about the variance of A
    relative to F. This is at most a tenth, since step_size times the spread between batches is
    limited to 0.2 (see `sgp.infer.log_determinant_diagnostics`). So A averages over at least 5 d
    Gaussian feature vectors, and over up to all observations if a few vectors are far longer than
    the others. The gradient is biased if hyperparameters change faster than this average.

    Args:
        step_size: 0 < step_size <= 1, or a schedule, a function of the step: by default
            0.05 (1 + step / 1000)^(-1/2). Steps are smaller if batches differ much.
        name: name of the NumPyro mutable site of the state.

    Raises:
        ValueError: if `step_size` is not in (0, 1].

    References:
        The bound: Boyd and Vandenberghe (2004), Convex Optimization, section 3.3.1 (the conjugate
        of -log|A|). The coordinates: Lin et al. (2021), Tractable Structured Natural-Gradient
        Descent Using Local Parameterizations. Time O(b d^2 + d^3) for each step, in matrix
        products.
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
        """One descent step on the batch's bound."""
        eye = jnp.eye(state.W.shape[0], dtype=state.W.dtype)
        rate = within_spread(at_step(self.step_size, state.step), spread)
        direction = eye - batch.whitened_gram(state.W)
        W = exponential_update(state.W, direction, rate, len(batch.features))
        return Whitening(W, state.step + 1)


def exponential_update(
    W: Float[Array, "d d"],
    direction: Float[Array, "d d"],
    rate: Float[ArrayLike, ""],
    num_rows: int,
) -> Float[Array, "d d"]:
    """exp(rate half(direction)) W for a symmetric direction, from a batch of `num_rows` rows.

    The exponential is exact on the diagonal and of first order off the diagonal.

    The rate is limited by the eigenvalues of W F W' for typical batches, up to
    (1 + (d / b)^(1/2))^2 (Marchenko-Pastur). For atypical batches a second limit, the only one that
    depends on the batch, keeps the diagonal positive.
    """
    typical = _TYPICAL_STEP / (1.0 + math.sqrt(len(W) / num_rows)) ** 2
    longest = jnp.minimum(typical, _LONGEST_STEP / _spectral_norm(direction))
    rate = jnp.minimum(jnp.asarray(rate).astype(W.dtype), longest)
    logarithm = rate * half(direction)
    diagonal = jnp.diagonal(logarithm)
    return W + triangular_product(logarithm + jnp.diag(jnp.expm1(diagonal) - diagonal), W)


def _spectral_norm(S: Float[Array, "d d"]) -> Float[Array, ""]:
    """A lower bound on the spectral norm of a symmetric matrix, in O(d^2).

    Two steps of a power iteration from the longest column, whose length the bound is at least.
    """
    tiny = jnp.finfo(S.dtype).tiny  # so that the norm of a zero matrix is 0
    lengths = jnp.linalg.norm(S, axis=0)
    column = S[:, jnp.argmax(lengths)] / jnp.maximum(jnp.max(lengths), tiny)
    product = matmul(S, column)
    return jnp.linalg.norm(matmul(S, product)) / jnp.maximum(jnp.linalg.norm(product), tiny)
