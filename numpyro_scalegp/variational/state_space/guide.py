"""The guide for functions of time."""

import functools

import jax
import jax.numpy as jnp
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.members import mean_at
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS
from numpyro_scalegp.tracing.sites import GPSite, Model
from numpyro_scalegp.variational.guide import AbstractGPGuide, Rest
from numpyro_scalegp.variational.natural_gradients import INPUTS, LOC, PRECISION
from numpyro_scalegp.variational.state_space.family import NaturalStateSpaceGP


class AutoStateSpaceGP(AbstractGPGuide):
    """A guide with a Gaussian site for each row at one GP site of time, in linear time.

    The distribution of the function is its prior times exp(b_i f_i - p_i f_i^2 / 2) for each row i:
    of all normal distributions, the best one has this form if each observation depends on the
    function at its row. A Kalman filter and a smoother compute its moments, so that there are no
    inducing points and no matrices of rows. The kernel needs a state-space form, as for
    `estimators.StateSpace`, and the model sees all rows in each step.

    Its parameters are `{site}_{prefix}_natural_loc` and `..._natural_precision`, b and p, initially
    zero, and the inputs of the rows, `..._natural_inputs`, which stay. The distribution follows
    the hyperparameters of the kernel and the mean of the prior, whose posterior gets its true
    width: give `rest=AutoMultivariateNormal` for their correlations. The derivatives of b and p are
    natural gradients: train with `sgp.infer.natural_gradients` and `QuadratureELBO`; objectives
    that draw the function raise an error. For normal observations a step of size 1 is exact if they
    lie within a prior standard deviation of the mean, and a few steps are if not; for others 0.3 to
    0.7 is a good choice. The parameters belong to the rows of the first step: other inputs of the
    same shape give NaN.

    Args:
        model: a NumPyro model with a `LatentGP` site; a plate over outputs makes the site a batch
            of functions.
        site: the name of that site; None if the model has only one.
        rest: the guide for the other sites; see `AutoSparseGP`.
        num_harmonics: the number of Fourier terms of each `Periodic` kernel; see
            `estimators.StateSpace`.
        prefix: part of the parameters' names.

    Raises:
        ValueError: if `num_harmonics` is not positive, or, when called, if the model has no such GP
            site, several, or one whose rows are a mini-batch; if the kernel has no state-space
            form.

    References:
        Khan and Lin (2017), Conjugate-Computation Variational Inference; Chang, Wilkinson, Khan and
        Solin (2020), Fast Variational Learning in State-Space Gaussian Process Models; Opper and
        Archambeau (2009), The Variational Gaussian Approximation Revisited. A step costs O(n s^3)
        for n rows and s state variables, about as much as eight log densities of
        `estimators.StateSpace`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import optax
        >>> from numpyro.infer import SVI
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y=None):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        ...     f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(lengthscale), X))
        ...     with numpyro.plate("rows", X.shape[0]):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        >>> X, y = jnp.arange(50.0)[:, None], jnp.arange(50) % 4
        >>> guide = sgp.guides.AutoStateSpaceGP(model)
        >>> optimizer = sgp.infer.natural_gradients(optax.adam(0.05), 0.5)
        >>> svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())
        >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
        >>> guide.posterior(result.params, X).mean(jnp.array([[50.5]])).shape
        (1,)
    """

    follows_hyperparameters = True

    def __init__(
        self,
        model: Model,
        site: str | None = None,
        *,
        rest: Rest = AutoNormal,
        num_harmonics: int = NUM_HARMONICS,
        prefix: str = "auto",
    ) -> None:
        super().__init__(model, site, rest=rest, prefix=prefix)
        self.num_harmonics = checks.count("num_harmonics", num_harmonics)

    def family(self, site: GPSite, *, training: bool = True) -> NaturalStateSpaceGP:
        """The family, initially the prior; see `AbstractGPGuide.family`."""
        if site.partial:
            raise ValueError(
                f"the plate `{site.partial[0]}` takes a mini-batch, and `AutoStateSpaceGP` passes "
                "over the whole series in each step: give the model all rows, or use "
                "`AutoSparseGP`."
            )
        param = functools.partial(self.param, site)
        X = jax.lax.stop_gradient(param(INPUTS, site.X))
        start = jnp.zeros((*site.batch_shape, site.X.shape[-2]), site.X.dtype)
        b, p = param(LOC, start), param(PRECISION, start)
        mean_function, mean = site.prior.mean_function, None
        if mean_function is not None:
            mean = mean_at(mean_function, X, b.shape)
        return NaturalStateSpaceGP(
            site.kernel, site.X, b, p, inputs=X, mean=mean, num_harmonics=self.num_harmonics
        )
