"""Laplace's approximation in linear time, against the same from dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import numpyro_scalegp as sgp

N = 40
RNG = np.random.default_rng(0)
X = RNG.uniform(0.0, 6.0, (N, 1))
X[:5] = X[20:25]  # several observations at one time
COUNTS = RNG.poisson(2.0, N)
LIKELIHOODS = {
    "poisson": (lambda f, s: dist.Poisson(jnp.exp(f + s)), COUNTS),
    "bernoulli": (lambda f, s: dist.Bernoulli(logits=f * jnp.exp(s)), COUNTS % 2),
    "gamma": (lambda f, s: dist.Gamma(jnp.exp(s), jnp.exp(s - f)), COUNTS + 0.5),
}
OTHERS = ("bernoulli", "gamma")
THETA = np.array([0.1, 0.3, 0.2, -0.1, 0.5])


def density(name, estimator, rows=slice(None)):
    likelihood, y = LIKELIHOODS[name]

    def of(theta, X):
        lengthscale, variance, frequency = jnp.exp(theta[:3])
        kernel = sgp.kernels.Matern32(lengthscale, variance) + sgp.kernels.Harmonic(frequency, 3.0)
        mean, given_f = theta[3] + 0.1 * X[:, 0], lambda f: likelihood(f, theta[4])
        return sgp.LaplaceGP(kernel, X, given_f, mean=mean, estimator=estimator).log_prob(y[rows])

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["poisson", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_values_and_gradients_are_those_of_dense_algebra(name, x64):
    """In hyperparameters, the mean, the likelihood's parameter and the times; not compiled whole.

    A program for the gradient alone once lost the derivative of W in some rows: XLA computed W
    twice with other rounding errors, and the derivative of a maximum compares it with the result.
    """
    computed, expected = (
        jax.value_and_grad(density(name, estimator), argnums=(0, 1))(THETA, jnp.asarray(X))
        for estimator in (sgp.estimators.StateSpace(), None)
    )
    for leaf, expected_leaf in zip(*map(jax.tree.leaves, (computed, expected)), strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_hessians_are_those_of_dense_algebra(x64):
    computed, expected = (
        jax.jit(jax.hessian(density("bernoulli", estimator)))(THETA, jnp.asarray(X))
        for estimator in (sgp.estimators.StateSpace(), None)
    )
    np.testing.assert_allclose(computed, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_one_row(x64):
    row = slice(1)
    computed, expected = (
        jax.jit(jax.grad(density("poisson", estimator, row)))(THETA, jnp.asarray(X[row]))
        for estimator in (sgp.estimators.StateSpace(), None)
    )
    np.testing.assert_allclose(computed, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_large_counts_in_float32():
    """Informative rows, far from where the search starts."""
    times = np.linspace(0.0, 20.0, 300)[:, None]
    y = RNG.poisson(1e4 * np.exp(np.sin(times[:, 0])))

    def of(theta, X):
        given_f = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731
        kernel = sgp.kernels.Matern52(jnp.exp(theta[0]), 1.0)
        estimator = sgp.estimators.StateSpace()
        return sgp.LaplaceGP(kernel, X, given_f, mean=theta[1], estimator=estimator).log_prob(y)

    results = []
    for dtype in (np.float32, np.float64):
        with jax.enable_x64(dtype == np.float64):
            theta = jnp.array([0.3, 8.0], dtype)
            results.append(jax.jit(jax.value_and_grad(of))(theta, jnp.asarray(times, dtype)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-3, atol=1e-2)


@pytest.mark.slow
def test_a_plate_of_series(x64):
    """Unequal lengths, hyperparameters for each, and draws of the functions."""
    lengthscales, observed = jnp.array([0.5, 1.1])[:, None], np.ones((2, N), bool)
    observed[1, 25:] = False
    y = np.where(observed, np.stack([COUNTS, COUNTS[::-1]]), 0)

    def of(estimator):
        given_f = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731
        kernel = sgp.kernels.Matern32(lengthscales)
        return sgp.LaplaceGP(kernel, X, given_f, observed=observed, estimator=estimator)

    series, dense = of(sgp.estimators.StateSpace()), of(None)
    np.testing.assert_allclose(series.log_prob(y), dense.log_prob(y), rtol=1e-10)
    new = jnp.linspace(-1.0, 8.0, 7)[:, None]
    posterior, expected = series.condition(y), dense.condition(y)
    np.testing.assert_allclose(posterior.variance(new), expected.variance(new), rtol=1e-9)
    draws = posterior.sample_functions(jax.random.key(0), 200)(new)
    errors = (draws.mean(axis=0) - expected.mean(new)) / np.sqrt(expected.variance(new) / 200)
    assert np.abs(errors).max() < 4.5
