"""A warning for inputs that a conversion to float32 makes equal."""

import warnings
from typing import Any

import jax
import numpy as np

# Odd, so that products modulo 2^64 lose nothing.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


REMEDY = (
    "Subtract an origin near the data (X - X.min(axis=0)) or standardize first, or work in float64 "
    "(numpyro.enable_x64())"
)


def warn_of_merged_rows(name: str, original: Any, rows: Any, remedy: str = REMEDY) -> None:
    """Warn if different rows of `original` are equal in `rows`, the matrix it was converted to.

    An example is times in seconds since 1970, which float32 rounds to multiples of 128. A few of
    very many rows agree in 24 bits by chance, without a warning. Nothing is checked if `original`
    is traced or its dtype converts without rounding. Costs O(n d + n log n).

    Args:
        name: the argument's name.
        original: the matrix that the user passed.
        rows: the converted matrix, shape (n, d).
        remedy: the last sentence of the warning, without its full stop.
    """
    # `rows` is traced if any part of `original` is.
    if original is rows or isinstance(rows, jax.core.Tracer):
        return
    before, after = np.asarray(original), np.asarray(rows)
    if before.dtype.kind not in "iuf" or np.can_cast(before.dtype, after.dtype, "safe"):
        return
    num_after = _num_distinct(after)
    if num_after == len(after):
        return
    num_before = _num_distinct(before)
    by_chance = num_before * 2.0 ** -np.finfo(after.dtype).nmant
    if num_before - num_after > num_before * (0.01 + by_chance):
        warnings.warn(
            f"`{name}` has {num_before} distinct rows, of which {num_after} are left in "
            f"{after.dtype}: the others become duplicates. {remedy}.",
            RuntimeWarning,
            stacklevel=1,
        )


def _num_distinct(rows: np.ndarray) -> int:
    """The number of distinct rows, by a 64-bit hash."""
    if rows.dtype.kind == "f":
        rows = rows + 0.0  # -0.0 becomes 0.0
    bits = np.ascontiguousarray(rows).view(f"u{rows.dtype.itemsize}").astype(np.uint64)
    total = np.zeros(len(bits), np.uint64)
    for column in bits.T:
        total = (total ^ column) * _MULTIPLIER
        total ^= total >> np.uint64(29)
    return len(np.unique(total))
