"""Expectations under normal distributions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
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


def normal_expectation(
    function: Callable[..., tuple[Float[Array, ""], Any]],
    moments: Sequence[tuple[Float[Array, "..."], Float[Array, "..."]]],
    num_nodes: int,
) -> tuple[Float[Array, ""], Any]:
    """E[function(f, g, ...)] where each entry of f, g, ... is normal: a Gauss-Hermite sum.

    The entries of one argument share their nodes, so that the function must be a sum of functions
    of single entries of it; several arguments use all combinations of nodes.

    Args:
        function: returns a value and anything that does not depend on the nodes.
        moments: means and variances of each argument.
        num_nodes: nodes for each argument.

    Returns:
        The expectation, and the other result at the first node.
    """
    nodes, weights = normal_nodes(num_nodes)
    grid = np.indices((len(nodes),) * len(moments)).reshape(len(moments), -1)
    scales = [jnp.sqrt(jnp.maximum(var, jnp.finfo(var.dtype).tiny)) for _, var in moments]

    def at(places: list[Array]) -> tuple[Array, Any]:
        triples = zip(moments, scales, places, strict=True)
        return function(*(mean + scale * place for (mean, _), scale, place in triples))

    places = [
        jnp.asarray(nodes[index], mean.dtype)
        for (mean, _), index in zip(moments, grid, strict=True)
    ]
    values, other = jax.vmap(at)(places)
    products = jnp.asarray(np.prod(weights[grid], axis=0), values.dtype)
    return jnp.sum(products * values), jax.tree.map(lambda leaf: leaf[0], other)
