"""The variational family of functions of time whose Gaussian sites have natural gradients."""

import copy
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.integrated.state_space.posterior import StateSpacePosterior
from numpyro_scalegp.integrated.state_space.prior import Prior
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS, AbstractKernel
from numpyro_scalegp.numerics.derivatives import explained_forward_mode, refuse_derivatives
from numpyro_scalegp.processes.batch import BatchPosterior
from numpyro_scalegp.processes.posterior import AbstractDerived
from numpyro_scalegp.programs import functions
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.family import AbstractVariationalGP
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.natural_gradients import (
    HOW_TO_TRAIN,
    LOC,
    PRECISION,
    scaled_derivatives,
    without_derivatives,
)
from numpyro_scalegp.variational.same import same_prior
from numpyro_scalegp.variational.state_space.moments import (
    Moments,
    Sites,
    moments_given_sites,
    observations,
)

_OTHER_ROWS = (
    "the parameters of `AutoStateSpaceGP` belong to the rows of its first step, and this step has "
    "other rows: start again, without the state of the former run."
)


class SitesPosterior(AbstractDerived):
    """The posterior of a function of time given Gaussian sites in place of observations.

    Made by `AutoStateSpaceGP`; immutable. See `StateSpacePosterior` for the costs.
    """

    process: StateSpacePosterior | BatchPosterior
    noise_variance: None = None


