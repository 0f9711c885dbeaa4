"""Long loops of compiled programs in stretches, between which the host reports and can interrupt.

A program cannot report to the host while it runs, unless it calls Python, and JAX stores no such
program in its compilation cache. So a program whose loop is marked is compiled in parts: what
precedes the loop, a stretch of the loop, and what follows it.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.programs.compiled import executable, trace_call
from numpyro_scalegp.programs.equations import add_results, bound, evaluate, read

# The name of the function of a stretch, which marks its equation.
_MARK = "stretch_of_a_loop"
# A stretch takes about as long as this, in seconds, but at least one unit of progress.
_SECONDS = 0.3


def while_loop(
    continues: Callable[[Any], Bool[Array, ""]],
    body: Callable[[Any], Any],
    state: Any,
    measure: Callable[[Any], Float[Array, " m"]],
) -> Any:
    """`jax.lax.while_loop`, marked for `run`.

    Args:
        continues: whether to continue, from a state.
        body: the next state.
        state: the initial state.
        measure: maps a state to what is reported: first the progress, which never decreases.
    """

    def stretch(state: Any, limit: Array) -> Any:
        def is_within(state: Any) -> Array:
            return continues(state) & (measure(state)[0] < limit)

        state = jax.lax.while_loop(is_within, body, state)
        return state, continues(state), measure(state)

    stretch.__name__ = _MARK
    return jax.jit(stretch)(state, jnp.inf)[0]


def run(
    function: Callable[..., Any], args: tuple[Any, ...], report: Callable[..., None] | None
) -> Any:
    """Run a function of pytrees without side effects as compiled programs.

    Args:
        function: a function, which may call `while_loop`. A loop within other control flow runs in
            one stretch.
        args: its arguments, of which nothing is traced.
        report: called before the loop and after each stretch with the values of `measure`; None
            for loops in one stretch. It may raise, which ends the run.
    """
    if jax.process_count() > 1:  # which would end their stretches at different times
        report = None
    traced = trace_call(function, args, {})
    flat = jax.make_jaxpr(lambda *leaves: _inlined(traced.closed, leaves))(*traced.leaves)
    values: dict[Any, Any] = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    values.update(zip(flat.jaxpr.invars, traced.leaves, strict=True))
    equations = list(flat.jaxpr.eqns)
    places = [i for i, equation in enumerate(equations) if _is_marked(equation)]
    begin = 0
    for place in places:
        _run_section(equations[begin:place], _read_by(equations[place:], flat.jaxpr), values)
        _run_loop(equations[place], values, report)
        begin = place + 1
    _run_section(equations[begin:], set(flat.jaxpr.outvars), values)
    results = [read(atom, values) for atom in flat.jaxpr.outvars]
    return traced.result(results)


def _is_marked(equation: Any) -> bool:
    return equation.params.get("name") == _MARK


def _has_mark(jaxpr: Jaxpr) -> bool:
    return any(
        _is_marked(equation)
        or (
            equation.primitive.name == "jit"
            and any(map(_has_mark, jaxprs_in_params(equation.params)))
        )
        for equation in jaxpr.eqns
    )


def _inlined(closed: ClosedJaxpr, args: Any) -> list[Any]:
    """The results, without `jit` around marked loops."""

    def results(equation: Any, inputs: list[Any]) -> list[Any]:
        is_around = equation.primitive.name == "jit" and not _is_marked(equation)
        if is_around and _has_mark(equation.params["jaxpr"].jaxpr):
            return _inlined(equation.params["jaxpr"], inputs)
        return bound(equation, inputs)

    return evaluate(closed, args, results)


def _read_by(equations: list[Any], jaxpr: Jaxpr) -> set[Any]:
    """The variables that these equations, or the results of a jaxpr, read."""
    atoms = [*jaxpr.outvars, *(atom for equation in equations for atom in equation.invars)]
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _run_section(equations: list[Any], needed: set[Any], values: dict[Any, Any]) -> None:
    """Add the values of the needed variables that these equations compute, from one program."""
    made = [variable for equation in equations for variable in equation.outvars]
    outputs = [variable for variable in made if variable in needed]
    if not outputs:
        return
    atoms = (atom for equation in equations for atom in equation.invars)
    inputs = list(dict.fromkeys(a for a in atoms if not isinstance(a, Literal) and a in values))

    def compute(*args: Any) -> list[Any]:
        inside = dict(zip(inputs, args, strict=True))
        add_results(equations, inside, bound)
        return [inside[variable] for variable in outputs]

    leaves = [values[variable] for variable in inputs]
    closed = jax.make_jaxpr(compute)(*(variable.aval for variable in inputs))
    program = executable(closed, leaves)
    values.update(zip(outputs, program(closed.consts, *leaves), strict=True))


def _run_loop(equation: Any, values: dict[Any, Any], report: Callable[..., None] | None) -> None:
    """Add the values of a marked loop, whose last results are `continues` and `measure`."""
    closed = equation.params["jaxpr"]
    *inputs, limit = [_as_strong(read(atom, values)) for atom in equation.invars]
    num_states = len(equation.outvars) - 2
    fixed, state = inputs[: len(inputs) - num_states], inputs[len(inputs) - num_states :]
    program = executable(closed, [*inputs, limit])

    def advanced(state: list[Any], limit: float) -> list[Any]:
        return program(closed.consts, *fixed, *state, np.asarray(limit, dtype))

    dtype = limit.dtype
    results = advanced(state, np.inf if report is None else -np.inf)
    pace = 1.0  # progress for each stretch
    while report is not None:
        measures = as_numpy(results[-1]).tolist()
        report(*measures)
        if not as_numpy(results[-2]):
            break
        start = time.monotonic()
        results = jax.block_until_ready(advanced(results[:num_states], measures[0] + pace))
        seconds, done = time.monotonic() - start, float(as_numpy(results[-1])[0]) - measures[0]
        if done > 0:
            pace = max(1.0, _SECONDS * done / max(seconds, 1e-6))
    values.update(zip(equation.outvars, results, strict=True))


def _as_strong(value: Any) -> Array:
    """An array, without the weak type of a Python number."""
    value = jnp.asarray(value)
    return value.astype(value.dtype) if jax.typeof(value).weak_type else value
