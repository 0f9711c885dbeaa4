"""The order of rows: each once per epoch, and equal parts of all ranges in each window."""

import numpy as np
import pytest

from numpyro_scalegp.streams.order import Order

SIZES = [(1, 1, 1), (7, 3, 2), (1000, 64, 8), (1003, 100, 16), (1003, 5000, 16), (50, 7, 1000)]


def window(order: Order, index: int) -> np.ndarray:
    rows = np.concatenate([np.arange(*piece) for piece in order.pieces(index)] or [np.arange(0)])
    return rows[order.permutation(index, len(rows))]


@pytest.mark.parametrize(("num_rows", "size", "num_ranges"), SIZES)
def test_each_row_once_an_epoch(num_rows: int, size: int, num_ranges: int) -> None:
    order = Order.checked(num_rows, 2, size, num_ranges, seed=0)
    for epoch in range(3):
        numbers = range(epoch * order.num_windows, (epoch + 1) * order.num_windows)
        windows = [window(order, index) for index in numbers]
        assert all(0 < len(rows) <= size + order.num_ranges for rows in windows)
        np.testing.assert_array_equal(np.sort(np.concatenate(windows)), np.arange(num_rows))


def test_seeds_and_epochs_differ_and_calls_do_not() -> None:
    order = Order.checked(1000, 2, 100, 8, seed=0)
    first = window(order, 0)
    np.testing.assert_array_equal(first, window(order, 0))
    windows = [window(order._replace(seed=1), 0), window(order, order.num_windows)]
    assert all(set(first) != set(rows) for rows in windows)
    assert np.any(np.diff(first) < 0)


@pytest.mark.parametrize("num_ranges", [4, 16])
def test_a_window_is_near_all_rows(num_ranges: int) -> None:
    # Rows in the order of their values: a few contiguous pieces alone would be far off.
    order = Order.checked(100_000, 2, 1000, num_ranges, seed=0)
    means = [window(order, index).mean() / 1e5 for index in range(3 * order.num_windows)]
    off = np.array(means) - 0.5
    assert np.abs(off).max() < 0.5 / num_ranges
    assert np.sqrt(np.mean(off**2)) < 2 * (1 / 12**0.5) / num_ranges**1.5
    without = Order.checked(100_000, 2, 1000, 1, seed=0)
    assert abs(window(without, 0).mean() / 1e5 - 0.5) > 1 / num_ranges


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["batch_size", "window", "num_ranges", "seed"])
def test_counts_are_checked(name: str) -> None:
    good = {"num_rows": 10, "batch_size": 2, "window": 4, "num_ranges": 2, "seed": 0}
    with pytest.raises(ValueError, match=rf"`{name}` must be at least"):
        Order.checked(**{**good, name: -1})
    with pytest.raises(TypeError, match=rf"`{name}` must be an integer"):
        Order.checked(**{**good, name: 1.5})
