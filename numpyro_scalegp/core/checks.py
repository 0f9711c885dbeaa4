"""Checks of arguments that name the argument, what it got and what it expected.

Shapes are checked always, values only where they are concrete: inside `jit` a value with the wrong
sign gives NaN.
"""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import precision


def is_concrete(value: object) -> bool:
    """Whether every array in `value` can be read on the host now (it is not being traced)."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def as_float(value: Any) -> Float[Array, "..."]:
    """Convert a number, a sequence of numbers or an array to a floating-point array.

    A Python number stays weakly typed, so that it never widens the type of a result.
    """
    array = jnp.asarray(float(value) if isinstance(value, int) else value)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(float)


def as_positive(value: Any) -> Float[Array, "..."]:
    """Convert like `as_float`; a traced entry that is not positive and finite becomes NaN.

    So does its derivative.
    """
    array = as_float(value)
    if is_concrete(array):
        return array
    return array * jnp.where((array > 0) & jnp.isfinite(array), 1.0, jnp.nan)


def positive(name: str, value: Array) -> None:
    """Raise unless every entry of `value` is positive and finite."""
    if is_concrete(value):
        entries = np.asarray(value)
        if not (np.isfinite(entries).all() and (entries > 0).all()):
            raise ValueError(f"`{name}` must be positive and finite, got {_shown(entries)}.")


def finite(name: str, value: Array) -> None:
    """Raise if `value` holds a NaN or an infinity."""
    if is_concrete(value):
        bad = ~np.isfinite(np.asarray(value))
        if bad.any():
            first = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"`{name}` must be finite, got {int(bad.sum())} NaN or infinite "
                f"value(s), the first at index {first}."
            )


def inputs(name: str, value: ArrayLike, width: int | None = None) -> Float[Array, "n d"]:
    """Check a matrix of inputs, one row a point: rank 2, finite, `width` columns if given."""
    array = as_float(value)
    if array.ndim != 2:
        remedy = " Write X[:, None] for one input column." if array.ndim == 1 else ""
        raise ValueError(f"`{name}` must have shape (n, d), got {array.shape}.{remedy}")
    if width is not None and array.shape[1] != width:
        raise ValueError(
            f"`{name}` must have shape (n, {width}), got {array.shape}: "
            f"one column for each input column of `X`."
        )
    finite(name, array)
    precision.warn_of_merged_rows(name, value, array)
    return array


def count(name: str, value: Any, least: int = 1) -> int:
    """Return `value`, or raise unless it is an integer of at least `least`.

    Raises:
        TypeError: if it is no integer of Python or NumPy.
        ValueError: if it is too small.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    return int(value)


def shape(name: str, value: Any, *allowed: tuple[int, ...], why: str = "") -> None:
    """Raise unless `value` has one of the `allowed` shapes."""
    if value.shape not in allowed:
        expected = " or ".join(str(option) for option in allowed)
        raise ValueError(
            f"`{name}` must have shape {expected}, got {value.shape}{': ' + why if why else ''}."
        )


def observations(
    value: ArrayLike, event_shape: tuple[int, ...], rows_of: str
) -> Float[Array, "*batch n"]:
    """Check observations `y`: finite, one for each row of the argument `rows_of`."""
    y = as_float(value)
    if y.shape[-1:] != event_shape:
        raise ValueError(
            f"`y` must have shape {event_shape}, got {y.shape}: one value for each row of "
            f"`{rows_of}`."
        )
    finite("y", y)
    return y


def _shown(entries: np.ndarray) -> str:
    return str(entries.item()) if entries.ndim == 0 else np.array2string(entries, threshold=8)
