"""What zero-mean priors over a function's values have in common."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks, linalg
from numpyro_scalegp.distributions.rows import RowsDistribution


class AbstractPriorGP(RowsDistribution):
    """A zero-mean Gaussian process at the rows of X, with an explicit covariance."""

    def covariance(self) -> Float[Array, "n n"]:
        """The covariance at the rows, jitter included, shape (n, n)."""
        raise NotImplementedError

    @property
    def mean(self) -> Float[Array, " n"]:
        """The mean, zero everywhere."""
        return jnp.zeros_like(self.variance)

    def log_prob(
        self, value: Float[ArrayLike, "*batch n"], intermediates: list | None = None
    ) -> Float[Array, "*batch"]:
        """The log density of function values of shape (..., n), in O(n^3) given the covariance."""
        value = checks.as_float(value, "value")
        if value.shape[-1:] != self.event_shape:
            raise ValueError(
                f"`value` must have shape (..., {self.event_shape[0]}), got {value.shape}: one "
                "value for each row of `X`."
            )
        K = self.covariance()
        return linalg.gaussian_log_density(K, value, linalg.factorise(K))
