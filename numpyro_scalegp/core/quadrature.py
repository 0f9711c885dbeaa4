"""Nodes and weights for expectations under a normal distribution."""

import jax.numpy as jnp
import numpy as np
from scipy.special import roots_hermitenorm


def normal_nodes(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the Gauss-Hermite rule for the standard normal distribution.

    Nodes whose weight float32 cannot hold are left out: they add nothing, and far out there a
    likelihood may be infinite.

    Args:
        num_nodes: of the rule, positive.

    Returns:
        Nodes and weights, which sum to one, each of shape (at most num_nodes,).

    Raises:
        ValueError: if `num_nodes` is not positive.
    """
    if num_nodes < 1:
        raise ValueError(f"`num_nodes` must be positive, got {num_nodes}.")
    nodes, weights = roots_hermitenorm(num_nodes)
    weights = weights / weights.sum()
    kept = weights >= float(jnp.finfo(jnp.float32).tiny)
    return nodes[kept], weights[kept]
