"""The base classes of priors over function values and of variational families."""

import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.numerics import linalg, rounding
from numpyro_scalegp.numerics.rounding import at_least
from numpyro_scalegp.processes.variational import AbstractVariationalPosterior
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction
from numpyro_scalegp.sites.rows import RowsDistribution


class AbstractPriorGP(RowsDistribution):
    """A Gaussian process at the rows of X, with an explicit covariance."""

    role = "prior"
    made_of: ClassVar[str]  # the argument besides X, by which guides recognize the class
    mean_function: RowsFunction | None = None

    def covariance(self) -> Float[Array, "... n n"]:
        """The covariance at the rows, jitter included, shape (n, n), or (*batch, n, n)."""
        raise NotImplementedError

    @property
    def num_white(self) -> int:
        """The number of standard normal values in a draw; see `of_white`."""
        return self.event_shape[0]

    def of_white(self, white: Float[Array, "... m"]) -> Float[Array, "... n"]:
        """Map standard normal values, shape (..., *batch, num_white), to draws from the prior."""
        raise NotImplementedError

    @property
    def mean(self) -> Float[Array, "... n"]:
        """The mean at the rows: zero, unless the prior has a mean function."""
        return jnp.zeros_like(self.variance)

    def _centered(self, value: Float[Array, "... n"]) -> Float[Array, "... n"]:
        """Function values minus the mean."""
        return value

    def log_prob(
        self, value: Float[ArrayLike, "... n"], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """The log density of function values of shape (..., n) or (..., *batch, n).

        In O(n^3) for each member, given the covariance.

        Raises:
            ValueError: if `value` has the wrong length, or the rows are a mini-batch.
        """
        self.check_all_rows()
        value = checks.as_float(value, "value")
        if value.shape[-1:] != self.event_shape:
            raise ValueError(
                f"`value` must have shape (..., {self.event_shape[0]}), got {value.shape}: one "
                "value for each row of `X`."
            )
        return self._log_density(self._centered(value))

    @compiled
    def _log_density(self, value: Float[Array, "... n"]) -> Float[Array, "..."]:
        axes = len(self.batch_shape)
        shape = jnp.broadcast_shapes(value.shape[:-1], self.batch_shape)

        def of_one(K: Array, values: Array) -> Array:
            factor = linalg.factorize(K, limit=rounding.NO_DIGITS)
            return linalg.gaussian_log_density(K, values, factor)

        densities = batches.each(
            of_one,
            batches.Batch(self.covariance(), axes),
            batches.Batch(batches.samples_last(value, self.batch_shape), axes),
        )
        return jnp.moveaxis(densities, -1, 0).reshape(shape)


class AbstractVariationalGP(RowsDistribution):
    """A variational approximation of a GP at the inputs X, for a GP site in a guide.

    The value of the site is the function at the rows of one mini-batch. `sample` and `log_prob` use
    the *marginals*, independent across rows: all that a likelihood that factorizes over rows needs,
    at a cost linear in n. Joint draws come from `posterior().sample`.

    Parameters with leading axes make it a batch of independent functions that share kernel and
    points, such as in a plate over outputs. Some families also accept a batch of kernels.

    Use it with an objective that takes the KL divergence between processes, such as
    `QuadratureELBO` or NumPyro's `TraceMeanField_ELBO`. The density at the rows of a mini-batch,
    which `Trace_ELBO` would use, gives no bound.
    """

    role = "variational"
    X: Float[Array, "n d"]

    def posterior(self) -> AbstractVariationalPosterior:
        """The approximate posterior, with moments and joint samples at any inputs."""
        raise NotImplementedError

    def under_scale(self, scale: Float[ArrayLike, ""]) -> "AbstractVariationalGP":
        """This family at a site with a scale from `numpyro.handlers.scale`."""
        return self

    def marginals(self) -> tuple[Float[Array, "... n"], Float[Array, "... n"]]:
        """The mean and the variance of f at each row of X, from one factorization."""
        return self.posterior().marginals(self.X)

    def split_marginals(self) -> tuple[Float[Array, "... n"], ...]:
        """The mean and the variance at each row of X, or the mean and both parts of the variance.

        Families with inducing points return three arrays: the mean, the variance of the inducing
        values, and the variance that they leave unexplained, which `QuadratureELBO` uses for a
        tighter bound.
        """
        return self.marginals()

    @property
    def mean(self) -> Float[Array, "... n"]:
        """The mean of f at each row."""
        return self.marginals()[0]

    @property
    def variance(self) -> Float[Array, "... n"]:
        """The variance of f at each row."""
        return self.marginals()[1]

    def _normal(self) -> dist.Normal:
        mean, variance = self.marginals()
        # Keeps the derivative of the square root finite where the variance is zero.
        tiny = jnp.finfo(variance.dtype).tiny
        return dist.Normal(mean, jnp.sqrt(at_least(variance, tiny)))

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "... n"]:
        """Draw from the marginals, independently across rows: shape (*sample_shape, *batch, n)."""
        normal = self._normal()
        # Not `normal.sample`, which draws in JAX's default type.
        noise = jax.random.normal(
            checks.as_key(key), (*sample_shape, *normal.batch_shape), normal.loc.dtype
        )
        return normal.loc + normal.scale * noise

    def log_prob(
        self, value: Float[ArrayLike, "... n"], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """The log density of values under the independent marginals, shape (...).

        It warns: an objective that calls it is not a variational bound.
        """
        warnings.warn(
            "the density of a GP at the rows of a mini-batch gives no variational bound: "
            "use loss=numpyro_scalegp.infer.QuadratureELBO() or numpyro.infer.TraceMeanField_ELBO "
            "with the family's prior in the model, which take the divergence of the processes.",
            UserWarning,
            stacklevel=2,
        )
        return jnp.sum(self._normal().log_prob(value), axis=-1)
