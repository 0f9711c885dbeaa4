"""The random order of rows, for which only a few contiguous pieces are read at a time."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from numpyro_scalegp.core import checks

Pieces = list[tuple[int, int]]


class Order(NamedTuple):
    """The order of rows: every row once per epoch, in windows with a piece of each range.

    The n rows are divided into R contiguous ranges of n / R rows. In each epoch every range is read
    once, cyclically from a random start, in W equal pieces. Window w consists of the w-th piece of
    each range, R pieces in all, and is shuffled. Batches are cut from consecutive windows, across
    windows and epochs.

    The mean of g(row) over a window differs from its mean over all rows by at most V / R, with V
    the total variation of g along the data: for data sorted by g, the range of g / R.
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
        """An order, with its arguments checked."""
        # With more ranges than rows in a window some windows would be empty.
        max_ranges = min(num_rows, checks.count("window", window))
        return cls(
            num_rows,
            checks.count("batch_size", batch_size),
            window,
            min(checks.count("num_ranges", num_ranges), max_ranges),
            checks.count("seed", seed, 0),
        )

    @property
    def num_windows(self) -> int:
        """Number of windows in an epoch, each of at most `window` rows up to rounding."""
        return -(-self.num_rows // self.window)

    def pieces(self, index: int) -> Pieces:
        """The rows of window `index`, counted across epochs, as pairs (start, stop)."""
        epoch, place = divmod(index, self.num_windows)
        edges = np.arange(self.num_ranges + 1) * self.num_rows // self.num_ranges
        sizes = np.diff(edges)
        first = self._generator(epoch, 0).integers(0, sizes)
        # Staggered, so that not all ranges round down in the same window.
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
        """The permutation of the rows of window `index`."""
        epoch, place = divmod(index, self.num_windows)
        return self._generator(epoch, place + 1).permutation(size)

    def _generator(self, *position: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, *position])))
