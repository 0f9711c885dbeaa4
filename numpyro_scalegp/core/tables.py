"""Data frames of pandas and polars and nested lists, where arrays are wanted."""

import numbers
from typing import Any

import jax
import numpy as np

from numpyro_scalegp.core import checks


def is_table(value: Any) -> bool:
    """Whether a value has numbers and is no array: a data frame, a column of one, or a list."""
    if isinstance(value, list):
        entries = jax.tree.leaves(value)
        return bool(entries) and all(isinstance(entry, numbers.Number) for entry in entries)
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
    return hasattr(value, "__array__") and not (is_array or hasattr(value, "__jax_array__"))


def as_arrays(tree: Any, name: str) -> Any:
    """A pytree with arrays of NumPy in place of its tables; all else as it is.

    Raises:
        TypeError: if a table holds anything but numbers; the message calls it `name`.
    """

    def of_leaf(leaf: Any) -> Any:
        if not is_table(leaf):
            return leaf
        try:
            array = np.asarray(leaf)
        except ValueError as error:  # lists of other lengths
            raise TypeError(f"`{name}` must have rows of one length: {error}") from error
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"`{name}` must hold numbers, got {checks.described(leaf)} of {array.dtype}: fill "
                "or drop what is missing, and convert the rest."
            )
        return array

    return jax.tree.map(of_leaf, tree, is_leaf=is_table)
