"""Streams from arrays of NumPy, such as memory maps."""

import mmap
import os
import zlib
from typing import Any

import numpy as np
from jaxtyping import Num

from numpyro_scalegp.core import checks
from numpyro_scalegp.streams.extra import imported
from numpyro_scalegp.streams.order import Order, Pieces
from numpyro_scalegp.streams.stream import AbstractRows, Batch, Stream


def arrays(
    X: Num[np.ndarray, "n d"],
    y: Num[np.ndarray, "n ..."] | None = None,
    *,
    batch_size: int,
    seed: int,
    window: int = 2**18,
    num_ranges: int = 256,
    dtype: Any = np.float32,
) -> Stream:
    """Mini-batches from arrays of NumPy, such as those of `numpy.load(file, mmap_mode="r")`.

    Pages of a memory map that were read are given back after each window.

    Args:
        X: inputs, shape (n, d), integers or floating-point numbers.
        y: targets, shape (n,) or (n, p); None for inputs alone.
        batch_size: rows of a batch.
        seed: of the order.
        window: rows that are shuffled at a time, about; more than a batch.
        num_ranges: contiguous ranges of the data that are read side by side.
        dtype: of the batches, float32 or float64. A warning says where rows of X that differ become
            equal, as times in seconds since 1970 do.

    Returns:
        Batches (X, y) of shapes (batch_size, d) and (batch_size,) or (batch_size, p), without end:
        every row once an epoch, see `sgp.streams.parquet`. About three windows of memory.

    Raises:
        TypeError: if an array does not hold real numbers.
        ValueError: if shapes do not fit, there is no row or entries of a masked array are missing;
            from the stream, if an entry is NaN, infinite or too large for `dtype`, or a state or
            checkpoint was made with other arrays.
        OSError: from the stream, if the file of a memory map of mode "r" has changed.
        ImportError: if grain is not installed.

    Example:
        >>> import numpy as np
        >>> import numpyro_scalegp as sgp
        >>> X = np.arange(20.0).reshape(10, 2)
        >>> stream = sgp.streams.arrays(X, X[:, 0], batch_size=4, seed=0)
        >>> X_batch, y_batch = next(iter(stream))
        >>> X_batch.shape, y_batch.shape, stream.num_rows
        ((4, 2), (4,), 10)
    """
    imported("grain")
    rows = _ArrayRows(X, y, checked_dtype(dtype))
    return Stream(rows, Order.checked(rows.num_rows, batch_size, window, num_ranges, seed))


def checked_dtype(dtype: Any) -> np.dtype:
    """A type that batches may have."""
    if np.dtype(dtype).name not in ("float32", "float64"):
        raise TypeError(f"`dtype` must be float32 or float64, got {np.dtype(dtype).name}.")
    return np.dtype(dtype)


# Rows that tell an array from another one: those of blocks spread over it.
_NUM_BLOCKS, _BLOCK_ROWS = 16, 16


class _ArrayRows(AbstractRows):
    error_of_other_data = ValueError

    def __init__(self, X: np.ndarray, y: np.ndarray | None, dtype: np.dtype) -> None:
        self.arrays = {"X": X} if y is None else {"X": X, "y": y}
        self.dtype = dtype
        for name, array in self.arrays.items():
            checks.instance(name, array, np.ndarray, "an array of NumPy, such as a memory map")
            if array.dtype.kind not in "biuf":
                raise TypeError(f"`{name}` must hold real numbers, got {array.dtype}.")
            checks.not_masked(name, array)
        if X.ndim != 2 or 0 in X.shape:
            raise ValueError(f"`X` must have shape (n, d), with at least one row, got {X.shape}.")
        if y is not None and y.shape[:1] != X.shape[:1]:
            raise ValueError(
                f"`y` must have the {len(X)} rows of `X` as its leading axis, got shape {y.shape}."
            )
        self.num_rows = len(X)
        self.fingerprint = self._checksum()
        self._statuses = {name: _status(array) for name, array in self.arrays.items()}

    def _checksum(self) -> int:
        starts = np.linspace(0, max(self.num_rows - _BLOCK_ROWS, 0), _NUM_BLOCKS, dtype=np.int64)
        described = [(array.shape, array.dtype.str) for array in self.arrays.values()]
        checksum = zlib.crc32(repr((described, self.dtype)).encode())
        for array in self.arrays.values():
            for start in starts.tolist():
                checksum = zlib.crc32(array[start : start + _BLOCK_ROWS].tobytes(), checksum)
        return checksum

    def read(self, pieces: Pieces) -> Batch:
        found = []
        for name, array in self.arrays.items():
            with np.errstate(over="ignore"):  # what becomes infinite is refused
                parts = [array[start:stop].astype(self.dtype) for start, stop in pieces]
            _finite(name, parts, pieces)
            found.append(np.concatenate(parts))
            if name == "X" and not self.has_read:
                self.warn_of_first(np.concatenate([array[a:b] for a, b in pieces]), found[0])
            if _is_another(_status(array), self._statuses[name]):
                raise OSError(
                    f"the file `{array.filename}` of `{name}` has changed since the stream was "  # type: ignore[attr-defined]
                    "made: rows of two arrays would be mixed. Load it again and make the stream "
                    "again, and write new data under another name."
                )
            _give_back(array)
        return tuple(found) if len(found) > 1 else found[0]


def _finite(name: str, parts: list[np.ndarray], pieces: Pieces) -> None:
    for part, (start, _) in zip(parts, pieces, strict=True):
        if not (good := np.isfinite(part)).all():
            row, *column = np.argwhere(~good)[0]
            where = f", column {column[0]}" if column else ""
            raise ValueError(
                f"`{name}` must be finite, got {part[(row, *column)]} in row {start + row}{where}: "
                "drop those rows, or fill them in."
            )


def _status(array: np.ndarray) -> os.stat_result | None:
    """That of the file of a memory map which is only read, if it is there."""
    if not isinstance(array, np.memmap) or array.mode != "r" or array.filename is None:
        return None
    try:
        return os.stat(array.filename)
    except OSError:
        return None


def _is_another(now: os.stat_result | None, before: os.stat_result | None) -> bool:
    """Whether a file was written to; a new one in its place leaves a map what it was."""
    if now is None or before is None or not os.path.samestat(now, before):
        return False
    return (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)


def _give_back(array: np.ndarray) -> None:
    """Let go of the pages of a memory map, which would count as memory of the process."""
    if not isinstance(array, np.memmap) or array.mode != "r":
        return
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
