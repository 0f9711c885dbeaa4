"""The variational family of the page on extending, with its guide, in training."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro.infer import SVI

import numpyro_scalegp as sgp
from tests.extending import CLASSES

N = 20
X = jnp.linspace(-2.0, 2.0, N)[:, None]
Y = jnp.sin(2.0 * X[:, 0])


def model(X: Array, y: Array | None = None, lengthscale: float | None = None) -> None:
    if lengthscale is None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


@pytest.mark.slow
def test_a_custom_guide_trains_and_predicts():
    guide = CLASSES["AutoPseudoDataGP"](model, X[::2])
    svi = SVI(model, guide, optax.adam(0.05), sgp.infer.QuadratureELBO(2))
    result = svi.run(jax.random.key(0), 600, X, Y, progress_bar=False)
    assert {"f_auto_targets", "f_auto_noise"} <= set(result.params)
    posterior = sgp.posterior(model, guide, result, X, Y)
    np.testing.assert_allclose(posterior.mean(X), Y, atol=0.15)
    assert jnp.all(posterior.variance(X) < 0.1)


@pytest.mark.slow
def test_pseudo_observations_that_are_the_data_give_the_log_marginal_likelihood(x64):
    X, Y = jnp.linspace(-2.0, 2.0, N)[:, None], jnp.cos(jnp.arange(N))
    guide = CLASSES["AutoPseudoDataGP"](model, X)
    params = {"f_auto_targets": Y, "f_auto_noise": jnp.full(N, 0.01)}
    loss = sgp.infer.QuadratureELBO(2).loss(jax.random.key(0), params, model, guide, X, Y, 0.5)
    log_prob = sgp.GaussianProcess(sgp.kernels.RBF(0.5), X, 0.01).log_prob(Y)
    np.testing.assert_allclose(-loss, log_prob, rtol=1e-8)
