"""Each mini-batch as a data set of its own."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.estimators.log_determinant import AbstractLogDeterminant, Batch
from numpyro_scalegp.estimators.weight_space import Statistics, log_densities


class MiniBatch(AbstractLogDeterminant):
    """n / b times the log marginal likelihood of the batch alone: a biased baseline.

    Rows of different batches count as independent, however alike they are. The weights are
    integrated out anew in each batch: `weights` takes no part. It is there to compare with.

    References:
        Chen et al. (2020), Stochastic Gradient Descent in Correlated Settings: A Study on Gaussian
        Processes. Time O(b d^2 + d^3) for each step.
    """

    def log_prob(
        self,
        batch: Batch,
        weights: Float[Array, " d"],
        y: Float[Array, "*batch b"],
        state: Any,
    ) -> Float[Array, "*batch"]:
        """The batch's own log N(y; 0, Phi Phi' + noise I), times n / b."""
        Phi, precision = batch.features, 1.0 / batch.noise_variance
        rows = y.reshape(-1, y.shape[-1])
        found = Statistics(
            precision * matmul(Phi.T, Phi),
            precision * matmul(Phi.T, rows.T),
            precision * jnp.sum(jnp.square(rows), axis=1),
        )
        noise = jnp.broadcast_to(batch.noise_variance, rows.shape[1:])
        return batch.scale * log_densities(found, noise).reshape(y.shape[:-1])
