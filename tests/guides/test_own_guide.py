"""A variational family of one's own, with a guide, from public hooks alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jaxtyping import Array
from numpyro.distributions import constraints
from numpyro.infer import SVI

import numpyro_scalegp as sgp
from numpyro_scalegp.tracing.sites import GPSite

N = 20
X = jnp.linspace(-2.0, 2.0, N)[:, None]
Y = jnp.sin(2.0 * X[:, 0])


class AutoMeanFieldGP(sgp.guides.AbstractGPGuide):
    """A sparse GP whose whitened inducing values are independent."""

    def __init__(self, model: Any, points: Array, site: str | None = None, **options: Any) -> None:
        super().__init__(model, site, **options)
        self.points = points

    def family(self, site: GPSite, *, training: bool = True) -> sgp.SparseGP:
        ones = jnp.ones((*site.batch_shape, len(self.points)))
        loc = self.param(site, "loc", 0.0 * ones)
        scale = self.param(site, "scale", ones, constraint=constraints.positive)
        scale_tril = scale[..., None] * jnp.eye(len(self.points))
        return sgp.SparseGP(site.kernel, site.X, self.points, loc, scale_tril)


def model(X: Array, y: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def test_a_guide_of_ones_own_trains_and_predicts():
    guide = AutoMeanFieldGP(model, X[::2])
    svi = SVI(model, guide, optax.adam(0.05), sgp.infer.QuadratureELBO(2))
    params = svi.run(jax.random.key(0), 600, X, Y, progress_bar=False).params
    assert {"f_auto_loc", "f_auto_scale"} <= set(params)
    posterior = guide.posterior(params, X, Y)
    np.testing.assert_allclose(posterior.mean(X), Y, atol=0.15)
    assert jnp.all(posterior.variance(X) < 0.1)
