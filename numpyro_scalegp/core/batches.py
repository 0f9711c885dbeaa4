"""Functions of a single member, applied to each member of a batch."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key


class Batch(NamedTuple):
    """Members with the same structure, stacked along the leading axes of their arrays.

    Leading axes broadcast by NumPy's rules.
    """

    tree: Any  # a pytree; leaves that are not arrays are shared by all members
    leading: Any  # the number of leading axes of each array: an integer, or a pytree of integers


def common_shape(message: str, **shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of leading axes.

    Args:
        message: the beginning of the error message, which ends with the shapes.
        **shapes: leading axes by name.

    Raises:
        ValueError: if they do not broadcast.
    """
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        nonempty = {name: shape for name, shape in shapes.items() if shape}
        raise ValueError(f"{message}, got {nonempty}.") from None


def keys(key: Key[Array, ""] | None, batch_shape: tuple[int, ...]) -> Batch:
    """A key for each member; the key itself if there is no batch."""
    if key is None or not batch_shape:
        return Batch(key, 0)
    return Batch(jax.random.split(key, batch_shape), len(batch_shape))


def shape_of(*batches: Batch) -> tuple[int, ...]:
    """The common shape of the leading axes, () for single members.

    Raises:
        ValueError: if they do not broadcast.
    """
    shapes = {leaf.shape[:leading] for batch in batches for leaf, leading in _leaves(batch)}
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            "the leading axes of a batch must fit together, those before the axes of one kernel, "
            f"one matrix of inputs or one vector: got {sorted(shapes - {()})}."
        ) from None


def each(function: Callable[..., Any], *batches: Batch, sequential: bool = False) -> Any:
    """Apply `function` to the members of batches that belong together.

    Args:
        function: maps one member of each batch to a pytree.
        *batches: batches whose shapes broadcast against each other.
        sequential: whether to work on one member at a time, in the memory of one.

    Returns:
        The results, stacked along the batch's leading axes; leaves that are not arrays come from
        one member.
    """
    shape = shape_of(*batches)
    if not shape:
        return function(*(batch.tree for batch in batches))
    arrays, static = eqx.partition([batch.tree for batch in batches], eqx.is_array)
    structure = jax.tree.structure(arrays)
    leaves, mapped = [], []
    for batch in batches:
        for leaf, leading in _leaves(batch):
            axes = list(range(len(shape) - leading, len(shape)))
            shared = [place for place, axis in enumerate(axes) if leaf.shape[place] != shape[axis]]
            leaves.append(jnp.squeeze(leaf, shared) if shared else leaf)
            mapped.append([axis for place, axis in enumerate(axes) if place not in shared])
    static_results: list[Any] = []

    def apply_to_member(*leaves: Array) -> Any:
        result = function(*eqx.combine(jax.tree.unflatten(structure, leaves), static))
        arrays, static_result = eqx.partition(result, eqx.is_array)
        static_results[:] = [static_result]
        return arrays

    apply: Callable[..., Any] = apply_to_member
    for axis in reversed(range(len(shape))):
        apply = _along_axis(apply, [axis in axes for axes in mapped], sequential)
    return eqx.combine(apply(*leaves), static_results[0])


def mapped(function: Callable[..., Any], *ndims: int) -> Callable[..., Any]:
    """Map a function of a single member's arrays over leading axes; see `each`.

    Args:
        function: a function of arrays.
        *ndims: how many axes each array of a single member has.
    """

    def apply(*arrays: Array) -> Any:
        pairs = zip(arrays, ndims, strict=True)
        return each(function, *[Batch(array, array.ndim - ndim) for array, ndim in pairs])

    return apply


def take(batch: Batch, members: Int[np.ndarray, " g"]) -> Batch:
    """The given members of a batch with one leading axis."""

    def take_leaf(leaf: Any, leading: int) -> Any:
        is_shared = not eqx.is_array(leaf) or leading == 0 or leaf.shape[0] == 1
        return leaf if is_shared else leaf[members]

    leading = batch.leading
    if isinstance(leading, int):
        return Batch(jax.tree.map(lambda leaf: take_leaf(leaf, leading), batch.tree), leading)
    return Batch(jax.tree.map(take_leaf, batch.tree, leading), leading)


def samples_last(
    values: Float[Array, "... n"], batch_shape: tuple[int, ...]
) -> Float[Array, "... samples n"]:
    """Move sample axes behind the batch: from (*samples, *batch, n) to (*batch, S, n)."""
    samples = values.shape[: max(0, values.ndim - 1 - len(batch_shape))]
    full = jnp.broadcast_to(values, (*samples, *batch_shape, values.shape[-1]))
    flat = full.reshape(math.prod(samples), *batch_shape, values.shape[-1])
    return jnp.moveaxis(flat, 0, -2)


def _along_axis(function: Callable[..., Any], is_mapped: list[bool], sequential: bool) -> Callable:
    """Map a function over the first axis of those arguments that `is_mapped` marks."""
    if not sequential:
        return jax.vmap(function, in_axes=[0 if has_axis else None for has_axis in is_mapped])

    def apply(*leaves: Array) -> Any:
        def apply_to_slices(slices: list[Array]) -> Any:
            remaining = iter(slices)
            pairs = zip(leaves, is_mapped, strict=True)
            return function(*[next(remaining) if has_axis else leaf for leaf, has_axis in pairs])

        pairs = zip(leaves, is_mapped, strict=True)
        return jax.lax.map(apply_to_slices, [leaf for leaf, has_axis in pairs if has_axis])

    return apply


def _leaves(batch: Batch) -> list[tuple[Array, int]]:
    """The arrays of a batch, each with its number of leading axes."""
    leaves, leading = jax.tree.leaves(batch.tree), batch.leading
    numbers = [leading] * len(leaves) if isinstance(leading, int) else jax.tree.leaves(leading)
    return [pair for pair in zip(leaves, numbers, strict=True) if eqx.is_array(pair[0])]
