"""Rows in order of time, cut into parts: a loop works on one row of every part at once."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Above this many state variables, a step of one lane fills the machine.
_MOST_IN_LANES = 24
# Up to this number of rows a single lane is faster.
_FEW_ROWS = 32


class Parts:
    """Parts of `steps` consecutive rows, one for each of the lanes; the last may be shorter.

    Args:
        num_rows: the number of rows.
        size: the number of state variables.
    """

    def __init__(self, num_rows: int, size: int) -> None:
        self.num_rows, self.lanes = num_rows, _num_lanes(num_rows, size)
        self.steps = -(-num_rows // self.lanes)

    def cut(self, values: Float[Array, "n ..."]) -> Float[Array, "steps lanes ..."]:
        """The rows of each part, with zeros after the last row."""
        missing = self.steps * self.lanes - self.num_rows
        padded = jnp.pad(values, ((0, missing), *[(0, 0)] * (values.ndim - 1)))
        return jnp.swapaxes(padded.reshape(self.lanes, self.steps, *values.shape[1:]), 0, 1)

    def joined(self, values: Float[Array, "steps lanes ..."]) -> Float[Array, "n ..."]:
        """The inverse of `cut`."""
        joined = jnp.swapaxes(values, 0, 1)
        return joined.reshape(-1, *values.shape[2:])[: self.num_rows]


def each_after_the_other(
    step: Callable[[Any, Any], Any], first: Any, parts: Any, *, backward: bool = False
) -> Any:
    """Carry a value from part to part.

    Args:
        step: the value after a part, from the value before it and the part. Arrays have one lane.
        first: the value before the first part or, if backward, after the last.
        parts: a pytree of arrays whose last axis is the lanes.
        backward: whether to go from the last part to the first.

    Returns:
        The value before each part, or behind it if backward, in arrays whose last axis is the
        lanes.
    """

    def scanned(carry: Any, part: Any) -> tuple[Any, Any]:
        return step(carry, part), carry

    single = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, -1, 0)[..., None], parts)
    before = jax.lax.scan(scanned, first, single, reverse=backward)[1]
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf[..., 0], 0, -1), before)


def _num_lanes(num_rows: int, size: int) -> int:
    """About as many lanes as steps, so that both loops are short."""
    if num_rows <= _FEW_ROWS or size > _MOST_IN_LANES:
        return 1
    return 2 ** round(0.5 * math.log2(num_rows))
