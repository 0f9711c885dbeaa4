"""Distributions of a stopping index: their tables, their draws, and weights whose means are one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.integrated.truncated.stopping import StoppingTime, decay_and_minimum

DISTRIBUTIONS = {
    "exponential": lambda: StoppingTime.exponential(0.3, 4, 30),
    "equal": lambda: StoppingTime.exponential(0.0, 2, 9),
    "certain": lambda: StoppingTime.exponential(0.5, 7, 7),
    "inverse": lambda: StoppingTime(np.append(0.0, 1.0 / np.arange(2, 21))),
    "table": lambda: StoppingTime(np.array([0.0, 2.0, 0.0, 1.0, 5.0])),
    "one term": lambda: StoppingTime(np.array([3.0])),
}
each_distribution = pytest.mark.parametrize("name", DISTRIBUTIONS)


@each_distribution
def test_weights_have_mean_one(name, x64):
    # The mean over all indices, weighted by their probabilities: no draws.
    distribution = DISTRIBUTIONS[name]()
    stops = jnp.arange(1, distribution.num_terms + 1)
    p = np.asarray(distribution.probabilities)
    np.testing.assert_allclose(p.sum(), 1.0, rtol=1e-14)
    np.testing.assert_allclose(p @ distribution.roulette_weights(stops), 1.0, rtol=1e-13)
    single = np.where(
        p > 0, p * np.where(p > 0, distribution.single_sample_weight(stops), 0.0), 1.0
    )
    np.testing.assert_allclose(single, 1.0, rtol=1e-14)


@each_distribution
def test_moments_and_survival(name, x64):
    distribution = DISTRIBUTIONS[name]()
    p, index = np.asarray(distribution.probabilities), np.arange(1, distribution.num_terms + 1)
    np.testing.assert_allclose(
        distribution.survival, [p[j:].sum() for j in range(len(p))], rtol=1e-13
    )
    np.testing.assert_allclose(distribution.mean, p @ index, rtol=1e-13)


@each_distribution
def test_draws_follow_the_distribution(name, x64):
    distribution = DISTRIBUTIONS[name]()
    draws = np.asarray(distribution.sample(jax.random.key(0), (20_000,)))
    p = np.asarray(distribution.probabilities)
    counts = np.bincount(draws, minlength=distribution.num_terms + 1)
    assert counts[0] == 0
    assert len(counts) == distribution.num_terms + 1
    spread = np.sqrt(p * (1 - p) / draws.size)
    error = counts[1:] / draws.size - p
    assert np.all(np.abs(error) <= 4.5 * spread)  # indices of no probability are never drawn
    assert distribution.sample(jax.random.key(1)).shape == ()


def test_a_truncated_sum_is_unbiased(x64):
    distribution = DISTRIBUTIONS["exponential"]()
    terms = 0.8 ** jnp.arange(distribution.num_terms)
    stops = distribution.sample(jax.random.key(2), (4000,))
    sums = distribution.roulette_weights(stops) @ terms
    singles = terms[stops - 1] * distribution.single_sample_weight(stops)
    # Single terms exclude the terms before the smallest index.
    for draws, total in ((sums, terms.sum()), (singles, terms[3:].sum())):
        error = np.mean(draws) - total
        assert abs(error) < 4 * np.std(draws) / math.sqrt(draws.size)
    # The truncated sum without weights fails the same check.
    plain = jnp.cumsum(terms)[stops - 1]
    assert abs(np.mean(plain) - terms.sum()) > 10 * np.std(plain) / math.sqrt(plain.size)


def test_weights_of_terms_are_zero_after_the_stop():
    weights = DISTRIBUTIONS["exponential"]().roulette_weights(jnp.array([5, 30]))
    np.testing.assert_array_equal(weights[0, 5:], 0.0)
    np.testing.assert_allclose(weights[0, :4], 1.0, rtol=1e-6)
    assert np.all(np.diff(weights[1, 3:]) > 0)


def test_many_terms_in_single_precision():
    # Most of these probabilities underflow to zero.
    distribution = StoppingTime.exponential(0.05, 80, 100_000)
    assert distribution.probabilities.dtype == jnp.float32
    assert abs(float(distribution.mean) - 99.5) < 0.1
    weights = distribution.roulette_weights(distribution.sample(jax.random.key(0), (50,)))
    assert np.all(np.isfinite(weights))


@pytest.mark.parametrize(("mean", "maximum", "share"), [(100, 10_000, 0.8), (30.0, 40, 0.7)])
def test_distribution_with_a_specified_mean(mean, maximum, share, x64):
    decay, minimum = decay_and_minimum(mean, maximum, share=share)
    assert minimum == round(share * mean)
    distribution = StoppingTime.exponential(decay, minimum, maximum)
    np.testing.assert_allclose(distribution.mean, mean, rtol=1e-10)
    assert decay > 0
