"""Programs that return their calls of host functions, so that a compilation cache can store them.

JAX stores no program that calls Python. Here a program returns, for each `call_where` in it, the
flag and the values; the function is called once the program has run. A loop returns the values of
the first iteration whose flag is set.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params
from jaxtyping import Array, Bool

from numpyro_scalegp.core.host import host_call
from numpyro_scalegp.programs.equations import bound, called, evaluate, parts, scanned


class HostCall(eqx.Module):
    """A call that is due if the flag is set."""

    flag: Bool[Array, ""]
    values: list[Array]
    function: Callable[..., None] = eqx.field(static=True)

    def __call__(self) -> None:
        """Call the function if the call is due."""
        host_call.bind(self.flag, *self.values, function=self.function)


Evaluated = tuple[list[Any], list[HostCall]]


class Returned(NamedTuple):
    """A jaxpr whose last results are the flags and values of host calls.

    Its first arguments are the constants of the jaxpr that it was made from.
    """

    closed: ClosedJaxpr
    structure: Any  # of the host calls

    def call(self, results: Sequence[Any]) -> list[Any]:
        """Make the calls that are due, and return the results without flags and values."""
        results, calls = _split(results, self.structure)
        for call in calls:
            call()
        return results


def returned(closed: ClosedJaxpr) -> Returned | None:
    """The jaxpr with its host calls as results, or None if there are none."""
    if not _has_host_calls(closed.jaxpr):
        return None
    num_constants = len(closed.consts)

    def run(*args: Any) -> Evaluated:
        constants, args = args[:num_constants], args[num_constants:]
        return evaluated(ClosedJaxpr(closed.jaxpr, constants), args)

    variables = *closed.jaxpr.constvars, *closed.jaxpr.invars
    traced = jax.make_jaxpr(run, return_shape=True)
    with_calls, (_, calls) = traced(*(variable.aval for variable in variables))
    return Returned(with_calls, jax.tree.structure(calls))


def _has_host_calls(jaxpr: Jaxpr) -> bool:
    return any(map(_is_or_has_host_call, jaxpr.eqns))


def _is_or_has_host_call(equation: Any) -> bool:
    inner = jaxprs_in_params(equation.params)
    return equation.primitive is host_call or any(map(_has_host_calls, inner))


def evaluated(closed: ClosedJaxpr, args: Sequence[Any]) -> Evaluated:
    """The results of a jaxpr, and its host calls."""
    calls: list[HostCall] = []

    def results(equation: Any, inputs: list[Any]) -> list[Any]:
        has_calls = _is_or_has_host_call(equation)
        rule = _RULES.get(equation.primitive.name, _unchanged) if has_calls else _unchanged
        outputs, new_calls = rule(equation, inputs)
        calls.extend(new_calls)
        return outputs

    return evaluate(closed, args, results), calls


def _unchanged(equation: Any, inputs: list[Any]) -> Evaluated:
    """Calls inside of this equation keep their effect."""
    return bound(equation, inputs), []


def _of_host_call(equation: Any, inputs: list[Any]) -> Evaluated:
    flag, *values = map(_without_weak_type, inputs)
    return [], [HostCall(flag, values, equation.params["function"])]


def _inlined(equation: Any, inputs: list[Any]) -> Evaluated:
    """Evaluate the jaxpr that is called, without rules of derivatives or batching."""
    closed = called(equation)
    assert closed is not None
    return evaluated(closed, inputs)


def _of_checkpoint(equation: Any, inputs: list[Any]) -> Evaluated:
    # Within a derivative the equation keeps its values from being stored.
    rule = _unchanged if equation.params["differentiated"] else _inlined
    return rule(equation, inputs)


def _of_cond(equation: Any, inputs: list[Any]) -> Evaluated:
    """Each branch returns the calls of all branches, of which only its calls can be due."""
    branches = equation.params["branches"]
    of_each = list(map(_calls_of, branches))

    def with_calls(number: int) -> ClosedJaxpr:
        def run(*args: Any) -> list[Any]:
            results, calls = evaluated(branches[number], args)
            lists = [calls if i == number else _not_due(of_each[i]) for i in range(len(branches))]
            return [*results, *jax.tree.leaves(lists)]

        return jax.make_jaxpr(run)(*_avals(branches[number]))

    with_all = tuple(map(with_calls, range(len(branches))))
    outputs = equation.primitive.bind(*inputs, **{**equation.params, "branches": with_all})
    return _split(outputs, jax.tree.structure([call for calls in of_each for call in calls]))


def _of_scan(equation: Any, inputs: list[Any]) -> Evaluated:
    params, body = equation.params, equation.params["jaxpr"]
    consts, carry, xs = scanned(equation, inputs)
    num_carry, calls = len(carry), _calls_of(body)

    def step(carry: tuple[list[Any], list[HostCall]], x: list[Any]) -> Any:
        results, new = evaluated(body, [*consts, *carry[0], *x])
        return (results[:num_carry], _first(carry[1], new)), results[num_carry:]

    start = carry, _not_due(calls)
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    (carry, calls), ys = jax.lax.scan(step, start, xs, **options)
    return [*carry, *ys], calls


def _of_while(equation: Any, inputs: list[Any]) -> Evaluated:
    params = equation.params
    num_consts = params["cond_nconsts"], params["body_nconsts"]
    of_condition, of_body, carry = parts(inputs, *num_consts)
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]

    def continues(state: tuple[list[Any], list[HostCall]]) -> Any:
        return evaluated(condition, [*of_condition, *state[0]])[0][0]

    def step(state: tuple[list[Any], list[HostCall]]) -> Any:
        results, new = evaluated(body, [*of_body, *state[0]])
        return results, _first(state[1], new)

    return jax.lax.while_loop(continues, step, (carry, _not_due(_calls_of(body))))


_RULES: dict[str, Callable[[Any, list[Any]], Evaluated]] = {
    "host_call": _of_host_call,
    "jit": _inlined,
    "closed_call": _inlined,
    "custom_jvp_call": _inlined,
    "custom_vjp_call": _inlined,
    "custom_vmap_call": _inlined,
    "remat2": _of_checkpoint,
    "cond": _of_cond,
    "scan": _of_scan,
    "while": _of_while,
}


def _calls_of(closed: ClosedJaxpr) -> list[HostCall]:
    """The calls of a jaxpr, with shapes and dtypes in place of arrays."""
    return jax.eval_shape(lambda *args: evaluated(closed, args)[1], *_avals(closed))


def _not_due(calls: list[HostCall]) -> list[HostCall]:
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), calls)


def _first(old: list[HostCall], new: list[HostCall]) -> list[HostCall]:
    """The old calls where they are due, otherwise the new ones."""
    return [
        jax.tree.map(functools.partial(jnp.where, before.flag), before, after)
        for before, after in zip(old, new, strict=True)
    ]


def _split(outputs: Sequence[Any], structure: Any) -> Evaluated:
    """Results, and the host calls after them."""
    num_results = len(outputs) - structure.num_leaves
    calls = jax.tree.unflatten(structure, outputs[num_results:])
    return list(outputs[:num_results]), calls


def _avals(closed: ClosedJaxpr) -> list[Any]:
    return [variable.aval for variable in closed.jaxpr.invars]


def _without_weak_type(value: Any) -> Array:
    value = jnp.asarray(value)
    return jax.lax.convert_element_type(value, value.dtype)
