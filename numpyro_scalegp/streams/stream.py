"""Mini-batches without end, in an order that can be resumed."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

from numpyro_scalegp.core import checks, precision
from numpyro_scalegp.streams.extra import imported
from numpyro_scalegp.streams.order import Order, Pieces
from numpyro_scalegp.streams.resumable import resumable

Batch = Any  # (X, y), or X alone


class AbstractRows(abc.ABC):
    """Rows that are read by their numbers."""

    num_rows: int
    fingerprint: int  # a checksum that tells data from other data
    has_read: bool = False
    error_of_other_data: ClassVar[type[Exception]]

    def warn_of_first(self, given: np.ndarray, X: np.ndarray) -> None:
        """Warn if inputs of the first rows that are read have lost digits in which they differ."""
        remedy = 'Read them with `dtype="float64"`, and subtract an origin near the data in a `map`'
        precision.warn_of_merged_rows("X", given, X, remedy)
        self.has_read = True

    def check_fingerprint(self, fingerprint: Any, source: str) -> None:
        """Raise if a state was made with other data.

        Args:
            fingerprint: that of the state's data.
            source: what has the state, such as "the state".

        Raises:
            OSError: of data in files.
            ValueError: of arrays.
        """
        if fingerprint != self.fingerprint:
            raise self.error_of_other_data(
                f"{source} belongs to another stream: it was made with other files, columns or "
                "values, or these have changed since. Make the stream of the data as they were, or "
                "begin again without it."
            )

    @abc.abstractmethod
    def read(self, pieces: Pieces) -> Batch:
        """The rows of the pieces, one piece after another: (X, y), or X alone.

        Raises:
            ValueError: if a value is missing or not finite.
        """


@dataclasses.dataclass(frozen=True)
class Stream:
    """Batches (X, y) of rows, in NumPy, without end; X alone where there is no target.

    Made by `sgp.streams.parquet` and `sgp.streams.arrays`. Each `iter(stream)` begins at the first
    batch. It is an iterator of grain, with `get_state()`, a dict of integers, `set_state(state)`
    and `close()`: with the same data, arguments and state the same batches follow, and other data
    are refused. A call that fails or is interrupted leaves the state as it was. A thread reads
    ahead by one window.
    """

    rows: AbstractRows
    order: Order
    functions: tuple[Callable[..., Batch], ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the data, the `size` of the model's plate."""
        return self.rows.num_rows

    @property
    def batch_size(self) -> int:
        """Rows of each batch."""
        return self.order.batch_size

    def map(self, function: Callable[..., Batch]) -> "Stream":
        """A stream with a function applied to each batch, in NumPy.

        Args:
            function: from the arrays of a batch, as in `lambda X, y: (X / scale, y)`, to those of
                another, with as many rows. `predict` applies it as well, to other numbers of rows,
                and without y where the stream has no target: `lambda X, y=None: ...` is for both.
        """
        checks.function("function", function)
        return dataclasses.replace(self, functions=(*self.functions, function))

    @property
    def dataset(self) -> Any:
        """The `grain.IterDataset` of the batches, for further transformations by grain."""
        return resumable(self.batches, self.rows)

    @property
    def batches(self) -> Any:
        """The same, with states that any data take."""
        grain = imported("grain")
        windows = grain.MapDataset.range(self.order.num_windows).repeat()
        windows = windows.map_with_index(self._window).to_iter_dataset(_read_ahead(grain))
        batches = imported("grain.experimental").RebatchIterDataset(windows, self.batch_size)
        return batches.map(self.mapped)

    def __iter__(self) -> Any:
        return iter(self.dataset)

    def chunks(self, size: int) -> Any:
        """A `grain.IterDataset` of all rows once, in the order of the data, `size` at a time.

        The last chunk may have fewer rows.
        """
        grain = imported("grain")

        def read(index: int) -> Batch:
            return self.rows.read([(index * size, min(self.num_rows, (index + 1) * size))])

        numbers = grain.MapDataset.range(-(-self.num_rows // size))
        return numbers.map(read).to_iter_dataset(_read_ahead(grain)).map(self.mapped)

    def _window(self, index: int, _: int) -> Batch:
        """All rows of a window, shuffled."""
        batch = self.rows.read(self.order.pieces(index))
        parts = parts_of(batch)
        shuffled = self.order.permutation(index, len(parts[0]))
        parts = tuple(np.take(part, shuffled, axis=0) for part in parts)
        return parts if isinstance(batch, tuple) else parts[0]

    def mapped(self, batch: Batch) -> Batch:
        """A batch as it is read, after the stream's functions."""
        for function in self.functions:
            batch = _applied(function, batch)
        return batch


def parts_of(batch: Batch) -> tuple[Any, ...]:
    """The arrays of a batch."""
    return batch if isinstance(batch, tuple) else (batch,)


def _applied(function: Callable[..., Batch], batch: Batch) -> Batch:
    """What a function makes of a batch, in which the rows must stay."""
    parts = parts_of(batch)
    found = function(*parts)
    found = tuple(found) if isinstance(found, list) else found
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(found)]
    if not shapes or any(shape[:1] != parts[0].shape[:1] for shape in shapes):
        raise ValueError(
            f"a function of `map` must return arrays with the {len(parts[0])} rows that it is "
            f"given, got shapes {shapes}: leave rows out where the data are written."
        )
    return found


def _read_ahead(grain: Any) -> Any:
    # One thread keeps the readers of a file going where they are; a window more costs memory.
    return grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
