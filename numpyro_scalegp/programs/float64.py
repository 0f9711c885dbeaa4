"""Functions of single data points, evaluated in float64 for any default precision.

A log likelihood is often a small difference of large terms: for a Poisson count of 10^5 the terms
are of the order of 10^6, and in float32 the log density has an error of about 0.1. There are far
fewer data points than entries of a covariance matrix, so float64 costs next to nothing here.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import batching, mlir
from jaxtyping import ArrayLike

from numpyro_scalegp.programs.reads import with_copied_arrays

# Other platforms, such as TPUs, have no float64 or lack functions for it.
_BACKENDS = ("cpu", "gpu", "cuda", "rocm")

_WIDE = 8  # bytes

_call = Primitive("call_in_float64")
_call.multiple_results = True


def in_float64(function: Callable[..., Any], *arguments: Any) -> Any:
    """Evaluate a function in float64, and round its results to the dtype of its arguments.

    Args:
        function: maps pytrees of arrays to a pytree of floating-point arrays.
        *arguments: the pytrees.

    Returns:
        The results, without derivatives. They are computed in the arguments' dtype if the function
        accepts no other, or the platform has no float64.
    """
    arguments = jax.lax.stop_gradient(arguments)
    floating = [leaf for leaf in jax.tree.leaves(arguments) if _is(leaf, jnp.floating)]
    dtype = jnp.result_type(*floating) if floating else jnp.result_type(float)
    if dtype == jnp.float64:
        return function(*jax.tree.map(_widened, arguments))
    if jax.default_backend() not in _BACKENDS:
        return function(*arguments)
    copied, arguments = with_copied_arrays((function, arguments))
    flat, structure = jax.tree.flatten(arguments)
    shape_of_output: Any = None

    def wide(*flat: ArrayLike) -> list:
        nonlocal shape_of_output
        with jax.enable_x64(True):
            output = copied(*jax.tree.unflatten(structure, map(_widened, flat)))
            leaves, shape_of_output = jax.tree.flatten(output)
            return [leaf.astype(dtype) for leaf in leaves]

    try:
        leaves = _bind(wide, *flat)
    except TypeError:  # a function that creates arrays of a fixed dtype
        return function(*arguments)
    return jax.tree.unflatten(shape_of_output, leaves)


def _bind(wide: Callable, *flat: ArrayLike) -> list:
    """Bind a function's jaxpr, with traced constants as arguments."""
    closed = jax.make_jaxpr(wide)(*flat)
    if any(isinstance(c, np.ndarray) and c.dtype.itemsize < _WIDE for c in closed.consts):
        # A 64-bit NumPy array that was read as 32-bit raises a TypeError here.
        jax.make_jaxpr(functools.partial(_evaluate, program=closed))(*flat)
    is_traced = [isinstance(constant, jax.core.Tracer) for constant in closed.consts]
    tracers = [constant for constant in closed.consts if isinstance(constant, jax.core.Tracer)]

    def with_tracers(*arguments: ArrayLike) -> list:
        first = iter(arguments[: len(tracers)])
        pairs = zip(closed.consts, is_traced, strict=True)
        constants = [next(first) if traced else constant for constant, traced in pairs]
        with jax.enable_x64(True):
            return jax.core.eval_jaxpr(closed.jaxpr, constants, *arguments[len(tracers) :])

    program = jax.make_jaxpr(with_tracers)(*tracers, *flat) if tracers else closed
    return _call.bind(*tracers, *flat, program=program)


def _is(leaf: ArrayLike, kind: type) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), kind))


def _widened(leaf: ArrayLike) -> ArrayLike:
    # Integers, too: functions such as `gammaln` compute in floats of an integer's size.
    wide = {jnp.floating: jnp.float64, jnp.integer: jnp.int64}
    return next((jnp.asarray(leaf, wide[kind]) for kind in wide if _is(leaf, kind)), leaf)


def _evaluate(*flat: ArrayLike, program: ClosedJaxpr) -> list:
    with jax.enable_x64(True):
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, *flat)


def _lower(ctx: Any, *flat: Any, program: ClosedJaxpr) -> Any:
    # Functions that JAX lowers by tracing, such as incomplete beta functions, need float64, too.
    with jax.enable_x64(True):
        return mlir.lower_fun(_evaluate, multiple_results=True)(ctx, *flat, program=program)


def _batch(flat: tuple, dims: tuple, *, program: ClosedJaxpr) -> tuple[list, tuple]:
    function = functools.partial(_evaluate, program=program)
    leaves = _bind(jax.vmap(function, in_axes=dims), *flat)
    return leaves, (0,) * len(leaves)


_call.def_impl(_evaluate)
_call.def_abstract_eval(lambda *_, program: [aval.strip_weak_type() for aval in program.out_avals])
batching.primitive_batchers[_call] = _batch
mlir.register_lowering(_call, _lower)
