"""Likelihoods other than normal noise, with the function integrated out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro.infer import MCMC, NUTS

import numpyro_scalegp as sgp

N = 12
RNG = np.random.default_rng(0)
X = RNG.uniform(0.0, 3.0, (N, 1))
NEW = np.linspace(-1.0, 4.0, 5)[:, None]
EXPOSURE = RNG.uniform(0.5, 4.0, N)
COUNTS = RNG.poisson(EXPOSURE * np.exp(np.sin(2.0 * X[:, 0])))
OBSERVED = np.arange(N) % 3 > 0
ESTIMATORS = {"cholesky": sgp.estimators.Cholesky(), "state space": sgp.estimators.StateSpace()}


@pytest.fixture(params=list(ESTIMATORS))
def estimator(request):
    return ESTIMATORS[request.param]


def kernel(lengthscale=0.7, variance=1.5):
    return sgp.kernels.Matern52(lengthscale, variance)


def counts(exposure=EXPOSURE, X=X, **options):
    exposure = jnp.asarray(exposure)
    return sgp.LaplaceGP(kernel(), X, lambda f: dist.Poisson(exposure * jnp.exp(f)), **options)


def test_a_normal_likelihood_gives_the_exact_process(estimator, x64):
    y = RNG.normal(size=N)
    noise = lambda f: dist.Normal(f, 0.3)  # noqa: E731
    gp = sgp.LaplaceGP(kernel(), X, noise, mean=0.4, estimator=estimator)
    exact = sgp.GaussianProcess(kernel(), X, 0.09, mean=0.4)
    np.testing.assert_allclose(gp.log_prob(y), exact.log_prob(y), rtol=1e-10)
    posterior, expected = gp.condition(y), exact.condition(y)
    np.testing.assert_allclose(posterior.mean(NEW), expected.mean(NEW), rtol=1e-8)
    np.testing.assert_allclose(posterior.variance(NEW), expected.variance(NEW), rtol=1e-8)
    loo = gp.leave_one_out(posterior)
    expected_loo = expected.leave_one_out()
    scale = np.sqrt(np.square(expected_loo.scale) - 0.09)
    np.testing.assert_allclose(loo.f.loc, expected_loo.loc, rtol=1e-8)
    np.testing.assert_allclose(loo.f.scale, scale, rtol=1e-8)
    replicates = gp.predictive(posterior)
    np.testing.assert_allclose(replicates.log_prob(y), expected.at_data().log_prob(y), rtol=1e-6)
    draws = replicates.sample(jax.random.key(0), (4000,))
    errors = np.asarray(draws.mean(axis=0) - expected.at_data().loc) / expected.at_data().scale
    assert np.abs(errors).max() < 4.0 / np.sqrt(4000)


@pytest.mark.slow
def test_the_approximation_is_near_the_integral(x64):
    """Importance sampling from the approximation has the exact integral as its mean."""
    gp = counts()
    posterior = gp.condition(COUNTS)
    q = dist.MultivariateNormal(posterior.mean(X), posterior.process.covariance(X))
    prior = dist.MultivariateNormal(jnp.zeros(N), kernel().covariance(X))
    f = q.sample(jax.random.key(0), (20_000,))
    log_weights = gp.given(f).log_prob(COUNTS).sum(axis=1) + prior.log_prob(f) - q.log_prob(f)
    weights = jnp.exp(log_weights - jnp.max(log_weights))
    exact = jnp.log(jnp.mean(weights)) + jnp.max(log_weights)
    error = jnp.std(weights) / jnp.mean(weights) / np.sqrt(len(f))
    assert error < 0.01
    assert abs(gp.log_prob(COUNTS) - exact) < 0.05
    mean = jnp.sum(weights[:, None] * f, axis=0) / jnp.sum(weights)
    assert np.all(np.abs(mean - posterior.mean(X)) < 0.3 * np.sqrt(posterior.variance(X)))


@pytest.mark.slow
def test_hidden_rows_drop_out(estimator, x64):
    y = np.where(OBSERVED, COUNTS, -7)

    def masked(observed):
        return counts(observed=observed, estimator=estimator)

    traced = jax.jit(lambda observed, y: masked(observed).log_prob(y))
    few = counts(EXPOSURE[OBSERVED], X[OBSERVED])
    expected = few.log_prob(COUNTS[OBSERVED])
    np.testing.assert_allclose(masked(OBSERVED).log_prob(y), expected, rtol=1e-10)
    np.testing.assert_allclose(traced(OBSERVED, y), expected, rtol=1e-10)
    posterior, of_few = masked(OBSERVED).condition(y), few.condition(COUNTS[OBSERVED])
    np.testing.assert_allclose(posterior.mean(NEW), of_few.mean(NEW), rtol=1e-8)
    np.testing.assert_allclose(posterior.variance(NEW), of_few.variance(NEW), rtol=1e-8)
    cavity, of_shown = posterior.cavity(), of_few.cavity()
    np.testing.assert_allclose(cavity.loc[OBSERVED], of_shown.loc, rtol=1e-7)
    np.testing.assert_allclose(cavity.scale[OBSERVED], of_shown.scale, rtol=1e-7)
    # The distribution of a hidden row is given all observed rows.
    hidden = np.flatnonzero(~OBSERVED)
    np.testing.assert_allclose(cavity.loc[hidden], of_few.mean(X[hidden]), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_leave_one_out_is_close_to_refits(x64):
    gp = counts()
    density = gp.leave_one_out(gp.condition(COUNTS)).log_prob(COUNTS)
    for row in range(4):
        without_row = counts(observed=np.arange(N) != row)
        expected = without_row.predictive(without_row.condition(COUNTS)).log_prob(COUNTS)[row]
        np.testing.assert_allclose(density[row], expected, atol=0.05)
    assert np.abs(density - gp.given(gp.condition(COUNTS).mode).log_prob(COUNTS)).max() > 0.2


APART = 50.0 * np.arange(6.0)[:, None]
LARGE = np.array([980, 1510, 640, 2200, 1100, 900])


def isolated(variance=1.0, mean=7.0, rows=APART, estimator=None):
    kernel, likelihood = sgp.kernels.Matern52(1.0, variance), lambda f: dist.Poisson(jnp.exp(f))
    return sgp.LaplaceGP(kernel, rows, likelihood, mean=mean, estimator=estimator)


@pytest.mark.slow
def test_large_counts_of_isolated_rows(estimator, dtype):
    """Each density is much narrower than the normal distribution that integrates it."""
    gp = isolated(rows=APART.astype(dtype), estimator=estimator)
    posterior = gp.condition(LARGE)
    # Each count given the prior of its row alone.
    f = np.linspace(-2.0, 16.0, 200_001)[:, None]
    logs = scipy.stats.poisson.logpmf(LARGE, np.exp(f)) + scipy.stats.norm.logpdf(f, 7.0)
    expected = np.log(np.trapezoid(np.exp(logs), f, axis=0))
    rtol = 1e-6 if dtype == jnp.float64 else 1e-4
    left_out = gp.leave_one_out(posterior)
    np.testing.assert_allclose(left_out.log_prob(LARGE), expected, rtol=rtol)
    new = isolated(rows=APART.astype(dtype) + 25.0).predictive(posterior)
    np.testing.assert_allclose(new.log_prob(LARGE), expected, rtol=rtol)


@pytest.mark.slow
def test_probabilities_of_all_counts_sum_to_one(dtype):
    gp = isolated(mean=3.0, rows=APART[:2].astype(dtype))
    posterior = gp.condition(LARGE[:2] // 50)
    counts = jnp.arange(3000)[:, None]
    for distribution in (gp.leave_one_out(posterior), gp.predictive(posterior)):
        probabilities = jnp.exp(distribution.log_prob(counts))
        assert probabilities.shape == (3000, 2)
        np.testing.assert_allclose(np.sum(probabilities, axis=0), 1.0, atol=1e-4)


@pytest.mark.parametrize("level", [0.0, 7.0, 11.0, 15.0])
@pytest.mark.parametrize("variance", [0.01, 1.0, 100.0])
def test_cavities_of_isolated_rows_are_the_prior(level, variance, estimator, dtype):
    """Even if an observation is far more informative than the prior."""
    gp = isolated(variance, level, APART.astype(dtype), estimator)
    y = np.round(np.exp(level + np.linspace(-0.5, 0.5, 6)))
    cavity = gp.condition(y).cavity()
    rtol = 1e-6 if dtype == jnp.float64 else 1e-4
    np.testing.assert_allclose(cavity.scale, np.sqrt(variance), rtol=rtol)
    np.testing.assert_allclose(cavity.loc, level, atol=10.0 * rtol * np.sqrt(variance) + 1e-5)


@pytest.mark.slow
def test_a_batch_is_a_loop(estimator, x64):
    y = RNG.poisson(2.0, (2, N))
    rows, exposure = np.stack([X, 0.5 * X]), RNG.uniform(0.5, 2.0, (2, N))
    means, lengthscales = np.array([0.1, -0.4]), np.array([0.5, 1.1])

    def of(lengthscale, X, exposure, mean):
        likelihood = lambda f: dist.Poisson(exposure * jnp.exp(f))  # noqa: E731
        return sgp.LaplaceGP(kernel(lengthscale), X, likelihood, mean=mean, estimator=estimator)

    batch = of(jnp.array(lengthscales)[:, None], rows, jnp.array(exposure), means)
    assert (batch.batch_shape, batch.event_shape) == ((2,), (N,))
    assert batch.log_prob(np.stack([y, y + 1, y])).shape == (3, 2)
    assert batch.sample(jax.random.key(0), (3,)).shape == (3, 2, N)
    posterior = batch.condition(y)
    for g in range(2):
        alone = of(lengthscales[g], rows[g], jnp.array(exposure[g]), means[g])
        np.testing.assert_allclose(batch.log_prob(y)[g], alone.log_prob(y[g]), rtol=1e-10)
        member_posterior = alone.condition(y[g])
        np.testing.assert_allclose(posterior.mean(NEW)[g], member_posterior.mean(NEW), rtol=1e-9)
        np.testing.assert_allclose(
            posterior.cavity().loc[g], member_posterior.cavity().loc, rtol=1e-8
        )


@jax.jit
def moments(theta, X, y):
    gp = sgp.LaplaceGP(
        kernel(theta[0], theta[1]),
        X,
        lambda f: dist.Gamma(theta[2], theta[2] * jnp.exp(-f)),
        mean=theta[3],
        observed=OBSERVED,
    )
    posterior = gp.condition(y)
    loo = posterior.cavity()
    return jnp.stack([posterior.mean(X), posterior.variance(X), loo.loc, loo.scale])


@pytest.mark.slow
def test_moments_have_derivatives(x64):
    theta, step = jnp.array([0.7, 1.5, 2.0, 0.4]), 1e-5
    of = functools.partial(moments, X=jnp.array(X), y=jnp.array(COUNTS + 0.5))
    for along in jnp.eye(4):
        _, tangent = jax.jvp(of, (theta,), (along,))
        expected = of(theta + step * along) - of(theta - step * along)
        np.testing.assert_allclose(tangent, expected / (2.0 * step), rtol=1e-6, atol=1e-8)


def model(X, exposure, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.3, 0.3))
    level = numpyro.sample("level", dist.Normal())
    likelihood = lambda f: dist.Poisson(exposure * jnp.exp(f))  # noqa: E731
    gp = sgp.LaplaceGP(kernel(lengthscale), X, likelihood, mean=level)
    numpyro.sample("y", gp, obs=y)


def over_functions(X, exposure, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.3, 0.3))
    level = numpyro.sample("level", dist.Normal())
    z = numpyro.sample("z", dist.Normal().expand([len(X)]).to_event(1))
    L = jnp.linalg.cholesky(kernel(lengthscale).covariance(X) + 1e-9 * jnp.eye(len(X)))
    f = numpyro.deterministic("f", level + L @ z)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(f)), obs=y)


def sampled(model, num_samples):
    mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=num_samples, progress_bar=False)
    mcmc.run(jax.random.key(0), X, EXPOSURE, COUNTS)
    return mcmc


@pytest.mark.slow
def test_nuts_against_nuts_over_functions(x64):
    mcmc = sampled(model, 1000)
    draws, oracle = mcmc.get_samples(), sampled(over_functions, 3000).get_samples()
    for name in ("lengthscale", "level"):
        estimate, expected = np.asarray(draws[name]), np.asarray(oracle[name])
        # Means, up to errors of about 0.1 deviations, and standard deviations.
        assert abs(estimate.mean() - expected.mean()) < 0.3 * expected.std()
        assert 0.75 < estimate.std() / expected.std() < 1.3
    posterior = sgp.posterior(model, draws, X, EXPOSURE, COUNTS)
    f = np.asarray(oracle["f"])
    assert np.all(np.abs(posterior.mean(X) - f.mean(axis=0)) < 0.3 * f.std(axis=0))
    predictive = sgp.infer.Predictive(
        model, posterior_samples=draws, data=(X, EXPOSURE, COUNTS), joint=True
    )
    new = predictive.draws(jax.random.key(1), NEW, np.ones(5), np.ones(5, int))
    assert new.predictive["y"].shape == new.log_likelihood["y"].shape == (1000, 5)
    data = sgp.to_arviz(mcmc, key=jax.random.key(2))
    assert data["log_likelihood"]["y"].shape == (1, 1000, N)


def test_saved_and_loaded(tmp_path, estimator, x64):
    posterior = counts(estimator=estimator).condition(COUNTS)
    sgp.save(tmp_path / "posterior", posterior)
    loaded = sgp.load(tmp_path / "posterior")
    np.testing.assert_array_equal(loaded.variance(NEW), posterior.variance(NEW))


def test_draws_of_the_prior_have_its_moments(estimator, x64):
    noise = lambda f: dist.Normal(2.0 * f, 0.1)  # noqa: E731
    gp = sgp.LaplaceGP(kernel(), X, noise, mean=0.5, estimator=estimator)
    draws = np.asarray(gp.sample(jax.random.key(0), (4000,)))
    expected = np.sqrt(4.0 * 1.5 + 0.01)
    assert np.abs(draws.mean(axis=0) - 1.0).max() < 4.0 * expected / np.sqrt(4000)
    assert np.abs(draws.std(axis=0) / expected - 1.0).max() < 4.0 / np.sqrt(2 * 4000)


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda f: dist.Poisson(jnp.exp(f - f.mean())),
        lambda f: dist.Poisson(jnp.exp(jnp.cumsum(f))),
    ],
)
def test_rows_must_not_be_combined(likelihood, x64):
    with pytest.raises(ValueError, match="combines rows"):
        sgp.LaplaceGP(kernel(), X, likelihood).log_prob(COUNTS)


def test_observations_outside_of_the_support(x64):
    with pytest.raises(ValueError, match="`y` must lie in the support"):
        counts().log_prob(np.where(OBSERVED, COUNTS, -1))
    with pytest.raises(ValueError, match=r"`y` must be finite.*give `observed=~jnp.isnan"):
        counts().log_prob(np.where(OBSERVED, COUNTS, np.nan))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Laplace's approximation found no mode:RuntimeWarning")
def test_without_a_mode_predictions_are_nan(estimator, x64):
    rows, likelihood = np.linspace(0.0, 1.0, 5)[:, None], lambda f: dist.Poisson(jnp.exp(f))
    mean = lambda X: 1e3 + X[:, 0]  # noqa: E731
    gp = sgp.LaplaceGP(kernel(), rows, likelihood, mean=mean, estimator=estimator)
    posterior = gp.condition(np.arange(5))
    for predicted in (gp.predictive(posterior), gp.leave_one_out(posterior)):
        assert np.isnan(predicted.log_prob(np.arange(5))).all()
        assert np.isnan(predicted.mean).all()
    assert np.isnan(posterior.predictive(rows, 0.1).log_prob(np.ones(5))).all()


def test_estimators_without_an_approximation(unchecked):
    with pytest.raises(TypeError, match=r"must be `sgp.estimators.Cholesky\(\)`, `StateSpace"):
        counts(estimator=sgp.estimators.Pathwise())
