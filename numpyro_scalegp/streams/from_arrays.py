"""Streams from NumPy arrays, such as memory maps."""

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
    """Mini-batches from NumPy arrays, such as memory maps by `numpy.load(file, mmap_mode="r")`.

    The pages of a memory map are released after each window.

    Args:
        X: inputs, shape (n, d), integers or floating-point numbers.
        y: targets, shape (n,) or (n, p); None for inputs alone.
        batch_size: number of rows in a batch.
        seed: seed of the random order.
        window: approximate number of rows that are shuffled together; more than a batch.
        num_ranges: number of contiguous ranges of the data from which each window is read.
        dtype: dtype of the batches, float32 or float64. A warning is given if rounding makes
            different rows of X equal, such as times in seconds since 1970.

    Returns:
        An infinite stream of batches (X, y) of shapes (batch_size, d) and (batch_size,) or
        (batch_size, p), with every row once per epoch; see `sgp.streams.parquet` for the order. It
        needs the memory of about three windows.

    Raises:
        TypeError: if an array does not hold real numbers.
        ValueError: if the shapes of X and y do not match, there are no rows, or a masked array has
            masked entries; when the stream is read, if an entry is NaN, infinite or too large for
            `dtype`, or a state or checkpoint was made with other arrays.
        OSError: when the stream is read, if the file of a memory map of mode "r" has changed.
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
    """`dtype` as a NumPy dtype, if batches may have it."""
    if np.dtype(dtype).name not in ("float32", "float64"):
        raise TypeError(f"`dtype` must be float32 or float64, got {np.dtype(dtype).name}.")
    return np.dtype(dtype)


# Blocks of rows, spread evenly over an array, from which its checksum is computed.
_NUM_BLOCKS, _BLOCK_ROWS = 16, 16


class _ArrayRows(AbstractRows):
    error_of_other_data = ValueError

    def __init__(self, X: np.ndarray, y: np.ndarray | None, dtype: np.dtype) -> None:
        self.arrays = {"X": X} if y is None else {"X": X, "y": y}
        self.dtype = dtype
        for name, array in self.arrays.items():
            checks.instance(name, array, np.ndarray, "a NumPy array, such as a memory map")
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
        shapes = [(array.shape, array.dtype.str) for array in self.arrays.values()]
        checksum = zlib.crc32(repr((shapes, self.dtype)).encode())
        for array in self.arrays.values():
            for start in starts.tolist():
                checksum = zlib.crc32(array[start : start + _BLOCK_ROWS].tobytes(), checksum)
        return checksum

    def read(self, pieces: Pieces) -> Batch:
        columns = []
        for name, array in self.arrays.items():
            with np.errstate(over="ignore"):  # infinite values raise an error below
                parts = [array[start:stop].astype(self.dtype) for start, stop in pieces]
            _require_finite(name, parts, pieces)
            columns.append(np.concatenate(parts))
            if name == "X" and not self.has_read:
                self.warn_of_first(np.concatenate([array[a:b] for a, b in pieces]), columns[0])
            if _has_changed(_status(array), self._statuses[name]):
                raise OSError(
                    f"the file `{array.filename}` of `{name}` has changed since the stream was "  # type: ignore[attr-defined]
                    "made: rows of two arrays would be mixed. Load it again and make the stream "
                    "again, and write new data under another name."
                )
            _release_pages(array)
        return tuple(columns) if len(columns) > 1 else columns[0]


def _require_finite(name: str, parts: list[np.ndarray], pieces: Pieces) -> None:
    for values, (start, _) in zip(parts, pieces, strict=True):
        if not (is_finite := np.isfinite(values)).all():
            row, *column = np.argwhere(~is_finite)[0]
            where = f", column {column[0]}" if column else ""
            raise ValueError(
                f"`{name}` must be finite, got {values[(row, *column)]} in row {start + row}"
                f"{where}: drop those rows, or fill them in."
            )


def _status(array: np.ndarray) -> os.stat_result | None:
    """The status of the file of a read-only memory map; None if there is no such file."""
    if not isinstance(array, np.memmap) or array.mode != "r" or array.filename is None:
        return None
    try:
        return os.stat(array.filename)
    except OSError:
        return None


def _has_changed(now: os.stat_result | None, before: os.stat_result | None) -> bool:
    """Whether a file was written to. Replacing the file does not change the memory map."""
    if now is None or before is None or not os.path.samestat(now, before):
        return False
    return (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)


def _release_pages(array: np.ndarray) -> None:
    """Release the pages of a memory map, which otherwise count as memory of the process."""
    if not isinstance(array, np.memmap) or array.mode != "r":
        return
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
