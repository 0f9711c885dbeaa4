"""These tests need BoTorch, which is not among the packages of the tests: PyTorch is large."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

import numpyro_scalegp as sgp

torch = pytest.importorskip("torch")
acquisition = pytest.importorskip("botorch.acquisition")
optimize_acqf = pytest.importorskip("botorch.optim").optimize_acqf

pytestmark = pytest.mark.usefixtures("x64")


def data(n=25):
    generator = np.random.default_rng(0)
    X = generator.uniform(size=(n, 3))
    return X, 5.0 - 20.0 * np.sum((X - 0.4) ** 2, axis=1) + 0.01 * generator.normal(size=n)


def fitted():
    X, y = data()
    gp = sgp.GaussianProcess(sgp.kernels.Matern52(0.7), X, 1e-4)
    return gp.condition((y - y.mean()) / y.std()), y.mean(), y.std()


def fully_bayesian(num_samples=24):
    X, y = data()

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        noise = numpyro.sample("noise", dist.LogNormal(-4.0, 0.5))
        kernel = sgp.kernels.Matern52(lengthscale)
        numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise**2), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=num_samples, progress_bar=False)
    z = (y - y.mean()) / y.std()
    mcmc.run(jax.random.key(0), X, z)
    return sgp.posterior(model, mcmc.get_samples(), X, z), y.mean(), y.std()


@pytest.mark.parametrize("batch_shape", [(), (5,), (2, 3)])
def test_moments_are_those_of_the_posterior(batch_shape):
    posterior, loc, scale = fitted()
    model = sgp.botorch.PosteriorModel(posterior, loc=loc, scale=scale)
    X = torch.rand(*batch_shape, 4, 3, dtype=torch.float64)
    joint = model.posterior(X)
    assert joint.mean.shape == (*batch_shape, 4, 1)
    first = X.reshape(-1, 4, 3)[0].numpy()
    mean = joint.mean.reshape(-1, 4)[0].numpy()
    covariance = joint.distribution.covariance_matrix.reshape(-1, 4, 4)[0].numpy()
    np.testing.assert_allclose(mean, loc + scale * posterior.mean(first), rtol=1e-9)
    expected = scale**2 * np.asarray(posterior.covariance(first))
    np.testing.assert_allclose(covariance, expected, rtol=1e-6, atol=1e-10)
    noisy = model.posterior(X, observation_noise=True).variance - joint.variance
    np.testing.assert_allclose(noisy.numpy(), scale**2 * 1e-4, rtol=1e-6)
    noise = torch.full((*batch_shape, 4, 1), 0.3, dtype=torch.float64)
    difference = model.posterior(X, observation_noise=noise).variance - joint.variance
    np.testing.assert_allclose(difference.numpy(), 0.3, rtol=1e-9)


@pytest.mark.parametrize("make", [fitted, fully_bayesian])
def test_gradients_are_differences(make):
    posterior, loc, scale = make()
    model = sgp.botorch.PosteriorModel(posterior, loc=loc, scale=scale, num_draws=3)
    X = torch.rand(3, 2, 3, dtype=torch.float64, requires_grad=True)

    def moments(X):
        normal = model.posterior(X).distribution
        return normal.mean, normal.covariance_matrix

    assert torch.autograd.gradcheck(moments, (X,), atol=1e-5)


def test_a_fully_bayesian_model_is_the_mixture():
    mixture, loc, scale = fully_bayesian()
    model = sgp.botorch.PosteriorModel(mixture, loc=loc, scale=scale, num_draws=24)
    assert model.batch_shape == (24,)
    X = torch.rand(5, 2, 3, dtype=torch.float64)
    joint = model.posterior(X)
    assert joint.mean.shape == (5, 24, 2, 1)
    rows = X.numpy().reshape(-1, 3)
    mean, variance = joint.mixture_mean.numpy().ravel(), joint.mixture_variance.numpy().ravel()
    np.testing.assert_allclose(mean, loc + scale * mixture.mean(rows), rtol=1e-9)
    np.testing.assert_allclose(variance, scale**2 * mixture.variance(rows), rtol=1e-6)
    assert sgp.botorch.PosteriorModel(mixture).batch_shape == (16,)
    noisy = model.posterior(X, observation_noise=True)
    assert torch.all(noisy.variance > joint.variance)


@pytest.mark.slow
@pytest.mark.parametrize("make", [fitted, fully_bayesian])
@pytest.mark.parametrize("kind", ["improvement", "several", "noisy", "bound"])
def test_acquisition_functions_find_the_maximum(make, kind):
    posterior, loc, scale = make()
    model = sgp.botorch.PosteriorModel(posterior, loc=loc, scale=scale, num_draws=4)
    X, y = data()
    options = {"X_baseline": torch.tensor(X), "cache_root": False}
    function, num_inputs = {
        "improvement": (lambda: acquisition.LogExpectedImprovement(model, y.max()), 1),
        "several": (lambda: acquisition.qLogExpectedImprovement(model, y.max()), 2),
        "noisy": (lambda: acquisition.qLogNoisyExpectedImprovement(model, **options), 2),
        "bound": (lambda: acquisition.UpperConfidenceBound(model, 0.1), 1),
    }[kind]
    bounds = torch.tensor([[0.0] * 3, [1.0] * 3], dtype=torch.float64)
    best, _ = optimize_acqf(function(), bounds, q=num_inputs, num_restarts=4, raw_samples=64)
    assert np.min(np.linalg.norm(best.numpy() - 0.4, axis=1)) < 0.15


def test_errors():
    with pytest.raises(TypeError, match="`posterior` must be"):
        sgp.botorch.PosteriorModel(sgp.kernels.RBF(1.0))
    with pytest.raises(ValueError, match="`scale` must be"):
        sgp.botorch.PosteriorModel(fitted()[0], scale=0.0)
