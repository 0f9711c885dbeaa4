"""Streams from Parquet files."""

import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from numpyro_scalegp.core import checks
from numpyro_scalegp.streams.extra import imported
from numpyro_scalegp.streams.from_arrays import checked_dtype
from numpyro_scalegp.streams.order import Order, Pieces
from numpyro_scalegp.streams.stream import AbstractRows, Batch, Stream

# Bytes of a column that an open reader fetches from its file at a time.
_BUFFER_SIZE = 2**17
# Rows that an open reader decodes at a time.
_READ_ROWS = 2**13
# Pieces of a file, spread evenly over it, from which a checksum is computed besides its footer's.
_NUM_PIECES, _PIECE_SIZE = 8, 2**12

File = str | os.PathLike[str]


def parquet(
    files: File | Sequence[File],
    *,
    inputs: Sequence[str],
    target: str | Sequence[str] | None = None,
    batch_size: int,
    seed: int,
    window: int = 2**18,
    num_ranges: int = 16,
    dtype: Any = np.float32,
) -> Stream:
    """Mini-batches from columns of Parquet files that need not fit in memory.

    Every row occurs once per epoch, in a different random order in each epoch. The n rows are
    divided into `num_ranges` contiguous ranges. Each range is read cyclically from a random start.
    A window consists of an equal piece of every range and is shuffled. Batches are cut from
    consecutive windows, across epochs, so that all have the same shape. If the files are sorted by
    a column, the mean of that column over a window differs from its overall mean by at most its
    range / `num_ranges`, and typically by that bound / sqrt(12 `num_ranges`).

    Args:
        files: one file, or several with the same columns, whose rows follow one another, such as
            `sorted(Path("folder").glob("*.parquet"))`.
        inputs: names of the columns of X, in that order, which hold numbers or Booleans.
        target: name of the column of y, or names for a matrix y; None for inputs alone.
        batch_size: number of rows in a batch.
        seed: seed of the random order.
        window: approximate number of rows that are shuffled together; more than a batch.
        num_ranges: number of contiguous ranges of the data from which each window is read.
        dtype: dtype of the batches, float32 or float64. A warning is given if rounding makes
            different rows of X equal, such as times in seconds since 1970.

    Returns:
        An infinite stream of batches (X, y) of shapes (batch_size, d) and (batch_size,) or
        (batch_size, p). Memory: about three windows, and a Parquet reader for each range and
        column, of at most 3 MiB each for files by most writers: 0.4 GiB for 16 ranges of 9 columns.
        Each row is decoded once per epoch. At the start of an epoch, and when a stream resumes,
        each range also decodes the rows between the beginning of its first row group and its start.

    Raises:
        FileNotFoundError: if a file does not exist.
        TypeError: if a column does not hold real numbers.
        ValueError: if a file is not a Parquet file, lacks a column or has several columns of the
            same name, or there are no rows; when the stream is read, if a value is missing, NaN,
            infinite or too large for `dtype`; the message names its column.
        OSError: when the stream is read, if a file is damaged or has changed since the stream was
            made, judged by its size and time of change and, when it is opened, its footer; also if
            a state or checkpoint was made with other files.
        ImportError: if grain or pyarrow is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> import pyarrow as pa
        >>> import pyarrow.parquet as pq
        >>> import numpyro_scalegp as sgp
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "rows.parquet"
        >>> pq.write_table(pa.table({"x": [1.0, 2.0, 3.0], "y": [0.0, 1.0, 0.0]}), file)
        >>> stream = sgp.streams.parquet(file, inputs=["x"], target="y", batch_size=2, seed=0)
        >>> X, y = next(iter(stream))
        >>> X.shape, y.shape, stream.num_rows
        ((2, 1), (2,), 3)
    """
    imported("grain")
    paths = [files] if isinstance(files, str | os.PathLike) else _listed("files", files, "paths")
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(f"`files` must be a path or a list of paths, got {paths}.")
    if not paths:
        raise ValueError("`files` must name at least one file, got none.")
    arrays: list[str | list[str]] = [_names("inputs", inputs)]
    if target is not None:
        arrays.append(target if isinstance(target, str) else _names("target", target))
    rows = ParquetRows(paths, arrays, checked_dtype(dtype))
    return Stream(rows, Order.checked(rows.num_rows, batch_size, window, num_ranges, seed))


def _listed(argument: str, value: Any, of: str) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"`{argument}` must be a list of {of}, got {checks.described(value)}.")
    return list(value)


def _names(argument: str, value: Any) -> list[str]:
    names = _listed(argument, value, "names of columns")
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"`{argument}` must be a list of names of columns, got {names}.")
    if not names:
        raise ValueError(f"`{argument}` must name at least one column, got none.")
    return names


