"""A run of a guide in one program, in place of one program for each operation."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array
from numpyro import handlers
from numpyro.primitives import Messenger, apply_stack

from numpyro_scalegp.tracing.runs import Trace

# It runs once, in less time than it is compiled.
_QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


def compiled(
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
        in the attributes of `owner`. Where the run raises, these are as they were.
    """
    arrays, static = eqx.partition((args, kwargs), eqx.is_array)
    before = {name: copy.copy(one) for name, one in vars(owner).items()}
    made: Any = None

    @functools.partial(jax.jit, compiler_options=_QUICK_TO_COMPILE)
    def program(key: Array, arrays: Any) -> list[Array]:
        nonlocal made
        args, kwargs = eqx.combine(arrays, static)
        with handlers.block(), handlers.trace() as trace, handlers.seed(rng_seed=key):
            result = run(*args, **kwargs)
        made = result, trace, dict(vars(owner))
        found: dict[int, Array] = {}
        _replaced(made, lambda one: found.setdefault(id(one), one))
        made = made, list(found)
        return list(found.values())

    try:
        values = program(key, arrays)
    except BaseException:
        vars(owner).clear()
        vars(owner).update(before)
        raise
    made, names = made
    of = dict(zip(names, values, strict=True))
    result, trace, attributes = _replaced(made, lambda one: of[id(one)])
    vars(owner).update(attributes)
    return result, trace


def emit(trace: Trace) -> bool:
    """Show the sites of a trace to the handlers around this call, as if they were made here.

    Returns:
        Whether these left the parameters and the mutable state as they were. If not, then no other
        site was shown, since it may depend on them.
    """
    kinds = ("param", "mutable")
    # That they stopped at the handler which hid them is over.
    sites = [{**site, "stop": False} for site in trace.values()]
    declared = [site for site in sites if site["type"] in kinds]
    if any(apply_stack(dict(site))["value"] is not site["value"] for site in declared):
        return False
    for site in sites:
        if site["type"] not in kinds:
            apply_stack(site)
    return True


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
