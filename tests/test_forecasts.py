import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

import numpyro_scalegp as sgp
from numpyro_scalegp.forecasts import impact, placebo_impacts, rolling_origin
from tests.compilation import programs

pytestmark = pytest.mark.usefixtures("x64")
X = np.arange(60.0)[:, None]


def autoregressive(seed=0, n=60):
    """An Ornstein-Uhlenbeck process with noise, with the covariance of `fit`."""
    generator = np.random.default_rng(seed)
    times = np.arange(float(n))
    K = np.exp(-np.abs(times[:, None] - times) / 5.0) + 0.25 * np.eye(n)
    return generator.multivariate_normal(np.zeros(n), K)


def fit(X, y, observed):
    kernel = sgp.kernels.Matern12(5.0)
    return sgp.GaussianProcess(kernel, X, 0.25, observed=observed).condition(y)


@pytest.mark.slow
def test_scores_are_those_of_separate_fits():
    y = autoregressive()
    scores = rolling_origin(fit, X, y, first=30, horizon=6, step=10, level=0.8)
    assert scores.origins.tolist() == [30, 40, 50]
    for k, origin in enumerate(scores.origins):
        posterior = sgp.GaussianProcess(sgp.kernels.Matern12(5.0), X[:origin], 0.25).condition(
            y[:origin]
        )
        new = posterior.predictive(X[origin : origin + 6])
        target = y[origin : origin + 6]
        mean, deviation = np.asarray(new.mean), np.sqrt(np.asarray(new.variance))
        expected = {
            "squared_error": (mean - target) ** 2,
            "log_score": -stats.norm.logpdf(target, mean, deviation),
            "crps": np.asarray(sgp.scores.crps(new, jnp.asarray(target))),
            "interval_score": np.asarray(
                sgp.scores.interval_score(new, jnp.asarray(target), level=0.8)
            ),
            "coverage": np.abs(target - mean) < stats.norm.ppf(0.9) * deviation,
        }
        assert expected.keys() == scores.scores.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(scores.scores[name][k], values, rtol=1e-6, err_msg=name)


def test_a_fit_does_not_see_the_future():
    """The observations after an origin change nothing but their own scores."""
    calls = []

    def watching(X, y, observed):
        calls.append((y, observed))
        return fit(X, y, observed)

    y = autoregressive()
    rolling_origin(watching, X, y, first=30, horizon=30)
    ((values, observed),) = calls
    assert np.all(values[30:] == 0.0)
    assert observed.tolist() == [True] * 30 + [False] * 30


def test_missing_observations_are_left_out():
    y = autoregressive()
    y[[10, 42, 43]] = np.nan
    scores = rolling_origin(fit, X, y, first=40, horizon=10)
    crps = scores.scores["crps"]
    assert np.flatnonzero(np.isnan(crps[0])).tolist() == [2, 3]
    assert np.isnan(crps[1]).sum() == 0
    mean, error = scores.by_lead()["crps"]
    np.testing.assert_allclose(mean[2], crps[1, 2])
    assert np.isnan(error[2]) and np.isfinite(error[0])
    of_origins = np.nanmean(crps, axis=1)
    overall, error = scores.overall()["crps"]
    assert np.isclose(overall, of_origins.mean())
    assert np.isclose(error, of_origins.std(ddof=1) / np.sqrt(2))


def test_a_compiled_fit_serves_all_origins():
    compiled = jax.jit(fit)
    y = autoregressive()
    rolling_origin(compiled, X, y, first=20, horizon=5)
    before = programs.number
    rolling_origin(compiled, X, y, first=22, horizon=5)
    assert programs.number == before


def test_coverage_of_the_true_model():
    """Over many series, 95 % of observations lie in their intervals, within four errors."""
    compiled = jax.jit(fit)
    covered = [
        rolling_origin(compiled, X, autoregressive(seed), first=40, horizon=20).scores["coverage"]
        for seed in range(60)
    ]
    shares = np.array([np.mean(values) for values in covered])
    assert abs(shares.mean() - 0.95) < 4.0 * shares.std() / np.sqrt(60)


def test_impact_of_known_draws():
    generator = np.random.default_rng(0)
    draws = generator.normal(size=(200_000, 4)) + np.arange(4.0)
    y = np.array([1.0, np.nan, 3.5, 4.0])
    effect = impact(draws, y, level=0.9)
    expected = np.array([1.0, 1.5, 1.0])
    np.testing.assert_allclose(effect.effect[0][[0, 2, 3]], expected, atol=0.02)
    np.testing.assert_allclose(effect.cumulative[0], [1.0, 1.0, 2.5, 3.5], atol=0.03)
    half = stats.norm.ppf(0.95) / np.sqrt(3)
    mean = expected.mean()
    np.testing.assert_allclose(effect.average, [mean, mean - half, mean + half], atol=0.02)
    np.testing.assert_allclose(effect.probability, stats.norm.cdf(mean * np.sqrt(3)), atol=0.01)
    assert not effect.is_covered
    assert impact(draws, np.arange(4.0)).is_covered


def test_the_interval_of_a_sum_counts_the_correlation():
    """Of a sum of perfectly correlated errors it is n times as wide, not sqrt(n) times."""
    common = np.random.default_rng(0).normal(size=(50_000, 1)) * np.ones(9)
    width = np.diff(impact(common, np.zeros(9)).cumulative[1:, -1])
    np.testing.assert_allclose(width, 9.0 * 2.0 * stats.norm.ppf(0.975), rtol=0.03)


@pytest.mark.slow
def test_placebos_of_the_true_model_cover_zero():
    compiled = jax.jit(fit)
    effects = [
        effect
        for seed in range(40)
        for effect in placebo_impacts(
            jax.random.key(seed), compiled, X, autoregressive(seed), first=20, horizon=20
        )
    ]
    assert len(effects) == 80
    share = np.mean([effect.is_covered for effect in effects])
    assert abs(share - 0.95) < 4.0 * np.sqrt(0.95 * 0.05 / 80)


def test_a_fit_may_return_any_predictive_distribution():
    class Naive:
        def __init__(self, last):
            self.last = last

        def predictive(self, X):
            return dist.Normal(jnp.full(len(X), self.last), 1.0)

    y = autoregressive()
    scores = rolling_origin(
        lambda X, y, observed: Naive(y[observed][-1]), X, y, first=50, horizon=10
    )
    np.testing.assert_allclose(scores.scores["squared_error"][0], (y[49] - y[50:]) ** 2, rtol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_errors():
    y = autoregressive()
    with pytest.raises(ValueError, match="`first` \\+ `horizon` must be at most 60"):
        rolling_origin(fit, X, y, first=55, horizon=6)
    with pytest.raises(ValueError, match="`step` must be at least 1"):
        rolling_origin(fit, X, y, first=5, horizon=6, step=0)
    with pytest.raises(ValueError, match="`y` must have shape"):
        rolling_origin(fit, X, y[:5], first=5, horizon=6)
    with pytest.raises(ValueError, match="`draws` must have shape"):
        impact(np.zeros((5, 3)), np.zeros(4))
    with pytest.raises(ValueError, match="must have an observation"):
        impact(np.zeros((5, 3)), np.full(3, np.nan))
    with pytest.raises(ValueError, match="`level` must"):
        impact(np.zeros((5, 3)), np.zeros(3), level=95)
