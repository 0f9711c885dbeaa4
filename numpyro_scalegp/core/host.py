"""Values of arrays on the host, and host calls that are made once for all members of a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Num

from numpyro_scalegp.core import checks


def as_numpy(value: ArrayLike) -> np.ndarray:
    """The values of an array; if several processes hold it, all values in each of them."""
    sharding = value.sharding if isinstance(value, jax.Array) else None
    if isinstance(sharding, NamedSharding) and not (
        sharding.is_fully_addressable or sharding.is_fully_replicated
    ):
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        with jax.ensure_compile_time_eval():
            value = jax.jit(lambda array: array, out_shardings=replicated)(value)
    return np.asarray(value)


@jax.custom_batching.custom_vmap
def largest_of_batch(value: Num[Array, ""] | Bool[Array, ""]) -> Array:
    """Return the value; under `vmap` the largest value of all members, the same for each of them.

    `jax.lax.cond` with a different condition for each member would run all branches.
    """
    return value


@largest_of_batch.def_vmap
def _(_axis_size: Any, _in_batched: list[bool], value: Array) -> tuple[Array, bool]:
    return largest_of_batch(jnp.max(value)), False


def call_where(flag: Bool[Array, ""], function: Callable[..., None], *values: ArrayLike) -> None:
    """Call a function on the host if a flag is set, once for all members of a batch.

    A compiled program of this package returns the flag and the values, and the function is called
    after it; see `programs.host_calls`. Within a user's `jax.jit`, the program calls the function
    itself, unless `warn_in_jit` turns that off.

    Args:
        flag: whether to call.
        function: a function that needs no result, such as a warning.
        *values: scalars, of which the function gets the largest among the members of a batch.
    """
    host_call.bind(flag, *values, function=function)


def warn_in_jit(enabled: bool | None = None) -> None:
    """Set whether programs that a user compiles warn of numerical trouble while they run.

    JAX does not store a program that calls Python in its compilation cache. Programs of this
    package warn after they have run, so this concerns only a user's own `jax.jit`, and loops such
    as `SVI.run` and NUTS. Set it before these are compiled.

    Args:
        enabled: True to warn, False not to; None, the default, to warn unless
            `jax_compilation_cache_dir` names a folder for compiled programs.

    Raises:
        TypeError: if `enabled` is not a bool or None.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> sgp.warn_in_jit(True)
        >>> sgp.warn_in_jit(None)
    """
    global _warns_in_jit
    if enabled is not None:
        checks.instance("enabled", enabled, bool, "True, False or None")
    _warns_in_jit = enabled


_warns_in_jit: bool | None = None


def _calls_from_programs() -> bool:
    if _warns_in_jit is None:
        return jax.config.jax_compilation_cache_dir is None  # type: ignore[attr-defined]
    return _warns_in_jit


# A call in a jaxpr, which compiled programs of this package replace by results.
host_call = Primitive("host_call")
host_call.multiple_results = True
# The effect of `jax.debug.callback`, which may occur in all kinds of control flow.
_EFFECTS = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects


@host_call.def_impl
def _call_now(flag: ArrayLike, *values: ArrayLike, function: Callable[..., None]) -> list[Any]:
    if as_numpy(flag):
        function(*map(as_numpy, values))
    return []


@host_call.def_effectful_abstract_eval
def _nothing(*_: Any, function: Callable[..., None]) -> tuple[list[Any], Any]:
    return [], _EFFECTS


def _call_without_tangents(primals: Any, _: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    return host_call.bind(*primals, **params), []


def _call_for_batch(args: Any, axes: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    largest = [
        arg if axis is None else jnp.max(arg, axis) for arg, axis in zip(args, axes, strict=True)
    ]
    return host_call.bind(*largest, **params), []


def _lower(context: Any, *args: Any, function: Callable[..., None]) -> Any:
    def call(flag: Array, *values: Array) -> list[Any]:
        jax.lax.cond(flag, lambda: jax.debug.callback(function, *values), lambda: None)
        return []

    return (
        mlir.lower_fun(call, multiple_results=True)(context, *args)
        if _calls_from_programs()
        else ()
    )


ad.primitive_jvps[host_call] = _call_without_tangents
batching.primitive_batchers[host_call] = _call_for_batch
mlir.register_lowering(host_call, _lower)
