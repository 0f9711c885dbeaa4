"""NumPyro's inference methods give correct results with the collapsed and the latent prior."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_scalegp as sgp

# During warmup a sampler tries hyperparameters for which the Cholesky factorization fails.
pytestmark = pytest.mark.filterwarnings("ignore:a covariance matrix:RuntimeWarning")

N = 20
KEY = jax.random.key(0)
GRID = np.linspace(-3.5, 1.5, 201)  # of the log lengthscale


def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-1.5, 1.5, size=(N, 1)), axis=0)
    return jnp.array(X), jnp.array(np.sin(3 * X[:, 0]) + 0.3 * rng.normal(size=N))


def collapsed(X: Array, y: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.8))
    numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale), X, 0.1), obs=y)


def latent(X: Array, y: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.8))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern52(lengthscale), X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1**0.5), obs=y)


def exact() -> tuple[float, float, float, float]:
    """Mean, standard deviation and mode of the log lengthscale, and its log evidence, by a grid."""
    X, y = (np.asarray(a, np.float64) for a in data())
    r = np.abs(X - X.T)
    density = []
    for log in GRID:
        s = np.sqrt(5) * r / np.exp(log)
        H = (1 + s + s**2 / 3) * np.exp(-s) + 0.1 * np.eye(N)
        log_likelihood = -0.5 * (
            y @ np.linalg.solve(H, y) + np.linalg.slogdet(H)[1] + N * np.log(2 * np.pi)
        )
        prior = -0.5 * ((log + 1.0) / 0.8) ** 2 - np.log(0.8 * np.sqrt(2 * np.pi))
        density.append(log_likelihood + prior)
    top, step = max(density), GRID[1] - GRID[0]
    weights = np.exp(np.array(density) - top)
    evidence = top + np.log(weights.sum() * step)
    weights /= weights.sum()
    mean = weights @ GRID
    sd = np.sqrt(weights @ (GRID - mean) ** 2)
    return mean, sd, GRID[np.argmax(density)], evidence


@pytest.mark.slow
def test_nuts_finds_the_posterior_of_the_lengthscale(x64):
    mean, sd, _, _ = exact()
    mcmc = MCMC(NUTS(collapsed), num_warmup=150, num_samples=400, progress_bar=False)
    mcmc.run(KEY, *data(), extra_fields=("diverging",))
    logs = np.log(np.asarray(mcmc.get_samples()["lengthscale"]))
    size = numpyro.diagnostics.effective_sample_size(logs[None])
    assert size > 50
    assert abs(logs.mean() - mean) < 4 * sd / np.sqrt(size)
    assert 0.6 * sd < logs.std() < 1.5 * sd
    assert mcmc.get_extra_fields()["diverging"].mean() < 0.05


@pytest.mark.slow
def test_nuts_finds_the_posterior_of_the_function(x64):
    X, y = (leaf[::3] for leaf in data())
    kernel = sgp.kernels.Matern12(0.5)

    def model() -> None:
        f = numpyro.sample("f", sgp.LatentGP(kernel, X))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    mcmc = MCMC(NUTS(model, max_tree_depth=5), num_warmup=150, num_samples=400, progress_bar=False)
    mcmc.run(KEY)
    f = np.asarray(mcmc.get_samples()["f"])
    posterior = sgp.GaussianProcess(kernel, X, 0.25).condition(y)
    mean, sd = posterior.mean(X), jnp.sqrt(posterior.variance(X))
    size = numpyro.diagnostics.effective_sample_size(f[None])
    assert size.min() > 50
    assert np.all(np.abs(f.mean(axis=0) - mean) < 4 * sd / np.sqrt(size))
    assert np.all(np.abs(f.std(axis=0) / sd - 1) < 4 / np.sqrt(2 * size))


@pytest.mark.parametrize(
    "guide_class",
    [AutoNormal, AutoMultivariateNormal, AutoLaplaceApproximation, AutoDelta],
)
def test_svi_with_autoguides(guide_class, x64):
    mean, sd, mode, evidence = exact()
    X, y = data()
    guide = guide_class(collapsed)
    finds_a_mode = guide_class in (AutoDelta, AutoLaplaceApproximation)
    loss = Trace_ELBO(num_particles=1 if finds_a_mode else 5)
    result = SVI(collapsed, guide, optax.adam(0.05), loss).run(KEY, 200, X, y, progress_bar=False)
    median = np.log(guide.median(result.params)["lengthscale"])
    if finds_a_mode:
        # NumPyro's modes: of the lengthscale's density for one, of its logarithm's for the other.
        assert abs(median - mode) < 0.1 + sd**2
    else:
        assert abs(median - mean) < 0.5 * sd
        bound = -np.asarray(result.losses)[-50:].mean()
        assert evidence - 1.0 < bound < evidence + 0.2
    if guide_class is not AutoDelta:
        draws = guide.sample_posterior(KEY, result.params, sample_shape=(1000,))
        logs = np.log(np.asarray(draws["lengthscale"]))
        assert 0.5 * sd < logs.std() < 1.6 * sd


def test_predictive(x64):
    X, _ = data()
    samples = {"lengthscale": jnp.full(4000, 0.5)}
    prior = Predictive(collapsed, samples)(KEY, X)["y"]
    assert prior.shape == (4000, N)
    covariance = sgp.GaussianProcess(sgp.kernels.Matern52(0.5), X, 0.1)
    assert np.all(np.abs(prior.mean(axis=0)) < 4 * np.sqrt(covariance.variance / 4000))
    spread = np.abs(prior.var(axis=0) - covariance.variance)
    assert np.all(spread < 4 * covariance.variance * np.sqrt(2 / 4000))
    without = Predictive(collapsed, num_samples=3)(KEY, X)
    assert {name: leaf.shape for name, leaf in without.items()} == {
        "lengthscale": (3,),
        "y": (3, N),
    }
    functions = Predictive(latent, num_samples=3)(KEY, X)
    assert functions["f"].shape == functions["y"].shape == (3, N)
