"""Priors with a mean function are the zero-mean prior plus this function."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.util import log_density

import numpyro_scalegp as sgp

N, D = 30, 2
X = jax.random.normal(jax.random.key(0), (N, D))
NEW = X[:4] + 0.1
KERNEL = sgp.kernels.Matern32(1.3, 0.8)
F = jax.random.normal(jax.random.key(1), (N,))


def slope(X):
    return 3.0 + 2.0 * X[..., 0]


@pytest.mark.parametrize("mean", [3.0, slope, slope(X)], ids=["number", "function", "values"])
def test_the_prior_is_the_zero_mean_prior_plus_the_mean(mean, x64):
    x, f = X.astype(float), F.astype(float)
    shift = mean(x) if callable(mean) else jnp.broadcast_to(mean, N)
    prior, zero = sgp.LatentGP(KERNEL, x, mean=mean), sgp.LatentGP(KERNEL, x)
    np.testing.assert_allclose(prior.mean, shift)
    np.testing.assert_allclose(prior.log_prob(f), zero.log_prob(f - shift))
    key = jax.random.key(2)
    np.testing.assert_allclose(prior.sample(key, (3,)), shift + zero.sample(key, (3,)))
    posterior, centered = prior.condition(f), zero.condition(f - shift)
    if isinstance(mean, jax.Array):
        with pytest.raises(ValueError, match="not known at other rows"):
            posterior.mean(NEW)
        return
    at_new = mean(NEW) if callable(mean) else mean
    np.testing.assert_allclose(posterior.mean(NEW), at_new + centered.mean(NEW))
    functions, of_centered = (each.sample_functions(key, 2) for each in (posterior, centered))
    np.testing.assert_allclose(functions(NEW), at_new + of_centered(NEW))


def test_a_batch(x64):
    kernel = sgp.kernels.Matern32(jnp.array([[0.5], [1.0], [2.0]]))
    f = jax.random.normal(jax.random.key(3), (3, N))
    prior, zero = sgp.LatentGP(kernel, X, mean=slope), sgp.LatentGP(kernel, X)
    np.testing.assert_allclose(prior.log_prob(f), zero.log_prob(f - slope(X)))
    posterior, centered = prior.condition(f), zero.condition(f - slope(X))
    np.testing.assert_allclose(posterior.mean(NEW), slope(NEW) + centered.mean(NEW))
    levels = jnp.arange(3.0)
    np.testing.assert_allclose(
        sgp.LatentGP(kernel, X, mean=levels).log_prob(f), zero.log_prob(f - levels[:, None])
    )


def test_whitened_draws_have_the_mean():
    def model():
        return numpyro.sample("f", sgp.LatentGP(KERNEL, X, mean=slope))

    whitened = numpyro.handlers.reparam(model, config={"f": sgp.infer.WhitenReparam()})
    zeros = numpyro.handlers.substitute(whitened, {"f_white": jnp.zeros(N)})
    np.testing.assert_allclose(numpyro.handlers.seed(zeros, 0)(), slope(X), rtol=1e-5)


GUIDES = {
    "sparse": lambda model: sgp.guides.AutoSparseGP(model, num_inducing=8),
    # Its sites are on values with the mean, which changes as inducing points move.
    "natural": lambda model: sgp.guides.AutoSparseGP(
        model, num_inducing=8, natural=True, learn_inducing_points=False
    ),
    "decoupled": lambda model: sgp.guides.AutoDecoupledGP(model, mean_size=20, cov_size=8),
    "hybrid": lambda model: sgp.guides.AutoHybridGP(model, num_inducing=8, num_residual=10),
    "neighbors": lambda model: sgp.guides.AutoNearestNeighborGP(model, num_inducing=20),
}


def added(X, y):
    """The mean as a term of the likelihood."""
    f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + 0.3 * X[:, 0])), obs=y)


def of_prior(X, y):
    """The mean as an argument of the prior."""
    f = numpyro.sample("f", sgp.LatentGP(KERNEL, X, mean=lambda X: 0.3 * X[:, 0]))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_learns_what_it_learns_where_the_likelihood_adds_the_mean(name, x64):
    x, new, y = X.astype(float), NEW.astype(float), jnp.round(jnp.exp(F)).astype(float)
    optimizer = optax.adam(0.05)
    if name == "natural":
        optimizer = sgp.infer.natural_gradients(optimizer)
    fits = []
    for model in (added, of_prior):
        guide = GUIDES[name](model)
        loss = sgp.infer.QuadratureELBO(20)
        svi = SVI(model, guide, optimizer, loss)
        state = svi.init(jax.random.key(0), x, y)
        for _ in range(5):
            state, value = jax.jit(svi.update)(state, x, y)
        params = {**svi.get_params(state), **(state.mutable_state or {})}
        fits.append((value, params, sgp.posterior(model, guide, params, x, y)))
    (expected_value, expected_params, expected), (value, params, posterior) = fits
    np.testing.assert_allclose(value, expected_value, rtol=1e-10)
    if name == "natural":
        P, mean = params["f_auto_natural_precision"], 0.3 * params["f_auto_inducing_points"][:, 0]
        K = KERNEL.covariance(params["f_auto_inducing_points"])
        shift = jnp.linalg.solve(jnp.linalg.cholesky(K + 1e-6 * KERNEL.variance * jnp.eye(8)), mean)
        expected_params["f_auto_natural_loc"] += P @ shift
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), params, expected_params)
    shift = 0.3 * new[:, 0]
    np.testing.assert_allclose(posterior.mean(new), shift + expected.mean(new))
    np.testing.assert_allclose(posterior.variance(new), expected.variance(new))
    key = jax.random.key(4)
    np.testing.assert_allclose(posterior.sample(key, new, 2), shift + expected.sample(key, new, 2))
    functions, without = (each.sample_functions(key, 2) for each in (posterior, expected))
    np.testing.assert_allclose(functions(new), shift + without(new))


def test_the_mean_may_be_learned():
    def model(X, y):
        level = numpyro.sample("level", dist.Normal(6.0, 1.0))
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X, mean=level))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    guide = sgp.guides.AutoSparseGP(model, num_inducing=10)
    y = 7.0 + jnp.sin(X[:, 0])
    svi = SVI(model, guide, optax.adam(0.1), TraceMeanField_ELBO())
    fit = svi.run(jax.random.key(0), 500, X, y, progress_bar=False)
    posterior = sgp.posterior(model, guide, fit, X, y)
    assert jnp.sqrt(jnp.mean(jnp.square(posterior.mean(X) - y))) < 0.4
    far = posterior.mean(100.0 + X[:1])
    np.testing.assert_allclose(far, guide.median(fit.params)["level"], atol=1e-3)
    assert 5.0 < far[0] < 9.0


def test_solved_weights_are_as_without_the_mean(x64):
    def with_mean(X, y):
        f = numpyro.sample("f", sgp.LatentGP(KERNEL, X, mean=slope))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    def without(X, y):
        f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    solved_weights, x, f = [], X.astype(float), F.astype(float)
    for model, y in ((with_mean, slope(x) + f), (without, f)):
        guide = GUIDES["hybrid"](model)
        svi = SVI(model, guide, optax.adam(0.05), sgp.infer.QuadratureELBO())
        state = svi.init(jax.random.key(0), x, y)
        solved = guide.solve_mean(svi.get_params(state), x, y)
        solved_weights.append(solved.params["f_auto_residual_weights"])
    np.testing.assert_allclose(solved_weights[0], solved_weights[1], rtol=1e-8)


def test_a_process_without_the_mean_is_refused():
    prior = sgp.LatentGP(KERNEL, X, mean=1.0)
    process = sgp.SparseGP(KERNEL, X, X[:5], jnp.zeros(5), jnp.eye(5))
    with pytest.raises(ValueError, match="the prior has a mean function"):
        kl_divergence(process, prior)


def test_a_mean_of_another_shape_is_refused(unchecked):
    with pytest.raises(ValueError, match="`mean`"):
        sgp.LatentGP(KERNEL, X, mean=jnp.zeros(N - 1))


def test_nuts_sees_the_mean():
    def model(shift):
        numpyro.sample("f", sgp.LatentGP(KERNEL, X, mean=shift))

    density = log_density(model, (2.0,), {}, {"f": 2.0 + F})[0]
    np.testing.assert_allclose(density, log_density(model, (0.0,), {}, {"f": F})[0], rtol=1e-5)
