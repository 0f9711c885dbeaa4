"""Expectations under normal distributions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array, Float, Key
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


class Nodes(NamedTuple):
    """Where a function of independent standard normal variables is evaluated, and the weights."""

    places: Array | np.ndarray  # (num, axes)
    weights: np.ndarray  # (num,)


def product_nodes(num_nodes: int, num_axes: int = 1) -> Nodes:
    """All combinations of the nodes of a Gauss-Hermite rule, at most num_nodes^num_axes."""
    nodes, weights = normal_nodes(num_nodes)
    grid = np.indices((len(nodes),) * num_axes).reshape(num_axes, -1)
    return Nodes(nodes[grid.T], np.prod(weights[grid], axis=0))


def shifted_nodes(
    key: Key[Array, ""], num_points: int, num_axes: int, dtype: jnp.dtype | None = None
) -> Nodes:
    """A Sobol' sequence under a random digital shift, through the normal quantile, and its mirror.

    Each point by itself is standard normal, so that a mean over the points is unbiased. With each
    point stands its negative: odd functions have mean zero, and what is left of an even one is of
    the order of its curvature.

    Args:
        key: of the shift.
        num_points: a power of two, at least 2.
        num_axes: dimensions of the points.
        dtype: of the points.

    Returns:
        The points, shape (num_points, num_axes), with equal weights.

    References:
        Owen (2023), Practical Quasi-Monte Carlo Integration, chapters 15 and 17.
    """
    # Here: SciPy's statistics take a second to import, and few models need these points.
    from scipy.stats import qmc

    dtype = jnp.dtype(float if dtype is None else dtype)
    used = min(32, jnp.finfo(dtype).nmant)  # bits: with half a unit more, the type holds them all
    sequence = qmc.Sobol(num_axes, scramble=False, bits=32).random(num_points // 2)
    digits = jnp.asarray(np.asarray(sequence * 2.0**32, np.uint32))
    shifted = digits ^ jax.random.bits(key, (num_axes,), jnp.uint32)
    uniform = ((shifted >> (32 - used)).astype(dtype) + 0.5) * 2.0**-used
    half = ndtri(uniform)
    return Nodes(jnp.concatenate([half, -half]), np.full(num_points, 1.0 / num_points))


def normal_expectation(
    function: Callable[..., Float[Array, ""]],
    moments: Sequence[tuple[Float[Array, "..."], Float[Array, "..."]]],
    nodes: Nodes,
    axes: Sequence[tuple[int, ...]] | None = None,
) -> Float[Array, ""]:
    """E[function(f, g, ...)] where each entry of f, g, ... is normal: a weighted sum over nodes.

    Entries on the same axis share their places, so that the function must be a sum of functions
    that each depend on one entry of an axis.

    Args:
        function: of all arguments.
        moments: means and variances of each argument.
        nodes: of as many axes as there are.
        axes: for each argument, the axis of all its entries, or those of its leading dimensions,
            flattened; None for an axis each.

    Returns:
        The sum.
    """
    axes = [(place,) for place in range(len(moments))] if axes is None else axes
    scales = [jnp.sqrt(jnp.maximum(var, jnp.finfo(var.dtype).tiny)) for _, var in moments]

    def at(place: Array) -> Array:
        arguments = []
        for (mean, _), scale, own in zip(moments, scales, axes, strict=True):
            shape = () if len(own) == 1 else (*mean.shape[:-1], 1)
            arguments.append(mean + scale * place[np.array(own)].reshape(shape).astype(mean.dtype))
        return function(*arguments)

    values = jax.vmap(at)(jnp.asarray(nodes.places))
    return jnp.sum(jnp.asarray(nodes.weights, values.dtype) * values)
