"""Batches from Parquet files and arrays."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numpyro_scalegp as sgp

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("grain")

ROWS = 1000


def table(start: int = 0, stop: int = ROWS, **columns: Any) -> Any:
    number = np.arange(start, stop)
    values = {"b": number / 10, "number": number, "a": np.cos(number), "flag": number % 2 == 0}
    return pa.table({**values, **columns})


def files(folder: Path) -> list[Path]:
    """Three files, one without rows, with row groups of different sizes."""
    cuts = [(0, 617, 100), (617, 617, 100), (617, ROWS, 50)]
    paths = []
    for place, (start, stop, size) in enumerate(cuts):
        paths.append(folder / f"part-{place}.parquet")
        pq.write_table(table(start, stop), paths[-1], row_group_size=size)
    return paths


def parquet(folder: Path, **options: Any) -> sgp.streams.Stream:
    options = {"inputs": ["a", "b"], "target": "number", "batch_size": 32, "seed": 0} | options
    return sgp.streams.parquet(files(folder), **{"window": 256, "num_ranges": 8, **options})


def arrays(folder: Path, **options: Any) -> sgp.streams.Stream:
    number = np.arange(ROWS)
    if not (folder / "X.npy").exists():  # it must not change under a map
        np.save(folder / "X.npy", np.stack([np.cos(number), number / 10], axis=1))
        np.save(folder / "y.npy", number)
    X, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "Xy")
    options = {"batch_size": 32, "seed": 0, "window": 256, "num_ranges": 8, **options}
    return sgp.streams.arrays(X, y, **options)


def taken(stream: Any, num: int) -> tuple[np.ndarray, np.ndarray]:
    iterator = iter(stream)
    batches = [next(iterator) for _ in range(num)]
    iterator.close()
    X, y = zip(*batches, strict=True)
    return np.stack(X), np.stack(y)


@pytest.mark.parametrize("make", [parquet, arrays])
def test_every_row_once_an_epoch_in_batches_of_one_shape(make: Any, tmp_path: Path) -> None:
    stream = make(tmp_path)
    assert (stream.num_rows, stream.batch_size) == (ROWS, 32)
    X, y = taken(stream, 2 * ROWS // 32 + 1)
    assert X.shape[1:] == (32, 2)
    assert X.dtype == y.dtype == np.float32
    np.testing.assert_allclose(X[..., 0], np.cos(y), atol=1e-6)
    np.testing.assert_allclose(X[..., 1], y / 10, rtol=1e-6)
    first, second = y.ravel()[:ROWS], y.ravel()[ROWS : 2 * ROWS]
    for epoch in (first, second):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(ROWS))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(taken(make(tmp_path), 3)[1], y[:3])
    assert not np.array_equal(taken(make(tmp_path, seed=1), 1)[1][0], y[0])


def test_files_and_arrays_have_the_same_order(tmp_path: Path) -> None:
    for a, b in zip(taken(parquet(tmp_path), 40), taken(arrays(tmp_path), 40), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("make", [parquet, arrays])
@pytest.mark.parametrize("done", [0, 1, 8, 31, 33])
def test_a_state_goes_on_with_the_same_batches(make: Any, done: int, tmp_path: Path) -> None:
    iterator = iter(make(tmp_path))
    for _ in range(done):
        next(iterator)
    state = iterator.get_state()
    there = [next(iterator) for _ in range(40)]
    again = iter(make(tmp_path))
    again.set_state(state)
    for batch in there:
        for a, b in zip(batch, next(again), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_file_that_is_sorted_by_the_target_does_not_bias_batches(tmp_path: Path) -> None:
    number = np.arange(20_000) / 20_000
    pq.write_table(pa.table({"x": number, "y": number}), tmp_path / "sorted.parquet")
    stream = sgp.streams.parquet(
        tmp_path / "sorted.parquet", inputs=["x"], target="y", batch_size=500, seed=0, window=2000
    )
    means = taken(stream, 80)[1].mean(axis=1)
    # The standard deviations of a random batch, and of its window.
    allowed = 4 * (1 / 12**0.5) * (1 / 500 + 1 / 16**3) ** 0.5
    assert np.abs(means - 0.5).max() < allowed
    assert abs(number[:500].mean() - 0.5) > 5 * allowed


def test_columns_and_types(tmp_path: Path) -> None:
    X, y = taken(parquet(tmp_path, inputs=["flag"], target=["b", "a"], dtype="float64"), 4)
    assert X.shape[1:] == (32, 1) and y.shape[1:] == (32, 2)
    assert X.dtype == y.dtype == np.float64
    number = np.round(10 * y[..., 0])
    np.testing.assert_array_equal(X[..., 0], number % 2 == 0)
    np.testing.assert_array_equal(y[..., 1], np.cos(number))
    alone = next(iter(parquet(tmp_path, target=None)))
    assert alone.shape == (32, 2)


def test_map_and_chunks(tmp_path: Path) -> None:
    stream = parquet(tmp_path).map(lambda X, y: (2 * X, y - 1)).map(lambda X, y: (X[:, :1], y))
    X, y = next(iter(stream))
    np.testing.assert_allclose(X, 2 * np.cos(y + 1)[:, None], rtol=1e-5, atol=1e-6)
    chunks = [y for _, y in stream.chunks(300)]
    assert [len(chunk) for chunk in chunks] == [300, 300, 300, 100]
    np.testing.assert_array_equal(np.concatenate(chunks), np.arange(ROWS) - 1)
    # A list becomes a tuple; the number of rows must not change.
    assert isinstance(next(iter(stream.map(lambda X, y: [X, y]))), tuple)
    for wrong in (lambda X, y: (X[:5], y[:5]), lambda X, y: None, lambda X, y: (X, y.mean())):
        with pytest.raises(
            ValueError, match="must return arrays with the 32 rows that it is given"
        ):
            next(iter(stream.map(wrong)))


def test_a_memory_map_is_given_back(tmp_path: Path) -> None:
    def resident() -> int:
        mapped, ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                ours = line.endswith("X.npy")
            elif ours and line.startswith("Rss:"):
                mapped += int(line.split()[1])
        return mapped

    if not Path("/proc/self/smaps").exists():
        pytest.skip("this system has no /proc/self/smaps")
    np.save(tmp_path / "X.npy", np.ones((200_000, 8), np.float32))
    X = np.load(tmp_path / "X.npy", mmap_mode="r")
    np.asarray(X).sum()
    assert resident() > 6000  # KiB
    batches = iter(sgp.streams.arrays(X, batch_size=8, seed=0, window=1000))
    next(batches)
    end = time.monotonic() + 10
    while resident() > 2000 and time.monotonic() < end:  # a thread may be reading the next window
        time.sleep(0.01)
    assert resident() < 2000


@pytest.mark.parametrize("bad", [np.nan, np.inf, None, 1e300])
def test_a_bad_value_is_named(bad: Any, tmp_path: Path) -> None:
    b = list(np.ones(617)) + [bad if i == 5 else 1.0 for i in range(ROWS - 617)]
    parts = files(tmp_path)
    pq.write_table(table(617, ROWS, b=pa.array(b[617:], pa.float64())), parts[-1])
    stream = sgp.streams.parquet(parts, inputs=["a", "b"], batch_size=ROWS, seed=0)
    expected = r"column `b` has a missing, NaN or infinite value .* in row 5 of `.*part-2.parquet`"
    with pytest.raises(ValueError, match=expected):
        next(iter(stream))
    # A column that is not asked for may have gaps.
    next(iter(sgp.streams.parquet(parts, inputs=["a"], batch_size=ROWS, seed=0)))


def test_missing_integers_and_flags_are_named(tmp_path: Path) -> None:
    file = tmp_path / "gaps.parquet"
    pq.write_table(pa.table({"n": [1, None, 3], "flag": [True, False, None]}), file)
    for name, row in {"n": 1, "flag": 2}.items():
        with pytest.raises(ValueError, match=rf"column `{name}` has a missing.*row {row} of"):
            next(iter(sgp.streams.parquet(file, inputs=[name], batch_size=2, seed=0)))


def test_arrays_with_a_bad_value() -> None:
    X, y = np.ones((20, 3)), np.ones(20)
    X[7, 2] = np.nan
    with pytest.raises(ValueError, match="`X` must be finite, got nan in row 7, column 2"):
        next(iter(sgp.streams.arrays(X, y, batch_size=20, seed=0, num_ranges=2)))
    y[3] = np.inf
    with pytest.raises(ValueError, match="`y` must be finite, got inf in row 3:"):
        next(iter(sgp.streams.arrays(np.ones((20, 3)), y, batch_size=20, seed=0)))


def test_digits_that_a_type_loses_are_warned_of(tmp_path: Path) -> None:
    seconds = 1_400_000_000 + np.arange(200)
    pq.write_table(pa.table({"seconds": seconds}), tmp_path / "times.parquet")
    options: dict[str, Any] = {"batch_size": 200, "seed": 0}
    for make in (
        lambda **more: sgp.streams.parquet(
            tmp_path / "times.parquet", inputs=["seconds"], **options, **more
        ),
        lambda **more: sgp.streams.arrays(seconds[:, None], **options, **more),
    ):
        with pytest.warns(
            RuntimeWarning, match=r"of which 3 are left in float32.*`dtype=\"float64"
        ):
            next(iter(make()))
        exact = make(dtype="float64").map(lambda X: (X - 1_400_000_000).astype(np.float32))
        assert len(np.unique(next(iter(exact)))) == 200


def test_bad_files(tmp_path: Path) -> None:
    def stream(file: Any, **options: Any) -> Any:
        options = {"inputs": ["a"], "batch_size": 2, "seed": 0, **options}
        return sgp.streams.parquet(file, **options)

    good = files(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no\.parquet"):
        stream(tmp_path / "no.parquet")
    (tmp_path / "text.parquet").write_text("not a table")
    with pytest.raises(ValueError, match=r"text.parquet` is not a Parquet file"):
        stream(tmp_path / "text.parquet")
    with pytest.raises(ValueError, match=r"part-0.parquet` has no column \['c'\]: it has \['b'"):
        stream(good, target="c")
    with pytest.raises(ValueError, match=r"`files` have no rows: \['.*part-1"):
        stream(good[1])
    with pytest.raises(ValueError, match="`files` must name at least one file"):
        stream([])
    pq.write_table(pa.table({"a": ["x", "y"]}), tmp_path / "words.parquet")
    with pytest.raises(TypeError, match=r"column `a` of `.*words.parquet` must hold real numbers"):
        stream(tmp_path / "words.parquet")
    with pytest.raises(TypeError, match="`dtype` must be float32 or float64, got float16"):
        stream(good, dtype="float16")
    with pytest.raises(ValueError, match="`inputs` must name at least one column"):
        stream(good, inputs=[])
    twice = pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["a", "a"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice.parquet` has several columns of the name \['a'\]"):
        stream(tmp_path / "twice.parquet")
    data = bytearray(good[2].read_bytes())
    data[100:300] = bytes(200)
    good[2].write_bytes(data)
    with pytest.raises(OSError, match=r"part-2.parquet` cannot be read: it is damaged, or has"):
        next(iter(stream(good, inputs=["b"], batch_size=ROWS)))


def rewritten(file: Path, seed: int, num_rows: int = ROWS, **options: Any) -> Path:
    """A file of `num_rows` rows in random order, with the same size for every seed."""
    number = np.random.default_rng(seed).permutation(num_rows).astype(float)
    options = {"row_group_size": 50, "compression": None, "use_dictionary": False, **options}
    pq.write_table(pa.table({"a": np.sin(number), "y": number}), file, **options)
    return file


def of_file(file: Path, **options: Any) -> sgp.streams.Stream:
    options = {"inputs": ["a"], "target": "y", "batch_size": 50, "seed": 0, **options}
    return sgp.streams.parquet(file, window=200, **options)


CHANGED = r"rows.parquet` has changed since the stream was made"


@pytest.mark.parametrize("num_taken", [0, 1, 7])
@pytest.mark.parametrize("write_statistics", [True, False])
def test_a_file_that_is_rewritten_under_a_stream(
    num_taken: int, write_statistics: bool, tmp_path: Path
) -> None:
    file = rewritten(tmp_path / "rows.parquet", 0, write_statistics=write_statistics)
    stream = of_file(file)
    iterator = iter(stream)
    rows = [next(iterator)[1] for _ in range(num_taken)]
    rewritten(file, 1, write_statistics=write_statistics)
    with pytest.raises(OSError, match=CHANGED):
        for _ in range(num_taken, 20):
            rows.append(next(iterator)[1])
    # Rows of one file alone, and none of them twice.
    assert len(np.unique(rows)) == np.size(rows)
    with pytest.raises(OSError, match=CHANGED):
        next(iter(stream.chunks(100)))
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"rows.parquet"):
        next(iterator)


def test_a_footer_tells_files_of_one_size_and_time(tmp_path: Path) -> None:
    file = rewritten(tmp_path / "rows.parquet", 0)
    stream, status = of_file(file), file.stat()
    rewritten(file, 1)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    with pytest.raises(OSError, match=CHANGED):
        next(iter(stream))


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    file = rewritten(tmp_path / "rows.parquet", 0, write_statistics=False)
    state = iter(of_file(file)).get_state()
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(file.read_bytes())
    iter(of_file(copy)).set_state(state)
    other_streams = [lambda: of_file(copy, target=None), lambda: of_file(copy, dtype="float64")]
    for make in (*other_streams, lambda: of_file(rewritten(file, 1, write_statistics=False))):
        iterator = iter(make().dataset.map(lambda batch: batch))
        with pytest.raises(OSError, match="the state belongs to another stream"):
            iterator.set_state(state)
    X = np.arange(20.0)[:, None]
    state = iter(sgp.streams.arrays(X, batch_size=2, seed=0)).get_state()
    with pytest.raises(ValueError, match="the state belongs to another stream: it was made with"):
        iter(sgp.streams.arrays(X + 1, batch_size=2, seed=0)).set_state(state)


def test_a_memory_map_whose_file_is_written_to(tmp_path: Path) -> None:
    file = tmp_path / "X.npy"
    np.save(file, np.ones((ROWS, 2)))
    X = np.load(file, mmap_mode="r")
    stream = sgp.streams.arrays(X, batch_size=8, seed=0)
    np.save(tmp_path / "new.npy", np.zeros((ROWS, 2)))
    os.replace(tmp_path / "new.npy", file)  # which does not change the map
    assert next(iter(stream)).min() == 1
    stream = sgp.streams.arrays(np.load(file, mmap_mode="r"), batch_size=8, seed=0)
    np.load(file, mmap_mode="r+")[:] = 2
    os.utime(file)
    with pytest.raises(OSError, match=r"X.npy` of `X` has changed since the stream was made"):
        next(iter(stream))


@pytest.mark.parametrize("make", [parquet, arrays])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_call_that_fails_leaves_the_state(make: Any, error: Any, tmp_path: Path) -> None:
    failures = {3, 4, 20}
    calls = 0

    def fail_at_times(X: np.ndarray, y: np.ndarray) -> Any:
        nonlocal calls
        calls += 1
        if calls in failures:
            raise error
        return X, y

    iterator = iter(make(tmp_path).map(fail_at_times))
    rows: list[np.ndarray] = []
    while len(rows) < 30:
        state = iterator.get_state()
        try:
            rows.append(next(iterator)[1])
        except error:
            assert iterator.get_state() == state
    assert calls == 33
    np.testing.assert_array_equal(rows, taken(make(tmp_path), 30)[1])


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="`inputs` must be a list of names"):
        parquet(tmp_path, inputs="a")
    assert next(iter(parquet(tmp_path, inputs=iter("ab"))))[0].shape == (32, 2)
    for wrong in (3, ["a", 3]):
        with pytest.raises(TypeError, match="`target` must be a list of names of columns, got"):
            parquet(tmp_path, target=wrong)
    for wrong in (3, b"a.parquet", [3]):
        with pytest.raises(TypeError, match=r"`files` must be a .*list of paths, got"):
            sgp.streams.parquet(wrong, inputs=["a"], batch_size=2, seed=0)
    with pytest.raises(ValueError, match="`y` has masked entries"):
        y = np.ma.masked_array(np.ones(3), [False, True, False])
        sgp.streams.arrays(np.ones((3, 1)), y, batch_size=2, seed=0)
    with pytest.raises(ValueError, match=r"`X` must have shape \(n, d\)"):
        sgp.streams.arrays(np.ones(3), batch_size=2, seed=0)
    with pytest.raises(ValueError, match="at least one row, got"):
        sgp.streams.arrays(np.ones((0, 2)), batch_size=2, seed=0)
    with pytest.raises(ValueError, match="`y` must have the 3 rows of `X`"):
        sgp.streams.arrays(np.ones((3, 1)), np.ones(2), batch_size=2, seed=0)
    with pytest.raises(TypeError, match="`X` must hold real numbers, got <U1"):
        sgp.streams.arrays(np.full((3, 1), "a"), batch_size=2, seed=0)
    with pytest.raises(TypeError, match="`X` must be a NumPy array"):
        sgp.streams.arrays([[1.0]], batch_size=2, seed=0)
    with pytest.raises(TypeError, match="`function` must be callable"):
        arrays(tmp_path).map(3)


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = files(tmp_path)
    for package, module in {"grain": "grain", "pyarrow": "pyarrow.parquet"}.items():
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, module, None)
            with pytest.raises(ImportError, match=rf"`{package}`.*numpyro_scalegp\[streams\]"):
                sgp.streams.parquet(made, inputs=["a"], batch_size=2, seed=0)
