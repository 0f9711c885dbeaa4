"""Derivatives with respect to time, observed and predicted, against dense algebra."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp

K = sgp.kernels
N = 18
RNG = np.random.default_rng(0)
X = np.stack([RNG.uniform(0.0, 5.0, N), np.arange(N) % 3 == 1], axis=1).astype(float)
X[1, 0] = X[0, 0]  # a value and a derivative at one time
Y = RNG.normal(size=N)
NEW = np.array([[-1.0, 0.0], [-1.0, 1.0], [2.2, 1.0], [7.0, 1.0], [X[0, 0], 1.0]])
KERNELS: dict[str, Any] = {
    "matern32": lambda t: K.Matern32(t, 1.5),
    "matern52": lambda t: 0.7 * K.Matern52(t),
    "harmonic": lambda t: K.Harmonic(3.0, 0.4 + t) + K.Harmonic(2.0, 5.0),
    "critical": lambda t: K.Harmonic(2.0 * t, 0.5),
    "periodic": lambda t: K.Matern52(3.0) * K.Periodic(t, period=1.3),
    "cosine": lambda t: K.Cosine(2.0, 0.5) * K.Matern32(t) + K.Constant(0.3),
    "trend": lambda t: K.Linear(t, 0.5) + K.Matern52(1.0),
    "level": lambda t: K.IntegratedWiener(t) + K.Matern32(2.0),
}


QUICK = ("matern52", "trend", "level")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KERNELS],
)
def test_density_and_posterior_are_those_of_dense_algebra(name, x64):
    def process(t: Any, estimator: Any) -> sgp.GaussianProcess:
        kernel = K.WithDerivatives(KERNELS[name](t))
        return sgp.GaussianProcess(kernel, jnp.array(X), 0.1, estimator=estimator)

    estimators = sgp.estimators.StateSpace(num_harmonics=16), sgp.estimators.Cholesky()

    def density(t: Array, estimator: Any) -> Array:
        return process(t, estimator).log_prob(Y)

    (value, slope), (exact, expected) = (
        jax.jit(jax.value_and_grad(density), static_argnums=1)(0.8, estimator)
        for estimator in estimators
    )
    np.testing.assert_allclose(value, exact, rtol=1e-8)
    np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-9)
    posterior, dense = (process(0.8, estimator).condition(Y) for estimator in estimators)
    np.testing.assert_allclose(posterior.mean(NEW), dense.mean(NEW), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(posterior.variance(NEW), dense.variance(NEW), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_the_rate_of_a_count_process(x64):
    """The posterior mean of the derivative is the derivative of the posterior mean."""
    values = np.stack([np.sort(X[:, 0]), np.zeros(N)], axis=1)
    counts = RNG.poisson(2.0, N)
    rate = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731
    options = {"estimator": sgp.estimators.StateSpace()}
    gp = sgp.LaplaceGP(K.WithDerivatives(K.Matern52(1.0)), values, rate, **options)
    posterior = gp.condition(counts)
    times, step = jnp.linspace(-0.5, 5.5, 7), 1e-4

    def mean(times: Array, order: float) -> Array:
        return posterior.mean(jnp.stack([times, jnp.full_like(times, order)], axis=1))

    differences = (mean(times + step, 0.0) - mean(times - step, 0.0)) / (2.0 * step)
    np.testing.assert_allclose(mean(times, 1.0), differences, atol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_errors():
    estimator = sgp.estimators.StateSpace()
    with pytest.raises(ValueError, match="as with `Matern12`: take a smoother one"):
        sgp.GaussianProcess(K.WithDerivatives(K.Matern12(1.0)), X, 0.1, estimator=estimator)
    with pytest.raises(ValueError, match="`RBF` has no state-space form"):
        gp = sgp.GaussianProcess(K.WithDerivatives(K.RBF(1.0)), X, 0.1, estimator=estimator)
        gp.log_prob(Y)
