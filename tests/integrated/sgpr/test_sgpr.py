"""The collapsed bound of a sparse GP, against dense algebra, the exact density and an SVGP."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.stats import multivariate_normal
from jaxtyping import Array
from numpy.testing import assert_allclose
from numpyro.infer.util import initialize_model

import numpyro_scalegp as sgp
from numpyro_scalegp.core import chunks
from numpyro_scalegp.estimators import SGPR
from numpyro_scalegp.processes.posterior import AbstractConditioned

N, M = 60, 8
JITTER = 1e-10

pytestmark = pytest.mark.usefixtures("x64")


def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, 2))
    return jnp.array(X), jnp.array(np.sin(X[:, 0]) + 0.3 * rng.normal(size=N))


def process(estimator: SGPR | None, lengthscale: float = 0.7, noise: float = 0.1):
    kernel = sgp.kernels.RBF(lengthscale, 1.5)
    return sgp.GaussianProcess(kernel, data()[0], noise, mean=0.2, estimator=estimator)


def bound(lengthscale: Array, noise: Array, Z: Array, tight: bool) -> Array:
    return process(SGPR(Z, tight, JITTER), lengthscale, noise).log_prob(data()[1])


def dense_bound(
    lengthscale: Array, noise: Array, Z: Array, tight: bool, X: Array | None = None
) -> Array:
    y, kernel = data()[1], sgp.kernels.RBF(lengthscale, 1.5)
    X = data()[0] if X is None else X
    K = kernel.covariance(Z) + 1.5 * JITTER * jnp.eye(M)
    across = kernel(X, Z)
    Q = across @ jnp.linalg.solve(K, across.T)
    ratio = (1.5 - jnp.diagonal(Q)) / noise
    density = multivariate_normal.logpdf(
        y - 0.2, jnp.zeros(N), Q + jnp.diag(jnp.broadcast_to(noise, N))
    )
    return density - 0.5 * jnp.sum(jnp.log1p(ratio) if tight else ratio)


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("rows_in_a_chunk", [N, 17])
def test_value_and_gradients_against_dense_algebra(tight, rows_in_a_chunk, monkeypatch):
    monkeypatch.setattr(chunks, "_MAX_ENTRIES", M * rows_in_a_chunk)
    noise = jnp.linspace(0.05, 0.3, N)
    arguments = jnp.array(0.7), noise, data()[0][:M]
    results, expected = (
        jax.jit(jax.value_and_grad(function, (0, 1, 2)), static_argnums=3)(*arguments, tight)
        for function in (bound, dense_bound)
    )
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-8, atol=1e-9), results, expected)
    results, expected = (
        jax.jit(jax.hessian(function), static_argnums=3)(*arguments, tight)
        for function in (bound, dense_bound)
    )
    assert_allclose(results, expected, rtol=1e-8)


@pytest.mark.slow
def test_inputs_that_are_a_site_have_the_potential_of_dense_algebra():
    (measured, y), Z, error = data(), data()[0][:M] + 0.1, 0.2

    def model(y):
        X = numpyro.sample("X", dist.Normal(measured, error).to_event(2))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        estimator = SGPR(Z, jitter=JITTER)
        kernel = sgp.kernels.RBF(lengthscale, 1.5)
        gp = sgp.GaussianProcess(kernel, X, 0.1, mean=0.2, estimator=estimator)
        numpyro.sample("y", gp, obs=y)

    def potential(at):
        X, log_lengthscale = at["X"], at["lengthscale"]  # on the unconstrained scale
        density = jnp.sum(dist.Normal(measured, error).log_prob(X))
        density += dist.Normal().log_prob(log_lengthscale)
        return -density - dense_bound(jnp.exp(log_lengthscale), 0.1, Z, True, X)

    at = {"X": measured + 0.1 * jnp.cos(jnp.arange(2 * N)).reshape(N, 2), "lengthscale": 0.3}
    at = jax.tree.map(jnp.asarray, at)
    run = initialize_model(jax.random.key(0), model, model_args=(y,), dynamic_args=False)
    results, expected = (
        jax.value_and_grad(function)(at) for function in (run.potential_fn, potential)
    )
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-8, atol=1e-8), results, expected)

    # Each draw's function is conditioned on the inputs of that draw.
    draws = {"X": jnp.stack([measured, at["X"]]), "lengthscale": jnp.array([0.7, 0.5])}
    Xs = measured[:4] + 0.3
    mean = sgp.posterior(model, draws, y).mean(Xs)
    for X, lengthscale in zip(*draws.values(), strict=True):
        kernel = sgp.kernels.RBF(lengthscale, 1.5)
        across = kernel(X, Z)
        K = kernel.covariance(Z) + 1.5 * JITTER * jnp.eye(M)
        weights = jnp.linalg.solve(0.1 * K + across.T @ across, across.T @ (y - 0.2))
        mean -= (0.2 + kernel(Xs, Z) @ weights) / 2
    assert_allclose(mean, jnp.zeros(4), rtol=0, atol=1e-7)


@pytest.mark.slow
def test_bounds_are_in_their_order_and_end_at_the_density():
    X, y = data()
    bounds = [process(SGPR(X[:M], tight)).log_prob(y) for tight in (False, True)]
    more = process(SGPR(X[: 4 * M])).log_prob(y)
    exact = process(None).log_prob(y)
    assert bounds[0] < bounds[1] < more < exact
    assert_allclose(process(SGPR(X, jitter=JITTER)).log_prob(y), exact, rtol=0, atol=1e-4)


def test_one_factorization_serves_several_data_vectors():
    X, y = data()
    gp = process(SGPR(X[:M]))
    densities = gp.log_prob(jnp.stack([y, 2.0 * y])[:, None])
    assert densities.shape == (2, 1)
    assert_allclose(densities[:, 0], [gp.log_prob(y), gp.log_prob(2.0 * y)], rtol=1e-10)


def whitened_optimum(noise: float) -> tuple[Array, Array]:
    X, y = data()
    kernel = sgp.kernels.RBF(0.7, 1.5)
    L = jnp.linalg.cholesky(kernel.covariance(X[:M]) + 1.5 * JITTER * jnp.eye(M))
    Phi = jnp.linalg.solve(L, kernel(X[:M], X)).T
    covariance = jnp.linalg.inv(jnp.eye(M) + Phi.T @ Phi / noise)
    return covariance @ Phi.T @ (y - 0.2) / noise, jnp.linalg.cholesky(covariance)


@pytest.mark.slow
def test_is_an_svgp_at_its_optimum():
    X, y = data()
    loc, scale_tril = whitened_optimum(0.1)
    q = sgp.SparseGP(sgp.kernels.RBF(0.7, 1.5), X, X[:M], loc, scale_tril, jitter=JITTER)
    gp = process(SGPR(X[:M], False, JITTER))
    fit = jnp.square(y - 0.2 - q.mean) + q.variance
    expected = -0.5 * jnp.sum(fit / 0.1 + jnp.log(2 * jnp.pi * 0.1))
    divergence = 0.5 * (jnp.sum(scale_tril**2) + loc @ loc - M)
    divergence -= jnp.sum(jnp.log(jnp.diagonal(scale_tril)))
    assert_allclose(gp.log_prob(y), expected - divergence, rtol=1e-10)
    posterior, expected = gp.condition(y), q.posterior()
    Xs = 1.5 * X[:5] + 0.1
    assert_allclose(posterior.mean(Xs), 0.2 + expected.mean(Xs), rtol=0, atol=1e-9)
    assert_allclose(posterior.variance(Xs), expected.variance(Xs), rtol=0, atol=1e-9)
    assert_allclose(
        jnp.diagonal(posterior.covariance(Xs)), posterior.variance(Xs), rtol=0, atol=1e-9
    )
    draws = posterior.sample(jax.random.key(0), Xs, 4000)
    error = jnp.cov(draws.T) - posterior.covariance(Xs)
    assert jnp.max(jnp.abs(error)) < 4 * 1.5 * np.sqrt(2 / 4000)


def test_leave_one_out_against_refits():
    X, y = data()
    noise = jnp.linspace(0.05, 0.3, N)
    estimator = SGPR(X[:M])
    left_out = process(estimator, noise=noise).condition(y).leave_one_out()
    for row in (3, 40):  # an inducing point and another point
        remaining = jnp.arange(N) != row
        gp = sgp.GaussianProcess(
            sgp.kernels.RBF(0.7, 1.5), X[remaining], noise[remaining], mean=0.2, estimator=estimator
        )
        predictive = gp.condition(y[remaining]).predictive(X[row : row + 1], noise[row])
        assert_allclose(left_out.loc[row], predictive.loc[0], rtol=1e-8)
        assert_allclose(left_out.scale[row], predictive.scale[0], rtol=1e-8)


def test_parts_of_a_sum_add_up():
    X, y = data()
    kernel = sgp.kernels.RBF(0.7, 1.5) + sgp.kernels.Linear(0.5)
    gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=SGPR(X[:M]))
    posterior = gp.condition(y)
    assert isinstance(posterior, AbstractConditioned)
    smooth = posterior.component(lambda k: k.left)
    line = posterior.component(lambda k: k.right)
    assert_allclose(smooth.mean(X) + line.mean(X), posterior.mean(X), rtol=0, atol=1e-8)
    exact = sgp.GaussianProcess(kernel, X, 0.1)
    close = sgp.GaussianProcess(kernel, X, 0.1, estimator=SGPR(X, jitter=JITTER))
    for select in (lambda k: k.left, lambda k: k.right):
        variance, expected = (g.condition(y).component(select).variance(X) for g in (close, exact))
        assert_allclose(variance, expected, rtol=0, atol=1e-5)


def test_prior_draws_have_the_variances_of_the_process():
    gp = process(SGPR(data()[0][:M]))
    draws = gp.sample(jax.random.key(1), (4000,))
    assert_allclose(jnp.var(draws, axis=0), gp.variance, rtol=4 * np.sqrt(2 / 4000) * 1.2)
    across = gp.kernel(gp.X, gp.X[:M])
    Q = across @ jnp.linalg.solve(gp.kernel.covariance(gp.X[:M]), across.T)
    assert_allclose(jnp.cov(draws.T)[:M, M:], Q[:M, M:], rtol=0, atol=4 * 1.7 / np.sqrt(4000))


@pytest.mark.slow
def test_single_precision_keeps_the_digits():
    X, y = data()
    exact = process(SGPR(X[:M])).condition(y)
    kernel = sgp.kernels.RBF(jnp.float32(0.7), jnp.float32(1.5))
    X, y = X.astype(jnp.float32), y.astype(jnp.float32)
    gp = sgp.GaussianProcess(kernel, X, jnp.float32(0.1), mean=0.2, estimator=SGPR(X[:M]))
    assert gp.log_prob(y).dtype == jnp.float32
    assert_allclose(gp.log_prob(y), process(SGPR(X[:M])).log_prob(y), rtol=0, atol=1e-2)
    posterior = gp.condition(y)
    assert_allclose(posterior.mean(X), exact.mean(X), rtol=0, atol=1e-3)
    assert_allclose(posterior.variance(X), exact.variance(X), rtol=0, atol=1e-3)