class NaturalStateSpaceGP(AbstractVariationalGP):
    """A function of time with the density p(f) exp(sum_i (b_i f_i - p_i f_i^2 / 2)), normalized.

    The sites exp(b_i f_i - p_i f_i^2 / 2) stand for the observations, one for each row, and p(f)
    depends on the hyperparameters, so that q(f) follows the kernel. Derivatives with respect to b
    and p are natural gradients: gradient descent at rate r, which `infer.natural_gradients` does,
    takes a natural-gradient step of size r.

    Args:
        kernel: covariance function of the prior, with a state-space form, or a batch of them.
        X: inputs of the site, shape (m, d), or (*batch, m, d).
        natural_loc: b, shape (n,), or (*batch, n) for independent functions.
        natural_precision: p, not negative, of the same shape.
        inputs: inputs of the observations, shape (n, d), or (*batch, n, d); None for `X`.
        mean: the mean m of a prior with a mean function at these inputs, of a shape that broadcasts
            with b. The process is without it, and the sites are on the function with it.
        num_harmonics: as in `estimators.StateSpace`.

    Raises:
        ValueError: if a shape does not fit, a value is NaN or infinite, or the kernel has no
            state-space form.

    References:
        Chang, Wilkinson, Khan and Solin (2020), Fast Variational Learning in State-Space Gaussian
        Process Models. Time O(n s^3), memory O(n s^2).
    """

    arg_constraints = {LOC: constraints.real_vector, PRECISION: constraints.real_vector}
    reparametrized_params = list(arg_constraints)
    pytree_data_fields = ("kernel", "X", LOC, PRECISION, "inputs", "prior_mean", "moments")
    pytree_aux_fields = ("num_harmonics",)
    moments: Moments  # of the function less its mean, at `inputs`
    prior_mean: Float[Array, "*batch n"]  # at `inputs`

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "... m d"],
        natural_loc: Float[ArrayLike, "*batch n"],
        natural_precision: Float[ArrayLike, "*batch n"],
        *,
        inputs: Float[ArrayLike, "... n d"] | None = None,
        mean: Float[ArrayLike, "..."] | None = None,
        num_harmonics: int = NUM_HARMONICS,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = checks.instance("kernel", kernel, AbstractKernel)
        self.X = checks.inputs("X", X, may_be_batch=True)
        self.inputs = self.X
        if inputs is not None:
            self.inputs = checks.inputs("inputs", inputs, self.X.shape[-1], may_be_batch=True)
        self.kernel.check_inputs("X", self.X)
        self.natural_loc = checks.as_float(natural_loc, LOC)
        self.natural_precision = checks.as_float(natural_precision, PRECISION)
        shape = self.natural_loc.shape
        checks.shape(LOC, self.natural_loc, (*shape[:-1], self.inputs.shape[-2]), why="a row each")
        checks.shape(PRECISION, self.natural_precision, shape, why="a value for each site")
        checks.finite(LOC, self.natural_loc)
        checks.finite(PRECISION, self.natural_precision)
        self.num_harmonics = checks.count("num_harmonics", num_harmonics)
        zero = jnp.zeros((), self.natural_loc.dtype)
        self.prior_mean = jnp.broadcast_to(zero if mean is None else jnp.asarray(mean), shape)
        self._set_moments(Sites(self.natural_loc, self.natural_precision))
        super().__init__(shape[:-1], (self.X.shape[-2],), validate_args=validate_args)

    def _set_moments(self, sites: Sites) -> None:
        with explained_forward_mode():
            self.moments = _moments(
                self.kernel, self.inputs, self.prior_mean, sites, self.num_harmonics
            )

    def under_scale(self, scale: Float[ArrayLike, ""]) -> "NaturalStateSpaceGP":
        """This family at a site with a scale; natural-gradient steps are as with scale one."""
        if jnp.ndim(scale):
            return self
        scaled = copy.copy(self)
        scale = jnp.asarray(scale, self.natural_loc.dtype)
        sites = scaled_derivatives((self.natural_loc, self.natural_precision), scale)
        scaled._set_moments(Sites(*sites))
        return scaled

    def marginals(self) -> tuple[Float[Array, "*batch m"], Float[Array, "*batch m"]]:
        """The mean and the variance of the function at X."""
        is_same = self.X.shape == self.inputs.shape and jnp.all(self.inputs == self.X)
        if checks.is_concrete(is_same) and not is_same:
            fixed = copy.copy(self)
            fixed.natural_loc, fixed.natural_precision = refuse_derivatives(
                _OTHER_ROWS, (self.natural_loc, self.natural_precision)
            )
            posterior = fixed.posterior()
            return posterior.mean(self.X), posterior.variance(self.X)
        means, variances, _ = self.moments
        # A step of SVI knows no values: inputs without sites show as NaN.
        if not checks.is_concrete(is_same):
            call_where(jnp.logical_not(is_same), _warn_of_other_rows)
        return jnp.where(is_same, means, jnp.nan), variances

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape_and_batch m"]:
        """Draw from the marginals, without derivatives in the natural parameters."""
        fixed = copy.copy(self)
        fixed.moments = without_derivatives(self.moments)
        return super(NaturalStateSpaceGP, fixed).sample(key, sample_shape)

    def posterior(self) -> Any:
        """The approximate posterior, with moments and joint samples at any inputs.

        Warns if p is negative, as after steps of another optimizer.
        """
        if checks.is_concrete(self.natural_precision):
            least = np.min(np.asarray(self.natural_precision), initial=0.0)
            if least < 0.0:
                warnings.warn(
                    f"`{PRECISION}` has the entry {least:.3g}, but must not be negative: "
                    f"{HOW_TO_TRAIN}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return SitesPosterior(self._process())

    @compiled
    def _process(self) -> StateSpacePosterior | BatchPosterior:
        dtype, num = self.prior_mean.dtype, len(self.batch_shape)
        zero = functions.constant_function(jnp.zeros((), dtype))
        prior = Prior.of(self.kernel, self.inputs, self.num_harmonics, self.prior_mean)
        sites = Sites(self.natural_loc, self.natural_precision)
        y, noise = observations(prior, self.prior_mean, sites)

        def of_member(
            series: Any, kernel: AbstractKernel, X: Array, y: Array, noise: Array
        ) -> StateSpacePosterior:
            options = zero, self.num_harmonics
            return StateSpacePosterior.of(series, kernel, X, y, noise, y, *options)

        process = batches.each(
            of_member,
            batches.Batch(prior.series, prior.series.times.ndim - 1),
            self.kernel.as_batch(),
            batches.Batch(self.inputs, self.inputs.ndim - 2),
            batches.Batch(y, num),
            batches.Batch(noise, num),
        )
        if not self.batch_shape:
            return process
        return BatchPosterior(
            members=process,
            X=self.inputs,
            y=y,
            noise_variance=None,
            mean_function=zero,
            observed=None,
            batch_shape=self.batch_shape,
        )


@compiled
def _moments(
    kernel: AbstractKernel,
    X: Float[Array, "... n d"],
    mean: Float[Array, "*batch n"],
    sites: Sites,
    num_harmonics: int,
) -> Moments:
    return moments_given_sites(Prior.of(kernel, X, num_harmonics, mean), mean, sites)


def _warn_of_other_rows() -> None:
    warnings.warn(f"the result is NaN: {_OTHER_ROWS}", RuntimeWarning, stacklevel=1)


@kl_divergence.register(NaturalStateSpaceGP, LatentGP)
def _(q: NaturalStateSpaceGP, p: LatentGP) -> Float[Array, "*batch"]:
    """The divergence of the processes, regardless of the inputs of the prior's site."""
    return same_prior(q, p) * q.moments.divergence
