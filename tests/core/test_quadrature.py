"""The Gauss-Hermite rule."""

import numpy as np
import pytest

from numpyro_scalegp.core.quadrature import normal_nodes


@pytest.mark.parametrize("num_nodes", [1, 2, 20, 500, 5000])
def test_moments_of_the_normal_distribution(num_nodes):
    nodes, weights = normal_nodes(num_nodes)
    assert len(nodes) == num_nodes if num_nodes <= 20 else len(nodes) < num_nodes
    assert np.all(weights > 0)
    moments = [1.0, 0.0, 1.0, 0.0, 3.0][: 2 * num_nodes]
    found = [np.sum(weights * nodes**power) for power in range(len(moments))]
    np.testing.assert_allclose(found, moments, atol=1e-11)


def test_needs_a_node():
    with pytest.raises(ValueError, match="`num_nodes` must be positive, got 0"):
        normal_nodes(0)
