"""The guide for sparse Gaussian processes with inducing points."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks
from numpyro_scalegp.families import SparseGP
from numpyro_scalegp.families.natural import LOC, PRECISION, NaturalSparseGP
from numpyro_scalegp.families.sparse import (
    declare_points,
    declare_whitened,
    initial_inducing_points,
)
from numpyro_scalegp.guides.guide import AbstractGPGuide, Rest
from numpyro_scalegp.tracing.sites import GPSite, Model


class AutoSparseGP(AbstractGPGuide):
    """A guide with a whitened sparse GP (SVGP) at one GP site and another guide for the rest.

    Its parameters are `{site}_{prefix}_inducing_points`, `..._loc`, `..._scale_tril` and, for the
    bound where observations are not normal, `..._unexplained_scale`. Train it with
    `QuadratureELBO` or NumPyro's `TraceMeanField_ELBO`. For two GP sites, nest:
    `AutoSparseGP(model, "f", rest=functools.partial(AutoSparseGP, site="g"))`.

    Args:
        model: a NumPyro model with a `LatentGP` site outside the plate of its rows; a plate over
            outputs makes it a batch of functions.
        site: the name of that site; None if the model has only one.
        rest: what guides the other sites: an autoguide class, which starts at prior medians, and
            lengthscales from the distances between rows; a `functools.partial` of one; another GP
            guide class; or any guide that takes the model's arguments and samples them all.
        num_inducing: number of inducing points, if `inducing_points` is not given.
        inducing_points: where they start, shape (M, d); None for k-means on 20,000 rows of all that
            the model's plate takes mini-batches of, or where it gets them as arguments on the rows
            of the first: then give `sgp.features.kmeans_points(key, X, M)`, with `categories=` for
            a kernel that has any. Their categories stay as they are.
        natural: whether the inducing values have natural parameters, `..._natural_loc` and
            `..._natural_precision`, in place of `..._loc` and `..._scale_tril`. Their derivatives
            are natural gradients: train them with `sgp.infer.natural_gradients` and
            `QuadratureELBO`; objectives that draw the function raise.
        prefix: part of the parameters' names.
        jitter: what K(Z, Z) gets on its diagonal, relative to its mean; None for 100 `eps`.

    Raises:
        ValueError: if `inducing_points` has the wrong rank or width, `num_inducing` is not
            positive, or, when called, the model has no such GP site, several, or one in a
            plate that takes a part of its elements.

    References:
        Hensman, Matthews and Ghahramani (2015). A step costs O(b M^2 + M^3) for b rows and M
        inducing points, whatever the size of the data.

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
        prefix: str = "auto",
        jitter: float | None = None,
    ) -> None:
        super().__init__(model, site, rest=rest, prefix=prefix)
        self.natural = checks.instance("natural", natural, bool, "True or False")
        self.inducing_points = initial_inducing_points(num_inducing, inducing_points)
        self.jitter = checks.jitter(jitter)

    def family(self, site: GPSite, *, training: bool = True) -> SparseGP:
        """The sparse GP, at the prior to begin with; see `AbstractGPGuide.family`."""
        param = functools.partial(self.param, site)
        options: dict[str, Any] = {
            "jitter": self.jitter,
            "unexplained_scale": declare_unexplained_scale(param, site) if training else None,
        }
        if self.natural:
            Z = declare_points(param, self.inducing_points, site.rows, site.kernel)
            b = param(LOC, jnp.zeros((*site.batch_shape, Z.shape[-2]), Z.dtype))
            P = param(PRECISION, jnp.zeros((*b.shape, Z.shape[-2]), Z.dtype))
            return NaturalSparseGP(site.kernel, site.X, Z, b, P, **options)
        whitened = declare_whitened(
            param, self.inducing_points, site.rows, site.kernel, site.batch_shape
        )
        return SparseGP(site.kernel, site.X, *whitened, **options)


def declare_unexplained_scale(
    param: Callable[..., Any], site: GPSite
) -> Float[Array, "*batch"] | None:
    """Declare the scale of what inducing values leave unexplained, at one, which changes nothing.

    Args:
        param: as `numpyro.param`, with a short name.
        site: the GP site.

    Returns:
        The scale, or None where all observations are normal: for these the bound has a better one.
    """
    if site.is_normal:
        return None
    start = jnp.ones(site.batch_shape, site.X.dtype)
    return param("unexplained_scale", start, constraint=constraints.positive)
