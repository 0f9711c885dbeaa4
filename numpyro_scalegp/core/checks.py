"""Checks of arguments; an error names the argument, what was expected and what was passed.

An object of the wrong class raises a `TypeError`, a wrong shape or a value out of range a
`ValueError`. Classes, shapes and dtypes are always checked, values only if they are concrete:
inside `jit` a value with the wrong sign gives NaN.
"""

import contextlib
import functools
import numbers
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key

from numpyro_scalegp.core import precision
from numpyro_scalegp.core.host import as_numpy

T = TypeVar("T")

_PHRASES = {
    "(0, inf)": "positive and finite",
    "(0, inf]": "positive",
    "[0, inf)": "finite and not negative",
}


def is_concrete(value: object) -> bool:
    """Whether every array in `value` can be read on the host now (it is not being traced)."""
    # A plain loop: this runs at every check of an argument.
    for leaf in jax.tree.leaves(value):  # noqa: SIM110
        if isinstance(leaf, jax.core.Tracer):
            return False
    return True


def known_values(*values: object) -> contextlib.AbstractContextManager:
    """If all values are concrete, a context that evaluates operations now, even within a trace."""
    return jax.ensure_compile_time_eval() if is_concrete(values) else contextlib.nullcontext()


def as_float(value: Any, name: str = "value") -> Float[Array, "..."]:
    """Convert a number, a sequence of numbers or an array to a floating-point array.

    A Python number stays weakly typed, so it does not promote the dtype of a result. Integers are
    converted; half precision is refused, since it has too few digits for a covariance.

    Raises:
        TypeError: if `value` holds anything but real numbers; the message calls it `name`.
    """
    if isinstance(value, float | int) and not isinstance(value, bool | np.generic):
        return jnp.asarray(float(value))
    if not isinstance(value, jax.Array):
        value = _as_array(value, name)
    if jnp.issubdtype(value.dtype, jnp.integer):
        # Converted by NumPy: JAX would wrap integers that its default dtype cannot hold.
        return jnp.asarray(value.astype(float))
    if value.dtype.name not in ("float32", "float64"):
        raise TypeError(
            f"`{name}` must be of type float32 or float64, got {value.dtype}: convert it, as by "
            '.astype("float32").'
        )
    if isinstance(value, np.ndarray) and not value.dtype.isnative:  # as in FITS files
        value = value.astype(value.dtype.newbyteorder("="))
    return jnp.asarray(value)


def as_positive(value: Any, name: str = "value", *, or_zero: bool = False) -> Float[Array, "..."]:
    """Convert like `as_float`; traced entries that are not positive and finite become NaN.

    So do their derivatives. With `or_zero`, zero is allowed.
    """
    array = as_float(value, name)
    compare = jnp.greater_equal if or_zero else jnp.greater
    return array if is_concrete(array) else _or_nan(array, compare)


def _or_nan(
    array: Float[Array, "..."], compare: Callable[[Array, float], Array] | None = None
) -> Float[Array, "..."]:
    """Replace entries that are not finite, or for which `compare(array, 0)` is false, by NaN."""
    is_good = jnp.isfinite(array)
    if compare is not None:
        is_good &= compare(array, 0)
    return array * jnp.where(is_good, 1.0, jnp.nan)


def positive(name: str, value: Array, *, or_zero: bool = False) -> None:
    """Raise unless every entry of `value` is finite and positive, or zero with `or_zero`."""
    if is_concrete(value):
        entries = as_numpy(value)
        if not (
            np.isfinite(entries).all() and (entries > 0 if not or_zero else entries >= 0).all()
        ):
            expected = _PHRASES["[0, inf)" if or_zero else "(0, inf)"]
            raise ValueError(f"`{name}` must be {expected}, got {_shown(entries)}.")


def lower_triangular(name: str, value: Array) -> None:
    """Raise unless matrices are lower triangular with a positive diagonal."""
    if is_concrete(value):
        entries = as_numpy(value)
        least = np.diagonal(entries, axis1=-2, axis2=-1).min(initial=np.inf)
        above = np.abs(np.triu(entries, 1)).max(initial=0.0)
        if not (least > 0 and above == 0):
            raise ValueError(
                f"`{name}` must be lower triangular with a positive diagonal, such as from "
                f"jnp.linalg.cholesky, got entries up to {above} above the diagonal and down to "
                f"{least} on it."
            )


