"""A reparameterizer that whitens latent GPs, for MCMC."""

from typing import Any

import numpyro
import numpyro.distributions as dist
from numpyro.infer.reparam import Reparam

from numpyro_scalegp.sites.family import AbstractPriorGP
from numpyro_scalegp.tracing.fitted_runs import function_sites, white_name


class WhitenReparam(Reparam):
    """A NumPyro reparameterizer that writes a latent GP in terms of standard normals, f = L v.

    The sampler sees v, the site "NAME_white", and L is the Cholesky factor of the prior covariance:
    of K(X, X) for a `LatentGP`, and of the nearest-neighbor covariance, in O(n m^3), for a
    `NearestNeighborGP`. For a `WeightSpaceGP`, f = Phi S^(-1/2) v with one value for each feature,
    in O(n m).

    Values of a smooth function depend on each other and on the lengthscale, so that NUTS over f
    takes short steps. Sampling v gives much larger effective sample sizes if observations are
    weakly informative about f, such as counts. If they are strongly informative (a normal
    likelihood with little noise), sample f itself, or use the collapsed `GaussianProcess`.

    The function stays among the draws as a deterministic site. `sgp.posterior` and
    `sgp.infer.Predictive` accept these draws with the model before or after this reparametrization:
    at new inputs the function is drawn given its values at the inputs of the fit.

    Raises:
        TypeError: if the site is not a `LatentGP`, `NearestNeighborGP` or `WeightSpaceGP`.
        ValueError: if the site is observed, or its inputs are a mini-batch.

    References:
        Murray and Adams (2010), *Slice sampling covariance hyperparameters of latent Gaussian
        models*. For a `LatentGP` each evaluation of the density takes O(n^3) time, as without
        whitening.

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
        """Replace the site; called by the handler `reparam`."""
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
