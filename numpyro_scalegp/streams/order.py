"""The order of rows: a shuffle for which only a few contiguous pieces are read at a time."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from numpyro_scalegp.core import checks

Pieces = list[tuple[int, int]]


class Order(NamedTuple):
    """Every row once an epoch, in windows that take a piece from each part of the data.

    The n rows are cut into R contiguous ranges of n / R rows. In each epoch a range is gone through
    once, from a random row of its own on, cyclically, in W equal steps; window w holds the w-th
    piece of each range, R pieces in all, and is shuffled. Batches are cut from one window after
    another, across windows and epochs.

    The mean of g(row) over a window differs from that over all rows by at most V / R, with V the
    total variation of g along the data: for data sorted by g, its range / R.
    """

    num_rows: int
    batch_size: int
    window: int
    num_ranges: int
    seed: int

    @classmethod
    def checked(
        cls, num_rows: int, batch_size: int, window: int, num_ranges: int, seed: int
    ) -> "Order":
        """An order, of arguments that are checked."""
        # More ranges than rows of a window would leave windows empty.
        most = min(num_rows, checks.count("window", window))
        return cls(
            num_rows,
            checks.count("batch_size", batch_size),
            window,
            min(checks.count("num_ranges", num_ranges), most),
            checks.count("seed", seed, 0),
        )

    @property
    def num_windows(self) -> int:
        """Windows of an epoch, none of which is larger than `window`, but for rounding."""
        return -(-self.num_rows // self.window)

    def pieces(self, index: int) -> Pieces:
        """The rows of a window, counted on from epoch to epoch, as ranges from start to stop."""
        epoch, place = divmod(index, self.num_windows)
        edges = np.arange(self.num_ranges + 1) * self.num_rows // self.num_ranges
        sizes = np.diff(edges)
        first = self._generator(epoch, 0).integers(0, sizes)
        # Not all ranges round down in the same windows.
        rounding = np.arange(self.num_ranges) * self.num_windows // self.num_ranges
        begin = first + (place * sizes + rounding) // self.num_windows
        end = first + ((place + 1) * sizes + rounding) // self.num_windows
        pieces = []
        for edge, size, low, high in zip(edges[:-1], sizes, begin, end, strict=True):
            if low < size:
                pieces.append((edge + low, edge + min(high, size)))
            if high > size:
                pieces.append((edge + max(low - size, 0), edge + high - size))
        return [(int(start), int(stop)) for start, stop in pieces if start < stop]

    def permutation(self, index: int, size: int) -> Int[np.ndarray, " size"]:
        """The shuffle within a window."""
        epoch, place = divmod(index, self.num_windows)
        return self._generator(epoch, place + 1).permutation(size)

    def _generator(self, *position: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, *position])))
