"""The base classes of distributions over observations with the function integrated out."""

import abc
from typing import Any, ClassVar, NoReturn

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions.batch_util import promote_batch_shape


def refuse_scan(fn: dist.Distribution) -> NoReturn:
    """Raise for a distribution in a `scan`, whose fields would hold the values of all steps."""
    raise ValueError(
        f"a `{type(fn).__name__}` stands in a `scan` of numpyro.contrib.control_flow, which would "
        "stack its kernel and inputs: write independent functions as a batch, with numpyro.plate("
        "name, size) and hyperparameters with a leading axis, or a site for each in a Python "
        "loop."
    )


class CollapsedDistribution(dist.Distribution):
    """A distribution over one observation for each row of `X`, with the function integrated out."""

    role: ClassVar[str] = "collapsed"

    @property
    def is_of_batch(self) -> bool:
        """Whether the density is scaled from a mini-batch to all rows, or may be."""
        return False

    @property
    def condition_options(self) -> frozenset[str]:
        """The options of `condition` that have an effect, besides `progress_bar`."""
        return frozenset()

    @abc.abstractmethod
    def given(self, f: Float[Array, "... n"]) -> dist.Distribution:
        """The distribution of observations, independent across rows, given values of f at X."""

    @abc.abstractmethod
    def predictive(self, posterior: Any, *, at_data: bool = False) -> dist.Distribution:
        """The distribution of new observations at X, independent across rows, under a posterior.

        Args:
            posterior: the posterior over the function, as `condition` returns it.
            at_data: whether the posterior is given observations at the same rows.
        """

    @abc.abstractmethod
    def leave_one_out(self, posterior: Any) -> dist.Distribution:
        """The distribution of each observation given all others, from the posterior given all."""


promote_batch_shape.register(CollapsedDistribution, refuse_scan)


class GaussianNoise(CollapsedDistribution):
    """Observations with normal noise."""

    noise_variance: Float[Array, "..."]
    posterior_inputs: Any

    def given(self, f: Float[Array, "... n"]) -> dist.Normal:
        """See `CollapsedDistribution.given`."""
        return dist.Normal(f, jnp.sqrt(self.noise_variance))

    def predictive(self, posterior: Any, *, at_data: bool = False) -> dist.Distribution:
        """See `CollapsedDistribution.predictive`; at the data, stored moments are used."""
        if at_data:
            return posterior.at_data()
        return posterior.predictive(self.posterior_inputs, self.noise_variance)

    def leave_one_out(self, posterior: Any) -> dist.Distribution:
        """See `CollapsedDistribution.leave_one_out`."""
        return posterior.leave_one_out()
