"""Conversion of pandas and polars data frames and of nested lists to arrays."""

import numbers
from typing import Any

import jax
import numpy as np

from numpyro_scalegp.core import checks


def is_table(value: Any) -> bool:
    """Whether a value is a data frame, a column of a data frame, or a list of numbers."""
    if isinstance(value, list):
        entries = jax.tree.leaves(value)
        return bool(entries) and all(isinstance(entry, numbers.Number) for entry in entries)
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
    return hasattr(value, "__array__") and not (is_array or hasattr(value, "__jax_array__"))


def as_arrays(tree: Any, name: str) -> Any:
    """Replace the tables of a pytree by NumPy arrays.

    Raises:
        TypeError: if a table holds anything but numbers; the message calls it `name`.
    """

    def convert(leaf: Any) -> Any:
        if not is_table(leaf):
            return leaf
        try:
            array = np.asarray(leaf)
        except ValueError as error:  # lists of different lengths
            raise TypeError(f"`{name}` must have rows of one length: {error}") from error
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"`{name}` must hold numbers, got {checks.described(leaf)} of {array.dtype}: fill "
                "or drop missing values, and convert the others."
            )
        return array

    return jax.tree.map(convert, tree, is_leaf=is_table)
