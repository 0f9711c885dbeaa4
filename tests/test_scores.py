"""Scores against numerical integration, closed forms and their definitions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats

import numpyro_scalegp as sgp
from numpyro_scalegp import scores

Y = np.array([-1.0, 0.2, 3.0])
LOC = np.array([[0.0, 1.0], [0.3, 0.3], [-2.0, 2.0]])
SCALE = np.array([[1.0, 0.5], [0.1, 2.0], [0.3, 0.3]])
WEIGHTS = np.array([[0.3, 0.7], [0.5, 0.5], [0.9, 0.1]])


def crps_by_integration(cdf: Callable[[float], float], y: float) -> float:
    below, _ = scipy.integrate.quad(lambda z: cdf(z) ** 2, -20.0, y, limit=200)
    above, _ = scipy.integrate.quad(lambda z: (1.0 - cdf(z)) ** 2, y, 20.0, limit=200)
    return below + above


def mixture(dtype: Any) -> dist.MixtureSameFamily:
    weights = dist.Categorical(probs=jnp.asarray(WEIGHTS, dtype))
    return dist.MixtureSameFamily(
        weights, dist.Normal(jnp.asarray(LOC, dtype), jnp.asarray(SCALE, dtype))
    )


def test_crps_of_normal_and_mixture(dtype: Any) -> None:
    y = jnp.asarray(Y, dtype)
    normal = dist.Normal(jnp.asarray(LOC[:, 0], dtype), jnp.asarray(SCALE[:, 0], dtype))
    by_integration = [
        crps_by_integration(scipy.stats.norm(*parameters).cdf, value)
        for *parameters, value in zip(LOC[:, 0], SCALE[:, 0], Y, strict=True)
    ]
    score = scores.crps(normal, y)
    assert score.dtype == dtype
    np.testing.assert_allclose(score, by_integration, rtol=1e-5)

    def cdf(i: int) -> Callable[[float], float]:
        return lambda z: float(WEIGHTS[i] @ scipy.stats.norm(LOC[i], SCALE[i]).cdf(z))

    by_integration = [crps_by_integration(cdf(i), Y[i]) for i in range(3)]
    score = scores.crps(mixture(dtype), y)
    assert score.dtype == dtype
    np.testing.assert_allclose(score, by_integration, rtol=1e-5)


@pytest.mark.parametrize("num_draws", [2, 5])
def test_crps_of_draws_is_unbiased(num_draws: int) -> None:
    normal = dist.Normal(jnp.zeros(3), 1.0)
    y = jnp.asarray(Y, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4000)
    draws = jax.vmap(lambda key: normal.sample(key, (num_draws,)))(keys)
    estimates = jax.vmap(lambda draws: scores.crps(draws, y))(draws)
    exact = scores.crps(normal, y)
    errors = jnp.abs(estimates.mean(axis=0) - exact) / (estimates.std(axis=0) / 4000**0.5)
    assert jnp.all(errors < 4.0)
    # The score of the empirical distribution of the draws is not the score of the normal one.
    plug_in = jax.vmap(
        lambda draws: (
            jnp.mean(jnp.abs(draws - y), axis=0)
            - jnp.mean(jnp.abs(draws[:, None] - draws), axis=(0, 1)) / 2
        )
    )(draws)
    errors = jnp.abs(plug_in.mean(axis=0) - exact) / (plug_in.std(axis=0) / 4000**0.5)
    assert jnp.all(errors > 4.0)


def test_crps_keeps_its_digits_far_from_zero() -> None:
    draws = np.random.default_rng(0).normal(size=(50, 3))
    near = scores.crps(jnp.asarray(draws, jnp.float32), jnp.zeros(3))
    shifted = jnp.asarray(np.float32(draws) + np.float32(2**10))
    far = scores.crps(shifted, jnp.full(3, 2.0**10))
    np.testing.assert_allclose(far, near, atol=1e-3)


@pytest.mark.slow
def test_log_score(dtype: Any) -> None:
    y = jnp.asarray(Y, dtype)
    density = [WEIGHTS[i] @ scipy.stats.norm(LOC[i], SCALE[i]).pdf(Y[i]) for i in range(3)]
    np.testing.assert_allclose(scores.log_score(mixture(dtype), y), -np.log(density), rtol=1e-5)
    counts = dist.Poisson(jnp.asarray([1.0, 2.0, 3.0], dtype))
    expected = -scipy.stats.poisson([1.0, 2.0, 3.0]).logpmf([0, 2, 5])
    np.testing.assert_allclose(scores.log_score(counts, np.array([0, 2, 5])), expected, rtol=1e-5)
    draws = dist.Normal(jnp.zeros(3, dtype), 1.0).sample(jax.random.key(0), (20_000,))
    smooth = scores.log_score(draws, jnp.asarray([-1.0, 0.0, 1.0], dtype))
    expected = -scipy.stats.norm.logpdf([-1.0, 0.0, 1.0])
    np.testing.assert_allclose(smooth, expected, atol=0.05)


def test_intervals(dtype: Any) -> None:
    normal = dist.Normal(jnp.zeros(4, dtype), 2.0)
    y = jnp.asarray([0.0, -3.0, 4.0, 3.2], dtype)
    half = 2.0 * scipy.stats.norm.ppf(0.95)
    expected = 2 * half + np.array([0.0, 0.0, 2 / 0.1 * (4.0 - half), 0.0])
    np.testing.assert_allclose(scores.interval_score(normal, y), expected, rtol=1e-5)
    assert scores.coverage(normal, y) == 0.75
    assert scores.coverage(normal, y, level=0.5) == 0.25
    key = jax.random.key(0)
    draws = normal.sample(key, (100_000,))
    np.testing.assert_allclose(scores.interval_score(draws, y), expected, rtol=0.05)
    # A mixture of NumPyro's has no quantiles: draws give them.
    same = dist.MixtureSameFamily(
        dist.Categorical(probs=jnp.full((4, 2), 0.5, dtype)),
        dist.Normal(jnp.zeros((4, 2), dtype), 2.0),
    )
    sampled = scores.interval_score(same, y, key=key, num_samples=100_000)
    np.testing.assert_allclose(sampled, expected, rtol=0.05)


@pytest.mark.slow
def test_coverage_of_the_right_distribution() -> None:
    rate = jnp.linspace(0.5, 30.0, 2000)
    normal = dist.Normal(rate, 1.0 + rate)
    y = normal.sample(jax.random.key(0))
    for level in (0.5, 0.9):
        error = (level * (1 - level) / 2000) ** 0.5
        assert abs(scores.coverage(normal, y, level=level) - level) < 4 * error
    counts = dist.Poisson(rate)
    y = counts.sample(jax.random.key(1))
    assert scores.coverage(counts, y, key=jax.random.key(2)) > 0.9
    assert scores.crps(counts, y, key=jax.random.key(3)).shape == (2000,)


def test_predictives_of_posteriors() -> None:
    X = jnp.linspace(0.0, 5.0, 40)[:, None]
    y = jnp.sin(X[:, 0])
    posterior = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1).condition(y)
    new = posterior.predictive(X)
    for score in (scores.log_score, scores.crps, scores.interval_score):
        assert score(new, y).shape == (40,)
    traced = jax.jit(lambda y: (scores.crps(new, y), scores.coverage(new, y)))(y)
    np.testing.assert_allclose(traced[0], scores.crps(new, y), rtol=1e-6)
    rows = jnp.stack([y, y])
    stacked = dist.Normal(jnp.stack([new.loc, new.loc]), jnp.stack([new.scale, new.scale]))
    np.testing.assert_allclose(scores.crps(stacked, rows)[1], scores.crps(new, y), rtol=1e-6)


def test_a_score_is_differentiable() -> None:
    def score(loc: jax.Array) -> jax.Array:
        return scores.crps(dist.Normal(loc, 1.0), jnp.asarray(Y, jnp.float32)).sum()

    assert jnp.isfinite(jax.grad(score)(jnp.zeros(3))).all()


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (
            ValueError,
            r"`y` must have shape \(3,\), got \(1,\)",
            lambda n: scores.crps(n, np.zeros(1)),
        ),
        (ValueError, r"`y` must have shape", lambda n: scores.coverage(n, np.zeros((3, 1)))),
        (ValueError, r"`y` must", lambda n: scores.log_score(n, Y * np.nan)),
        (ValueError, r"`level` must", lambda n: scores.coverage(n, Y, level=90.0)),
        (ValueError, r"two draws along", lambda n: scores.crps(np.zeros((1, 3)), Y)),
        (ValueError, r"`y` must have shape \(4,\)", lambda n: scores.crps(np.zeros((3, 4)), Y)),
        (
            ValueError,
            r"one marginal for each observation, got a distribution of event shape \(3,\)",
            lambda n: scores.log_score(n.to_event(1), Y),
        ),
        (
            ValueError,
            "`key` must be given: this score of a `Poisson` needs draws",
            lambda n: scores.crps(dist.Poisson(np.ones(3)), np.arange(3)),
        ),
        (
            TypeError,
            "draws of a continuous distribution for a log score, got integers",
            lambda n: scores.log_score(np.zeros((4, 3), int), np.arange(3)),
        ),
    ],
)
def test_errors(error: Any, match: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(error, match=match):
        call(dist.Normal(jnp.zeros(3), 1.0))
