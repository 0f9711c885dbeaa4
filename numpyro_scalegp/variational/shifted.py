"""Variational processes around the mean function of a prior."""

import copy
from typing import Any

import jax
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.processes.shifted import ShiftedPosterior
from numpyro_scalegp.programs.functions import RowsFunction
from numpyro_scalegp.sites.family import AbstractPriorGP, AbstractVariationalGP
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.same import one_if_same


class ShiftedGP(AbstractVariationalGP):
    """A variational process f(x) = m(x) + g(x), with m the mean function of the prior.

    Args:
        family: the variational process g, whose prior has mean zero.
        mean_function: the mean function m of the prior.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("family", "X", "mean_function")

    def __init__(self, family: AbstractVariationalGP, mean_function: RowsFunction) -> None:
        self.family, self.X, self.mean_function = family, family.X, mean_function
        super().__init__(family.batch_shape, family.event_shape)

    @property
    def kernel(self) -> AbstractKernel:
        """The kernel of g."""
        return self.family.kernel

    @property
    def unexplained_scale(self) -> Float[Array, "..."] | None:
        """The factor on the variance that the inducing values of g leave unexplained, or None."""
        return getattr(self.family, "unexplained_scale", None)

    def posterior(self) -> Any:
        """The approximate posterior, with moments and joint samples at any inputs."""
        return ShiftedPosterior(self.family.posterior(), self.mean_function)

    def under_scale(self, scale: Float[ArrayLike, ""]) -> "ShiftedGP":
        """This family at a site with a scale."""
        return ShiftedGP(self.family.under_scale(scale), self.mean_function)

    def marginals(self) -> tuple[Float[Array, "... n"], Float[Array, "... n"]]:
        """The mean and the variance of f at X."""
        mean, variance = self.family.marginals()
        return self.mean_function(self.X) + mean, variance

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "... n"]:
        """Draw as the family does, which may refuse derivatives of its draws."""
        return self.mean_function(self.X) + self.family.sample(key, sample_shape)

    def split_marginals(self) -> tuple[Float[Array, "... n"], ...]:
        """The mean and the components of the variance at X."""
        mean, *variances = self.family.split_marginals()
        return self.mean_function(self.X) + mean, *variances


def around_mean(family: AbstractVariationalGP, prior: AbstractPriorGP) -> AbstractVariationalGP:
    """The family, shifted by the prior's mean function if it has one."""
    mean_function = prior.mean_function
    return family if mean_function is None else ShiftedGP(family, mean_function)


@kl_divergence.register(ShiftedGP, LatentGP)
def _kl_shifted_latent(q: ShiftedGP, p: LatentGP) -> Float[Array, "*batch"]:
    """The divergence between the processes without their common mean function."""
    means = (tuple(jax.tree.leaves(process.mean_function)) for process in (q, p))
    centered = copy.copy(p)
    centered.mean_function = None
    return one_if_same("mean", *means) * kl_divergence(q.family, centered)
