"""Proofs that a program combines no rows of its arguments, from its operations.

Most likelihoods consist of operations on each entry alone and of sums. Where that shows, `probing`
need not evaluate the program, which it does hundreds of times with all rows.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

# Operations on each entry alone.
_ENTRYWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
    *("bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "convert_element_type", "copy"),
    *("copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2"),
    *("expm1", "floor", "ge", "gt", "igamma", "igammac", "integer_pow", "is_finite", "le"),
    *("lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter"),
    *("not", "or", "polygamma", "pow", "regularized_incomplete_beta", "rem", "round", "rsqrt"),
    *("select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh"),
    *("xor", "zeta"),
}
# Operations that are linear in all operands jointly, or in one of the operands at these places.
_LINEAR = {
    *(
        "add",
        "add_any",
        "sub",
        "neg",
        "copy",
        "copy_p",
        "stop_gradient",
        "reduce_sum",
        "cumsum",
        "broadcast_in_dim",
    ),
    *("reshape", "squeeze", "expand_dims", "transpose", "rev", "slice", "concatenate", "stack"),
}
_LINEAR_IN: dict[str, tuple[int, ...]] = {
    "mul": (0, 1),
    "dot_general": (0, 1),
    "convert_element_type": (0,),
    "div": (0,),
    "select_n": tuple(range(1, 100)),
    "gather": (0,),
    "dynamic_slice": (0,),
}
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_CALLS = ("pjit", "jit", "closed_call", "checkpoint", "custom_jvp_call", "custom_vjp_call")


class Kind(IntEnum):
    """What is known of the entries of a variable; later kinds claim less."""

    CONSTANT = 0  # they do not depend on the arguments
    ROWS = 1  # they depend on the rows with their index along an axis
    SUM = 2  # they are sums of functions of single rows
    OTHER = 3


class Claim(NamedTuple):
    """What is known of a variable."""

    kind: Kind
    axis: int = 0  # of the rows


def claims_of_results(jaxpr: Jaxpr, arguments: Sequence[int]) -> list[Claim]:
    """What is known of the results of a program of arguments with rows on their last axis.

    Args:
        jaxpr: the program.
        arguments: the positions of the inputs that have rows; the others are held constant.
    """
    shapes: list[Any] = [variable.aval for variable in jaxpr.invars]
    inputs = [
        Claim(Kind.ROWS, len(like.shape) - 1) if place in arguments else _CONSTANT
        for place, like in enumerate(shapes)
    ]
    return _forward(jaxpr, inputs)


_CONSTANT, _SUM, _OTHER = Claim(Kind.CONSTANT), Claim(Kind.SUM), Claim(Kind.OTHER)


def _forward(jaxpr: Jaxpr, inputs: Sequence[Claim]) -> list[Claim]:
    claims = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variable: Any) -> Claim:
        return _CONSTANT if isinstance(variable, Literal) else claims.get(variable, _CONSTANT)

    for equation in jaxpr.eqns:
        operands = list(map(of, equation.invars))
        if any(operand.kind for operand in operands):
            results = _of_results(equation, operands)
            claims.update(zip(equation.outvars, results, strict=True))
    return list(map(of, jaxpr.outvars))


def _of_results(equation: Any, operands: list[Claim]) -> list[Claim]:
    name, num_results = equation.primitive.name, len(equation.outvars)
    if name in _CALLS:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and len(inner.invars) == len(operands):
            return _forward(inner, operands)
        return [_OTHER] * num_results
    varying = {place: operand for place, operand in enumerate(operands) if operand.kind}
    axes = {operand.axis for operand in varying.values()}
    are_rows = all(operand.kind is Kind.ROWS for operand in varying.values()) and len(axes) == 1
    if are_rows and not (name == "gather" and 1 in varying):  # rows among the indices
        axis = _axis_of_rows(equation, *axes)
        if axis is not None:
            return [Claim(Kind.ROWS, axis)] * num_results
    # A sum of functions of single rows stays one under linear operations, which integers have not:
    # quotients are rounded, and sums wrap around.
    is_linear = name in _LINEAR or (len(varying) == 1 and varying.keys() <= _linear_in(equation))
    operand_types = [equation.invars[place].aval.dtype for place in varying]
    types = [*operand_types, *(variable.aval.dtype for variable in equation.outvars)]
    is_linear = is_linear and all(jnp.issubdtype(dtype, jnp.inexact) for dtype in types)
    is_known = all(operand.kind is not Kind.OTHER for operand in operands)
    return [_SUM if is_known and is_linear else _OTHER] * num_results


def _linear_in(equation: Any) -> set[int]:
    return set(_LINEAR_IN.get(equation.primitive.name, ()))


def _axis_of_rows(equation: Any, axis: int) -> int | None:
    """The axis of rows in the result of an operation, or None if it may move or combine rows."""
    name, params = equation.primitive.name, equation.params
    if name in _ENTRYWISE:
        return axis
    shape, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if name in _REDUCTIONS or name == "squeeze":
        removed = params["axes" if name in _REDUCTIONS else "dimensions"]
        return None if axis in removed else axis - sum(other < axis for other in removed)
    if name in _CUMULATIVE:
        return None if params["axis"] == axis else axis
    if name == "rev":
        return None if axis in params["dimensions"] else axis
    if name == "transpose":
        return params["permutation"].index(axis)
    if name == "stack":
        return axis + (params["axis"] <= axis)
    if name == "concatenate":
        return None if params["dimension"] == axis else axis
    if name == "slice":
        return axis if shape[axis] == new[axis] else None
    if name == "broadcast_in_dim":
        target = params["broadcast_dimensions"][axis]
        return target if shape[axis] == new[target] else None
    if name == "gather" and axis in params["dimension_numbers"].operand_batching_dims:
        numbers = params["dimension_numbers"]
        place = numbers.operand_batching_dims.index(axis)
        of_indices = [d for d in range(len(new)) if d not in numbers.offset_dims]
        return of_indices[numbers.start_indices_batching_dims[place]]
    if name in ("reshape", "expand_dims") and params.get("dimensions") is None:
        before = math.prod(shape[:axis])
        for target, size in enumerate(new):
            if size == shape[axis] and math.prod(new[:target]) == before:
                return target
    return None
