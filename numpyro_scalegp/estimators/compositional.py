"""The log-determinant by a running average of F."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core.linalg import inverse_cholesky
from numpyro_scalegp.estimators.log_determinant import AbstractBound, Batch, at_step


class RunningAverage(NamedTuple):
    """The state: what the batches so far say about F."""

    average: Float[Array, "d d"]
    num_batches: Int[Array, ""]


class Compositional(AbstractBound):
    """log|F| through a running average A of the batches' estimates of F.

    The estimate log|A| + tr(A^-1 F_batch) - d has the gradient <A^-1, dF_batch>, unbiased for
    <A^-1, dF>; A comes from the batches before this one. It is biased by what A^-1 is: an average
    over the last N rows makes it too large by about N / (N - d - 1), N = b (1 + decay) /
    (1 - decay). So choose `decay` such that N is several times d.

    Args:
        decay: the weight of the old average, 0 <= decay < 1 (the paper's b is 1 - decay), or a
            schedule, a function of the number of batches so far. The first batches get equal
            weights, with the start as one of them, until that gives them less than 1 - decay.
        name: the NumPyro mutable site of the state.

    Raises:
        ValueError: if `decay` is not in [0, 1), or, in a step, too small for the features.

    References:
        Shoham and Avron (2025), Unbiased Stochastic Optimization for Gaussian Processes on Finite
        Dimensional RKHS, section 3.2; Wang et al. (2017), Stochastic
        Compositional Gradient Descent. Time O(b d^2 + d^3) for each step.
    """

    decay: float | Callable[[Array], ArrayLike] = eqx.field(static=True, default=0.9)
    name: str = eqx.field(static=True, default="log_determinant")

    def __check_init__(self) -> None:
        if not callable(self.decay) and not 0.0 <= self.decay < 1.0:
            raise ValueError(f"`decay` must be at least 0 and less than 1, got {self.decay}.")

    def start(self, F: Float[Array, "d d"], num_batches: int = 1) -> RunningAverage:
        """The state whose average is F."""
        return RunningAverage(F, jnp.asarray(num_batches, jnp.int32))

    def advance(self, batch: Batch, state: RunningAverage) -> RunningAverage:
        """Average the batch's estimate in.

        Raises:
            ValueError: if a constant decay averages over no more rows than there are features, for
                which A^-1 is infinite in the mean.
        """
        num, d = batch.features.shape
        if not callable(self.decay) and num * (1.0 + self.decay) <= (d + 1) * (1.0 - self.decay):
            raise ValueError(
                f"`decay` of {self.decay} averages over too few rows for {d} features and batches "
                f"of {num}: it must be more than {(d + 1 - num) / (d + 1 + num):.4f}, and better "
                "much more."
            )
        count = state.num_batches + 1
        new = jnp.maximum(1.0 / count, 1.0 - jnp.asarray(at_step(self.decay, count)))
        new = new.astype(state.average.dtype)
        return RunningAverage((1.0 - new) * state.average + new * batch.gram(), count)

    def estimate(self, batch: Batch, state: RunningAverage) -> Float[Array, ""]:
        """log|A| + tr(A^-1 F) - d, at least log|F| in the mean over batches."""
        W = inverse_cholesky(state.average)
        log_determinant = -2.0 * jnp.sum(jnp.log(jnp.diagonal(W)))
        return log_determinant + batch.trace(W) - W.shape[0]
