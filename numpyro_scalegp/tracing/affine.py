"""What is affine or quadratic in a function's arguments, by the operations that it is made of."""

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

# Products, and what is linear in its operands: in all of them, or in those at some places.
_PRODUCTS = ("mul", "dot_general")
_ALL = {
    *("add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "reshape"),
    *("broadcast_in_dim", "squeeze", "expand_dims", "transpose", "concatenate", "pad", "rev"),
    *("slice", "copy", "copy_p", "stack", "unstack", "split", "tile"),
}
_PLACES: dict[str, tuple[int, ...]] = {
    "div": (0,),
    "triangular_solve": (1,),
    "gather": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
    "scatter_add": (0, 2),
    "select_n": tuple(range(1, 100)),
}
# Not what has derivatives of its own, such as `stop_gradient`: its values need not have them.
_CALLS = ("pjit", "jit", "closed_call")


class Degree(IntEnum):
    """Of a polynomial in the arguments."""

    CONSTANT = 0
    AFFINE = 1
    QUADRATIC = 2
    OTHER = 3  # or no polynomial, or not known to be one


def degree(function: Callable[..., Any], *args: Any) -> Degree:
    """The largest degree of the outputs, as polynomials in the entries of all arguments.

    Nothing is evaluated. The answer is sure up to `QUADRATIC`, if not always the least; an
    operation that is not known to be a polynomial makes it `OTHER`, though its derivative be zero.

    Args:
        function: of pytrees of arrays; it may close over traced values, which are constants here.
        *args: its arguments, of which shapes and types count.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return max(_outputs(jaxpr, [Degree.AFFINE] * len(jaxpr.invars)), default=Degree.CONSTANT)


class Cut(NamedTuple):
    """Variables of a program that decide a result, each affine in arguments of its own."""

    variables: tuple[Any, ...]
    arguments: tuple[frozenset[int], ...]  # places of the arguments that each depends on


def affine_cut(jaxpr: Jaxpr, result: Any) -> Cut:
    """What a result is a function of, other than constants, each affine in arguments of its own.

    A sum of two arguments is one variable where two were; of a product of two sums there are two,
    if they have no argument in common. No operation is evaluated.

    Args:
        jaxpr: a program.
        result: one of its variables.

    Returns:
        As few variables as there are, computed from the arguments as late as there are; the
        arguments themselves, as far as the result depends on them, if there are no fewer.
    """
    if isinstance(result, Literal):
        return Cut((), ())
    equations = _between(jaxpr, jaxpr.invars, [result])
    degrees = _degrees(equations, dict.fromkeys(jaxpr.invars, Degree.AFFINE))
    origins = {variable: frozenset([place]) for place, variable in enumerate(jaxpr.invars)}
    # How many operations need a variable that depends on an argument; the result needs itself.
    users: dict[Any, int] = {result: 1}
    for equation in equations:
        operands = _variables(equation.invars) & origins.keys()
        found = frozenset().union(*map(origins.__getitem__, operands))
        origins.update(dict.fromkeys(equation.outvars, found))
        for variable in operands:
            users[variable] = users.get(variable, 0) + 1
    live = [variable for variable in jaxpr.invars if variable in users]
    best = live
    # All that is affine before all that is not, which needs it.
    for equation in equations:
        if max(map(degrees.__getitem__, equation.outvars)) > Degree.AFFINE:
            continue
        for variable in _variables(equation.invars) & origins.keys():
            users[variable] -= 1
        live = [v for v in (*live, *equation.outvars) if users.get(v)]
        own = [origins[v] for v in live]
        apart = sum(map(len, own)) == len(frozenset().union(*own))
        if apart and len(live) <= len(best):
            best = live
    return Cut(tuple(best), tuple(origins[variable] for variable in best))


def evaluated(closed: ClosedJaxpr, given: dict[Any, Any], wanted: Sequence[Any]) -> list[Any]:
    """The values of variables of a program, from those of others that decide them.

    Args:
        closed: the program.
        given: values, by variable.
        wanted: variables; only the operations that they need are evaluated.
    """
    jaxpr = closed.jaxpr
    equations = _needed(jaxpr, wanted, {*jaxpr.constvars, *given})
    part = jaxpr.replace(invars=list(given), outvars=list(wanted), eqns=equations)
    return jaxpr_as_fun(ClosedJaxpr(part, closed.consts))(*given.values())


def _is_square(equation: Any) -> bool:
    name = equation.primitive.name
    return name == "square" or (name == "integer_pow" and equation.params["y"] == 2)


def _variables(operands: Iterable[Any]) -> set[Any]:
    return {operand for operand in operands if not isinstance(operand, Literal)}


def _needed(jaxpr: Jaxpr, wanted: Iterable[Any], known: set[Any]) -> list[Any]:
    """The operations that compute wanted variables from known ones."""
    needed = _variables(wanted) - known
    equations = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            for operand in equation.invars:
                if not (isinstance(operand, Literal) or operand in known):
                    needed.add(operand)
    return equations[::-1]


def _between(jaxpr: Jaxpr, inputs: Iterable[Any], wanted: Iterable[Any]) -> list[Any]:
    """The operations that wanted variables need, and that need an input themselves."""
    dependent = set(inputs)
    equations = []
    for equation in _needed(jaxpr, wanted, set()):
        if not dependent.isdisjoint(_variables(equation.invars)):
            equations.append(equation)
            dependent.update(equation.outvars)
    return equations


def _outputs(jaxpr: Jaxpr, inputs: list[Degree]) -> list[Degree]:
    degrees = dict(zip(jaxpr.invars, inputs, strict=True))
    varying = [variable for variable, own in degrees.items() if own]
    degrees = _degrees(_between(jaxpr, varying, jaxpr.outvars), degrees)
    return [_degree_of(variable, degrees) for variable in jaxpr.outvars]


def _degrees(equations: Iterable[Any], degrees: dict[Any, Degree]) -> dict[Any, Degree]:
    """The degrees of all variables, given those that are not constant."""
    for equation in equations:
        operands = [_degree_of(variable, degrees) for variable in equation.invars]
        degrees.update(zip(equation.outvars, _of_equation(equation, operands), strict=True))
    return degrees


def _degree_of(variable: Any, degrees: dict[Any, Degree]) -> Degree:
    is_literal = isinstance(variable, Literal)
    return Degree.CONSTANT if is_literal else degrees.get(variable, Degree.CONSTANT)


def _of_equation(equation: Any, operands: list[Degree]) -> list[Degree]:
    name, largest = equation.primitive.name, max(operands, default=Degree.CONSTANT)
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if name in _CALLS and largest:
        return _outputs(getattr(inner, "jaxpr", inner), operands)
    places = {place for place, own in enumerate(operands) if own}
    # To whole numbers they are rounded.
    is_cast = name == "convert_element_type" and jnp.issubdtype(
        equation.params["new_dtype"], jnp.inexact
    )
    is_linear = (
        not places or name in _ALL or is_cast or (name in _PLACES and places <= set(_PLACES[name]))
    )
    found = Degree.OTHER
    if name in _PRODUCTS:
        found = Degree(min(sum(operands), Degree.OTHER))
    elif is_linear:
        found = largest
    elif _is_square(equation) and largest == Degree.AFFINE:
        found = Degree.QUADRATIC
    return [found] * len(equation.outvars)
