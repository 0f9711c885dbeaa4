"""Bounds whose derivatives do not depend on rounding errors."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_scalegp.numerics.rounding import at_least, at_most, remaining_variance


def test_bounds_and_their_derivatives(dtype):
    x = jnp.array([-2.0, -0.5, 0.3, 1.5, jnp.nan], dtype)
    np.testing.assert_array_equal(at_least(x, 0.1), jnp.maximum(x, 0.1))
    np.testing.assert_array_equal(at_most(x, 0.1), jnp.minimum(x, 0.1))
    slopes = jax.vmap(jax.grad(lambda x: at_least(x, 0.1)))(x[:-1])
    np.testing.assert_array_equal(slopes, [0.0, 0.0, 1.0, 1.0])
    slopes = jax.vmap(jax.grad(lambda x: at_most(x, 0.1)))(x[:-1])
    np.testing.assert_array_equal(slopes, [1.0, 1.0, 0.0, 0.0])


def test_derivatives_do_not_compare_results():
    """As the derivative of `jnp.maximum` does, whose result may have other rounding errors."""
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: at_least(at_most(x * x, 3.0), 0.1)))(1.0)
    assert "eq" not in {equation.primitive.name for equation in jaxpr.eqns}
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.maximum(x * x, 0.1)))(1.0)
    assert "eq" in {equation.primitive.name for equation in jaxpr.eqns}


def test_a_remaining_variance_is_positive(dtype):
    prior, explained = jnp.array([1.0, 1.0, -1e-9], dtype), jnp.array([0.4, 1.1, 0.2], dtype)
    remaining = np.asarray(remaining_variance(prior, explained))
    np.testing.assert_allclose(remaining[0], 0.6, rtol=1e-6)
    assert (remaining > 0.0).all()
    assert remaining[1] <= jnp.finfo(dtype).eps
