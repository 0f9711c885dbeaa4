"""Priors of lengthscales and variances: tails, bounds from data, and use in models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jaxtyping import Array
from numpyro.infer.util import potential_energy
from scipy import stats

import numpyro_scalegp as sgp
from numpyro_scalegp.infer import initial_hyperparameters, lengthscale_prior, variance_prior
from numpyro_scalegp.tracing.starting_values import starting_values


@pytest.mark.parametrize("mass", [0.5, 0.98, 0.999])
@pytest.mark.parametrize(("lower", "upper"), [(0.1, 2.0), (1e-4, 1e4), (3.0, 3.3), (2e5, 2e6)])
def test_tails_of_the_lengthscale(lower, upper, mass, x64):
    prior = lengthscale_prior(lower, upper, mass)
    exact = stats.invgamma(float(prior.concentration), scale=float(prior.rate))
    tail = 0.5 * (1.0 - mass)
    np.testing.assert_allclose(exact.cdf(lower), tail, rtol=1e-6)
    np.testing.assert_allclose(exact.sf(upper), tail, rtol=1e-6)


def test_bounds_make_a_batch(dtype):
    prior = lengthscale_prior(jnp.array([0.1, 1.0]), np.array([[2.0], [3.0]]))
    assert prior.batch_shape == (2, 2)
    assert prior.concentration.dtype == prior.rate.dtype == dtype
    alone = lengthscale_prior(1.0, 3.0)
    np.testing.assert_allclose(prior.concentration[1, 1], alone.concentration, rtol=1e-6)
    np.testing.assert_allclose(prior.rate[1, 1], alone.rate, rtol=1e-6)


@pytest.mark.slow
def test_bounds_from_data(x64):
    """Spacing and range of a single column; scaled distances for several columns."""
    X = np.array([[0.0], [1.0], [2.0], [2.0], [7.0]])
    prior, expected = lengthscale_prior(X=X), lengthscale_prior(np.array([1.0]), 7.0)
    np.testing.assert_allclose(prior.concentration, expected.concentration)
    np.testing.assert_allclose(prior.rate, expected.rate)
    upper = lengthscale_prior(upper=3.0, X=X).rate
    np.testing.assert_allclose(upper, lengthscale_prior(np.array([1.0]), 3.0).rate)
    grid = np.stack(np.meshgrid(np.arange(4.0), 10.0 * np.arange(4.0)), axis=-1).reshape(-1, 2)
    two = lengthscale_prior(X=grid)
    expected = lengthscale_prior(np.array([1.0, 10.0]), np.array([3.0, 30.0]) * np.sqrt(2.0))
    np.testing.assert_allclose(two.concentration, expected.concentration)
    np.testing.assert_allclose(two.rate, expected.rate)
    many = np.random.default_rng(0).normal(size=(5000, 12))
    prior = lengthscale_prior(X=many)
    exact = stats.invgamma(np.asarray(prior.concentration), scale=np.asarray(prior.rate))
    median = float(sgp.infer.median_distance(many))
    assert np.all((exact.cdf(median) > 0.1) & (exact.cdf(median) < 0.9))


@pytest.mark.parametrize("tail", [0.01, 0.3])
def test_tail_of_the_amplitude(tail, x64):
    upper = jnp.array([0.5, 3.0])
    prior = variance_prior(upper, tail)
    assert prior.batch_shape == (2,)
    np.testing.assert_allclose(1.0 - prior.cdf(upper**2), tail, rtol=1e-10)
    amplitude = dist.Exponential(-np.log(tail) / upper)
    v = jnp.array([0.04, 2.0])
    change = jnp.log(0.5 / jnp.sqrt(v))  # of variables
    np.testing.assert_allclose(prior.log_prob(v), amplitude.log_prob(jnp.sqrt(v)) + change)


def model(X: Array, y: Array | None = None, latent: bool = False) -> None:
    prior = lengthscale_prior(0.2, 20.0).expand([2]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", prior)
    variance = numpyro.sample("variance", variance_prior(3.0))
    noise = numpyro.sample("noise", variance_prior(1.0))
    kernel = sgp.kernels.RBF(lengthscale, variance)
    if latent:
        f = numpyro.sample("f", sgp.LatentGP(kernel, X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, jnp.sqrt(noise)), obs=y)
    else:
        numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise), obs=y)


def data() -> tuple[Array, Array]:
    random = np.random.default_rng(0)
    X = random.uniform(-2.0, 2.0, size=(40, 2))
    return jnp.array(X), jnp.array(np.sin(2.0 * X[:, 0]) + 0.1 * random.normal(size=40))


@pytest.mark.slow
def test_fits_start_from_them():
    X, y = data()
    start = starting_values(model, (X, y, True), {})
    half = 0.5 * sgp.infer.median_distance(X)
    np.testing.assert_allclose(start["lengthscale"], half, rtol=0.2)
    values = initial_hyperparameters(jax.random.key(0), model, X, y, num_steps=100)
    assert values["lengthscale"][0] < 2.0 < values["lengthscale"][1]
    assert abs(np.sqrt(values["noise"]) - 0.1) < 0.05


def test_their_density_has_finite_gradients_far_out(dtype):
    """At values that a sampler may visit during warmup."""
    X, y = data()

    @jax.jit
    @jax.value_and_grad
    def energy(logs: Any) -> Array:
        return potential_energy(model, (X, y), {}, logs)

    for value in (-3.0, 0.0, 6.0):
        logs = {"lengthscale": jnp.full(2, value), "variance": jnp.asarray(value)}
        logs["noise"] = jnp.asarray(-2.0)
        leaves = jax.tree.leaves(energy(logs))
        assert all(np.isfinite(leaf).all() for leaf in leaves)
        assert all(leaf.dtype == dtype for leaf in leaves)


def test_bad_arguments(unchecked):
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="`lower` must be positive and finite, got"):
            lengthscale_prior(bad, 2.0)
        with pytest.raises(ValueError, match="`upper` must be positive and finite, got"):
            variance_prior(bad)
    for bad in (1.0, 0.5, [3.0, 0.9]):
        with pytest.raises(ValueError, match=r"`upper` must be above `lower` by .* got .* and 1\."):
            lengthscale_prior(1.0, bad)
    for bad in (0.0, 1.0, 98.0):
        with pytest.raises(ValueError, match=r"`mass` must be in \(0, 1\), got"):
            lengthscale_prior(1.0, 2.0, bad)
        with pytest.raises(ValueError, match=r"`tail` must be in \(0, 1\), got"):
            variance_prior(1.0, bad)
    with pytest.raises(ValueError, match="`lower` and `upper` must both be given unless `X` is"):
        lengthscale_prior(1.0)
    with pytest.raises(ValueError, match="`X` must vary in each column, got column 1 with the sam"):
        lengthscale_prior(X=np.array([[0.0, 1.0], [1.0, 1.0]]))
    with pytest.raises(ValueError, match="A bound that is None is from `X`: its range may be"):
        lengthscale_prior(X=np.array([[0.0], [1.0], [1.0]]))
    with pytest.raises(ValueError, match=r"`X` must have shape \(n, d\), got \(3,\)"):
        lengthscale_prior(X=np.arange(3.0))
    with pytest.raises(
        ValueError, match="`X` must be known when the prior is made, got an array tr"
    ):
        jax.jit(lambda X: lengthscale_prior(X=X).rate)(jnp.ones((3, 1)))
    with pytest.raises(ValueError, match="`upper` must be known when the prior is made"):
        jax.jit(lambda upper: lengthscale_prior(1.0, upper).rate)(2.0)
