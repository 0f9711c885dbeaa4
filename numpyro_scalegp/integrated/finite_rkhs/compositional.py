"""The log-determinant from a running average of F."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import (
    AbstractStateful,
    Batch,
    at_step,
    within_spread,
)
from numpyro_scalegp.numerics.linalg import inverse_cholesky

# The weight of the old average where the user gives none.
_DECAY = 0.9

# The numbers of batches at which to warn: the first one at which the spread between them is known
# well enough, and a later one.
_CHECKS = (64, 4096)


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
    Gaussian feature vectors, this bias is (d + 1) / N. With fixed hyperparameters, it vanishes as
    decay goes to one.

    Args:
        decay: the weight of the old average, 0 <= decay < 1, or a schedule, a function of the
            number of batches so far. The paper's b_t = 0.9 is the weight of the new batch, so
            `decay=0.1`. None, the default, is 0.9, or more where batches differ so much that the
            bias would exceed a tenth: with a few very long feature vectors, the average is then
            over several epochs. A weight that is given is used as it is, with a warning if the bias
            exceeds a tenth. The first batches and the initial estimate have equal weights, until
            these fall below 1 - decay.
        name: name of the NumPyro mutable site of the state.

    Raises:
        ValueError: if `decay` is not in [0, 1).

    References:
        Shoham and Avron (2025), Unbiased Stochastic Optimization for Gaussian Processes on Finite
        Dimensional RKHS, section 3.2; Wang et al. (2017), Stochastic Compositional Gradient
        Descent. Time O(b d^2 + d^3) for each step.
    """

    decay: float | Callable[[Array], ArrayLike] | None = eqx.field(static=True, default=None)
    name: str = eqx.field(static=True, default="log_determinant")

    def __check_init__(self) -> None:
        if self.decay is not None:
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
        rate = 1.0 - jnp.asarray(at_step(_DECAY if self.decay is None else self.decay, count))
        largest = within_spread(rate, spread)
        if self.decay is None:
            rate = largest
        else:
            due = jnp.any(count == jnp.array(_CHECKS))
            call_where(due & (rate > largest), _warn, 1.0 - largest, 0.5 * rate * spread)
        new = jnp.maximum(1.0 / count, rate).astype(state.average.dtype)
        average = (1.0 - new) * state.average + new * batch.gram()
        return RunningAverage(average, inverse_cholesky(average), count)


def _warn(advised: ArrayLike, bias: ArrayLike) -> None:
    warnings.warn(
        "`Compositional` averages over too few mini-batches: for the spread between them, a "
        f"weight `decay` below {np.asarray(advised).item():.3g} makes A^-1 too large, here by a "
        f"factor of about {1.0 + np.asarray(bias).item():.2g}. Leave `decay` out, or use larger "
        "mini-batches.",
        RuntimeWarning,
        stacklevel=1,
    )
