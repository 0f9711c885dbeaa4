"""The values that a user's function reads when it is called, besides its arguments."""

import contextlib
import copy
import dis
import functools
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

_STANDARD = sysconfig.get_path("stdlib")
Jitted: Any = type(jax.jit(lambda: None))
_Cached: Any = type(functools.cache(lambda: None))
# Packages whose objects may hold users' functions.
_HOLDERS = ("numpyro_scalegp", "numpyro", "equinox", "jax", "types", "argparse")


def is_users(value: FunctionType | type | ModuleType) -> bool:
    """Whether a function, class or module is a user's and not from an installed package."""
    if isinstance(value, FunctionType):
        # Not `__module__`, which `functools.wraps` copies.
        return not _is_installed(str(value.__globals__.get("__name__")).partition(".")[0])
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return not _is_installed(name.partition(".")[0])


@functools.cache
def _is_installed(package: str) -> bool:
    if package in ("numpyro_scalegp", *sys.builtin_module_names):
        return True
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    files = [Path(place) for place in places if place]
    return any(
        file.is_relative_to(_STANDARD) or {"site-packages", "dist-packages"} & set(file.parts)
        for file in files
    )


def closed_over(function: FunctionType) -> list[Any]:
    """The values in a function's closure, without variables that are not set."""
    values = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def named_variables(code: CodeType, variables: dict[str, Any]) -> dict[str, Any]:
    """The module variables that a code object names, including its nested functions."""
    return {name: variables[name] for name in sorted(_names(code)) if name in variables}


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, including NumPy arrays that are attributes of its class."""
    attributes: dict[str, Any] = {}
    for cls in reversed(type(value).__mro__):
        attributes |= {k: v for k, v in vars(cls).items() if type(v) is np.ndarray}
        slots = getattr(cls, "__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        attributes |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return attributes | getattr(value, "__dict__", {})


def _may_hold_arrays(value: Any) -> bool:
    """Whether to look for arrays and functions in an attribute: other objects may be large."""
    return isinstance(value, np.ndarray | tuple | list | dict | eqx.Module) or callable(value)


def writes_cells(code: CodeType) -> bool:
    """Whether a function sets a variable of its closure, such as a counter of its calls."""
    return not _stored(code, "STORE_DEREF").isdisjoint(code.co_freevars)


def _stored(code: CodeType, operation: str) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname == operation}


def with_copied_arrays(value: Any) -> Any:
    """Copy the user's NumPy arrays in a pytree, and in what its functions read.

    JAX keeps one array for each NumPy array, in the precision in which it was first read. A
    function that is evaluated in another precision than the default must therefore read copies.
    """
    return _Copies().of(value)


class _Copies:
    """Copies of objects that hold NumPy arrays; other objects are not copied."""

    def __init__(self) -> None:
        self.copies: dict[int, Any] = {}
        self.originals: list[Any] = []  # kept alive, so that their ids stay unique

    def of(self, value: Any) -> Any:
        """A copy of a value, or the value if it holds no array."""
        if id(value) not in self.copies:
            self.originals.append(value)
            self.copies[id(value)] = value  # if it refers to itself
            self.copies[id(value)] = self._of_new(value)
        return self.copies[id(value)]

    def _of_new(self, value: Any) -> Any:
        """Copy a value that is not in `copies`."""
        if type(value) is np.ndarray:
            return np.array(value)
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, MethodType):
            return self._rebuilt(value, [value.__func__, value.__self__], MethodType)
        if isinstance(value, Jitted):
            return self._rebuilt(value, [value.__wrapped__], lambda function: function)
        if isinstance(value, _Cached):
            return self.of(value.__wrapped__)
        if isinstance(value, functools.partial):
            parts = [value.func, value.args, value.keywords]
            return self._rebuilt(value, parts, lambda f, args, kw: type(value)(f, *args, **kw))
        if type(value) in (tuple, list):
            return self._rebuilt(value, list(value), lambda *new: type(value)(new))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._rebuilt(value, list(value), type(value))
        if isinstance(value, dict):
            return self._with_items(value, value, lambda new, key, item: new.update({key: item}))
        if isinstance(value, type | ModuleType | jax.Array):
            return value
        cls = type(value)
        is_holder = cls.__module__.partition(".")[0] in _HOLDERS
        if not (is_holder or is_users(cls)):
            return value
        attributes = {k: v for k, v in _attributes(value).items() if _may_hold_arrays(v)}
        return self._with_items(value, attributes, object.__setattr__)

    def _rebuilt(self, value: Any, parts: list[Any], make: Callable[..., Any]) -> Any:
        """The value, made again from copies of its parts if one of them changes."""
        copies = list(map(self.of, parts))
        is_same = all(new is old for new, old in zip(copies, parts, strict=True))
        return value if is_same else make(*copies)

    def _with_items(self, value: Any, items: dict[Any, Any], put: Callable[..., Any]) -> Any:
        """A shallow copy of the value with copies of those items that hold arrays."""
        changed = self._changed(items)
        if not changed:
            return value
        try:
            shallow = copy.copy(value)
            for name, new in changed.items():
                put(shallow, name, new)
        except (TypeError, AttributeError):  # an object that cannot be copied
            return value
        return shallow

    def _changed(self, variables: dict[Any, Any]) -> dict[Any, Any]:
        """Copies of those variables that hold arrays."""
        copies = {name: self.of(value) for name, value in variables.items()}
        return {name: new for name, new in copies.items() if new is not variables[name]}

    def _of_function(self, function: FunctionType) -> FunctionType:
        code = function.__code__
        if writes_cells(code) or _stored(code, "STORE_GLOBAL"):  # a copy would write elsewhere
            return function
        closure = function.__closure__ or ()
        cells = tuple(map(self._of_cell, closure))
        defaults, keywords = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        read = self._of_module(function) if is_users(function) else {}
        pairs = zip(
            (*cells, defaults, keywords),
            (*closure, function.__defaults__, function.__kwdefaults__),
            strict=True,
        )
        if not read and all(new is old for new, old in pairs):
            return function
        variables = {**function.__globals__, **read}
        duplicate = FunctionType(code, variables, function.__name__, defaults, cells)
        duplicate.__kwdefaults__ = keywords
        duplicate.__dict__.update(function.__dict__)
        return duplicate

    def _of_cell(self, cell: CellType) -> CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that is not set yet
            return cell
        new = self.of(content)
        return cell if new is content else CellType(new)

    def _of_module(self, function: FunctionType) -> dict[str, Any]:
        """Copies of the module variables that a function reads and that hold arrays."""
        code = function.__code__
        variables = named_variables(code, function.__globals__)
        changed = self._changed(variables)
        for name, module in variables.items():
            if isinstance(module, ModuleType) and is_users(module):
                inside = self._changed(named_variables(code, vars(module)))
                if inside:
                    changed[name] = ModuleType(module.__name__)
                    vars(changed[name]).update({**vars(module), **inside})
        return changed


_ITSELF = object()  # replaces a function in its closure


class Closure(eqx.Module):
    """A function as a pytree, whose leaves are the arrays in its closure and its defaults."""

    arrays: Any
    skeleton: Any = eqx.field(static=True)  # a `FunctionType`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with these arrays as its variables."""
        variables = eqx.combine(self.arrays, _variables(self.skeleton))
        return _with_variables(self.skeleton, variables)(*args, **kwargs)