class ParquetFile(NamedTuple):
    """A file as it was when the stream was made."""

    path: str
    metadata: Any
    size: int  # bytes
    time: int  # of the last change, in nanoseconds
    footer: int  # a checksum
    pieces: int  # a checksum of pieces of its content

    @classmethod
    def of(cls, path: str, columns: list[str]) -> "ParquetFile":
        """The file at a path, with its columns checked."""
        status = os.stat(path)
        metadata = _metadata(path, columns)
        starts = np.linspace(0, max(status.st_size - _PIECE_SIZE, 0), _NUM_PIECES, dtype=np.int64)
        pieces = 0
        with open(path, "rb") as file:
            for start in starts.tolist():
                file.seek(start)
                pieces = zlib.crc32(file.read(_PIECE_SIZE), pieces)
        footer = _footer_checksum(path, status.st_size)
        return cls(path, metadata, status.st_size, status.st_mtime_ns, footer, pieces)

    def check(self, *, footer: bool = False) -> None:
        """Raise if the file has changed, by its size, time of change and optionally its footer.

        Raises:
            OSError: if the file has changed or no longer exists.
        """
        status = os.stat(self.path)
        is_same = (status.st_size, status.st_mtime_ns) == (self.size, self.time)
        if not is_same or (footer and _footer_checksum(self.path, self.size) != self.footer):
            raise OSError(
                f"`{self.path}` has changed since the stream was made, when it had {self.size} "
                "bytes: rows of two files would be mixed. Make the stream again, and write new "
                "data under another name."
            )


def _footer_checksum(path: str, size: int) -> int:
    """A checksum of the footer: the schema, offsets and statistics of all columns."""
    with open(path, "rb") as file:
        file.seek(max(size - 8, 0))
        length = int.from_bytes(file.read(4), "little")  # the last bytes are "PAR1"
        file.seek(max(size - 8 - length, 0))
        return zlib.crc32(file.read(length))


class RowGroup(NamedTuple):
    """A row group, which holds the rows `start` to `stop` of the concatenated files."""

    file: ParquetFile
    group: int
    start: int
    stop: int


class ParquetRows(AbstractRows):
    """Columns of Parquet files, read by row numbers.

    A reader stays open at the end of a piece and resumes if a later piece starts there.

    Args:
        paths: the files.
        arrays: for each array of a batch the name of its column, or a list of names for a matrix.
        dtype: dtype of the arrays.
    """

    error_of_other_data = OSError

    def __init__(
        self, paths: Sequence[File], arrays: list[str | list[str]], dtype: np.dtype
    ) -> None:
        self.arrays = arrays
        self.dtype = dtype
        self.columns = [
            name for names in arrays for name in ([names] if isinstance(names, str) else names)
        ]
        self.groups = _row_groups(paths, self.columns)
        # Without paths and times of change: a copy of a file has the same rows.
        contents = [
            (group.start, group.file.size, group.file.footer, group.file.pieces)
            for group in self.groups
        ]
        self.fingerprint = zlib.crc32(repr((contents, self.arrays, self.dtype)).encode())
        self.num_rows = self.groups[-1].stop if self.groups else 0
        if self.num_rows == 0:
            raise ValueError(f"`files` have no rows: {[os.fspath(path) for path in paths]}.")
        self._stops = np.array([group.stop for group in self.groups])
        self._readers: dict[int, _Reader] = {}  # by the row that each reads next
        self._lock = threading.Lock()

    def read(self, pieces: Pieces) -> Batch:
        """Read the rows of the pieces, with open readers where possible."""
        size = sum(stop - start for start, stop in pieces)
        shapes = [() if isinstance(names, str) else (len(names),) for names in self.arrays]
        batch = [np.empty((size, *shape), self.dtype) for shape in shapes]
        is_first = not self.has_read
        if is_first:
            batch[0] = np.empty(batch[0].shape)  # float64, to notice digits that `dtype` loses
        views = _columns_of(batch)
        ends = np.cumsum([stop - start for start, stop in pieces]).tolist()

        def read_piece(piece: tuple[int, int], end: int) -> None:
            start, stop = piece
            self._read_piece(start, stop, [view[end - stop + start : end] for view in views])

        # Decoding releases Python's global lock. Threads matter most at the start of an epoch, when
        # the readers of all ranges skip to their first rows.
        with self._lock, ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as pool:
            list(pool.map(read_piece, pieces, ends))
            # The readers unused for longest belong to ranges that are read to their end.
            for row in list(self._readers)[: -len(pieces)]:
                del self._readers[row]
        X = batch[0]
        with np.errstate(over="ignore"):  # infinite values raise an error below
            batch[0] = X.astype(self.dtype, copy=False)
        self._check(_columns_of(batch), pieces)
        if is_first:
            self.warn_of_first(X, batch[0])
        return tuple(batch) if len(batch) > 1 else batch[0]

    def _read_piece(self, start: int, stop: int, views: list[np.ndarray]) -> None:
        row = start
        while row < stop:
            group = self.groups[int(np.searchsorted(self._stops, row, side="right"))]
            reader = self._readers.pop(row, None) or _Reader(group, self.columns, row - group.start)
            end = min(stop, group.stop)
            reader.read_into([view[row - start : end - start] for view in views])
            group.file.check()  # after reading, to notice a change during it
            if end < group.stop:
                self._readers[end] = reader
            row = end

    def _check(self, views: list[np.ndarray], pieces: Pieces) -> None:
        """Raise, with column, row and file, if a value is missing or not finite."""
        for name, view in zip(self.columns, views, strict=True):
            if np.isfinite(view).all():
                continue
            index = int(np.argmin(np.isfinite(view)))
            row = np.concatenate([np.arange(start, stop) for start, stop in pieces])[index]
            path, first = self._file_of(int(row))
            raise ValueError(
                f"column `{name}` has a missing, NaN or infinite value (as {self.dtype}) in row "
                f"{row - first} of `{path}`: drop those rows, or fill them in."
            )

    def _file_of(self, row: int) -> tuple[str, int]:
        """The file of a row, and the number of the file's first row."""
        path = self.groups[int(np.searchsorted(self._stops, row, side="right"))].file.path
        return path, min(group.start for group in self.groups if group.file.path == path)


