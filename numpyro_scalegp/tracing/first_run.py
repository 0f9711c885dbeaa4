"""First runs of guides and fits as one compiled program, not one for each operation."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array
from numpyro import handlers
from numpyro.distributions import Distribution
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack

from numpyro_scalegp.programs import compiled
from numpyro_scalegp.tracing.runs import Trace
from numpyro_scalegp.tracing.sites import StandIn

# The program runs once, so that compile time matters more than run time.
_QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


def run_as_program(
    run: Callable[..., Any],
    owner: Any,
    key: Array,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Trace]:
    """Run a function with NumPyro statements as one program, hidden from the handlers outside.

    Args:
        run: the function.
        owner: an object whose attributes the run may set, such as an autoguide that sets itself up.
        key: a JAX key.
        args: positional arguments; arrays among them are traced.
        kwargs: keyword arguments; arrays among them are traced.

    Returns:
        The function's result, and its trace. In both, and in the attributes of `owner`, concrete
        values replace the tracers; if the run raises, the attributes may hold tracers.
    """
    arrays, static = eqx.partition((args, kwargs), _is_numeric_array)
    outcome: Any = None
    tracer_ids: list[int] = []

    def values_of_run(key: Array, arrays: Any) -> list[Array]:
        nonlocal outcome
        args, kwargs = eqx.combine(arrays, static)
        with handlers.block(), handlers.trace() as trace, handlers.seed(rng_seed=key):
            result = run(*args, **kwargs)
        outcome = result, trace, dict(vars(owner))
        tracers: dict[int, Array] = {}
        _replace_tracers(outcome, lambda tracer: tracers.setdefault(id(tracer), tracer))
        tracer_ids[:] = tracers
        return list(tracers.values())

    closed = jax.make_jaxpr(values_of_run)(key, arrays)
    leaves = jax.tree.leaves((key, arrays))
    program = compiled.executable(closed, leaves, options=_QUICK_TO_COMPILE)
    values = dict(zip(tracer_ids, program(closed.consts, *leaves), strict=True))
    result, trace, attributes = _replace_tracers(outcome, lambda tracer: values[id(tracer)])
    vars(owner).update(attributes)
    return result, trace


def initial_state(
    svi: SVI,
    key: Array,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[SVIState, dict[str, Any]]:
    """`SVI.init` as one program, which sets the guide up and keeps `svi.constrain_fn`.

    Args:
        svi: NumPyro's SVI.
        key: a JAX key.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model, and `init_params` if any.

    Returns:
        The state, and the parameters with their constraints.
    """

    def run(*args: Any, **kwargs: Any) -> tuple[SVIState, dict[str, Any], Any]:
        with handlers.block():
            state = svi.init(*args, **kwargs)
        return state, svi.get_params(state), svi.constrain_fn

    result, _ = run_as_program(run, svi.guide, key, (key, *args), kwargs)
    state, params, svi.constrain_fn = result
    return state, params


def only_watched() -> bool:
    """Whether no handler around this call changes the values of sites, but for functions."""
    watchers = handlers.block, handlers.seed, handlers.trace, StandIn
    return all(type(handler) in watchers for handler in _PYRO_STACK)


def emit(trace: Trace) -> None:
    """Pass the sites of a trace to the handlers around this call, as if they were sampled here."""
    for site in trace.values():
        # The handler that hid the site during the run has set `stop`.
        apply_stack({**site, "stop": False})


def _is_numeric_array(leaf: Any) -> bool:
    """Whether an argument is traced: a JAX array, or a numeric NumPy array without a mask."""
    return eqx.is_array(leaf) or (type(leaf) is np.ndarray and leaf.dtype.kind in "biuf")


def _replace_tracers(tree: Any, value_of: Callable[[Any], Any]) -> Any:
    """Replace the tracers in a tree, also within partial functions, handlers and distributions."""

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer):
            return value_of(leaf)
        if isinstance(leaf, functools.partial):
            parts = leaf.func, leaf.args, leaf.keywords
            if _are_identical(parts, new := _replace_tracers(parts, value_of)):
                return leaf
            return functools.partial(new[0], *new[1], **new[2])
        if isinstance(leaf, Messenger | Distribution):
            if _are_identical(vars(leaf), new := _replace_tracers(vars(leaf), value_of)):
                return leaf
            replaced = copy.copy(leaf)
            vars(replaced).update(new)
            return replaced
        return leaf

    # As a pytree, a distribution has its fields in an order that differs between processes.
    return jax.tree.map(replace, tree, is_leaf=lambda node: isinstance(node, Distribution))


def _are_identical(old: Any, new: Any) -> bool:
    """Whether two trees have the same objects as leaves."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(left is right for left, right in pairs)
