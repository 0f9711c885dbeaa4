"""Infinite streams of mini-batches that can be resumed."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

from numpyro_scalegp.core import checks, precision
from numpyro_scalegp.streams.extra import imported
from numpyro_scalegp.streams.order import Order, Pieces

Batch = Any  # (X, y), or X alone

_DATA = "data"  # the key of the fingerprint in the state of an iterator of grain


class AbstractRows(abc.ABC):
    """Data whose rows can be read by their numbers."""

    num_rows: int
    fingerprint: int  # a checksum of the data
    has_read: bool = False
    error_of_other_data: ClassVar[type[Exception]]

    def warn_of_first(self, original: np.ndarray, X: np.ndarray) -> None:
        """Warn if rounding has made different inputs equal, in the first rows that are read."""
        remedy = 'Read them with `dtype="float64"`, and subtract an origin near the data in a `map`'
        precision.warn_of_merged_rows("X", original, X, remedy)
        self.has_read = True

    def check_fingerprint(self, fingerprint: Any, source: str) -> None:
        """Raise if a state was made with other data.

        Args:
            fingerprint: the fingerprint in the state.
            source: a description of the state, such as "the state".

        Raises:
            OSError: for data in files, if the fingerprints differ.
            ValueError: for arrays, if the fingerprints differ.
        """
        if fingerprint != self.fingerprint:
            raise self.error_of_other_data(
                f"{source} belongs to another stream: it was made with other files, columns or "
                "values, or these have changed since. Make the stream from the unchanged data, or "
                "start again without it."
            )

    @abc.abstractmethod
    def read(self, pieces: Pieces) -> Batch:
        """Read the rows of the pieces, concatenated: (X, y), or X alone.

        Raises:
            ValueError: if a value is missing or not finite.
        """


@dataclasses.dataclass(frozen=True)
class Stream:
    """An infinite stream of batches (X, y) in NumPy, or of X alone without a target.

    Made by `sgp.streams.parquet` and `sgp.streams.arrays`. Each `iter(stream)` begins at the first
    batch. The iterator is a grain iterator: `get_state()` returns a dict of integers, and
    `set_state(state)` resumes from it with the same batches, if the data and the stream's arguments
    are the same; a state from other data raises an error. A call that fails or is interrupted
    leaves the state unchanged. A thread reads one window ahead; `close()` ends it.
    """

    rows: AbstractRows
    order: Order
    functions: tuple[Callable[..., Batch], ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of rows of the data, the `size` of the model's plate."""
        return self.rows.num_rows

    @property
    def batch_size(self) -> int:
        """Number of rows in each batch."""
        return self.order.batch_size

    def map(self, function: Callable[..., Batch]) -> "Stream":
        """A stream with a function applied to each batch, in NumPy.

        Args:
            function: a function from the arrays of a batch to arrays with the same number of rows,
                such as `lambda X, y: (X / scale, y)`. `predict` also applies it, to chunks of
                another size and without y if the stream has no target: `lambda X, y=None: ...`
                covers both cases.
        """
        checks.function("function", function)
        return dataclasses.replace(self, functions=(*self.functions, function))

    @property
    def dataset(self) -> Any:
        """The `grain.IterDataset` of the batches, for further transformations by grain."""
        return resumable(self.batches, self.rows)

    @property
    def batches(self) -> Any:
        """The dataset, without the check that a state belongs to these data."""
        grain = imported("grain")
        windows = grain.MapDataset.range(self.order.num_windows).repeat()
        windows = windows.map_with_index(self._window).to_iter_dataset(_read_ahead(grain))
        batches = imported("grain.experimental").RebatchIterDataset(windows, self.batch_size)
        return batches.map(self.mapped)

    def __iter__(self) -> Any:
        return iter(self.dataset)

    def chunks(self, size: int) -> Any:
        """A `grain.IterDataset` of all rows in the order of the data, `size` rows at a time.

        The last chunk may have fewer rows.
        """
        grain = imported("grain")

        def read(index: int) -> Batch:
            return self.rows.read([(index * size, min(self.num_rows, (index + 1) * size))])

        indices = grain.MapDataset.range(-(-self.num_rows // size))
        return indices.map(read).to_iter_dataset(_read_ahead(grain)).map(self.mapped)

    def _window(self, index: int, _: int) -> Batch:
        """All rows of a window, shuffled."""
        batch = self.rows.read(self.order.pieces(index))
        arrays = parts_of(batch)
        permutation = self.order.permutation(index, len(arrays[0]))
        arrays = tuple(np.take(array, permutation, axis=0) for array in arrays)
        return arrays if isinstance(batch, tuple) else arrays[0]

    def mapped(self, batch: Batch) -> Batch:
        """A batch after the functions of `map`."""
        for function in self.functions:
            batch = _applied(function, batch)
        return batch


def parts_of(batch: Batch) -> tuple[Any, ...]:
    """The arrays of a batch."""
    return batch if isinstance(batch, tuple) else (batch,)


def _applied(function: Callable[..., Batch], batch: Batch) -> Batch:
    """Apply a function of `map` to a batch; it must keep the number of rows."""
    arrays = parts_of(batch)
    mapped = function(*arrays)
    mapped = tuple(mapped) if isinstance(mapped, list) else mapped
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(mapped)]
    if not shapes or any(shape[:1] != arrays[0].shape[:1] for shape in shapes):
        raise ValueError(
            f"a function of `map` must return arrays with the {len(arrays[0])} rows that it is "
            f"given, got shapes {shapes}: leave rows out where the data are written."
        )
    return mapped


def _read_ahead(grain: Any) -> Any:
    # With one thread the readers read a file sequentially; each further window costs memory.
    return grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)


def resumable(dataset: Any, rows: AbstractRows) -> Any:
    """A `grain.IterDataset` of the same elements; its states hold a fingerprint of the rows."""
    return _dataset_class()(dataset, rows)


@functools.cache
def _dataset_class() -> Any:
    grain = imported("grain")
    Dataset: Any = grain.IterDataset
    Iterator: Any = grain.DatasetIterator

    class ResumableIterDataset(Dataset):
        def __init__(self, parent: Any, rows: AbstractRows) -> None:
            super().__init__(parent)
            self.rows = rows

        def __iter__(self) -> Any:
            return ResumableIterator(iter(self._parent), self.rows)

    class ResumableIterator(Iterator):
        def __init__(self, parent: Any, rows: AbstractRows) -> None:
            super().__init__(parent)
            self.rows = rows

        def __next__(self) -> Any:
            state = self._parent.get_state()
            try:
                return next(self._parent)
            except BaseException:
                # Otherwise rows that were read before the failure would be skipped.
                self._parent.set_state(state)
                raise

        def get_state(self) -> dict[str, Any]:
            return {"parent": self._parent.get_state(), _DATA: self.rows.fingerprint}

        def set_state(self, state: dict[str, Any]) -> None:
            self.rows.check_fingerprint(state.get(_DATA), "the state")
            self._parent.set_state(state["parent"])

    return ResumableIterDataset