def finite(name: str, value: ArrayLike, remedy: str = "") -> None:
    """Raise if `value` holds NaN or infinity; the message ends with `remedy`."""
    if is_concrete(value):
        bad = ~np.isfinite(as_numpy(value))
        if bad.any():
            first = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"`{name}` must be finite, got {int(bad.sum())} NaN or infinite "
                f"value(s), the first at index {first}.{remedy}"
            )


def inputs(
    name: str,
    value: ArrayLike,
    width: int | None = None,
    *,
    may_be_empty: bool = False,
    may_be_batch: bool = False,
) -> Float[Array, "... n d"]:
    """Check a finite matrix of inputs with one row for each point, and `width` columns if given.

    It must have a column and, unless it `may_be_empty`, a row. If it `may_be_batch`, it may have
    leading axes. A traced infinity becomes NaN, since a kernel may have a finite limit there.
    """
    # Concrete values, also of NumPy arrays, stay concrete within a trace.
    with known_values(value):
        array = as_float(value, name)
    if array.ndim < 2 or (array.ndim > 2 and not may_be_batch):
        remedy = " Write X[:, None] for one input dimension." if array.ndim == 1 else ""
        raise ValueError(f"`{name}` must have shape (n, d), got {array.shape}.{remedy}")
    num_rows, num_columns = array.shape[-2:]
    if num_columns == 0 or (num_rows == 0 and not may_be_empty):
        missing = "column" if num_columns == 0 else "row"
        raise ValueError(f"`{name}` must have at least one {missing}, got shape {array.shape}.")
    if width is not None and num_columns != width:
        raise ValueError(
            f"`{name}` must have shape (n, {width}), got {array.shape}: "
            f"one column for each column of `X`."
        )
    finite(name, array)
    if array.ndim == 2:
        precision.warn_of_merged_rows(name, value, array)
    return array if is_concrete(array) else _or_nan(array)


def is_grid(value: object) -> bool:
    """Whether a value is a sequence with the inputs of each axis of a grid, not rows."""
    return isinstance(value, list | tuple) and any(jnp.ndim(X) > 1 for X in value)


def categories(name: str, value: ArrayLike, column: int, allowed: tuple[int, ...]) -> None:
    """Raise unless each entry of a column of the inputs `value` is an `allowed` integer."""
    if is_concrete(value):
        entries = as_numpy(value)[..., column].ravel()
        bad = ~np.isin(entries, allowed)
        if bad.any():
            row = int(np.argmax(bad))
            shown = allowed if len(allowed) < 9 else (*allowed[:3], "...", allowed[-1])
            raise ValueError(
                f"`{name}` must hold the kernel's categories in column {column}, "
                f"{', '.join(map(str, shown))}, got {entries[row]} in row {row}."
            )


def within_range(name: str, value: ArrayLike, column: int, bounds: tuple[float, float]) -> None:
    """Raise unless each entry of a column of the inputs `value` lies between two numbers."""
    if is_concrete(value):
        entries = as_numpy(value)[..., column].ravel()
        bad = (entries < bounds[0]) | (entries > bounds[1])
        if bad.any():
            row, (low, high) = int(np.argmax(bad)), bounds
            raise ValueError(
                f"`{name}` must hold values from {low:g} to {high:g} in column {column}, "
                f"got {entries[row]:g} in row {row}."
            )


def shape(name: str, value: Any, *allowed: tuple[int, ...], why: str = "") -> None:
    """Raise unless `value` has one of the `allowed` shapes."""
    if value.shape not in allowed:
        expected = " or ".join(str(option) for option in allowed)
        raise ValueError(
            f"`{name}` must have shape {expected}, got {value.shape}{': ' + why if why else ''}."
        )


