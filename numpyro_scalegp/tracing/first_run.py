"""A run of a guide in one program, in place of one program for each operation."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array
from numpyro import handlers
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack

from numpyro_scalegp.core import programs
from numpyro_scalegp.tracing.runs import Trace

# It runs once, in less time than it is compiled.
_QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


def run_as_program(
    run: Callable[..., Any],
    owner: Any,
    key: Array,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Trace]:
    """Run a function with NumPyro's statements in one program, seen by no handler outside.

    Args:
        run: the function.
        owner: an object whose attributes the run may set, such as an autoguide that sets itself up.
        key: a JAX key.
        args: positional arguments, of which arrays are traced.
        kwargs: keyword arguments.

    Returns:
        What the function returns, and its trace, both with values in place of what was traced, as
        in the attributes of `owner`. Where the run raises, these may have what was traced.
    """
    arrays, static = eqx.partition((args, kwargs), _is_numbers)
    made: Any = None

    def values_of_run(key: Array, arrays: Any) -> list[Array]:
        nonlocal made
        args, kwargs = eqx.combine(arrays, static)
        with handlers.block(), handlers.trace() as trace, handlers.seed(rng_seed=key):
            result = run(*args, **kwargs)
        made = result, trace, dict(vars(owner))
        found: dict[int, Array] = {}
        _replaced(made, lambda one: found.setdefault(id(one), one))
        made = made, list(found)
        return list(found.values())

    closed = jax.make_jaxpr(values_of_run)(key, arrays)
    leaves = jax.tree.leaves((key, arrays))
    program = programs.executable(closed, leaves, options=_QUICK_TO_COMPILE)
    values = program(closed.consts, *leaves)
    made, names = made
    of = dict(zip(names, values, strict=True))
    result, trace, attributes = _replaced(made, lambda one: of[id(one)])
    vars(owner).update(attributes)
    return result, trace


def only_watched() -> bool:
    """Whether no handler around this call would change the values of sites."""
    return all(type(one) in (handlers.block, handlers.seed, handlers.trace) for one in _PYRO_STACK)


def emit(trace: Trace) -> None:
    """Show the sites of a trace to the handlers around this call, as if they were made here."""
    for site in trace.values():
        # That it stopped at the handler which hid it is over.
        apply_stack({**site, "stop": False})


def _is_numbers(leaf: Any) -> bool:
    """Whether an argument is traced: an array, if no strings or objects and nothing masked."""
    return eqx.is_array(leaf) or (type(leaf) is np.ndarray and leaf.dtype.kind in "biuf")


def _replaced(tree: Any, value_of: Callable[[Any], Any]) -> Any:
    """A tree with other values for what is traced, in partial functions and handlers as well."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer):
            return value_of(leaf)
        if isinstance(leaf, functools.partial):
            parts = leaf.func, leaf.args, leaf.keywords
            if _same(parts, new := _replaced(parts, value_of)):
                return leaf
            return functools.partial(new[0], *new[1], **new[2])
        if isinstance(leaf, Messenger):
            if _same(vars(leaf), new := _replaced(vars(leaf), value_of)):
                return leaf
            other = copy.copy(leaf)
            vars(other).update(new)
            return other
        return leaf

    return jax.tree.map(of_leaf, tree)


def _same(old: Any, new: Any) -> bool:
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(one is other for one, other in pairs)
