"""Functions that are computed in float64 while the default is float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from numpyro_scalegp.core.float64 import in_float64

F = jnp.linspace(0.5, 2.0, 4, dtype=jnp.float32)
COUNTS = jnp.array([70_000, 80_000, 90_000, 100_000])


def log_density(f, count):
    """Of a Poisson distribution whose rate is near the count."""
    rate = count + 100.0 * f
    return count * jnp.log(rate) - rate - jax.scipy.special.gammaln(count + 1)


def expected():
    f, count = np.asarray(F, float), np.asarray(COUNTS)
    rate = count + 100.0 * f
    return count * np.log(rate) - rate - scipy.special.gammaln(count + 1.0)


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, lambda f: jax.vmap(jax.jit(f)), lambda f: jax.jit(jax.vmap(f))],
)
def test_no_digits_are_lost(transform):
    found = transform(lambda f, count: in_float64(log_density, f, count))(F, COUNTS)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected(), rtol=1e-6)
    assert np.abs(log_density(F, COUNTS) - expected()).max() > 1e-2


def test_counts_of_32_bits_in_float64(x64):
    """Functions of integers follow these."""
    found = in_float64(log_density, F.astype(jnp.float64), COUNTS.astype(jnp.int32))
    np.testing.assert_allclose(found, expected(), rtol=1e-9)


@pytest.mark.parametrize(
    "function",
    [
        lambda f: jax.scipy.special.betainc(f, 2.0, 0.3),  # lowered by tracing
        lambda f: jax.scipy.special.i0e(f),
        lambda f: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * f), (0, f))[1],
        lambda f: f[jnp.argsort(f)],
        # A function that takes float32 alone is computed in float32.
        lambda f: jax.lax.mul(f, jnp.ones(4, jnp.float32)),
    ],
)
def test_any_function(function):
    compiled = jax.jit(lambda f: in_float64(function, f))
    np.testing.assert_allclose(compiled(F), function(F), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(compiled)(F[None]), function(F)[None], rtol=1e-5)


def test_no_derivative():
    gradient = jax.jit(jax.grad(lambda f: jnp.sum(f * in_float64(jnp.exp, f))))(F)
    np.testing.assert_allclose(gradient, jnp.exp(F), rtol=1e-6)
