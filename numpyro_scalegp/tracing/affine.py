"""Whether a function is affine in its arguments, by the operations that it is made of."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

# Which operands may depend on the arguments: all of them, one alone, or those at some places.
_ALL = {
    *("add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "convert_element_type", "reshape"),
    *("broadcast_in_dim", "squeeze", "expand_dims", "transpose", "concatenate", "pad", "rev"),
    *("slice", "copy", "copy_p", "stop_gradient"),
}
_ONE = ("mul", "dot_general")
_PLACES: dict[str, tuple[int, ...]] = {
    "div": (0,),
    "gather": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
    "scatter_add": (0, 2),
    "select_n": tuple(range(1, 100)),
}
_CALLS = ("pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call")


class _Kind(IntEnum):
    """How a value depends on the arguments."""

    CONSTANT = 0
    AFFINE = 1
    OTHER = 2


def is_affine(function: Callable[..., Any], *args: Any) -> bool:
    """Whether each output is a sum of the arguments' entries with constant factors, and a constant.

    Nothing is evaluated. The answer is sure where it is True; an operation that is not known to be
    linear makes it False.

    Args:
        function: of pytrees of arrays; it may close over traced values, which are constants here.
        *args: its arguments, of which shapes and types count.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return max(_outputs(jaxpr, [_Kind.AFFINE] * len(jaxpr.invars)), default=0) < _Kind.OTHER


def _outputs(jaxpr: Jaxpr, inputs: list[_Kind]) -> list[_Kind]:
    kinds: dict[Any, _Kind] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variable: Any) -> _Kind:
        is_literal = isinstance(variable, Literal)
        return _Kind.CONSTANT if is_literal else kinds.get(variable, _Kind.CONSTANT)

    for equation in jaxpr.eqns:
        operands = [of(variable) for variable in equation.invars]
        kinds.update(zip(equation.outvars, _of_equation(equation, operands), strict=True))
    return [of(variable) for variable in jaxpr.outvars]


def _of_equation(equation: Any, operands: list[_Kind]) -> list[_Kind]:
    name, largest = equation.primitive.name, max(operands, default=_Kind.CONSTANT)
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if name in _CALLS and largest:
        return _outputs(getattr(inner, "jaxpr", inner), operands)
    places = {place for place, kind in enumerate(operands) if kind}
    is_linear = (
        not places
        or name in _ALL
        or (name in _ONE and len(places) == 1)
        or (name in _PLACES and places <= set(_PLACES[name]))
    )
    return [largest if is_linear else _Kind.OTHER] * len(equation.outvars)
