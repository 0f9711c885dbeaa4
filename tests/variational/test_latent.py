"""The latent prior, the sparse family and the divergence between them against dense algebra."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from jaxtyping import Array
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import TraceMeanField_ELBO

import numpyro_scalegp as sgp
from tests.integrated.test_gaussian_process import (
    LENGTHSCALE,
    VARIANCE,
    M,
    N,
    assert_within_standard_errors,
    data,
    rbf,
)

JITTER = 1e-3  # large enough for tests to detect


def prior(**kwargs: Any) -> sgp.LatentGP:
    kernel = sgp.kernels.RBF(LENGTHSCALE, VARIANCE)
    return sgp.LatentGP(kernel, jnp.array(data()[0]), jitter=JITTER, **kwargs)


def dense_prior() -> np.ndarray:
    X = data()[0]
    return rbf(X, X) + JITTER * VARIANCE * np.eye(N)


# LatentGP


def test_prior_moments_and_log_prob(dtype):
    f = np.random.default_rng(0).normal(size=(2, 3, N))
    gp = prior()
    assert (gp.batch_shape, gp.event_shape) == ((), (N,))
    np.testing.assert_array_equal(gp.mean, np.zeros(N))
    np.testing.assert_allclose(gp.variance, np.full(N, VARIANCE), rtol=1e-6)
    values = jax.jit(gp.log_prob)(jnp.array(f))
    assert values.shape == (2, 3)
    assert values.dtype == dtype
    expected = scipy.stats.multivariate_normal(np.zeros(N), dense_prior()).logpdf(f)
    np.testing.assert_allclose(values, expected, rtol=1e-10 if dtype == jnp.float64 else 1e-3)


def test_prior_sample_moments(dtype):
    draws = prior().sample(jax.random.key(0), (2, 10_000))
    assert draws.shape == (2, 10_000, N)
    assert draws.dtype == dtype
    assert_within_standard_errors(draws.reshape(-1, N), np.zeros(N), dense_prior())


def test_prior_goes_through_transformations(x64):
    f = jnp.array(data()[1])
    again = jax.jit(lambda gp: gp)(prior())
    assert isinstance(again, sgp.LatentGP)
    assert again.jitter == JITTER
    gradient = jax.jit(jax.grad(lambda gp: gp.log_prob(f)))(again)
    assert np.all(gradient.kernel.lengthscale != 0)
    assert np.all(gradient.X != 0)

    @jax.vmap
    def log_prob(lengthscale: Array) -> Array:
        kernel = sgp.kernels.RBF(lengthscale, VARIANCE)
        return sgp.LatentGP(kernel, data()[0], jitter=JITTER).log_prob(f)

    values = jax.jit(log_prob)(jnp.array([0.3, LENGTHSCALE]))
    expected = scipy.stats.multivariate_normal(np.zeros(N), dense_prior()).logpdf(np.asarray(f))
    np.testing.assert_allclose(values[1], expected, rtol=1e-10)
    assert values[0] != values[1]
    expanded = prior().expand([4])
    assert expanded.sample(jax.random.key(0)).shape == (4, N)


def test_prior_conditions_on_function_values(x64):
    X, f, Xs = data()
    posterior = prior().condition(jnp.array(f))
    gain = np.linalg.solve(dense_prior(), rbf(X, Xs)).T
    covariance = rbf(Xs, Xs) - gain @ rbf(X, Xs)
    np.testing.assert_allclose(posterior.mean(jnp.array(Xs)), gain @ f, rtol=1e-8)
    np.testing.assert_allclose(
        posterior.variance(jnp.array(Xs)), np.diagonal(covariance), rtol=1e-8
    )
    draws = posterior.sample(jax.random.key(1), jnp.array(Xs), 10_000)
    assert_within_standard_errors(draws, gain @ f, covariance)


def test_prior_keeps_the_type_of_its_inputs(x64):
    X = jnp.array(data()[0], jnp.float32)
    gp = sgp.LatentGP(sgp.kernels.RBF(0.8, 1.5), X)
    shapes = jax.eval_shape(
        lambda gp: (
            gp.mean,
            gp.variance,
            gp.sample(jax.random.key(0)),
            gp.log_prob(X[:, 0]),
            gp.condition(X[:, 0]).mean(X),
            gp.condition(X[:, 0]).variance(X),
        ),
        gp,
    )
    assert [leaf.dtype for leaf in shapes] == [jnp.float32] * 6


# SparseGP


def variational() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.normal(size=M), np.tril(0.3 * rng.normal(size=(M, M)), -1) + np.diag(
        rng.uniform(0.3, 1.2, M)
    )


def sparse(**kwargs: Any) -> sgp.SparseGP:
    X, _, Z = data()
    loc, scale_tril = variational()
    arguments = {"X": X, "inducing_points": Z, "loc": loc, "scale_tril": scale_tril, **kwargs}
    kernel = sgp.kernels.RBF(LENGTHSCALE, VARIANCE)
    return sgp.SparseGP(kernel, **{k: jnp.asarray(v) for k, v in arguments.items()}, jitter=JITTER)


def dense_inducing() -> np.ndarray:
    """The Cholesky factor of K(Z, Z)."""
    Z = data()[2]
    return np.linalg.cholesky(rbf(Z, Z) + JITTER * VARIANCE * np.eye(M))


def dense_sparse(X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the covariance of f(X), by conditioning on f(Z) ~ N(L loc, L S S' L')."""
    Z = data()[2]
    loc, S = variational()
    L = dense_inducing()
    gain = np.linalg.solve(L @ L.T, rbf(Z, X)).T
    values = L @ S @ S.T @ L.T
    return gain @ L @ loc, rbf(X, X) - gain @ rbf(Z, X) + gain @ values @ gain.T


