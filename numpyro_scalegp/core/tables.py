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


def num_rows(arrays: Any) -> int:
    """The number of rows that all arrays have."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(arrays)]
    if () in shapes:
        raise ValueError("all arrays must have rows as their leading axis, got a single number.")
    if len({shape[:1] for shape in shapes}) > 1:
        raise ValueError(
            f"all arrays must have the same number of rows as their leading axis, got {shapes}."
        )
    return shapes[0][0] if shapes else 0
