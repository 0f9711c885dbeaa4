"""The equations of a jaxpr, evaluated one after another."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

# Maps an equation and its inputs to its results.
Rule = Callable[[Any, list[Any]], list[Any]]


def evaluate(closed: ClosedJaxpr, args: Sequence[Any], rule: Rule) -> list[Any]:
    """The results of a jaxpr for these arguments, with a rule for each equation."""
    values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, args, strict=True))
    add_results(closed.jaxpr.eqns, values, rule)
    return [read(atom, values) for atom in closed.jaxpr.outvars]


def add_results(equations: Iterable[Any], values: dict[Any, Any], rule: Rule) -> None:
    """Add the results of equations to the values of variables."""
    for equation in equations:
        inputs = [read(atom, values) for atom in equation.invars]
        with equation.ctx.manager:
            results = rule(equation, inputs)
        values.update(zip(equation.outvars, results, strict=True))


def bound(equation: Any, inputs: list[Any]) -> list[Any]:
    """The rule that binds the primitive of an equation to its inputs."""
    primitive, params = equation.primitive, equation.params
    results = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def read(atom: Any, values: dict[Any, Any]) -> Any:
    """The value of a variable or of a literal."""
    return atom.val if isinstance(atom, Literal) else values[atom]
