"""A latent GP in coordinates that are independent a priori, for samplers."""

from typing import Any

import numpyro
import numpyro.distributions as dist
from numpyro.infer.reparam import Reparam

from numpyro_scalegp.families.family import AbstractPriorGP
from numpyro_scalegp.infer.fitted_runs import function_sites, white_name


class WhitenReparam(Reparam):
    """A reparameterizer of NumPyro's that makes a latent GP of independent normals, f = L v.

    L is the Cholesky factor of K(X, X), and v, the site "NAME_white", is what a sampler sees; of a
    `WeightSpaceGP`, f = Phi S^(-1/2) v with as many values as features, in O(n m); of a
    `NearestNeighborGP`, L is that of its own covariance, in O(n m^3).
    Values of a smooth function depend on each other and on the lengthscale, so that NUTS over them
    takes short steps: with v effective sample sizes are larger by far where observations say little
    of each value, as counts do. Where they say much (a normal likelihood of little noise) f itself
    is the better choice, or the collapsed `GaussianProcess`. The function stays among the draws, as
    a deterministic site, and `sgp.posterior` and `sgp.infer.Predictive` take them with the model
    before or after this reparametrization: at new inputs the function is drawn given its values at
    the rows of the fit.

    Raises:
        TypeError: if the site is no `LatentGP`, `NearestNeighborGP` or `WeightSpaceGP`.
        ValueError: if it is observed, or its rows are those of a mini-batch.

    References:
        Murray and Adams (2010), *Slice sampling covariance hyperparameters of latent Gaussian
        models*. O(n^3) time for each density, as without it.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> X, y = jnp.linspace(0.0, 1.0, 20)[:, None], jnp.ones(20)
        >>> def model(X, y=None):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        ...     f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
        ...     with numpyro.plate("rows", len(X)):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        >>> whitened = numpyro.handlers.reparam(model, config={"f": sgp.infer.WhitenReparam()})
        >>> seeded = numpyro.handlers.seed(whitened, jax.random.key(0))
        >>> sites = numpyro.handlers.trace(seeded).get_trace(X, y)
        >>> [name for name, site in sites.items() if site["type"] == "sample"]
        ['lengthscale', 'f_white', 'y']
    """

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[Any, Any]:
        """What the handler `reparam` calls: no distribution, and the function's values."""
        shape, event_dim, site_fn, sites = fn.shape(), fn.event_dim, fn, function_sites()
        fn, *_ = self._unwrap(fn)
        if not isinstance(fn, AbstractPriorGP):
            raise TypeError(
                f"`{name}` must be a `LatentGP`, a `NearestNeighborGP` or a `WeightSpaceGP`, got a "
                f"`{type(fn).__name__}`."
            )
        if obs is not None:
            raise ValueError(f"`{name}` is observed, so there is nothing to sample.")
        fn.check_all_rows()
        normal = dist.Normal(0.0, 1.0).expand((*shape[:-1], fn.num_white)).to_event(event_dim)
        if sites is None:
            return None, fn.of_white(numpyro.sample(white_name(name), normal))
        if name not in sites.without_white:
            sites.whitened[name] = fn.of_white(numpyro.sample(white_name(name), normal))
        return site_fn, None
