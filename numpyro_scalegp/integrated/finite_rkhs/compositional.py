"""The log-determinant from a running average of F."""

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
from numpyro_scalegp.numerics.linalg import inverse_cholesky


class RunningAverage(NamedTuple):
    """The state: an average of the batches' estimates of F."""

    average: Float[Array, "d d"]
    W: Float[Array, "d d"]  # lower triangular, average^-1 = W'W
    num_batches: Int[Array, ""]


class Compositional(AbstractStateful):
    """log|F| from a running average A of the batches' estimates of F.

    The estimate log|A| + tr(A^-1 F_batch) - d has the gradient <A^-1, dF_batch>, unbiased for
    <A^-1, dF> since A is from the previous batches. The bias of A^-1 remains: the inverse of an
    average is too large on average, by about (1 - decay) / 2 times the spread between batches (see
    `sgp.infer.log_determinant_diagnostics`). For an average over N = b (1 + decay) / (1 - decay)
    Gaussian feature vectors, this bias is (d + 1) / N. If the bias would exceed a tenth, the
    average is over more batches than `decay` implies; with a few very long feature vectors it can
    be over several epochs. With fixed hyperparameters, the bias vanishes as decay goes to one.

    Args:
        decay: the weight of the old average, 0 <= decay < 1 (the paper's b is 1 - decay), or a
            schedule, a function of the number of batches so far. The weight is larger if batches
            differ much. The first batches and the initial estimate have equal weights, until these
            fall below 1 - decay.
        name: name of the NumPyro mutable site of the state.

    Raises:
        ValueError: if `decay` is not in [0, 1).

    References:
        Shoham and Avron (2025), Unbiased Stochastic Optimization for Gaussian Processes on Finite
        Dimensional RKHS, section 3.2; Wang et al. (2017), Stochastic Compositional Gradient
        Descent. Time O(b d^2 + d^3) for each step.
    """

    decay: float | Callable[[Array], ArrayLike] = eqx.field(static=True, default=0.9)
    name: str = eqx.field(static=True, default="log_determinant")

    def __check_init__(self) -> None:
        checks.rate("decay", self.decay, "[0, 1)")

    def start_from(
        self, F: Float[Array, "d d"], W: Float[Array, "d d"], num_batches: int
    ) -> RunningAverage:
        """The state whose average is F."""
        return RunningAverage(F, W, jnp.asarray(num_batches, jnp.int32))

    def advance(
        self, batch: Batch, state: RunningAverage, spread: Float[ArrayLike, ""] = 0.0
    ) -> RunningAverage:
        """Include the batch's estimate in the average."""
        count = state.num_batches + 1
        limit = within_spread(1.0 - jnp.asarray(at_step(self.decay, count)), spread)
        new = jnp.maximum(1.0 / count, limit).astype(state.average.dtype)
        average = (1.0 - new) * state.average + new * batch.gram()
        return RunningAverage(average, inverse_cholesky(average), count)
