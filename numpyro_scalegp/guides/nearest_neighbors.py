"""The guide for a Gaussian process of nearest inducing values."""

import functools

import jax
import jax.numpy as jnp
import numpyro
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.neighbors import coarse_to_fine
from numpyro_scalegp.families import VariationalNearestNeighborGP
from numpyro_scalegp.families.bases import InitialPoints, spread_rows
from numpyro_scalegp.families.sparse import whitened_loc
from numpyro_scalegp.guides.guide import AbstractGPGuide, Rest
from numpyro_scalegp.guides.sparse import declare_unexplained_scale
from numpyro_scalegp.tracing.sites import GPSite, Model

# Random rows for each point that is chosen among them: the more there are, the more evenly points
# lie, and the more of them lie where there is next to no data.
_CANDIDATES = 2


class AutoNearestNeighborGP(AbstractGPGuide):
    """A guide with thousands of inducing values at one GP site, each beside its nearest ones.

    For functions of two or three columns with details that hundreds of inducing points miss, such
    as maps, under any likelihood and in mini-batches. The family is `VariationalNearestNeighborGP`,
    and a step costs as much for a thousand rows as for a million. In many columns, where rows are
    about as far from each other, `AutoSparseGP` is the better guide.

    Its parameters are `{site}_{prefix}_inducing_points`, which stay where they start, `..._loc`,
    `..._scale` and, for the bound where observations are not normal, `..._unexplained_scale`.
    Neighbors are found anew in each step, in lengthscales of the kernel. In training each step
    draws the inducing values once. Train it with `QuadratureELBO` or NumPyro's
    `TraceMeanField_ELBO`.

    `model`, `site`, `rest` and `prefix` are as of `AutoSparseGP`.

    Args:
        num_inducing: number of inducing points, if `inducing_points` is not given.
        inducing_points: where they are, shape (M, d), in any order; None for rows of all that the
            model's plate takes mini-batches of, each far from those before it.
        num_neighbors: on how many of the nearest each inducing value and each row depend.
        jitter: what each inducing value gets as independent variance, relative to the mean of
            k(z, z); None for 100 `eps`.

    Raises:
        ValueError: as of `AutoSparseGP`; if `num_neighbors` is not positive.

    References:
        Wu, Pleiss and Cunningham (2022), Variational Nearest Neighbor Gaussian Process. A step
        costs O((M + b) (M + m^3)) for b rows and M inducing points with m neighbors each.

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
        """The family, at the prior to begin with; see `AbstractGPGuide.family`."""
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
    """Rows far from each other, from coarse to fine."""
    some = spread_rows(key, X, min(len(X), _CANDIDATES * num))
    return some[coarse_to_fine(some, num)]
