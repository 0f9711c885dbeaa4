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


def called(equation: Any) -> ClosedJaxpr | None:
    """The jaxpr that an equation calls, without rules of derivatives or batches; else None."""
    parameter = _CALLED.get(equation.primitive.name)
    if parameter is None:
        return None
    inner = equation.params[parameter]
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])


_CALLED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "call_with_jvp": "jaxpr",
    "remat2": "jaxpr",
}


def scanned(equation: Any, inputs: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The constants, the carry and the rows of a scan."""
    params = equation.params
    if "ft_in" in params:  # JAX 0.11.2 and later
        consts, carry, xs = map(list, params["ft_in"].update(inputs).unpack())
        return consts, carry, xs
    return parts(inputs, params["num_consts"], params["num_carry"])


def parts(inputs: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The first inputs, the next ones, and the rest."""
    return inputs[:first], inputs[first : first + second], inputs[first + second :]
