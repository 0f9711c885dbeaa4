"""Weights of basis functions by preconditioned conjugate gradients, against dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.core import chunks
from numpyro_scalegp.kernels import Matern32
from numpyro_scalegp.variational.representer_weights import representer_weights

N, M = 120, 30
KERNEL = Matern32(0.7, 1.4)


def data():
    rng = np.random.default_rng(0)
    X = jnp.array(rng.normal(size=(N, 2)))
    t = jnp.sin(2.0 * X.sum(axis=1)) + 0.1 * jnp.array(rng.normal(size=N))
    return X, t, jnp.array(rng.uniform(0.5, 20.0, size=N))


def dense(P, X, t, precision):
    K_PX = KERNEL(P, X)
    normal = (K_PX * precision) @ K_PX.T + KERNEL(P, P)
    return jnp.linalg.solve(normal, K_PX @ (precision * t))


@pytest.mark.parametrize("chunk_size", [N, 32])
def test_weights_minimize_the_penalized_misfit(chunk_size, x64, monkeypatch):
    monkeypatch.setattr(chunks, "_MAX_ENTRIES", M * chunk_size)
    jax.clear_caches()  # the chunk size is not an argument of the compiled function
    X, t, precision = data()
    P = X[:M]
    weights = representer_weights(KERNEL, P, X, t, precision, tolerance=1e-12, jitter=0.0)
    assert weights.converged
    assert weights.iterations < 40
    np.testing.assert_allclose(weights.value, dense(P, X, t, precision), rtol=1e-7)


def test_an_offset_counts(x64):
    """With an offset g = k(., Q) b, the weights minimize the joint objective for fixed b."""
    X, t, precision = data()
    P, Q, b = X[:M], X[M : M + 9], jnp.linspace(-1.0, 1.0, 9)
    offset = KERNEL(X, Q) @ b, KERNEL(P, Q) @ b
    weights = representer_weights(
        KERNEL, P, X, t, precision, offset=offset, tolerance=1e-12, jitter=0.0
    )

    def objective(a):
        points, coefficients = jnp.concatenate([P, Q]), jnp.concatenate([a, b])
        misfit = t - KERNEL(X, points) @ coefficients
        norm = coefficients @ KERNEL(points, points) @ coefficients
        return precision @ misfit**2 + norm

    assert np.max(np.abs(jax.grad(objective)(weights.value))) < 1e-8
    # Without the offset in the norm, the minimum is another one.
    without = representer_weights(KERNEL, P, X, t - offset[0], precision, tolerance=1e-12)
    assert np.max(np.abs(jax.grad(objective)(without.value))) > 1e-2


def test_inactive_points(x64):
    X, t, precision = data()
    P = X[:M].at[::3].set(0.0)  # the same point many times
    active = jnp.arange(M) % 3 > 0
    weights = representer_weights(
        KERNEL, P, X, t, precision, active=active, tolerance=1e-12, jitter=0.0
    )
    assert np.all(weights.value[::3] == 0.0)
    expected = dense(P[np.asarray(active)], X, t, precision)
    np.testing.assert_allclose(weights.value[np.asarray(active)], expected, rtol=1e-7)


def test_float32_with_many_observations():
    X = jnp.array(np.random.default_rng(0).normal(size=(4000, 2)), jnp.float32)
    t = jnp.sin(X.sum(axis=1))
    weights = representer_weights(KERNEL, X[:100], X, t, jnp.full(4000, 10.0))
    assert weights.converged
    assert weights.iterations < 40
    assert weights.value.dtype == jnp.float32
    assert jnp.sqrt(jnp.mean(jnp.square(KERNEL(X, X[:100]) @ weights.value - t))) < 0.1


def test_a_guess_is_where_it_starts(x64):
    X, t, precision = data()
    P = X[:M]
    exact = dense(P, X, t, precision)
    weights = representer_weights(KERNEL, P, X, t, precision, guess=exact, max_iterations=1)
    np.testing.assert_allclose(weights.value, exact, rtol=1e-5)
    far = representer_weights(
        KERNEL, P, X, t, precision, guess=exact + 1.0, tolerance=1e-12, jitter=0.0
    )
    np.testing.assert_allclose(far.value, exact, rtol=1e-7)


def test_ends_with_its_budget(x64):
    X, t, precision = data()
    weights = representer_weights(KERNEL, X[:M], X, t, precision, tolerance=1e-12, max_iterations=2)
    assert weights.iterations == 2
    assert not weights.converged
    assert weights.residual > 1e-12


def test_targets_of_zero_give_zero():
    X = jnp.linspace(0.0, 1.0, 20)[:, None]
    weights = representer_weights(Matern32(0.3), X[:4], X, jnp.zeros(20), jnp.ones(20))
    assert weights.converged
    assert np.all(weights.value == 0.0)
