"""Quantiles of mixtures of normal distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.test_util import check_grads
from jaxtyping import Array
from scipy import optimize, stats

from numpyro_scalegp.processes.mixture import NormalMixture

WEIGHTS, LOC, SCALE = np.array([0.2, 0.5, 0.3]), np.array([-3.0, 0.1, 40.0]), np.array([0.01, 1, 9])


def mixture(weights: Array, loc: Array, scale: Array) -> NormalMixture:
    return NormalMixture(dist.Categorical(probs=weights), dist.Normal(loc, scale))


def given(dtype: jnp.dtype) -> NormalMixture:
    return mixture(*(jnp.asarray(values, dtype) for values in (WEIGHTS, LOC, SCALE)))


def exact(q: float) -> float:
    """By SciPy, in the nearer tail."""
    tail, p = (stats.norm.cdf, q) if q <= 0.5 else (stats.norm.sf, 1.0 - q)
    error = lambda x: np.log(WEIGHTS @ tail(x, LOC, SCALE)) - np.log(p)  # noqa: E731
    return float(optimize.brentq(error, -200.0, 500.0, xtol=1e-13))


def test_quantiles_in_both_tails(dtype: jnp.dtype) -> None:
    small = np.array([1e-30, 1e-12, 1e-4, 0.1999, 0.2001, 0.4, 0.5], dtype)
    q = np.concatenate([small, 1.0 - small[2:]]).astype(dtype)
    quantiles = jax.jit(lambda q: given(dtype).icdf(q))(q)
    assert quantiles.dtype == dtype
    expected = [exact(float(probability)) for probability in q]
    rtol = 2e-4 if dtype == jnp.float32 else 1e-9
    np.testing.assert_allclose(quantiles, expected, rtol=rtol)
    np.testing.assert_allclose(given(dtype).icdf(jnp.asarray(q[:3])), quantiles[:3], rtol=1e-5)


def test_a_normal_distribution_is_one_component(dtype: jnp.dtype) -> None:
    """Also at 0 and 1, and where q is not a probability; a variance of zero gives the mean."""
    q = jnp.array([0.0, 1e-6, 0.3, 0.5, 1.0, -0.1, 1.1, jnp.nan], dtype)
    single = mixture(*(jnp.full(1, value, dtype) for value in (1.0, 0.7, 2.0)))
    np.testing.assert_allclose(single.icdf(q), dist.Normal(0.7, 2.0).icdf(q), rtol=1e-5)
    with dist.distribution.validation_enabled(False):
        halves, means = jnp.full(2, 0.5, dtype), jnp.array([1.0, 4.0], dtype)
        certain = mixture(halves, means, jnp.zeros(2, dtype))
    np.testing.assert_allclose(certain.icdf(q[1:3]), 1.0, rtol=1e-6)
    np.testing.assert_allclose(certain.icdf(0.7), 4.0, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_derivatives_are_those_of_the_inverse() -> None:
    arguments = *map(jnp.asarray, (LOC, SCALE)), jnp.array(0.31)

    def quantile(loc: Array, scale: Array, q: Array) -> Array:
        return mixture(jnp.asarray(WEIGHTS), loc, scale).icdf(q)

    check_grads(quantile, arguments, order=2, modes=["fwd"], rtol=1e-4)
    assert np.all(np.isfinite(jax.grad(quantile, 1)(*arguments)))


def test_quantiles_of_each_entry_of_a_batch() -> None:
    loc = jnp.stack([jnp.asarray(LOC), jnp.asarray(LOC) + 1.0])
    shape = loc.shape
    batch = mixture(*(jnp.broadcast_to(a, shape) for a in (WEIGHTS, loc, SCALE)))
    quantiles = batch.icdf(jnp.array([[0.1], [0.9]]))
    assert quantiles.shape == (2, 2)
    np.testing.assert_allclose(quantiles[:, 1] - quantiles[:, 0], 1.0, rtol=1e-4)
    np.testing.assert_allclose(batch.cdf(quantiles), [[0.1, 0.1], [0.9, 0.9]], rtol=1e-4)
    np.testing.assert_allclose(jax.vmap(batch.icdf)(jnp.array([0.1, 0.9])), quantiles, rtol=1e-6)