def hoisted(function: Any) -> Any:
    """Convert a function with traced or floating-point arrays as variables to a `Closure`.

    These arrays are parameters, like those in a `Partial`, and the same leaves inside of compiled
    code and outside. Other variables are read when the function is called. A jitted function is
    converted like the function inside; any other value is returned unchanged.
    """
    return _hoisted(function, ())


def _hoisted(function: Any, outer: tuple[Any, ...]) -> Any:
    if isinstance(function, Jitted):
        inner = _hoisted(function.__wrapped__, outer)
        return inner if isinstance(inner, Closure) else function
    if (
        not isinstance(function, FunctionType)
        or function in outer
        or writes_cells(function.__code__)
    ):
        return function
    try:
        variables = _variables(function)
    except ValueError:  # a variable that is not set yet
        return function
    inside = jax.tree.map(lambda leaf: _hoisted(leaf, (*outer, function)), variables)
    arrays, static = eqx.partition(inside, _is_parameter)
    if not jax.tree.leaves(arrays):
        return function
    return Closure(arrays, _with_variables(function, static))


def _is_parameter(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return True
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _variables(function: FunctionType) -> tuple[Any, Any, Any]:
    """The closure of a function, and its defaults."""
    contents = [cell.cell_contents for cell in function.__closure__ or ()]
    cells = tuple(_ITSELF if content is function else content for content in contents)
    return cells, function.__defaults__, function.__kwdefaults__


def _with_variables(function: FunctionType, variables: tuple[Any, Any, Any]) -> FunctionType:
    """A function with the same code and other variables."""
    cells, defaults, keywords = variables
    closure = tuple(CellType() for _ in cells)
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, closure
    )
    for cell, content in zip(closure, cells, strict=True):
        cell.cell_contents = copy if content is _ITSELF else content
    copy.__kwdefaults__ = keywords
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    copy.__dict__.update(function.__dict__)
    return copy
