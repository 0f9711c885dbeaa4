"""Stopping laws: their tables, their draws, and weights whose means are one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.solvers.stopping import StoppingLaw, decay_and_minimum

LAWS = {
    "exponential": lambda: StoppingLaw.exponential(0.3, 4, 30),
    "equal": lambda: StoppingLaw.exponential(0.0, 2, 9),
    "certain": lambda: StoppingLaw.exponential(0.5, 7, 7),
    "inverse": lambda: StoppingLaw.inverse(20, minimum=2),
    "table": lambda: StoppingLaw(np.array([0.0, 2.0, 0.0, 1.0, 5.0])),
    "one term": lambda: StoppingLaw(np.array([3.0])),
}
every_law = pytest.mark.parametrize("name", LAWS)


@every_law
def test_weights_have_mean_one(name, x64):
    # The mean over all indices, weighted by their probabilities: no draws.
    law = LAWS[name]()
    stops = jnp.arange(1, law.num_terms + 1)
    p = np.asarray(law.probabilities)
    np.testing.assert_allclose(p.sum(), 1.0, rtol=1e-14)
    np.testing.assert_allclose(p @ law.roulette_weights(stops), 1.0, rtol=1e-13)
    single = np.where(p > 0, p * np.where(p > 0, law.single_sample_weight(stops), 0.0), 1.0)
    np.testing.assert_allclose(single, 1.0, rtol=1e-14)


@every_law
def test_moments_and_survival(name, x64):
    law = LAWS[name]()
    p, index = np.asarray(law.probabilities), np.arange(1, law.num_terms + 1)
    np.testing.assert_allclose(law.survival, [p[j:].sum() for j in range(len(p))], rtol=1e-13)
    np.testing.assert_allclose(law.mean, p @ index, rtol=1e-13)
    np.testing.assert_allclose(law.variance, p @ (index - p @ index) ** 2, atol=1e-12)


@every_law
def test_draws_follow_the_law(name, x64):
    law = LAWS[name]()
    draws = np.asarray(law.sample(jax.random.key(0), (20_000,)))
    p = np.asarray(law.probabilities)
    counts = np.bincount(draws, minlength=law.num_terms + 1)
    assert counts[0] == 0
    assert len(counts) == law.num_terms + 1
    spread = np.sqrt(p * (1 - p) / draws.size)
    error = counts[1:] / draws.size - p
    assert np.all(np.abs(error) <= 4.5 * spread)  # indices of no probability are never drawn
    assert law.sample(jax.random.key(1)).shape == ()


def test_a_truncated_sum_is_unbiased(x64):
    law = LAWS["exponential"]()
    terms = 0.8 ** jnp.arange(law.num_terms)
    stops = law.sample(jax.random.key(2), (4000,))
    sums = law.roulette_weights(stops) @ terms
    singles = terms[stops - 1] * law.single_sample_weight(stops)
    # The single terms never see those before the least index.
    for draws, whole in ((sums, terms.sum()), (singles, terms[3:].sum())):
        error = np.mean(draws) - whole
        assert abs(error) < 4 * np.std(draws) / math.sqrt(draws.size)
    # The sum cut short without weights fails the same check.
    plain = jnp.cumsum(terms)[stops - 1]
    assert abs(np.mean(plain) - terms.sum()) > 10 * np.std(plain) / math.sqrt(plain.size)


def test_weights_of_terms_are_zero_after_the_stop():
    weights = LAWS["exponential"]().roulette_weights(jnp.array([5, 30]))
    np.testing.assert_array_equal(weights[0, 5:], 0.0)
    np.testing.assert_allclose(weights[0, :4], 1.0, rtol=1e-6)
    assert np.all(np.diff(weights[1, 3:]) > 0)


def test_many_terms_in_single_precision():
    # Most of these probabilities are no numbers above zero any more.
    law = StoppingLaw.exponential(0.05, 80, 100_000)
    assert law.probabilities.dtype == jnp.float32
    assert abs(float(law.mean) - 99.5) < 0.1
    weights = law.roulette_weights(law.sample(jax.random.key(0), (50,)))
    assert np.all(np.isfinite(weights))


@pytest.mark.parametrize(("mean", "maximum", "share"), [(100, 10_000, 0.8), (30.0, 40, 0.7)])
def test_law_with_a_wanted_mean(mean, maximum, share, x64):
    law = StoppingLaw.with_mean(mean, maximum, share=share)
    np.testing.assert_allclose(law.mean, mean, rtol=1e-10)
    decay, minimum = decay_and_minimum(mean, maximum, share=share)
    assert minimum == round(share * mean)
    np.testing.assert_allclose(
        law.probabilities, StoppingLaw.exponential(decay, minimum, maximum).probabilities
    )
    assert decay > 0
