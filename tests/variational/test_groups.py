"""Groups in a plate, each with separate hyperparameters, inputs and gaps."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI

import numpyro_scalegp as sgp

G, N = 3, 15
RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0.0, 6.0, (G, N, 1)), axis=1).astype(np.float32)
PHASE, AMPLITUDE = np.arange(3.0), np.array([0.5, 1.0, 2.0])
NEW = np.linspace(0.5, 5.5, 7, dtype=np.float32)[:, None]
OBSERVED = RNG.uniform(size=(G, N)) < 0.8


def truth(X):
    return (AMPLITUDE[:, None] * np.sin(X[..., 0] + PHASE[:, None])).astype(np.float32)


Y = np.where(OBSERVED, truth(X) + 0.05 * RNG.normal(size=(G, N)), np.nan).astype(np.float32)


def kernel():
    typical = numpyro.sample("typical", dist.LogNormal(0.5, 0.5))
    with numpyro.plate("groups", G):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(typical), 0.3))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    return sgp.kernels.RBF(lengthscale[:, None], variance)


def collapsed(X, y=None, observed=None):
    noise, of_groups = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0)), kernel()
    with numpyro.plate("groups", G):
        gp = sgp.GaussianProcess(of_groups, X, noise**2, observed=observed)
        numpyro.sample("y", gp, obs=y)


def latent(X, y=None, is_masked=True):
    noise, of_groups = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0)), kernel()
    with numpyro.plate("groups", G):
        f = numpyro.sample("f", sgp.LatentGP(of_groups, X))
    with numpyro.plate("groups", G, dim=-2), numpyro.plate("rows", X.shape[-2], dim=-1):
        mask, y = (True, y) if not is_masked or y is None else (~jnp.isnan(y), jnp.nan_to_num(y))
        with handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)


def assert_close(posterior):
    assert posterior.mean(NEW).shape == posterior.variance(NEW).shape == (G, len(NEW))
    assert np.sqrt(np.mean((posterior.mean(NEW) - truth(NEW)) ** 2)) < 0.15
    batch = np.broadcast_to(NEW, (G, *NEW.shape))
    np.testing.assert_allclose(posterior.mean(batch), posterior.mean(NEW), rtol=1e-4, atol=1e-4)
    predictive = posterior.predictive(batch)
    np.testing.assert_allclose(predictive.mean, posterior.mean(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a covariance matrix")  # of a step that is too long
def test_nuts_over_groups_with_gaps():
    sampler = MCMC(NUTS(collapsed), num_warmup=60, num_samples=20, progress_bar=False)
    sampler.run(jax.random.key(0), X, Y, OBSERVED)
    draws = sampler.get_samples()
    assert draws["lengthscale"].shape == (20, G)
    assert_close(sgp.posterior(collapsed, draws, X, Y, OBSERVED))
    data = sgp.to_arviz(sampler, key=jax.random.key(1))
    has_groups = hasattr(data, "log_likelihood")
    terms = data.log_likelihood["y"] if has_groups else data["log_likelihood"]["y"]
    assert terms.shape == (1, 20, OBSERVED.sum())
    assert np.isfinite(terms.values).all()
    predictive = sgp.infer.Predictive(collapsed, posterior_samples=draws, data=(X, Y, OBSERVED))
    new = np.broadcast_to(NEW, (G, *NEW.shape))
    assert predictive(jax.random.key(2), new)["y"].shape == (20, G, len(NEW))


@pytest.mark.slow
@pytest.mark.parametrize("natural", [False, True])
def test_sparse_guides_over_groups_with_gaps(natural):
    guide = sgp.guides.AutoSparseGP(latent, num_inducing=6, natural=natural)
    optimizer = optax.adam(0.03)
    optimizer = sgp.infer.natural_gradients(optimizer) if natural else optimizer
    svi = SVI(latent, guide, optimizer, sgp.infer.QuadratureELBO(num_nodes=2))
    result = svi.run(jax.random.key(0), 400, X, Y, progress_bar=False)
    assert result.params["f_auto_inducing_points"].shape == (G, 6, 1)
    assert_close(sgp.posterior(latent, guide, result, X, Y))


@pytest.mark.slow
def test_gaps_without_a_mask_raise_with_the_lines_to_write():
    guide = sgp.guides.AutoSparseGP(latent, num_inducing=6)
    svi = SVI(latent, guide, optax.adam(0.03), sgp.infer.QuadratureELBO(num_nodes=2))
    with pytest.raises(ValueError, match=r"handlers.mask\(mask=~jnp.isnan\(y\)\)"):
        svi.init(jax.random.key(0), X, Y, False)
