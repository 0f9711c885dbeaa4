"""The posterior of a function given transformed observations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.processes.posterior import AbstractDerived, Inputs


class WarpedPosterior(AbstractDerived):
    """The posterior of f given y = T(z), where z are noisy observations of f.

    Moments and draws of f, and the noise variance, are on the scale of z. Predictive distributions
    are on the scale of y, with quantiles by `icdf` and draws by `sample`.

    Made by `sgp.posterior` for a site `dist.TransformedDistribution(sgp.GaussianProcess(...), T)`;
    immutable. It costs the same as the posterior given z.

    Args:
        process: the posterior given z = T^-1(y).
        transforms: the elementwise transforms whose composition is T, in order of application.

    References:
        Snelson, Ghahramani and Rasmussen (2003), Warped Gaussian Processes.
    """

    process: Any
    transforms: tuple[Any, ...]

    @property
    def noise_variance(self) -> Float[Array, "..."] | None:
        """The noise variance of z."""
        return self.process.noise_variance

    @property
    def X(self) -> Float[Array, "... n d"]:
        """The inputs of the data."""
        return self.process.X

    @property
    def y(self) -> Float[Array, "... n"]:
        """The observations."""
        y = self.process.y
        for transform in self.transforms:
            y = transform(y)
        return y

    def predictive(
        self,
        Xs: Inputs,
        noise_variance: Float[ArrayLike, "..."] | None = None,
        *,
        chunk_size: int | None = None,
    ) -> dist.TransformedDistribution:
        """The predictive distribution of new observations y; see `AbstractPosterior.predictive`.

        Args:
            Xs: inputs, shape (m, d).
            noise_variance: noise variance of z at the new inputs; None for `noise_variance`.
            chunk_size: rows evaluated at a time.

        Returns:
            The transformed normal distribution, with `log_prob`, `cdf`, `icdf` and `sample`, of the
            means' shape.

        Raises:
            ValueError: as in `AbstractPosterior.predictive`; if a transform has an array of values
                for the training rows.
        """
        if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(self.transforms)):
            raise ValueError(
                "the transform around the Gaussian process has an array of values for the training "
                "rows: take `sgp.infer.Predictive`, which runs the model at new rows."
            )
        normal = self.process.predictive(Xs, noise_variance, chunk_size=chunk_size)
        return dist.TransformedDistribution(normal, list(self.transforms))

    def leave_one_out(self) -> dist.TransformedDistribution:
        """The predictive distribution of each y_i given all other observations; shape (n,)."""
        return dist.TransformedDistribution(self.process.leave_one_out(), list(self.transforms))
