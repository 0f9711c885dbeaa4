"""User functions that close over arrays as pytrees: equal where code, globals and values are."""

import dis
from collections import defaultdict
from types import CellType, CodeType, FunctionType
from typing import Any
from weakref import WeakSet

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

_ITSELF = object()  # in the variables of a function that calls itself
_Jitted: Any = type(jax.jit(lambda: None))

# By code and globals, as long as something has the structure.
_SKELETONS: dict[tuple[CodeType, int], WeakSet[FunctionType]] = defaultdict(WeakSet)


class Closure(eqx.Module):
    """A function whose leaves are the arrays that it closes over or has as defaults."""

    held: Any
    skeleton: Any = eqx.field(static=True)  # a `FunctionType`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the arrays in their places."""
        variables = eqx.combine(self.held, _variables(self.skeleton))
        return _with(self.skeleton, variables)(*args, **kwargs)


def hoisted(function: Any) -> Any:
    """A function with traced or floating-point arrays in its variables as a `Closure`.

    Of functions that are the same but for these arrays there is one skeleton, so that a lambda made
    anew has the structure that it had before. What else it closes over, such as a mask of columns
    or the width of a layer, stays as it is: under `jit`, too, it has a value. Of a function that is
    jitted it is the function inside; what is no function comes back as it is.
    """
    return _hoisted(function, ())


def _hoisted(function: Any, outer: tuple[Any, ...]) -> Any:
    if isinstance(function, _Jitted):
        inner = _hoisted(function.__wrapped__, outer)
        return inner if isinstance(inner, Closure) else function
    if not isinstance(function, FunctionType) or function in outer or _writes(function.__code__):
        return function
    try:
        variables = _variables(function)
    except ValueError:  # a variable that is not set yet
        return function
    inside = jax.tree.map(lambda leaf: _hoisted(leaf, (*outer, function)), variables)
    held, kept = eqx.partition(inside, _is_value)
    if jax.tree.leaves(held):
        return Closure(held, _interned(_with(function, kept)))
    is_local = "<" in function.__qualname__
    return _interned(_with(function, kept)) if is_local else function


def _writes(code: CodeType) -> bool:
    """Whether a function counts its calls, say: a copy would count for itself."""
    stored = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_DEREF"}
    return not stored.isdisjoint(code.co_freevars)


def _is_value(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return True
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _variables(function: FunctionType) -> tuple[Any, Any, Any]:
    """What a function closes over, and its defaults."""
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    cells = tuple(_ITSELF if one is function else one for one in held)
    return cells, function.__defaults__, function.__kwdefaults__


def _with(function: FunctionType, variables: tuple[Any, Any, Any]) -> FunctionType:
    """The same code with other variables."""
    cells, defaults, keywords = variables
    closure = tuple(CellType() for _ in cells)
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, closure
    )
    for cell, held in zip(closure, cells, strict=True):
        cell.cell_contents = made if held is _ITSELF else held
    made.__kwdefaults__ = keywords
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__dict__.update(function.__dict__)
    return made


def _interned(function: FunctionType) -> FunctionType:
    """The first function that was the same as this one."""
    known = _SKELETONS[function.__code__, id(function.__globals__)]
    for one in known:
        if _is_same(_variables(one), _variables(function)):
            return one
    known.add(function)
    return function


def _is_same(one: Any, other: Any) -> bool:
    leaves, structures = zip(*map(jax.tree.flatten, (one, other)), strict=True)
    if structures[0] != structures[1]:
        return False
    return all(_is_same_leaf(a, b) for a, b in zip(*leaves, strict=True))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    try:
        if isinstance(one, np.ndarray | jax.Array):
            return one.dtype == other.dtype and np.array_equal(_numbers(one), _numbers(other))
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False  # what cannot be compared, such as an array that was donated


def _numbers(array: Any) -> np.ndarray:
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(array)
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.random.key_data(array))
