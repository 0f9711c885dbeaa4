"""Iterators of grain that know their data and stay where they were when a call fails."""

import functools
from typing import TYPE_CHECKING, Any

from numpyro_scalegp.streams.extra import imported

if TYPE_CHECKING:
    from numpyro_scalegp.streams.stream import AbstractRows

_DATA = "data"


def resumable(dataset: Any, rows: "AbstractRows") -> Any:
    """A `grain.IterDataset` of the same elements, whose states hold a fingerprint of the rows."""
    return _dataset_class()(dataset, rows)


@functools.cache
def _dataset_class() -> Any:
    grain = imported("grain")
    Dataset: Any = grain.IterDataset
    Iterator: Any = grain.DatasetIterator

    class ResumableIterDataset(Dataset):
        def __init__(self, parent: Any, rows: "AbstractRows") -> None:
            super().__init__(parent)
            self.rows = rows

        def __iter__(self) -> Any:
            return ResumableIterator(iter(self._parent), self.rows)

    class ResumableIterator(Iterator):
        def __init__(self, parent: Any, rows: "AbstractRows") -> None:
            super().__init__(parent)
            self.rows = rows

        def __next__(self) -> Any:
            before = self._parent.get_state()
            try:
                return next(self._parent)
            except BaseException:
                # Or rows that were read before it failed would be left out.
                self._parent.set_state(before)
                raise

        def get_state(self) -> dict[str, Any]:
            return {"parent": self._parent.get_state(), _DATA: self.rows.fingerprint}

        def set_state(self, state: dict[str, Any]) -> None:
            self.rows.check_fingerprint(state.get(_DATA), "the state")
            self._parent.set_state(state["parent"])

    return ResumableIterDataset
