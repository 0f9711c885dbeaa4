"""The nearest-neighbor prior against dense algebra, in NUTS, and its posterior."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

import numpyro_scalegp as sgp

N = 40
RNG = np.random.default_rng(0)
X = RNG.uniform(size=(N, 2))
NEW = RNG.uniform(size=(5, 2))
KERNEL = sgp.kernels.Matern32(0.4, 1.5)
WHITE = {"f": sgp.infer.WhitenReparam()}
Vecchia = sgp.estimators.Vecchia


def prior(num, kernel=KERNEL, **options):
    return sgp.NearestNeighborGP(kernel, X, Vecchia(num), **options)


@pytest.mark.slow
def test_with_all_neighbors_it_is_the_latent_gp(x64):
    # Jitter relative to the diagonal is the same for both.
    near, exact = prior(N - 1, jitter=1e-8), sgp.LatentGP(KERNEL, X, jitter=1e-8)
    f = exact.sample(jax.random.key(0), (3,))
    np.testing.assert_allclose(near.log_prob(f), exact.log_prob(f), rtol=1e-9)
    np.testing.assert_allclose(near.variance, exact.variance)

    def total(scale, kind):
        return kind(sgp.kernels.Matern32(scale), X).log_prob(f[0])

    gradients = [
        jax.grad(total)(0.4, lambda k, X: sgp.NearestNeighborGP(k, X, Vecchia(N - 1), jitter=1e-8)),
        jax.grad(total)(0.4, lambda k, X: sgp.LatentGP(k, X, jitter=1e-8)),
    ]
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-7)
    approximate, expected = (process.condition(f[0]) for process in (prior(N, jitter=1e-8), exact))
    np.testing.assert_allclose(approximate.mean(NEW), expected.mean(NEW), rtol=1e-6)
    np.testing.assert_allclose(approximate.variance(NEW), expected.variance(NEW), rtol=1e-6)


@pytest.mark.slow
def test_draws_are_linear_in_white_values_and_have_the_density(x64):
    near = prior(5)
    root = near.of_white(jnp.eye(N))  # rows L e_i
    covariance = root.T @ root
    expected = dist.MultivariateNormal(jnp.zeros(N), covariance)
    f = near.sample(jax.random.key(1), (4,))
    np.testing.assert_allclose(near.log_prob(f), expected.log_prob(f), rtol=1e-8)
    white = jax.random.normal(jax.random.key(2), (2, 3, N))
    np.testing.assert_allclose(near.of_white(white), white @ root, rtol=1e-8)


def test_its_whitened_density_is_that_of_the_function(x64):
    def model(lengthscale):
        numpyro.sample("f", sgp.NearestNeighborGP(sgp.kernels.RBF(lengthscale), X, Vecchia(6)))

    whitened = numpyro.handlers.reparam(model, config=WHITE)
    values = []
    for lengthscale in (0.2, 0.3):
        white = {"f_white": jax.random.normal(jax.random.key(0), (N,))}
        of_white, trace = log_density(whitened, (lengthscale,), {}, white)
        of_function = log_density(model, (lengthscale,), {}, {"f": trace["f"]["value"]})[0]
        root = sgp.NearestNeighborGP(sgp.kernels.RBF(lengthscale), X, Vecchia(6)).of_white(
            jnp.eye(N)
        )
        values.append(of_white - of_function - jnp.linalg.slogdet(root)[1])
    np.testing.assert_allclose(values, 0.0, atol=1e-7)


@pytest.mark.slow
def test_a_sampler_and_the_posterior_after_it(x64):
    y = RNG.poisson(np.exp(1.0 + np.sin(6.0 * X[:, 0])))

    def model(X, y=None, kind=sgp.NearestNeighborGP):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        f = numpyro.sample("f", kind(KERNEL, X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)

    values = []
    for kind in (lambda k, X: sgp.NearestNeighborGP(k, X, Vecchia(10)), sgp.LatentGP):
        whitened = numpyro.handlers.reparam(model, config=WHITE)
        mcmc = MCMC(NUTS(whitened), num_warmup=200, num_samples=300, progress_bar=False)
        mcmc.run(jax.random.key(0), X, y, kind)
        draws = mcmc.get_samples()
        assert draws["f_white"].shape == (300, N)
        posterior = sgp.posterior(model, draws, X, y, kind)
        log_rate = draws["level"].mean() + posterior.mean(NEW)
        values.append((log_rate, jnp.sqrt(posterior.variance(NEW))))
    (mean, deviation), (expected, expected_deviation) = values
    np.testing.assert_allclose(mean, expected, atol=0.3 * float(expected_deviation.max()))
    np.testing.assert_allclose(deviation, expected_deviation, rtol=0.3)


def test_what_it_is_not_for(x64, unchecked):
    with pytest.raises(ValueError, match="`neighbors` must be of all rows"):
        sgp.NearestNeighborGP(KERNEL, X, Vecchia(5).on(np.arange(3)))
    with pytest.raises(TypeError, match="`neighbors` must be"):
        sgp.NearestNeighborGP(KERNEL, X, 5)

    def model():
        f = numpyro.sample("f", sgp.NearestNeighborGP(KERNEL, X))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=jnp.zeros(N))

    guide = sgp.guides.AutoSparseGP(model, num_inducing=4)
    with pytest.raises(ValueError, match="the model has no GP site"):
        numpyro.handlers.seed(guide, 0)()
