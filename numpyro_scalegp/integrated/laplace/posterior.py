"""The posterior of a function by Laplace's approximation."""

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from numpyro_scalegp.processes.posterior import AbstractConditioned, AbstractDerived
from numpyro_scalegp.programs.compiled import compiled


class LaplacePosterior(AbstractDerived):
    """The normal approximation of f | y around its mode.

    With the first derivatives g and the negative second derivatives W of the log likelihood at the
    mode, the mean is m(x) + k(x, X) g and the covariance is k(x, z) - k(x, X) (K + W^-1)^-1 k(X, z)
    of a Gaussian process with noise variances 1 / W. The mean is the mode of the function, not its
    mean under the exact posterior.

    Made by `LaplaceGP.condition`; immutable. See `ExactPosterior` and
    `StateSpacePosterior` for the costs.

    References:
        Rasmussen and Williams (2006), eq. 3.21 and 3.24.
    """

    process: AbstractConditioned  # given observations of noise variance 1 / W
    X: Float[Array, "... n d"]
    mode: Float[Array, "... n"]
    gradient: Float[Array, "... n"]  # g
    curvature: Float[Array, "... n"]  # W, positive
    noise_variance: None = None

    @property
    def diagnostics(self) -> dict[str, Array]:
        """Empty: the posterior is conditioned on pseudo-observations, not on the data."""
        return {}

    def leave_one_out(self) -> dist.Distribution:
        """Not available: use `LaplaceGP.leave_one_out`.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a `LaplacePosterior` does not have the likelihood: call `leave_one_out(posterior)` of "
            "the `LaplaceGP` that made it, or use the distributions of f from `cavity()`."
        )

    @compiled
    def cavity(self) -> dist.Normal:
        """The marginal distributions of f at each row of X given all other observations, (..., n).

        Each removes one observation's contribution from the approximation, at the same mode: with v
        the marginal variance, the variance is v / (1 - v W) and the mean is f - g v / (1 - v W).
        Time O(n^3), or O(n s^3) from a state space.

        References:
            Vehtari et al. (2016), Bayesian leave-one-out cross-validation approximations for
            Gaussian latent variable models, section 3.3.
        """
        # 1 - v W, from the precision of the pseudo-observations. It gives v accurately where an
        # observation is more informative about f than the others are; `variance` does elsewhere.
        remaining = self.process._precision() / self.curvature
        from_precision = (1.0 - remaining) / self.curvature
        marginal = jnp.where(remaining < 0.5, from_precision, self.variance(self.X))
        variance = marginal / remaining
        return dist.Normal(self.mode - self.gradient * variance, jnp.sqrt(variance))
