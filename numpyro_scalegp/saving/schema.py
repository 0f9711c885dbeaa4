"""Check the fields of this package's objects against their type annotations.

The tests check the annotations at each call. A file may hold anything, so they are also checked
when an object is loaded, and when it is saved, to store whether it passes.
"""

import collections.abc
import dataclasses
import functools
import types
import typing
from typing import Any

import equinox as eqx
import jax
import jaxtyping
import numpy as np
from numpyro.distributions import Distribution

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.iterative.solver_state import SolverState
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.functions import RowsFunction

_NUMBERS = (bool, int, float, complex)
# The fields of a distribution that are not named after an argument of its constructor.
_DERIVED: dict[str, Any] = {
    "_batch_shape": tuple[int, ...],
    "_event_shape": tuple[int, ...],
    "_validate_args": bool | None,
    "key": jax.Array | None,
    "likelihood": RowsFunction,
    "state": SolverState | None,
}


def check_fields(value: Any) -> None:
    """Check each field of an object of this package against its annotation.

    Sizes of the same name, such as the n of `X` and `y`, must be the same in all of its fields.

    Raises:
        ValueError: if a field does not match; the message names it.
    """
    of: Any = type(value)
    with jaxtyping.jaxtyped("context"):
        for name, annotation in annotations(of).items():
            field = _field(value, name)
            # Not in a function, which would have its own context of sizes.
            shapes = _array_types(annotation) if eqx.is_array_like(field) else []
            fits = any([isinstance(field, shape) for shape in shapes])
            if not (fits or (not shapes and _fits(field, annotation))):
                raise ValueError(f"`{name}` must be {_shown(annotation)}, got {_described(field)}.")
            if name.startswith("num_") and isinstance(field, int):
                checks.count(name, field, 0)
            if name == "jitter" and not shapes:
                checks.jitter(field)
    if isinstance(value, RowsFunction):
        function = value.arrays
        if value.structure is not None:
            function = eqx.combine(value.arrays, value.structure)
        checks.function("arrays", function)
    if isinstance(value, AbstractPosterior) and value.noise_variance is not None:
        checks.positive("noise_variance", value.noise_variance, or_zero=True)


def check_kinds(value: Any) -> None:
    """Check the types of the fields of an object that does not pass `check_fields`.

    Such objects are pytrees with the structure of an object of this package: in a stack of
    posteriors the arrays have further axes, in an optimizer's moments for a kernel the
    hyperparameters may be negative, and in a masked pytree fields are empty.

    Raises:
        ValueError: if a field has another type; the message names it.
    """
    of: Any = type(value)
    static = {f.name for f in _fields(of) if f.metadata.get("static", False)}
    for name, annotation in annotations(of).items():
        field = _field(value, name)
        is_array = isinstance(field, jax.Array | np.ndarray)
        if isinstance(value, AbstractPosterior):
            is_allowed = is_array and bool(_array_types(annotation))
        else:
            is_empty = field is None or (isinstance(field, tuple) and not jax.tree.leaves(field))
            is_allowed = is_array or is_empty or isinstance(field, np.generic | int | float)
        if not (_fits(field, annotation) or (name not in static and is_allowed)):
            raise ValueError(f"`{name}` must be {_shown(annotation)}, got {_described(field)}.")


@functools.cache
def annotations(of: Any) -> dict[str, Any]:
    """The annotations of the saved fields of a class; empty for classes of other packages."""
    if of.__module__.partition(".")[0] != __name__.partition(".")[0]:
        return {}
    if issubclass(of, Distribution):
        names = (*of.gather_pytree_data_fields(), *of.gather_pytree_aux_fields())
        # Arguments of the constructor, and of the bases' constructors, become fields of that name.
        bases = [base for base in reversed(of.__mro__) if "__init__" in vars(base)]
        hints: dict[str, Any] = {"mean_function": RowsFunction}
        for base in bases:
            arguments = typing.get_type_hints(vars(base)["__init__"])
            hints |= {name: hint for name, hint in arguments.items() if hint is not Any}
        hints |= typing.get_type_hints(of) | _DERIVED
        return {name: hints[name] for name in names if name in hints}
    hints = typing.get_type_hints(of)
    if issubclass(of, tuple):
        return {name: hints[name] for name in getattr(of, "_fields", ()) if name in hints}
    return {name: hints[name] for name in saved_fields(of)}


def _field(value: Any, name: str) -> Any:
    # A distribution lacks the attributes that it has not computed yet.
    return vars(value).get(name) if isinstance(value, Distribution) else getattr(value, name)


def saved_fields(of: type) -> list[str]:
    """The names of a module's fields that a file holds."""
    return [field.name for field in _fields(of) if field.metadata.get("is_saved", True)]


def _fields(of: type) -> tuple[Any, ...]:
    return dataclasses.fields(of) if dataclasses.is_dataclass(of) else ()


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value matches an annotation; true for annotations of an unknown form."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if annotation is None:
        return value is None
    if origin in (typing.Union, types.UnionType):
        # Where an annotation allows arrays and numbers, the field holds an array.
        arrays = _array_types(annotation)
        return any(_fits(value, arg) for arg in args if not (arrays and arg in _NUMBERS))
    if origin is typing.Literal:
        return value in args
    if annotation is collections.abc.Callable or origin is collections.abc.Callable:
        return callable(value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if args[-1:] == (...,):
            return all(_fits(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(_fits, value, args))
    if isinstance(origin, type):
        return isinstance(value, origin)
    if annotation in (int, float):
        allowed = (int,) if annotation is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    return isinstance(value, annotation) if isinstance(annotation, type) else True


def _array_types(annotation: Any) -> list[Any]:
    """The array types that an annotation allows."""
    options = typing.get_args(annotation) or (annotation,)
    return [
        option
        for option in options
        if isinstance(option, type) and issubclass(option, jaxtyping.AbstractArray)
    ]


def _shown(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return f"`{text}`"


def _described(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of {value.dtype}{list(value.shape)}"
    return checks.described(value)
