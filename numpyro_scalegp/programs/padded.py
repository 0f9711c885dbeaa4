"""Rows padded to one of few numbers, so that a call with another number compiles nothing."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from numpyro_scalegp.programs.compiled import is_inside_of_jit

# Up to so many rows the number with padding is a power of two; beyond, at most an eighth larger.
_MOST_DOUBLED = 1024


def padded_size(num_rows: int) -> int:
    """The number of rows with padding."""
    if num_rows <= _MOST_DOUBLED:
        return 1 << (num_rows - 1).bit_length()
    unit = 1 << (num_rows.bit_length() - 4)
    return -(-num_rows // unit) * unit


class PaddedRows(NamedTuple):
    """Rows of inputs, with the last row repeated."""

    X: Float[Array, "... size d"]
    num_rows: int | None  # without padding; None if there is none

    @classmethod
    def of(cls, X: Float[Array, "... m d"]) -> "PaddedRows":
        """Pad rows; unchanged in a function that is compiled, and on several devices."""
        if is_inside_of_jit() or not _is_on_one_device(X):
            return cls(X, None)
        num_rows = X.shape[-2]
        num_more = padded_size(num_rows) - num_rows
        if not num_more:
            return cls(X, None)
        module = np if _is_on_host(X) else jnp  # NumPy compiles nothing
        rows = module.asarray(X)
        padded = module.concatenate([rows, module.repeat(rows[..., -1:, :], num_more, -2)], -2)
        return cls(_like(X, padded), num_rows)

    def unpad(self, values: Array, axis: int | None) -> Array:
        """The values of the rows without padding, which lie along an axis."""
        if self.num_rows is None or axis is None:
            return values
        index = (*[slice(None)] * (values.ndim + axis), slice(self.num_rows))
        if _is_on_host(values):
            return _like(values, np.asarray(values)[index])
        return values[index]


def _is_on_one_device(array: Array) -> bool:
    is_concrete = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
    return is_concrete and len(array.sharding.device_set) == 1


def _is_on_host(array: Array) -> bool:
    """Whether an array lies in the memory of one CPU device."""
    if not _is_on_one_device(array):
        return False
    device: Any = next(iter(array.sharding.device_set))
    return bool(device.platform == "cpu")


def _like(array: Array, values: Any) -> Array:
    """Values on the device of an array, and bound to it only if the array is."""
    return jax.device_put(values, array.sharding if array.committed else None)
