"""Laplace's approximation with a nearest-neighbor prior, against dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.neighbors import laplace, search
from numpyro_scalegp.neighbors.latent_precision import (
    LatentPrecision,
    TwoLevelFactor,
    coarse_columns,
)
from numpyro_scalegp.neighbors.prior_factor import PriorFactor

N = 150
RNG = np.random.default_rng(0)
X = RNG.uniform(size=(N, 2))
F = np.sin(6.0 * X[:, 0]) + np.cos(5.0 * X[:, 1])
COUNTS = RNG.poisson(np.exp(1.0 + F))
NEW = RNG.uniform(size=(9, 2))
THETA = np.array([-1.2, -1.0, 0.3, 0.5, 0.2])
LIKELIHOODS = {
    "poisson": (lambda f, s: dist.Poisson(jnp.exp(f + s)), COUNTS),
    "bernoulli": (lambda f, s: dist.Bernoulli(logits=f * jnp.exp(s)), (COUNTS > 2).astype(int)),
    "gamma": (lambda f, s: dist.Gamma(jnp.exp(s), jnp.exp(s - f)), COUNTS + 0.5),
}


def process(estimator, name="poisson", theta=THETA, X=X, **options):
    likelihood, y = LIKELIHOODS[name]
    kernel = sgp.kernels.Matern32(jnp.exp(theta[:2]), jnp.exp(theta[2]))
    given_f = lambda f: likelihood(f, theta[4])  # noqa: E731
    mean = lambda X: theta[3] + 0.1 * X[:, 0]  # noqa: E731
    return sgp.LaplaceGP(kernel, X, given_f, mean=mean, estimator=estimator, **options), y[: len(X)]


def density(estimator, name="poisson", **options):
    def of(theta, X):
        gp, y = process(estimator, name, theta, X, **options)
        return gp.log_prob(y)

    return of


@pytest.mark.parametrize("name", ["poisson", "gamma"])
def test_with_all_rows_before_it_is_dense(name, x64):
    neighbors = sgp.estimators.Vecchia(N - 1).find_neighbors(X)
    computed, expected = (
        jax.jit(jax.value_and_grad(density(estimator, name)))(THETA, jnp.asarray(X))
        for estimator in (neighbors, None)
    )
    np.testing.assert_allclose(computed[0], expected[0], rtol=1e-9)
    np.testing.assert_allclose(computed[1], expected[1], rtol=1e-5)


@pytest.mark.slow
def test_posteriors_with_all_rows_are_dense(x64):
    observed = np.arange(N) % 7 > 0
    (gp, y), (dense, _) = (
        process(estimator, observed=observed) for estimator in (sgp.estimators.Vecchia(N), None)
    )
    posterior, expected = gp.condition(y), dense.condition(y)
    np.testing.assert_allclose(posterior.mean(NEW), expected.mean(NEW), rtol=1e-6)
    np.testing.assert_allclose(posterior.variance(NEW), expected.variance(NEW), rtol=1e-5)
    cavity, expected_cavity = posterior.cavity(), expected.cavity()
    np.testing.assert_allclose(cavity.mean, expected_cavity.mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(cavity.variance, expected_cavity.variance, rtol=1e-4)
    moments = expected.mean(NEW), expected.variance(NEW)
    for draws in (
        posterior.sample(jax.random.key(0), NEW, 400),
        posterior.sample_functions(jax.random.key(1), 400)(NEW),
    ):
        errors = (draws.mean(axis=0) - moments[0]) / np.sqrt(moments[1] / 400)
        assert np.abs(errors).max() < 4.5
        assert np.abs(draws.var(axis=0) / moments[1] - 1.0).max() < 4.5 * np.sqrt(2 / 400)


def iterative(monkeypatch):
    """Iterate for few rows; only programs that are not yet compiled do, as with other probes."""
    monkeypatch.setattr(laplace, "MAX_DENSE", 0)


def estimates(keys, name="bernoulli", num_probes=8, theta=THETA):
    """Values and gradients for each key."""
    estimator = sgp.estimators.Vecchia(12, num_probes=num_probes).find_neighbors(X)

    def of(theta, key):
        return density(estimator, name, key=key)(theta, jnp.asarray(X))

    compute = jax.jit(jax.value_and_grad(of))
    values, gradients = zip(*(compute(theta, key) for key in keys), strict=True)
    return np.column_stack([values, gradients])


def exact(name="bernoulli", theta=THETA):
    estimator = sgp.estimators.Vecchia(12).find_neighbors(X)
    of_theta = jax.value_and_grad(lambda theta: density(estimator, name)(theta, jnp.asarray(X)))
    value, gradient = jax.jit(of_theta)(theta)
    return np.append(value, gradient)


def errors(computed, expected):
    return (computed.mean(axis=0) - expected) / (computed.std(axis=0) / np.sqrt(len(computed)))


@pytest.mark.monte_carlo
def test_estimates_are_unbiased(x64, monkeypatch):
    expected, keys = exact(), jax.random.split(jax.random.key(0), 60)
    iterative(monkeypatch)
    assert np.abs(errors(estimates(keys), expected)).max() < 4.0
    # Solutions of the preconditioner in place of the precision are biased.
    monkeypatch.setattr(laplace, "_solution", lambda A, P, B, *_: P.solve(B))
    assert np.abs(errors(estimates(keys, num_probes=9), expected)[1:]).max() > 4.0


@pytest.mark.monte_carlo
def test_the_derivative_in_the_mean_of_a_wide_prior(x64, monkeypatch):
    """Its terms nearly cancel."""
    theta = THETA + np.array([0.0, 0.0, 9.0, 0.0, 0.0])
    expected = exact("gamma", theta)
    iterative(monkeypatch)
    computed = estimates(jax.random.split(jax.random.key(0), 30), "gamma", theta=theta)
    assert np.abs(errors(computed, expected)).max() < 4.0
    monkeypatch.setattr(laplace, "_FINE_TOLERANCE", 1e-3)
    computed = estimates(jax.random.split(jax.random.key(0), 30), "gamma", 7, theta)
    assert np.abs(errors(computed, expected)[4]) > 4.0


@pytest.mark.slow
def test_warns_of_jitter_that_observations_see(monkeypatch):
    iterative(monkeypatch)
    gp, _ = process(sgp.estimators.Vecchia(6), theta=THETA + np.array([0.0, 0.0, 3.0, 0.0, 9.0]))
    with pytest.warns(RuntimeWarning, match="few digits left"):
        gp.log_prob(np.round(9e3 * np.exp(F)))


@pytest.mark.monte_carlo
def test_stored_draws_have_the_covariance(x64, monkeypatch):
    estimator = sgp.estimators.Vecchia(12)
    gp, y = process(estimator)
    expected = gp.condition(y)
    iterative(monkeypatch)
    gp, y = process(sgp.estimators.Vecchia(12, num_probes=3))
    posterior = gp.condition(y, key=jax.random.key(1), num_samples=2_000)
    np.testing.assert_allclose(posterior.mean(NEW), expected.mean(NEW), rtol=1e-4)
    limit = 4.5 * np.sqrt(2.0 / 2_000)
    assert np.abs(posterior.variance(NEW) / expected.variance(NEW) - 1.0).max() < limit
    precision, of_dense = posterior.process._precision(), expected.process._precision()
    assert np.abs(precision / of_dense - 1.0).max() < limit
    draws = posterior.sample(jax.random.key(0), NEW, 1_000)
    more = posterior.sample(jax.random.key(0), NEW, 2_500)
    assert np.abs(draws.var(axis=0) / expected.variance(NEW) - 1.0).max() < 5 * np.sqrt(2 / 1_000)
    assert np.abs(more.var(axis=0) / expected.variance(NEW) - 1.0).max() < 5 * np.sqrt(2 / 2_500)


@pytest.mark.slow
def test_only_first_derivatives_of_many_rows(monkeypatch, x64):
    iterative(monkeypatch)
    estimator = sgp.estimators.Vecchia(5).find_neighbors(X)
    of_theta = lambda theta: density(estimator)(theta, jnp.asarray(X))  # noqa: E731
    for derivative in (jax.hessian(of_theta), lambda theta: jax.jvp(of_theta, [theta], [theta])):
        with pytest.raises(TypeError, match="only first derivatives"):
            derivative(jnp.asarray(THETA))


@pytest.mark.slow
def test_the_preconditioner(x64):
    """Inverse, log-determinant and draws are of one matrix, which is exact for coarse values."""
    kernel, noise = sgp.kernels.Matern32(0.3), jnp.array(1e-6)
    operator = KernelOperator.from_checked(kernel, jnp.asarray(X), noise)
    graph = sgp.estimators.Vecchia(8).find_neighbors(X).graph
    factor = PriorFactor.of(operator, 8, graph)
    L = factor.times(jnp.eye(factor.num_slots))
    np.testing.assert_allclose(factor.transposed_times(jnp.eye(factor.num_slots)), L.T, atol=1e-12)
    np.testing.assert_allclose(factor.at_rows(L), factor.dense(), atol=1e-12)
    W = factor.at_slots(jnp.asarray(RNG.gamma(1.0, 5.0, N)))
    A = LatentPrecision(factor, W)
    dense = np.eye(A.size) + L.T @ (W[:, None] * L)
    np.testing.assert_allclose(A.matmul(jnp.eye(A.size)), dense, atol=1e-9)
    P = TwoLevelFactor.of(A, coarse_columns(factor))
    inverse = P.solve(jnp.eye(A.size))
    np.testing.assert_allclose(inverse, inverse.T, atol=1e-12)
    matrix, coarse = np.linalg.inv(inverse), np.asarray(P._coarse)
    np.testing.assert_allclose(matrix[coarse], dense[coarse], atol=1e-8)
    np.testing.assert_allclose(P.log_determinant(), np.linalg.slogdet(matrix)[1], rtol=1e-10)
    whitened = np.linalg.solve(np.linalg.cholesky(matrix), P.sample(jax.random.key(0), 4_000))
    gram = whitened @ whitened.T / 4_000
    assert np.abs(gram - np.eye(A.size)).max() < 5.5 / np.sqrt(4_000) * np.sqrt(2)


@pytest.mark.parametrize("n", [1, 2, 40, 3_000])
def test_steps_follow_the_neighbors(n):
    near = np.sort(RNG.integers(0, 2 * n, (n, 4)), axis=1)
    near = np.where(near < np.arange(n)[:, None], near, n)
    steps = search.in_steps(near)
    assert sorted(steps[steps < n]) == list(range(n))
    step = np.full(n + 1, -1)
    step[steps.reshape(-1)] = np.repeat(np.arange(len(steps)), steps.shape[1])
    step[n] = -1
    assert np.all(step[near] < step[:n, None])


def model(y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.3))
    level = numpyro.sample("level", dist.Normal())
    given_f = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731
    estimator = sgp.estimators.Vecchia(10)
    kernel = sgp.kernels.Matern32(lengthscale)
    gp = sgp.LaplaceGP(kernel, X, given_f, mean=level, estimator=estimator)
    numpyro.sample("f", gp, obs=y)


@pytest.mark.slow
def test_models_find_the_neighbors(monkeypatch):
    samples = MCMC(NUTS(model), num_warmup=10, num_samples=10, progress_bar=False)
    samples.run(jax.random.key(0), COUNTS)
    posterior = sgp.posterior(model, samples.get_samples(), COUNTS)
    assert np.all(np.isfinite(posterior.mean(NEW)))
    iterative(monkeypatch)
    svi = SVI(model, AutoDelta(model), optax.adam(0.05), Trace_ELBO())
    losses = svi.run(jax.random.key(0), 30, COUNTS, progress_bar=False).losses
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]


def test_errors():
    estimator, rows = sgp.estimators.Vecchia(5), np.tile(X[:8], (2, 1, 1))
    given_f = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731
    batch = sgp.LaplaceGP(sgp.kernels.RBF(0.3), rows, given_f, estimator=estimator)
    with pytest.raises(ValueError, match="is for one Gaussian process"):
        batch.log_prob(COUNTS[:8])
    gp = sgp.LaplaceGP(sgp.kernels.RBF(0.3), X, given_f, estimator=estimator.on(np.arange(3)))
    with pytest.raises(ValueError, match="takes all rows at once"):
        gp.condition(COUNTS)
    with pytest.raises(ValueError, match="`num_probes` must be"):
        sgp.estimators.Vecchia(num_probes=0)
    with pytest.raises(ValueError, match="is not the `X` whose neighbors"):
        process(estimator.find_neighbors(X[::-1]))[0].log_prob(COUNTS)
