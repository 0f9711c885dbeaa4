"""One line for an object: what `repr` shows in place of its arrays."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

# Arrays of at most so many entries are shown in full.
_MAX_ENTRIES = 8
# Texts up to so many characters are shown.
_MAX_LENGTH = 120


class OneLine(eqx.Module):
    """A module whose `repr` is one line with the fields that differ from their defaults."""

    def __repr__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name, None)
            is_plain = isinstance(value, bool | int | float | str | tuple)
            is_default = value is field.default or (is_plain and value == field.default)
            if value is not None and not is_default:
                parts.append(f"{field.name}={shown(value)}")
        return one_line(self, parts)


def one_line(owner: object, parts: Iterable[str]) -> str:
    """The name of an object's class, with `parts` in parentheses."""
    return f"{type(owner).__name__}({', '.join(text for text in parts if text)})"


def shown(value: Any) -> str:
    """A number or a short array as its values, a longer or traced one as its dtype and shape.

    Functions show their name, and objects without a short `repr` the name of their class.
    """
    if not isinstance(value, jax.Array | np.ndarray):
        text = getattr(value, "__name__", repr(value)) if callable(value) else repr(value)
        is_short = len(text) < _MAX_LENGTH and "\n" not in text and " at 0x" not in text
        return text if is_short else f"{type(value).__name__}(...)"
    is_hidden = isinstance(value, jax.core.Tracer) or value.size > _MAX_ENTRIES or value.ndim > 1
    if is_hidden or not jnp.issubdtype(value.dtype, jnp.number) or not _is_local(value):
        return f"{value.dtype}{list(value.shape)}"
    entries = [f"{entry:.4g}" for entry in np.asarray(value).ravel()]
    return f"[{', '.join(entries)}]" if value.ndim else entries[0]


def counted_rows(X: Any, noun: str = "row") -> str:
    """The size of a matrix of inputs, such as "30 rows of 2 columns"."""
    shape: tuple[int, ...] = getattr(X, "shape", ())
    if len(shape) < 2:
        return ""
    rows, columns = counted(shape[-2], noun), counted(shape[-1], "column")
    batch = f", batch shape {tuple(shape[:-2])}" if len(shape) > 2 else ""
    return f"{rows} of {columns}{batch}"


def counted(number: int, noun: str) -> str:
    """A number of things, such as "1 row" or "30 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _is_local(value: Any) -> bool:
    """Whether this process has all entries of an array."""
    return not isinstance(value, jax.Array) or (
        value.is_fully_addressable and not value.is_deleted()
    )
