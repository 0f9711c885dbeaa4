"""Expectations under normal distributions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array, Float, Key
from scipy.special import roots_hermitenorm

from numpyro_scalegp.numerics.rounding import at_least


def normal_nodes(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the Gauss-Hermite rule for the standard normal distribution.

    Nodes whose weights underflow in float32 are dropped: their terms are negligible, and a
    likelihood may be infinite at such extreme nodes.

    Args:
        num_nodes: number of nodes of the rule, positive.

    Returns:
        At most `num_nodes` nodes and their weights, which sum to one.

    Raises:
        ValueError: if `num_nodes` is not positive.
    """
    if num_nodes < 1:
        raise ValueError(f"`num_nodes` must be positive, got {num_nodes}.")
    nodes, weights = roots_hermitenorm(num_nodes)
    weights = weights / weights.sum()
    is_normal = weights >= float(jnp.finfo(jnp.float32).tiny)
    return nodes[is_normal], weights[is_normal]


class Nodes(NamedTuple):
    """Quadrature nodes for a function of independent standard normal variables, and weights."""

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
    """Normal quantiles of a Sobol' sequence with a random digital shift, and their negatives.

    Each point is standard normal, so that the mean over the points is unbiased. Since each point
    comes with its negative, odd functions integrate to zero exactly.

    Args:
        key: a typed JAX key for the shift.
        num_points: a power of two, at least 2.
        num_axes: dimension of the points.
        dtype: dtype of the points.

    Returns:
        The points, shape (num_points, num_axes), with equal weights.

    References:
        Owen (2023), Practical Quasi-Monte Carlo Integration, chapters 15 and 17.
    """
    # Imported here, since `scipy.stats` takes a second to import, and few models need these points.
    from scipy.stats import qmc

    dtype = jnp.dtype(float if dtype is None else dtype)
    num_bits = min(32, jnp.finfo(dtype).nmant)  # so that the midpoints below are exact
    sequence = qmc.Sobol(num_axes, scramble=False, bits=32).random(num_points // 2)
    digits = jnp.asarray(np.asarray(sequence * 2.0**32, np.uint32))
    shifted = digits ^ jax.random.bits(key, (num_axes,), jnp.uint32)
    uniform = ((shifted >> (32 - num_bits)).astype(dtype) + 0.5) * 2.0**-num_bits
    half = ndtri(uniform)
    return Nodes(jnp.concatenate([half, -half]), np.full(num_points, 1.0 / num_points))


def normal_expectation(
    function: Callable[..., Float[Array, ""]],
    moments: Sequence[tuple[Float[Array, "..."], Float[Array, "..."]]],
    nodes: Nodes,
    axes: Sequence[tuple[int, ...]] | None = None,
) -> Float[Array, ""]:
    """E[function(f, g, ...)] for normal entries of f, g, ...: a weighted sum over nodes.

    Entries on the same axis share the nodes, so that the function must be a sum of functions that
    each depend on one entry of an axis.

    Args:
        function: a scalar function of all arguments.
        moments: means and variances of each argument.
        nodes: nodes with the number of axes that `axes` has.
        axes: for each argument, a single axis for all entries, or the axis of each leading entry,
            flattened; None for one axis for each argument.

    Returns:
        The expectation, shape ().
    """
    axes = [(place,) for place in range(len(moments))] if axes is None else axes
    scales = [jnp.sqrt(at_least(var, jnp.finfo(var.dtype).tiny)) for _, var in moments]

    def at(place: Array) -> Array:
        arguments = []
        for (mean, _), scale, axis in zip(moments, scales, axes, strict=True):
            shape = () if len(axis) == 1 else (*mean.shape[:-1], 1)
            arguments.append(mean + scale * place[np.array(axis)].reshape(shape).astype(mean.dtype))
        return function(*arguments)

    values = jax.vmap(at)(jnp.asarray(nodes.places))
    return jnp.sum(jnp.asarray(nodes.weights, values.dtype) * values)
