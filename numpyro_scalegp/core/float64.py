"""Functions of single rows that are computed in float64, whatever the default precision is.

A log likelihood is often a small difference of large terms: those of a Poisson density of 10^5
counts are of the order of 10^6, and float32 holds the density itself to a tenth. Rows are few
beside the entries of a covariance matrix, so that twice the digits cost next to nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import ArrayLike

# Other platforms, such as TPUs, have no float64 or lack functions for it.
_PLATFORMS = ("cpu", "cuda", "rocm")

_call = Primitive("call_in_float64")
_call.multiple_results = True


def in_float64(function: Callable[..., Any], *arguments: Any) -> Any:
    """Evaluate a function in float64, and round what it returns to the type of its arguments.

    Args:
        function: of pytrees of arrays, to a pytree of floating-point arrays.
        *arguments: the pytrees.

    Returns:
        The results, which carry no derivative. Computed in the arguments' type where the function
        takes no other, or the platform has no float64.
    """
    arguments = jax.lax.stop_gradient(arguments)
    flat, structure = jax.tree.flatten(arguments)
    dtype = jnp.result_type(*(leaf for leaf in flat if _is(leaf, jnp.floating)))
    if dtype == jnp.float64:
        return function(*jax.tree.map(_widened, arguments))
    shape_of_output: Any = None

    def narrow(*flat: ArrayLike) -> list:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, flat)))

    def wide(*flat: ArrayLike) -> list:
        nonlocal shape_of_output
        with jax.enable_x64(True):
            output = function(*jax.tree.unflatten(structure, map(_widened, flat)))
            leaves, shape_of_output = jax.tree.flatten(output)
            return [leaf.astype(dtype) for leaf in leaves]

    try:
        types = _types_of_output(wide, *flat)
    except TypeError:  # a function that fixes the types of its own arrays
        return function(*arguments)
    leaves = _call.bind(*flat, wide=wide, narrow=narrow, types=types)
    return jax.tree.unflatten(shape_of_output, leaves)


def _is(leaf: ArrayLike, kind: type) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), kind))


def _widened(leaf: ArrayLike) -> ArrayLike:
    # Counts as well: functions such as `gammaln` compute in the floating type of an integer's size.
    wide = {jnp.floating: jnp.float64, jnp.integer: jnp.int64}
    return next((jnp.asarray(leaf, wide[kind]) for kind in wide if _is(leaf, kind)), leaf)


def _types_of_output(function: Callable, *flat: ArrayLike) -> tuple:
    return tuple(aval.strip_weak_type() for aval in jax.make_jaxpr(function)(*flat).out_avals)


def _evaluate(*flat: ArrayLike, wide: Callable, **_: Any) -> list:
    return list(wide(*flat))


def _lower_wide(ctx: Any, *flat: Any, wide: Callable, **_: Any) -> Any:
    # Functions that JAX lowers by tracing, such as incomplete beta functions, need the types, too.
    with jax.enable_x64(True):
        return mlir.lower_fun(wide, multiple_results=True)(ctx, *flat)


def _lower_narrow(ctx: Any, *flat: Any, narrow: Callable, **_: Any) -> Any:
    return mlir.lower_fun(narrow, multiple_results=True)(ctx, *flat)


def _batch(
    flat: tuple, dims: tuple, *, wide: Callable, narrow: Callable, types: tuple
) -> tuple[list, tuple]:
    wide, narrow = jax.vmap(wide, in_axes=dims), jax.vmap(narrow, in_axes=dims)
    leaves = _call.bind(*flat, wide=wide, narrow=narrow, types=_types_of_output(wide, *flat))
    return leaves, (0,) * len(types)


_call.def_impl(_evaluate)
_call.def_abstract_eval(lambda *_, types, **__: list(types))
batching.primitive_batchers[_call] = _batch
mlir.register_lowering(_call, _lower_narrow)
for platform in _PLATFORMS:
    mlir.register_lowering(_call, _lower_wide, platform=platform)