def _columns_of(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [column for array in arrays for column in ([array] if array.ndim == 1 else array.T)]


class _Reader:
    """Reads a row group sequentially, a few rows at a time."""

    def __init__(self, group: RowGroup, columns: list[str], skip: int) -> None:
        group.file.check(footer=True)
        self.path = group.file.path
        file = imported("pyarrow.parquet").ParquetFile(
            self.path, metadata=group.file.metadata, buffer_size=_BUFFER_SIZE, pre_buffer=False
        )
        self.columns = columns
        self.batches = file.iter_batches(
            _READ_ROWS, row_groups=[group.group], columns=columns, use_threads=False
        )
        self.unread = self._next()
        while skip >= len(self.unread):
            skip -= len(self.unread)
            self.unread = self._next()
        self.unread = self.unread.slice(skip)

    def _next(self) -> Any:
        try:
            return next(self.batches)
        except (OSError, imported("pyarrow").ArrowException, StopIteration) as error:
            raise OSError(
                f"`{self.path}` cannot be read: it is damaged, or has changed since the stream was "
                f"made ({type(error).__name__}: {error})."
            ) from error

    def read_into(self, views: list[np.ndarray]) -> None:
        """Fill one array per column with the next rows."""
        filled, size = 0, len(views[0])
        while filled < size:
            if len(self.unread) == 0:
                self.unread = self._next()
            rows = self.unread.slice(0, size - filled)
            self.unread = self.unread.slice(len(rows))
            for name, view in zip(self.columns, views, strict=True):
                values = rows.column(name).to_numpy(zero_copy_only=False)
                with np.errstate(over="ignore"):  # infinite values raise an error later
                    view[filled : filled + len(rows)] = values  # a missing Boolean becomes NaN
            filled += len(rows)


def _row_groups(paths: Sequence[File], columns: list[str]) -> list[RowGroup]:
    """All row groups that have rows, with their columns checked."""
    groups, start = [], 0
    for path in [os.fspath(path) for path in paths]:
        file = ParquetFile.of(path, columns)
        for group in range(file.metadata.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            if stop > start:
                groups.append(RowGroup(file, group, start, stop))
            start = stop
    return groups


def _metadata(path: str, columns: list[str]) -> Any:
    pyarrow = imported("pyarrow")
    try:
        with imported("pyarrow.parquet").ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"`{path}` is not a Parquet file, or is damaged: {error}") from error
    duplicates = [name for name in columns if schema.names.count(name) > 1]
    if duplicates:
        raise ValueError(f"`{path}` has several columns of the name {duplicates}: rename them.")
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise ValueError(f"`{path}` has no column {missing}: it has {schema.names}.")
    types = pyarrow.types
    for name in columns:
        kind = schema.field(name).type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            raise TypeError(
                f"column `{name}` of `{path}` must hold real numbers, got {kind}: convert it when "
                "the file is written."
            )
    return metadata
