"""The Gauss-Hermite rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.likelihoods.quadrature import normal_nodes, shifted_nodes


@pytest.mark.parametrize("num_nodes", [1, 2, 20, 500, 5000])
def test_moments_of_the_normal_distribution(num_nodes):
    nodes, weights = normal_nodes(num_nodes)
    assert len(nodes) == num_nodes if num_nodes <= 20 else len(nodes) < num_nodes
    assert np.all(weights > 0)
    moments = [1.0, 0.0, 1.0, 0.0, 3.0][: 2 * num_nodes]
    powers = [np.sum(weights * nodes**power) for power in range(len(moments))]
    np.testing.assert_allclose(powers, moments, atol=1e-11)


def test_needs_a_node():
    with pytest.raises(ValueError, match="`num_nodes` must be positive, got 0"):
        normal_nodes(0)


def test_shifted_points_are_normal_and_mirrored(dtype):
    """Each point has the moments of the normal distribution over shifts."""
    draw = jax.vmap(lambda key: shifted_nodes(key, 8, 3, dtype).places)
    places = np.asarray(jax.jit(draw)(jax.random.split(jax.random.key(0), 2000)))
    assert places.dtype == dtype
    np.testing.assert_array_equal(places[:, :4], -places[:, 4:])
    assert np.all(np.isfinite(places))
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        values = places[:, :4].astype(float) ** power
        error = values.std(axis=0) / np.sqrt(len(values))
        assert np.all(abs(values.mean(axis=0) - moment) < 4.0 * error)


def test_shifts_that_reach_the_ends_stay_finite(dtype, monkeypatch):
    for shift in (0, 2**32 - 1):
        bits = lambda key, shape, kind, shift=shift: jnp.full(shape, shift, kind)  # noqa: E731
        monkeypatch.setattr(jax.random, "bits", bits)
        places = shifted_nodes(jax.random.key(0), 16, 2, dtype).places
        assert np.all(np.isfinite(places))
        assert np.max(places) > 5.0
