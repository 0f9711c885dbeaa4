"""User functions that close over floating-point or traced arrays as pytrees of these arrays."""

from types import CellType, FunctionType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from numpyro_scalegp.core.reads import Jitted, writes_cells

_ITSELF = object()  # in the variables of a function that calls itself


class Closure(eqx.Module):
    """A function whose leaves are the arrays that it closes over or has as defaults."""

    arrays: Any
    skeleton: Any = eqx.field(static=True)  # a `FunctionType`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the arrays in their places."""
        variables = eqx.combine(self.arrays, _variables(self.skeleton))
        return _with(self.skeleton, variables)(*args, **kwargs)


def hoisted(function: Any) -> Any:
    """A function with traced or floating-point arrays in its variables as a `Closure`.

    These are parameters, learned as what a `Partial` holds, and the same leaves inside of compiled
    code and outside. What else a function closes over it reads when it is called. Of a function
    that is jitted it is the function inside; any other value comes back unchanged.
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
    arrays, others = eqx.partition(inside, _is_parameter)
    return Closure(arrays, _with(function, others)) if jax.tree.leaves(arrays) else function


def _is_parameter(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return True
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _variables(function: FunctionType) -> tuple[Any, Any, Any]:
    """What a function closes over, and its defaults."""
    contents = [cell.cell_contents for cell in function.__closure__ or ()]
    cells = tuple(_ITSELF if content is function else content for content in contents)
    return cells, function.__defaults__, function.__kwdefaults__


def _with(function: FunctionType, variables: tuple[Any, Any, Any]) -> FunctionType:
    """The same code with other variables."""
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
