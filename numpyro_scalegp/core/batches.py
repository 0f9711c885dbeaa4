"""Functions of one member, applied to each member of a batch."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key


class Batch(NamedTuple):
    """Members that are alike, side by side along the leading axes of their arrays.

    Fewer leading axes than others have, or some of length one, are shared, as in NumPy's rules.
    """

    tree: Any  # a pytree; what is no array is the same for all
    leading: Any  # how many leading axes each array has: a number, or a pytree of such


def common_shape(message: str, **shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the batch that parts with these leading axes make.

    Args:
        message: of the error where they do not fit, to which what there is is added.
        **shapes: leading axes by the names of the parts.

    Raises:
        ValueError: if they do not fit.
    """
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        found = {name: shape for name, shape in shapes.items() if shape}
        raise ValueError(f"{message}, got {found}.") from None


def keys(key: Key[Array, ""] | None, batch_shape: tuple[int, ...]) -> Batch:
    """A key for each member; of a single member the key itself."""
    if key is None or not batch_shape:
        return Batch(key, 0)
    return Batch(jax.random.split(key, batch_shape), len(batch_shape))


def shape_of(*batches: Batch) -> tuple[int, ...]:
    """The common shape of the leading axes, () for single members.

    Raises:
        ValueError: if they do not fit.
    """
    found = {leaf.shape[:leading] for batch in batches for leaf, leading in _leaves(batch)}
    try:
        return np.broadcast_shapes(*found)
    except ValueError:
        raise ValueError(
            "the leading axes of a batch must fit together, those before the axes of one kernel, "
            f"one matrix of inputs or one vector: got {sorted(found - {()})}."
        ) from None


def each(function: Callable[..., Any], *batches: Batch, in_turn: bool = False) -> Any:
    """Apply `function` to the members of batches that belong together.

    Args:
        function: of one member of each batch, to a pytree.
        *batches: whose shapes broadcast against each other.
        in_turn: whether members are worked on one after the other, in the memory of one.

    Returns:
        The results side by side, leading axes the batch's; what is no array is that of one member.
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
    rest: list[Any] = []

    def of_one(*leaves: Array) -> Any:
        found = function(*eqx.combine(jax.tree.unflatten(structure, leaves), static))
        arrays, other = eqx.partition(found, eqx.is_array)
        rest[:] = [other]
        return arrays

    apply: Callable[..., Any] = of_one
    for axis in reversed(range(len(shape))):
        apply = _along(apply, [axis in of_leaf for of_leaf in mapped], in_turn)
    return eqx.combine(apply(*leaves), rest[0])


def take(batch: Batch, members: Int[np.ndarray, " g"]) -> Batch:
    """Some members of a batch of one axis."""

    def of_leaf(leaf: Any, leading: int) -> Any:
        has_own = eqx.is_array(leaf) and leading > 0 and leaf.shape[0] > 1
        return leaf[members] if has_own else leaf

    leading = batch.leading
    if isinstance(leading, int):
        return Batch(jax.tree.map(lambda leaf: of_leaf(leaf, leading), batch.tree), leading)
    return Batch(jax.tree.map(of_leaf, batch.tree, leading), leading)


def samples_last(
    values: Float[Array, "... n"], batch_shape: tuple[int, ...]
) -> Float[Array, "... samples n"]:
    """Values of each member behind its axes, (*batch, S, n), from (*samples, *batch, n)."""
    samples = values.shape[: max(0, values.ndim - 1 - len(batch_shape))]
    full = jnp.broadcast_to(values, (*samples, *batch_shape, values.shape[-1]))
    flat = full.reshape(math.prod(samples), *batch_shape, values.shape[-1])
    return jnp.moveaxis(flat, 0, -2)


def _along(function: Callable[..., Any], is_mapped: list[bool], in_turn: bool) -> Callable:
    """The function along the leading axes of some of its arguments."""
    if not in_turn:
        return jax.vmap(function, in_axes=[0 if one else None for one in is_mapped])

    def apply(*leaves: Array) -> Any:
        def of_one(moving: list[Array]) -> Any:
            parts = iter(moving)
            pairs = zip(leaves, is_mapped, strict=True)
            return function(*[next(parts) if one else leaf for leaf, one in pairs])

        pairs = zip(leaves, is_mapped, strict=True)
        return jax.lax.map(of_one, [leaf for leaf, one in pairs if one])

    return apply


def _leaves(batch: Batch) -> list[tuple[Array, int]]:
    """The arrays of a batch, each with the number of its leading axes."""
    leaves, leading = jax.tree.leaves(batch.tree), batch.leading
    numbers = [leading] * len(leaves) if isinstance(leading, int) else jax.tree.leaves(leading)
    return [pair for pair in zip(leaves, numbers, strict=True) if eqx.is_array(pair[0])]