def call_hook(owner: Any, hook: str, shape: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
    """Call a method that users implement, and raise unless the result has the expected shape."""
    value = getattr(owner, hook)(*args, **kwargs)
    if jnp.shape(value) != shape:
        raise ValueError(
            f"`{type(owner).__name__}.{hook}` must return an array of shape {shape}, got one of "
            f"shape {jnp.shape(value)}."
        )
    return value


def observations(
    value: ArrayLike, event_shape: tuple[int, ...], rows_of: str, remedy: str = ""
) -> Float[Array, "... n"]:
    """Check observations `y`: finite, and one for each row of the argument `rows_of`."""
    y = as_float(value, "y")
    if y.shape[-1:] != event_shape:
        raise ValueError(
            f"`y` must have shape {event_shape}, got {y.shape}: one value for each row of "
            f"`{rows_of}`."
        )
    finite("y", y, remedy)
    return y


def not_masked(name: str, value: Any) -> None:
    """Raise for a NumPy masked array with missing entries."""
    if np.ma.is_masked(value):
        raise ValueError(f"`{name}` has masked entries: drop those rows, or fill the entries.")


def count(name: str, value: Any, least: int = 1, *, even: bool = False) -> int:
    """Return `value`, or raise unless it is an integer of at least `least`.

    Raises:
        TypeError: if it is not a Python or NumPy integer.
        ValueError: if it is too small or, where it must be `even`, odd.
    """
    if integer(name, value) < least or (even and value % 2):
        expected = f"{'even and ' if even else ''}at least {least}"
        raise ValueError(f"`{name}` must be {expected}, got {value}.")
    return int(value)


def integer(name: str, value: Any) -> int:
    """Return `value`, or raise a `TypeError` unless it is a Python or NumPy integer."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        remedy = ": write int(...)" if isinstance(value, numbers.Real | Array) else ""
        raise TypeError(f"`{name}` must be an integer, got {described(value)}{remedy}.")
    return int(value)


def count_or_none(name: str, value: Any, least: int = 1) -> int | None:
    """`count`, or None."""
    return None if value is None else count(name, value, least)


def number(name: str, value: Any, within: str) -> int | float:
    """Return `value`, or raise unless it is a real number in an interval.

    Args:
        name: the argument's name.
        value: its value.
        within: the interval, such as "[0, 1)" or "(0, inf)".

    Raises:
        TypeError: if it is not a Python or NumPy number.
        ValueError: if it lies outside the interval.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        remedy = ": write float(...)" if isinstance(value, Array) else ""
        raise TypeError(f"`{name}` must be a number, got {described(value)}{remedy}.")
    lower, upper = (float(bound) for bound in within[1:-1].split(","))
    x = float(value)
    above = x > lower or (x == lower and within[0] == "[")
    below = x < upper or (x == upper and within[-1] == "]")
    if not (above and below):
        raise ValueError(f"`{name}` must be {_PHRASES.get(within, f'in {within}')}, got {value}.")
    return plain(value)


def rate(name: str, value: Any, within: str) -> Any:
    """Return `value`, or raise unless it is a `number` in an interval or a function of the step."""
    is_function = callable(value) and not isinstance(value, type)
    return value if is_function else number(name, value, within)


def jitter(value: Any) -> int | float | None:
    """Return a `jitter` argument, or raise unless it is None or a nonnegative number."""
    return None if value is None else number("jitter", value, "[0, inf)")


def instance(name: str, value: T, kind: type | tuple[type, ...], expected: str = "") -> T:
    """Return `value`, or raise unless it is an instance of `kind`.

    Args:
        name: the argument's name.
        value: its value.
        kind: a class or several. For a class of this package the message names the namespace.
        expected: what the message says instead.

    Raises:
        TypeError: if it is not an instance; for a subclass itself, with a hint to call it.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, type) and issubclass(value, kind):
        raise TypeError(
            f"`{name}` must be an instance, got the class `{value.__name__}`: write "
            f"`{value.__name__}(...)`."
        )
    if not expected and isinstance(kind, type):
        expected = f"one of `sgp.{_namespace(kind)}` (`{kind.__name__}`)"
    raise TypeError(f"`{name}` must be {expected}, got {described(value)}.")


def _namespace(kind: type) -> str:
    """The public module that exports a class of this package, or else its subpackage."""
    package, subpackage = kind.__module__.split(".")[:2]
    modules = vars(sys.modules[package]).items()
    exporting = (
        name for name, module in modules if kind.__name__ in getattr(module, "__all__", ())
    )
    return next(exporting, subpackage)


def function(name: str, value: Any) -> Any:
    """Return `value`, or raise a `TypeError` unless it is callable and not a class."""
    if isinstance(value, type) or not callable(value):
        raise TypeError(f"`{name}` must be callable, got {described(value)}.")
    return value


def as_key(value: Any, name: str = "key") -> Key[Array, ""]:
    """Return a typed JAX key; a raw key, such as NumPyro's handlers pass, is wrapped.

    Raises:
        TypeError: if it is not a key; the message calls it `name`.
        ValueError: if it is an array of several keys.
    """
    is_array = isinstance(value, jax.Array | np.ndarray)
    if is_array and value.dtype == np.uint32 and value.shape in ((2,), (4,)):
        return jax.random.wrap_key_data(value)
    if not (is_array and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)):
        got = f"an array of {value.dtype}{list(value.shape)}" if is_array else described(value)
        raise TypeError(f"`{name}` must be a JAX key, such as jax.random.key(0), got {got}.")
    if value.shape != ():
        raise ValueError(f"`{name}` must be one key, got an array of shape {value.shape}.")
    return value


def as_index(value: Any, name: str = "index") -> Int[Array, "..."]:
    """Convert a sequence or an array of integers to a JAX array of at least 32 bits.

    Narrower integers would overflow when compared with a number of rows.
    """
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`{name}` must hold integers, got {array.dtype}.")
    return jnp.asarray(array, jnp.int32 if array.dtype.itemsize < 4 else None)


def to_positive(name: str, *, or_zero: bool = False) -> Callable[[Any], Float[Array, "..."]]:
    """`as_positive` for the field `name` of a module."""
    return functools.partial(as_positive, name=name, or_zero=or_zero)


def plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number, as a static field must be; else return `value`."""
    return value.item() if isinstance(value, np.generic) else value


def described(value: object) -> str:
    """A short description of an argument's value."""
    if isinstance(value, type):
        return f"the class `{value.__name__}`"
    if isinstance(value, str):
        return repr(str(value)) if len(value) < 60 else "a long `str`"
    if value is None or isinstance(value, bool | numbers.Number):
        return str(value)
    return f"a `{type(value).__name__}`"


def _shown(entries: np.ndarray) -> str:
    return str(entries.item()) if entries.ndim == 0 else np.array2string(entries, threshold=8)


def _as_array(value: Any, name: str) -> Any:
    """Convert anything but a JAX array to an array."""
    if hasattr(value, "__jax_array__"):
        return value.__jax_array__()
    not_masked(name, value)
    has_jax_leaves = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
    try:
        array = jnp.asarray(value) if has_jax_leaves else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` must be a number or an array of numbers, got {described(value)}."
        ) from error
    if array.dtype.kind in "OSUMm":
        _refuse_entries(name, value, array)
    return array


def _refuse_entries(name: str, value: Any, array: Any) -> None:
    """Raise for an array of objects, text or dates."""
    if array.ndim == 0:
        raise TypeError(
            f"`{name}` must be a number or an array of numbers, got {described(value)}."
        )
    for index, entry in np.ndenumerate(array):
        if not isinstance(entry, numbers.Real):
            raise TypeError(
                f"`{name}` must hold numbers, got {described(entry)} at index "
                f"{tuple(map(int, index))}: fill or drop missing values, and convert the others, "
                'as by .astype("float32").'
            )
    raise TypeError(
        f"`{name}` must be of type float32 or float64, got {array.dtype}: convert it, as by "
        '.astype("float32").'
    )


def used(options: Collection[str], useful: Collection[str], where: str) -> None:
    """Raise if an option has no effect.

    Args:
        options: names of the options that are set.
        useful: names of the options that have an effect.
        where: what the options are for, which begins the message.
    """
    useless = ", ".join(f"`{name}`" for name in sorted(set(options) - set(useful)))
    if useless:
        raise ValueError(
            f"{where} has no use for {useless}, which is for an estimator that solves iteratively "
            "or draws at random: leave it out."
        )
