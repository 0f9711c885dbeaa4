"""The posterior of a function under a likelihood that Laplace's approximation stands in for."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import linalg
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.batch import BatchPosterior
from numpyro_scalegp.posteriors.exact import ExactPosterior
from numpyro_scalegp.posteriors.function_samples import AbstractFunctionSamples
from numpyro_scalegp.posteriors.posterior import AbstractPosterior

_inverse = jnp.vectorize(linalg.triangular_inverse, signature="(n,n)->(n,n)")


class LaplacePosterior(AbstractPosterior):
    """The normal approximation of f | y around its mode.

    That of a Gaussian process with noise variances 1 / W, with W the negative second derivatives of
    the log likelihood at the mode and g the first ones: mean m(x) + k(x, X) g, covariance
    k(x, z) - k(x, X) (K + W^-1)^-1 k(X, z). The mean is the mode of the function, not its mean
    under the exact posterior.

    Made by `LaplaceGP.condition`; immutable. Costs are those of `ExactPosterior`.

    References:
        Rasmussen and Williams (2006), eq. 3.21 and 3.24.
    """

    process: ExactPosterior | BatchPosterior  # given observations of noise variance 1 / W
    X: Float[Array, "... n d"]
    mode: Float[Array, "... n"]
    gradient: Float[Array, "... n"]  # g
    curvature: Float[Array, "... n"]  # W, positive
    noise_variance: None = None

    @property
    def _num_columns(self) -> int:
        return self.X.shape[-1]

    @property
    def _takes_batches(self) -> bool:
        return self.process._takes_batches

    def _check(self, Xs: ArrayLike) -> Float[Array, "... m d"]:
        return self.process._check(Xs)

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.process._mean(Xs, chunk_size)

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.process._variance(Xs, chunk_size)

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        return self.process._mean_and_variance(Xs, chunk_size)

    def _covariance(self, Xs: Array) -> Array:
        return self.process._covariance(Xs)

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        return self.process._sample(key, Xs, num_samples)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        return self.process._functions(key, num_samples, num_features)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> Any:
        """The posterior of a part of f; see `AbstractPosterior.restrict`."""
        return self.process.restrict(change)

    def leave_one_out(self) -> dist.Distribution:
        """None without the likelihood; see `AbstractPosterior.leave_one_out`.

        Raises:
            ValueError: always, and it names what to call.
        """
        raise ValueError(
            "a `LaplacePosterior` does not know the likelihood: call `leave_one_out(posterior)` of "
            "the `LaplaceGP` that it was made by, or take the distributions of f from `cavity()`."
        )

    @compiled
    def cavity(self) -> dist.Normal:
        """The marginals of f at each row of X given the observations of all others, (..., n).

        Those of the approximation less each row's own part of it, without another search: with v
        the marginal variance, variance v / (1 - v W) and mean f - g v / (1 - v W). O(n^3) time.

        References:
            Vehtari et al. (2016), Bayesian leave-one-out cross-validation approximations for
            Gaussian latent variable models, section 3.3.
        """
        process = self.process
        members: Any = process.members if isinstance(process, BatchPosterior) else process
        tril = members.factor.tril  # of H = K + W^-1
        precision = jnp.sum(jnp.square(_inverse(tril)), axis=-2)  # the diagonal of H^-1
        # 1 - v W is the entry of B^-1 on the diagonal, with B = I + W^1/2 K W^1/2. It says v
        # where a row says more of f than the prior does; where it says less, the covariances do.
        of_others = precision / self.curvature
        determines = self.curvature * jnp.sum(jnp.square(tril), axis=-1) > 2.0
        variance = jnp.where(determines, (1.0 - of_others) / self.curvature, self.variance(self.X))
        variance = variance / of_others
        return dist.Normal(self.mode - self.gradient * variance, jnp.sqrt(variance))