def test_sparse_moments(dtype):
    X, _, _ = data()
    q = sparse()
    assert (q.batch_shape, q.event_shape) == ((), (N,))
    mean, covariance = dense_sparse(X)
    rtol = 1e-9 if dtype == jnp.float64 else 1e-3
    np.testing.assert_allclose(q.mean, mean, rtol=rtol)
    np.testing.assert_allclose(q.variance, np.diagonal(covariance), rtol=rtol)
    assert q.mean.dtype == q.variance.dtype == dtype


def test_sparse_samples_are_draws_of_the_marginals(dtype):
    X, _, _ = data()
    draws = sparse().sample(jax.random.key(0), (10_000,))
    assert draws.shape == (10_000, N)
    assert draws.dtype == dtype
    mean, covariance = dense_sparse(X)
    assert_within_standard_errors(draws, mean, np.diag(np.diagonal(covariance)))


def test_sparse_recovers_the_exact_posterior(x64):
    """With inducing points X and the exact posterior as q(v), the posterior is exact."""
    X, y, Xs = data()
    kernel, noise = sgp.kernels.RBF(LENGTHSCALE, VARIANCE), 0.1
    K = rbf(X, X) + 1e-10 * np.eye(N)
    L = np.linalg.cholesky(K)
    covariance = np.linalg.inv(np.eye(N) + L.T @ L / noise)
    loc = covariance @ L.T @ y / noise
    q = sgp.SparseGP(
        kernel,
        jnp.array(Xs),
        jnp.array(X),
        jnp.array(loc),
        jnp.array(np.linalg.cholesky(covariance)),
        jitter=1e-10 / VARIANCE,
    )
    exact = sgp.GaussianProcess(kernel, jnp.array(X), noise).condition(jnp.array(y))
    mean, variance = q.marginals()
    np.testing.assert_allclose(mean, exact.mean(jnp.array(Xs)), rtol=1e-6)
    np.testing.assert_allclose(variance, exact.variance(jnp.array(Xs)), rtol=1e-6)
    # The bound is tight: expected log-likelihood minus divergence is the log marginal likelihood.
    at_data = sgp.SparseGP(
        kernel, jnp.array(X), q.inducing_points, q.loc, q.scale_tril, jitter=q.jitter
    )
    m, v = at_data.marginals()
    expected = dist.Normal(m, noise**0.5).log_prob(jnp.array(y)) - v / (2 * noise)
    bound = expected.sum() - kl_divergence(at_data, sgp.LatentGP(kernel, jnp.array(X)))
    exact_value = sgp.GaussianProcess(kernel, jnp.array(X), noise).log_prob(jnp.array(y))
    np.testing.assert_allclose(bound, exact_value, rtol=1e-6)


def test_sparse_log_prob_warns_that_it_is_no_bound(dtype):
    X, y, _ = data()
    q = sparse()
    with pytest.warns(UserWarning, match=r"no variational bound.*QuadratureELBO.*TraceMeanField"):
        value = q.log_prob(jnp.array(y))
    mean, covariance = dense_sparse(X)
    expected = scipy.stats.norm(mean, np.sqrt(np.diagonal(covariance))).logpdf(y).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-8 if dtype == jnp.float64 else 1e-3)


