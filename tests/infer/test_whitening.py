"""A whitened latent GP has the same prior, and NUTS moves faster in it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

import numpyro_scalegp as sgp

X = jnp.linspace(0.0, 4.0, 30)[:, None]
Y = jnp.asarray(np.random.default_rng(0).poisson(np.exp(np.sin(2.0 * X[:, 0]))), jnp.float32)
WHITE = {"f": sgp.infer.WhitenReparam()}


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern52(lengthscale, 1.5), X))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def groups(X, y=None):
    with numpyro.plate("groups", 2):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern52(lengthscale[:, None]), X))


def shared(X, y=None):
    with numpyro.plate("groups", 2):
        numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(0.5), X))


@pytest.mark.parametrize("model", [model, groups, shared])
def test_its_density_is_that_of_the_function(model):
    """p(f) = p(v) / |L|, for one function, a batch of priors, and two draws of one prior."""
    with jax.enable_x64(True):
        inputs = jnp.asarray(X[::3], jnp.float64)
        whitened = numpyro.handlers.reparam(model, config=WHITE)
        seeded = numpyro.handlers.seed(whitened, jax.random.key(1))
        sites = numpyro.handlers.trace(seeded).get_trace(inputs)
        kinds = ("sample", "deterministic")
        values = {name: site["value"] for name, site in sites.items() if site["type"] in kinds}
        plain = {name: value for name, value in values.items() if name != "f_white"}
        white = {name: value for name, value in values.items() if name != "f"}
        of_white = log_density(whitened, (inputs,), {}, white)[0]
        of_function = log_density(model, (inputs,), {}, plain)[0]
        substituted = numpyro.handlers.substitute(model, plain)
        prior = numpyro.handlers.trace(substituted).get_trace(inputs)["f"]["fn"]
        K = getattr(prior, "base_dist", prior).covariance()
        each = jnp.broadcast_to(jnp.linalg.slogdet(K)[1], plain["f"].shape[:-1])
        np.testing.assert_allclose(of_white, of_function + 0.5 * each.sum(), rtol=1e-8)


def test_a_gradient_goes_through_the_hyperparameters():
    with jax.enable_x64(True):
        inputs = jnp.asarray(X, jnp.float64)
        v = jnp.asarray(np.random.default_rng(1).normal(size=30))

        def total(lengthscale):
            kernel = sgp.kernels.Matern52(lengthscale)
            return jnp.sum(jnp.sin(sgp.LatentGP(kernel, inputs, jitter=1e-8).of_white(v)))

        def dense(lengthscale):
            K = sgp.kernels.Matern52(lengthscale).covariance(inputs)
            return jnp.sum(jnp.sin(jnp.linalg.cholesky(K + 1e-8 * jnp.eye(30)) @ v))

        np.testing.assert_allclose(jax.grad(total)(0.7), jax.grad(dense)(0.7), rtol=1e-6)


# The first steps of a sampler go far.
@pytest.mark.filterwarnings("ignore:a covariance matrix:RuntimeWarning")
@pytest.mark.slow
def test_nuts_moves_and_its_draws_condition_the_model():
    whitened = numpyro.handlers.reparam(model, config=WHITE)
    mcmc = MCMC(NUTS(whitened), num_warmup=300, num_samples=300, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    draws = mcmc.get_samples()
    assert effective_sample_size(np.asarray(draws["lengthscale"])[None]) > 40
    posterior = sgp.posterior(model, draws, X, Y)
    np.testing.assert_allclose(posterior.mean(X), draws["f"].mean(axis=0), atol=0.02)


def test_other_sites_are_refused():
    def other(X, y=None):
        numpyro.sample("f", dist.Normal(0.0, 1.0).expand([len(X)]).to_event(1))

    with pytest.raises(TypeError, match=r"`f` must be a `LatentGP`, .* got a `Normal`"):
        numpyro.handlers.seed(numpyro.handlers.reparam(other, config=WHITE), 0)(X)
    observed = numpyro.handlers.condition(model, {"f": jnp.zeros(30)})
    with pytest.raises(ValueError, match="`f` is observed"):
        numpyro.handlers.seed(numpyro.handlers.reparam(observed, config=WHITE), 0)(X, Y)
