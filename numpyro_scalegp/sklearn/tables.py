"""Input columns of arrays and data frames as standardized numbers."""

import dataclasses
import datetime
from typing import Any

import numpy as np

# A column with more categories than this gets random directions in place of a dimension each.
_MAX_DIMENSIONS = 32
_EPOCH = datetime.date(1970, 1, 1).toordinal()


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A numeric column: its mean and standard deviation, and whether values were missing."""

    mean: float
    deviation: float
    has_missing: bool

    @classmethod
    def of(cls, values: np.ndarray) -> "Numbers":
        """Describe the values of training data, missing ones NaN."""
        present = values[~np.isnan(values)]
        mean = float(present.mean()) if present.size else 0.0
        deviation = float(present.std()) if present.size else 0.0
        # Rounding gives a constant column a deviation above zero.
        is_constant = deviation <= 1e-12 * abs(mean)
        return cls(mean, 1.0 if is_constant else deviation, present.size < values.size)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Standardized values, shape (n, 1), or (n, 2) with an indicator of missing values."""
        missing = np.isnan(values)
        standardized = np.where(missing, 0.0, (values - self.mean) / self.deviation)
        columns = [standardized, missing] if self.has_missing else [standardized]
        return np.stack(columns, axis=1).astype(float)


@dataclasses.dataclass(frozen=True)
class Categories:
    """A categorical column: its values, and a point for each, at about the same distances."""

    points: dict[Any, np.ndarray]

    @classmethod
    def of(cls, values: np.ndarray) -> "Categories":
        """Describe the values of training data, missing ones None."""
        names = sorted(set(values.tolist()), key=lambda name: (name is None, str(name)))
        if len(names) <= _MAX_DIMENSIONS:
            points = np.eye(len(names))
        else:
            points = np.random.default_rng(0).normal(size=(len(names), _MAX_DIMENSIONS))
            points /= np.linalg.norm(points, axis=1, keepdims=True)
        return cls(dict(zip(names, points, strict=True)))

    def encode(self, values: np.ndarray) -> np.ndarray:
        """The point of each value, shape (n, dimensions); zero for values that are new."""
        zero = np.zeros_like(next(iter(self.points.values())))
        return np.stack([self.points.get(value, zero) for value in values.tolist()])


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How the columns of training data become standardized numbers."""

    columns: tuple[Numbers | Categories, ...]

    @classmethod
    def of(cls, table: Any) -> "Encoding":
        """Describe the columns of an array, which are numbers, or of a data frame."""
        if not is_frame(table):
            return cls(tuple(map(Numbers.of, map(_numbers, np.asarray(table).T))))
        columns: list[Numbers | Categories] = []
        for name in table.columns:
            if _is_categorical(table[name]):
                columns.append(Categories.of(_categories(table[name])))
            else:
                columns.append(Numbers.of(_numbers(table[name])))
        return cls(tuple(columns))

    def encode(self, table: Any) -> np.ndarray:
        """Standardized inputs, shape (n, d), float64; a column is what it is in training data."""
        encoded = []
        for j, column in enumerate(self.columns):
            values = table[table.columns[j]] if is_frame(table) else table[:, j]
            as_values = _categories if isinstance(column, Categories) else _numbers
            encoded.append(column.encode(as_values(values)))
        return np.concatenate(encoded, axis=1)

    def __str__(self) -> str:
        categories = [len(c.points) for c in self.columns if isinstance(c, Categories)]
        missing = sum(isinstance(c, Numbers) and c.has_missing for c in self.columns)
        phrases = [f"{len(self.columns)} columns"]
        if categories:
            counts = ", ".join(map(str, categories))
            phrases.append(f"{len(categories)} of them categorical with {counts} values")
        if missing:
            phrases.append(f"{missing} with missing values")
        return ", ".join(phrases)


def is_frame(X: Any) -> bool:
    """Whether this is a data frame, of pandas or polars."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def _is_categorical(column: Any) -> bool:
    """Whether a column holds text, or is of a categorical type."""
    if str(column.dtype).lower().startswith(("category", "categorical", "enum")):
        return True
    values = np.asarray(column)
    if values.dtype.kind in "biufmM":
        return False
    return any(isinstance(value, str | bytes) for value in values.tolist())


def _numbers(column: Any) -> np.ndarray:
    """The values of a column as floats, dates in seconds; NaN where they are missing."""
    values = np.asarray(column)
    if values.dtype.kind in "mM":
        seconds = values.astype(f"{values.dtype.kind}8[ms]").astype(np.int64) / 1000.0
        return np.where(np.isnat(values), np.nan, seconds)
    if values.dtype.kind in "biuf":
        numbers = values.astype(float)
    else:
        pairs = zip(values.tolist(), _is_missing(column), strict=True)
        numbers = np.array([np.nan if missing else _number(value) for value, missing in pairs])
    if np.isinf(numbers).any():
        raise ValueError("`X` contains infinity.")
    return numbers


def _number(value: Any) -> float:
    """A number, or a date in seconds."""
    if hasattr(value, "to_timestamp"):
        value = value.to_timestamp()
    if hasattr(value, "timestamp"):
        return float(value.timestamp())
    if hasattr(value, "toordinal"):
        return 86_400.0 * (value.toordinal() - _EPOCH)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a column of numbers in the training data must hold numbers, got {value!r}."
        ) from error


def _categories(column: Any) -> np.ndarray:
    """The values of a column as objects, with None where they are missing."""
    values = np.array(column, dtype=object)
    values[_is_missing(column)] = None
    return values


def _is_missing(column: Any) -> np.ndarray:
    if hasattr(column, "isna"):
        return np.asarray(column.isna(), bool)
    if hasattr(column, "is_null"):
        return np.asarray(column.is_null(), bool)
    values = np.asarray(column, object).tolist()
    return np.array([value is None or value != value for value in values], bool)