@pytest.mark.slow
def test_sparse_goes_through_transformations(x64):
    q = sparse()
    again = jax.jit(lambda q: q)(q)
    assert isinstance(again, sgp.SparseGP)
    assert again.jitter == JITTER

    def objective(q: sgp.SparseGP) -> Array:
        return jnp.sum(q.sample(jax.random.key(0)) ** 2)

    def of_arguments(Z: Array, loc: Array, scale_tril: Array) -> Array:
        return objective(sparse(inducing_points=Z, loc=loc, scale_tril=scale_tril))

    gradient = jax.jit(jax.grad(objective))(q)
    expected = jax.jit(jax.grad(of_arguments, (0, 1, 2)))(q.inducing_points, q.loc, q.scale_tril)
    names = ("inducing_points", "loc", "scale_tril")
    for name, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(getattr(gradient, name), value, rtol=1e-10, err_msg=name)
        assert np.any(value != 0)
    assert gradient.kernel.lengthscale != 0

    batch = jax.jit(jax.vmap(lambda loc: sparse(loc=loc).mean))(jnp.stack([q.loc, 2 * q.loc]))
    np.testing.assert_allclose(batch, np.stack([q.mean, 2 * q.mean]), rtol=1e-10)


def test_sparse_keeps_the_type_of_its_arguments(x64):
    X, _, Z = (jnp.array(a, jnp.float32) for a in data())
    loc, scale_tril = (jnp.array(a, jnp.float32) for a in variational())
    q = sgp.SparseGP(sgp.kernels.RBF(0.8, 1.5), X, Z, loc, scale_tril)
    shapes = jax.eval_shape(
        lambda q: (
            *q.marginals(),
            q.sample(jax.random.key(0)),
            q.posterior().sample(jax.random.key(0), X),
            kl_divergence(q, sgp.LatentGP(q.kernel, X)),
        ),
        q,
    )
    assert [leaf.dtype for leaf in shapes] == [jnp.float32] * 5


# The divergence


def test_the_divergence_is_between_inducing_values(dtype):
    """KL(N(L loc, L S S' L') || N(0, K_ZZ)), regardless of the inputs."""
    loc, S = variational()
    L = dense_inducing()
    K, mean, covariance = L @ L.T, L @ loc, L @ S @ S.T @ L.T
    expected = 0.5 * (
        np.trace(np.linalg.solve(K, covariance))
        + mean @ np.linalg.solve(K, mean)
        - M
        + np.linalg.slogdet(K)[1]
        - np.linalg.slogdet(covariance)[1]
    )
    rtol = 1e-9 if dtype == jnp.float64 else 1e-4
    np.testing.assert_allclose(kl_divergence(sparse(), prior()), expected, rtol=rtol)
    few = sparse(X=data()[0][:2])
    np.testing.assert_allclose(kl_divergence(few, prior()), expected, rtol=rtol)
    white = sparse(loc=np.zeros(M), scale_tril=np.eye(M))
    assert kl_divergence(white, prior()) == 0


@pytest.mark.slow
def test_stock_objective_uses_the_registered_rule(monkeypatch):
    """Without the rule, NumPyro would silently use sampled log-densities."""
    X, y, _ = data()

    def model() -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(LENGTHSCALE, VARIANCE), X))
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=jnp.array(y))

    def guide() -> None:
        numpyro.sample("f", sparse())

    def loss() -> Array:
        return TraceMeanField_ELBO().loss(jax.random.key(0), {}, model, guide)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the rule for the processes must replace this")

    for method in ("log_prob", "sample"):
        monkeypatch.setattr(sgp.LatentGP, method, refuse)
    monkeypatch.setattr(sgp.SparseGP, "log_prob", refuse)
    value = loss()

    calls = []

    def spy(q: Any, p: Any) -> Array:
        calls.append((type(q), type(p)))
        return kl_divergence(q, p) + 1.0

    monkeypatch.setattr("numpyro.infer.elbo.kl_divergence", spy)
    np.testing.assert_allclose(loss(), value + 1.0, rtol=1e-5)
    assert calls == [(sgp.SparseGP, sgp.LatentGP)]
