"""The guide with nearest-neighbor inducing values."""

import functools

import jax
import jax.numpy as jnp
import numpyro
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks
from numpyro_scalegp.neighbors.family import VariationalNearestNeighborGP
from numpyro_scalegp.neighbors.search import coarse_to_fine
from numpyro_scalegp.tracing.sites import GPSite, Model
from numpyro_scalegp.variational.bases import InitialPoints, spread_rows
from numpyro_scalegp.variational.guide import AbstractGPGuide, Rest
from numpyro_scalegp.variational.sparse.guide import declare_unexplained_scale
from numpyro_scalegp.variational.sparse.sparse import whitened_loc

# Random candidates for each inducing point. More candidates spread the points more evenly, but
# place more of them where data are sparse.
_CANDIDATES = 2


class AutoNearestNeighborGP(AbstractGPGuide):
    """A guide with thousands of inducing points at one GP site, each linked to its neighbors.

    Use it for functions of two or three input dimensions with details that hundreds of inducing
    points miss, such as maps, with any likelihood and in mini-batches. The variational family is
    `VariationalNearestNeighborGP`, and the cost of a step does not depend on the number of
    observations. In many input dimensions, where all inputs are about equally far apart, prefer
    `AutoSparseGP`.

    Its parameters are `{site}_{prefix}_inducing_points`, which are fixed, `..._loc`, `..._scale`
    and, for the tighter bound if observations are not normal, `..._unexplained_scale`. Each step
    searches for neighbors again, by distances relative to the kernel's lengthscales, and draws the
    inducing values once. Train it with `QuadratureELBO` or NumPyro's `TraceMeanField_ELBO`.

    For `model`, `site`, `rest` and `prefix`, see `AutoSparseGP`.

    Args:
        num_inducing: number of inducing points, if `inducing_points` is not given.
        inducing_points: inducing points, shape (M, d), in any order; None to choose inputs from all
            the data, not only from the mini-batch, each far from the ones before it.
        num_neighbors: number of inducing values that each inducing value, and f at each input,
            depends on.
        jitter: variance added to each inducing value, relative to the mean of k(z, z); None for 100
            times machine epsilon.

    Raises:
        ValueError: as for `AutoSparseGP`; if `num_neighbors` is not positive.

    References:
        Wu, Pleiss and Cunningham (2022), Variational Nearest Neighbor Gaussian Process. A step
        costs O((M + b) (M + m^3)) for a batch of b observations and M inducing points with m
        neighbors each.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y=None):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-2.0, 1.0))
        ...     f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(lengthscale), X))
        ...     with numpyro.plate("rows", X.shape[0]):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        >>> guide = sgp.guides.AutoNearestNeighborGP(model, num_inducing=4_000)
    """

    def __init__(
        self,
        model: Model,
        site: str | None = None,
        *,
        rest: Rest = AutoNormal,
        num_inducing: int = 2048,
        inducing_points: Float[ArrayLike, "M d"] | None = None,
        num_neighbors: int = 15,
        prefix: str = "auto",
        jitter: float | None = None,
    ) -> None:
        super().__init__(model, site, rest=rest, prefix=prefix)
        if inducing_points is not None:
            points = checks.inputs("inducing_points", inducing_points)
            inducing_points = points[coarse_to_fine(points, len(points))]
        self.inducing_points = InitialPoints(
            "inducing_points",
            "num_inducing",
            num_inducing,
            inducing_points,
            _far_rows,
            "X[:num_points] of shuffled rows",
        )
        self.num_neighbors = checks.count("num_neighbors", num_neighbors)
        self.jitter = checks.jitter(jitter)

    def family(self, site: GPSite, *, training: bool = True) -> VariationalNearestNeighborGP:
        """The family, initially at the prior; see `AbstractGPGuide.family`."""
        param = functools.partial(self.param, site)
        Z = param("inducing_points", lambda key: self.inducing_points(key, site.rows, site.kernel))
        Z = jax.lax.stop_gradient(Z)
        shape = *site.batch_shape, len(Z)
        loc = param("loc", lambda _: jnp.zeros(shape, Z.dtype), constraint=whitened_loc)
        positive = constraints.independent(constraints.positive, 1)
        scale = param("scale", lambda _: jnp.ones(shape, Z.dtype), constraint=positive)
        return VariationalNearestNeighborGP(
            site.kernel,
            site.X,
            Z,
            loc,
            scale,
            num_neighbors=self.num_neighbors,
            jitter=self.jitter,
            unexplained_scale=declare_unexplained_scale(param, site) if training else None,
            key=numpyro.prng_key() if training else None,
        )


def _far_rows(
    key: Array, X: Float[Array, "n d"], num: int, categories: tuple[int, ...]
) -> Float[Array, "num d"]:
    """Inputs far from each other, in coarse-to-fine order."""
    candidates = spread_rows(key, X, min(len(X), _CANDIDATES * num))
    return candidates[coarse_to_fine(candidates, num)]
