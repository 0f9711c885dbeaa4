"""The guide for sparse Gaussian processes with inducing points."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.members import mean_at
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.programs.functions import is_of_rows
from numpyro_scalegp.tracing.sites import GPSite, Model
from numpyro_scalegp.variational.guide import AbstractGPGuide, Rest
from numpyro_scalegp.variational.natural_gradients import LOC, PRECISION, REFERENCE
from numpyro_scalegp.variational.sparse.natural import NaturalSparseGP
from numpyro_scalegp.variational.sparse.sparse import (
    SparseGP,
    declare_points,
    declare_whitened,
    initial_inducing_points,
)

# Of a family that follows the hyperparameters. With less, float64 has room for covariances so close
# to singular that the same observations say different things at two lengthscales.
_LEAST_JITTER = 1e-6


class AutoSparseGP(AbstractGPGuide):
    """A guide with a whitened sparse GP (SVGP) at one GP site and another guide for other sites.

    Its parameters are `{site}_{prefix}_inducing_points`, `..._loc`, `..._scale_tril` and, if
    observations are not normal, `..._unexplained_scale` (see `SparseGP`). Train it with
    `QuadratureELBO` or NumPyro's `TraceMeanField_ELBO`. For two GP sites, nest:
    `AutoSparseGP(model, "f", rest=functools.partial(AutoSparseGP, site="g"))`.

    Args:
        model: a NumPyro model with a `LatentGP` site outside the data plate; a plate over outputs
            makes the site a batch of functions.
        site: the name of that site; None if the model has only one.
        rest: the guide for the other sites: an autoguide class, which is initialized at prior
            medians, and for lengthscales at distances between inputs; a `functools.partial` of such
            a class; another GP guide class; or any guide that takes the model's arguments and
            samples all other latent sites.
        num_inducing: number of inducing points, if `inducing_points` is not given.
        inducing_points: initial inducing points, shape (M, d). None for k-means on up to 20,000
            inputs of the data. If the model gets mini-batches as arguments, k-means sees only the
            first: then give `sgp.features.kmeans_points(key, X, M)` for the inputs X of all data,
            with `categories=` if the kernel has categorical inputs, which training does not change.
        natural: whether the distribution of the inducing values is their prior times what the
            observations add to its natural parameters, `..._natural_loc` and
            `..._natural_precision`, in place of `..._loc` and `..._scale_tril`; these are for the
            values whitened at the hyperparameters of the first step, which `..._natural_reference`
            keeps. Then it follows the hyperparameters of the kernel and the mean of the prior,
            whose posterior gets its true width: give `rest=AutoMultivariateNormal` for their
            correlations, and a level as `LatentGP(mean=)`, by a number or a function of the inputs
            (values at rows are not followed). The derivatives of these parameters are natural
            gradients: train them with `sgp.infer.natural_gradients` and `QuadratureELBO`;
            objectives that draw the function raise an error. If False, the values do not depend on
            the hyperparameters, whose standard deviations come out too small, often by a factor of
            several.
        learn_inducing_points: whether the inducing points are trained; if not, they stay where they
            begin.
        prefix: part of the parameters' names.
        jitter: added to the diagonal of K(Z, Z), relative to its mean; None for 100 times machine
            epsilon, with `natural=True` at least 1e-6.

    Raises:
        ValueError: if `inducing_points` has the wrong rank or width, `num_inducing` is not
            positive, or, when called, if the model has no such GP site, several, or one in a
            plate that takes mini-batches.

    References:
        Hensman, Matthews and Ghahramani (2015); with `natural=True`, Adam, Chang, Khan and Solin
        (2021), Dual Parameterization of Sparse Variational Gaussian Processes, with sites on the
        inducing values, which depend less on the hyperparameters. A step costs O(b M^2 + M^3) for a
        mini-batch of b observations and M inducing points, regardless of the size of the data.

    Example:
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y=None):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        ...     f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
        ...     with numpyro.plate("rows", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
        >>> guide = sgp.guides.AutoSparseGP(model, num_inducing=20)
    """

    def __init__(
        self,
        model: Model,
        site: str | None = None,
        *,
        rest: Rest = AutoNormal,
        num_inducing: int = 512,
        inducing_points: Float[ArrayLike, "... M d"] | None = None,
        natural: bool = False,
        learn_inducing_points: bool = True,
        prefix: str = "auto",
        jitter: float | None = None,
    ) -> None:
        super().__init__(model, site, rest=rest, prefix=prefix)
        self.natural = checks.instance("natural", natural, bool, "True or False")
        self.follows_hyperparameters = natural
        self.inducing_points = initial_inducing_points(num_inducing, inducing_points)
        self.learn_inducing_points = checks.instance(
            "learn_inducing_points", learn_inducing_points, bool, "True or False"
        )
        self.jitter = checks.jitter(jitter)

    def family(self, site: GPSite, *, training: bool = True) -> SparseGP:
        """The sparse GP, initially at the prior; see `AbstractGPGuide.family`."""
        param = functools.partial(self.param, site)
        options: dict[str, Any] = {
            "jitter": self.jitter,
            "unexplained_scale": declare_unexplained_scale(param, site) if training else None,
        }
        if self.natural:
            Z = self._points(declare_points(param, self.inducing_points, site.rows, site.kernel))
            b = param(LOC, jnp.zeros((*site.batch_shape, Z.shape[-2]), Z.dtype))
            P = param(PRECISION, jnp.zeros((*b.shape, Z.shape[-2]), Z.dtype))
            leaves = param(REFERENCE, hyperparameters_of(site.kernel))
            reference = with_hyperparameters(site.kernel, jax.lax.stop_gradient(leaves))
            if self.jitter is None:
                options["jitter"] = max(_LEAST_JITTER, 100.0 * float(jnp.finfo(Z.dtype).eps))
            mean = inducing_mean(site, Z)
            return NaturalSparseGP(site.kernel, site.X, Z, b, P, reference, mean, **options)
        Z, *whitened = declare_whitened(
            param, self.inducing_points, site.rows, site.kernel, site.batch_shape
        )
        return SparseGP(site.kernel, site.X, self._points(Z), *whitened, **options)

    def _points(self, Z: Float[Array, "... M d"]) -> Float[Array, "... M d"]:
        return Z if self.learn_inducing_points else jax.lax.stop_gradient(Z)


def inducing_mean(site: GPSite, Z: Float[Array, "... M d"]) -> Float[Array, "... M"] | None:
    """The prior's mean at the inducing points; None without one, or if it is known at X only."""
    mean_function = site.prior.mean_function
    if mean_function is None or is_of_rows(mean_function):
        return None
    return mean_at(mean_function, Z, (*site.batch_shape, Z.shape[-2]))


def hyperparameters_of(kernel: AbstractKernel) -> Float[Array, " p"]:
    """The hyperparameters of a kernel as a vector."""
    return ravel_pytree(eqx.filter(kernel, eqx.is_inexact_array))[0]


def with_hyperparameters(kernel: AbstractKernel, vector: Float[Array, " p"]) -> AbstractKernel:
    """The kernel with other hyperparameters, in the order of `hyperparameters_of`."""
    arrays, rest = eqx.partition(kernel, eqx.is_inexact_array)
    return eqx.combine(ravel_pytree(arrays)[1](vector), rest)


def declare_unexplained_scale(
    param: Callable[..., Any], site: GPSite
) -> Float[Array, "*batch"] | None:
    """Declare the factor on the variance that inducing values leave unexplained, initially 1.

    Args:
        param: like `numpyro.param`, with a short name.
        site: the GP site.

    Returns:
        The factor, or None if all observations are normal, where the bound has an optimal factor.
    """
    if site.is_normal:
        return None
    start = jnp.ones(site.batch_shape, site.X.dtype)
    return param("unexplained_scale", start, constraint=constraints.positive)
