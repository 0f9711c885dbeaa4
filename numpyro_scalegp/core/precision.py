"""What a conversion to a narrower type does to inputs."""

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


def warn_of_merged_rows(name: str, given: Any, rows: Any, remedy: str = REMEDY) -> None:
    """Warn if rows that differ in `given` are equal in `rows`, the matrix it was converted to.

    Such as times in seconds since 1970, which float32 holds to the nearest 128. A few of very many
    rows agree in 24 bits by chance: those are no reason to warn. Nothing is done where `given` is
    traced, or of a type that converts without rounding.

    Args:
        name: the argument.
        given: what the user passed, a matrix.
        rows: what it became, shape (n, d). O(n d + n log n).
        remedy: what to do, the last sentence of the warning without its full stop.
    """
    # What it became is traced if any part of `given` is.
    if given is rows or isinstance(rows, jax.core.Tracer):
        return
    before, after = np.asarray(given), np.asarray(rows)
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
            f"{after.dtype}: the others are taken for repetitions. {remedy}.",
            RuntimeWarning,
            stacklevel=1,
        )


def _num_distinct(rows: np.ndarray) -> int:
    """The number of distinct rows, by a hash of 64 bits."""
    if rows.dtype.kind == "f":
        rows = rows + 0.0  # of the two zeros, one
    bits = np.ascontiguousarray(rows).view(f"u{rows.dtype.itemsize}").astype(np.uint64)
    total = np.zeros(len(bits), np.uint64)
    for column in bits.T:
        total = (total ^ column) * _MULTIPLIER
        total ^= total >> np.uint64(29)
    return len(np.unique(total))
