"""What a user's function reads when it is called, beside its arguments."""

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
import numpy as np

_STANDARD = sysconfig.get_path("stdlib")
Jitted: Any = type(jax.jit(lambda: None))
_Cached: Any = type(functools.cache(lambda: None))
# Whose objects may hold functions of a user's.
_HOLDERS = ("numpyro_scalegp", "numpyro", "equinox", "jax", "types", "argparse")


def is_users(value: FunctionType | type | ModuleType) -> bool:
    """Whether a function, class or module is a user's, and not an installed package's."""
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
    """The values that a function closes over, without those that are not set."""
    values = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def named_variables(code: CodeType, variables: dict[str, Any]) -> dict[str, Any]:
    """Those of a module's variables that some code names, itself or in functions inside."""
    return {name: variables[name] for name in sorted(_names(code)) if name in variables}


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, and those that its class has for all."""
    attributes: dict[str, Any] = {}
    for of in reversed(type(value).__mro__):
        attributes |= {name: part for name, part in vars(of).items() if type(part) is np.ndarray}
        slots = getattr(of, "__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        attributes |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return attributes | getattr(value, "__dict__", {})


def _may_hold(part: Any) -> bool:
    """Whether an attribute may hold arrays or functions: other objects may be of any size."""
    return isinstance(part, np.ndarray | tuple | list | dict | eqx.Module) or callable(part)


def writes_cells(code: CodeType) -> bool:
    """Whether a function sets a variable that it closes over, as one that counts its calls."""
    return not _stored(code, "STORE_DEREF").isdisjoint(code.co_freevars)


def _stored(code: CodeType, operation: str) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname == operation}


def with_copied_arrays(value: Any) -> Any:
    """A function, or a pytree of arguments, that reads copies of the user's NumPy arrays.

    JAX has one array for each NumPy array, of the precision with which it was read first, until
    nothing refers to it: where the precision is not the default one, functions read copies.
    """
    return _Copies().of(value)


class _Copies:
    """Copies of what holds NumPy arrays; all else remains as it is."""

    def __init__(self) -> None:
        self.copies: dict[int, Any] = {}
        self.originals: list[Any] = []  # alive, so that no other object takes an id

    def of(self, value: Any) -> Any:
        """A copy of a value, or the value where it holds no array."""
        if id(value) not in self.copies:
            self.originals.append(value)
            self.copies[id(value)] = value  # where it refers to itself
            self.copies[id(value)] = self._of_unknown(value)
        return self.copies[id(value)]

    def _of_unknown(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            return np.array(value)
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, MethodType):
            return self._remade(value, [value.__func__, value.__self__], MethodType)
        if isinstance(value, Jitted):
            return self._remade(value, [value.__wrapped__], lambda function: function)
        if isinstance(value, _Cached):
            return self.of(value.__wrapped__)
        if isinstance(value, functools.partial):
            parts = [value.func, value.args, value.keywords]
            return self._remade(value, parts, lambda f, args, kw: type(value)(f, *args, **kw))
        if type(value) in (tuple, list):
            return self._remade(value, list(value), lambda *new: type(value)(new))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._remade(value, list(value), type(value))
        if isinstance(value, dict):
            return self._twin(value, value, lambda twin, name, new: twin.update({name: new}))
        if isinstance(value, type | ModuleType | jax.Array):
            return value
        of_class = type(value)
        is_holder = of_class.__module__.partition(".")[0] in _HOLDERS
        if not (is_holder or is_users(of_class)):
            return value
        held = {name: part for name, part in _attributes(value).items() if _may_hold(part)}
        return self._twin(value, held, object.__setattr__)

    def _remade(self, value: Any, parts: list[Any], make: Callable[..., Any]) -> Any:
        copies = list(map(self.of, parts))
        is_same = all(new is old for new, old in zip(copies, parts, strict=True))
        return value if is_same else make(*copies)

    def _twin(self, value: Any, parts: dict[Any, Any], put: Callable[..., Any]) -> Any:
        changed = self._changed(parts)
        if not changed:
            return value
        try:
            twin = copy.copy(value)
            for name, new in changed.items():
                put(twin, name, new)
        except (TypeError, AttributeError):  # an object that cannot be copied
            return value
        return twin

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
        twin = FunctionType(code, variables, function.__name__, defaults, cells)
        twin.__kwdefaults__ = keywords
        twin.__dict__.update(function.__dict__)
        return twin

    def _of_cell(self, cell: CellType) -> CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that is not set yet
            return cell
        new = self.of(content)
        return cell if new is content else CellType(new)

    def _of_module(self, function: FunctionType) -> dict[str, Any]:
        """The variables of its module that a function reads, where they hold arrays."""
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
