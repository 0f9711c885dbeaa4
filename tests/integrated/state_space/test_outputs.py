"""Several series with common components, by `Coregion` times kernels of time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels.kernel import AbstractKernel

N = 24
RNG = np.random.default_rng(0)
X = np.stack([RNG.uniform(0.0, 5.0, N), np.arange(N) % 3], axis=1)
X[3:6, 0] = X[3, 0]  # three categories at one time
Y = RNG.normal(size=N)
NEW = np.array([[-1.0, 0.0], [2.2, 2.0], [7.0, 1.0], [X[3, 0], 1.0]])
THETA = {
    "W": np.array([[1.0, 0.2], [0.5, -0.4], [-0.3, 0.8]]),
    "diag": np.array([0.3, 0.1, 0.2]),
    "lengthscale": 0.8,
}


def intrinsic(theta: dict[str, Any]) -> AbstractKernel:
    outputs = sgp.kernels.Coregion(theta["W"], theta["diag"])
    return sgp.kernels.Matern32(theta["lengthscale"]).on((0,)) * outputs.on((1,))


def linear(theta: dict[str, Any]) -> AbstractKernel:
    """The linear model of coregionalization, and a common trend."""
    smooth = sgp.kernels.Coregion(theta["W"][:, :1], 0.0 * theta["diag"])
    rough = sgp.kernels.Coregion(theta["W"][:, 1:], theta["diag"])
    kernel = smooth.on((1,)) * sgp.kernels.Matern52(2.0).on((0,))
    kernel += sgp.kernels.Matern12(theta["lengthscale"]).on((0,)) * rough.on((1,))
    return kernel + 0.5 * sgp.kernels.Linear(0.2).on((0,))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", (intrinsic, linear))
def test_density_and_posterior_are_those_of_dense_algebra(kernel, x64):
    def density(theta: Any, times: Array, estimator: Any) -> Array:
        inputs = jnp.asarray(X).at[:, 0].set(times)
        return sgp.GaussianProcess(kernel(theta), inputs, 0.1, estimator=estimator).log_prob(Y)

    estimators = sgp.estimators.StateSpace(), sgp.estimators.Cholesky()
    (value, gradient), (exact, expected) = (
        jax.jit(jax.value_and_grad(density, argnums=(0, 1)), static_argnums=2)(
            THETA, X[:, 0], estimator
        )
        for estimator in estimators
    )
    np.testing.assert_allclose(value, exact, rtol=1e-10)
    at_ties = np.isin(np.arange(N), (3, 4, 5))  # where kernels have a kink
    for name in THETA:
        np.testing.assert_allclose(gradient[0][name], expected[0][name], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(gradient[1][~at_ties], expected[1][~at_ties], rtol=1e-8, atol=1e-9)
    posterior, dense = (
        sgp.GaussianProcess(kernel(THETA), X, 0.1, estimator=estimator).condition(Y)
        for estimator in estimators
    )
    np.testing.assert_allclose(posterior.mean(NEW), dense.mean(NEW), rtol=1e-8)
    np.testing.assert_allclose(posterior.variance(NEW), dense.variance(NEW), rtol=1e-8)
    np.testing.assert_allclose(posterior.covariance(NEW), dense.covariance(NEW), atol=1e-9)
    left, of_dense = (p.component(lambda kernel: kernel.left) for p in (posterior, dense))
    if kernel is linear:
        np.testing.assert_allclose(left.mean(NEW), of_dense.mean(NEW), rtol=1e-7)


@pytest.mark.slow
def test_draws_have_the_covariance(x64):
    gp = sgp.GaussianProcess(intrinsic(THETA), X, 0.1, estimator=sgp.estimators.StateSpace())
    draws = gp.sample(jax.random.key(0), (20_000,))
    exact = intrinsic(THETA)(X, X) + 0.1 * np.eye(N)
    error = np.sqrt(exact**2 + np.outer(np.diag(exact), np.diag(exact))) / np.sqrt(len(draws))
    assert np.all(np.abs(np.cov(draws, rowvar=False) - exact) < 5.0 * error)


@pytest.mark.slow
def test_counts_of_several_series(x64):
    counts = np.random.default_rng(1).poisson(2.0, N)
    rate = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731
    value, exact = (
        sgp.LaplaceGP(intrinsic(THETA), X, rate, estimator=estimator).log_prob(counts)
        for estimator in (sgp.estimators.StateSpace(), None)
    )
    np.testing.assert_allclose(value, exact, rtol=1e-9)


@pytest.mark.usefixtures("unchecked")
def test_errors():
    outputs = sgp.kernels.Coregion(jnp.ones((3, 1)), jnp.ones(3))
    estimator = sgp.estimators.StateSpace()
    with pytest.raises(ValueError, match="the kernel does not depend on the time: multiply"):
        sgp.GaussianProcess(outputs.on((1,)), X, 0.1, estimator=estimator).log_prob(Y)
    wrong = X.copy()
    wrong[0, 1] = 3.0
    kernel = intrinsic(THETA)
    with pytest.raises(ValueError, match="3"):
        sgp.GaussianProcess(kernel, wrong, 0.1, estimator=estimator)
    inside = jax.jit(lambda X: sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator).log_prob(Y))
    assert np.isfinite(inside(X))
    with pytest.warns(RuntimeWarning, match="the result is NaN"):
        assert np.isnan(inside(wrong))
