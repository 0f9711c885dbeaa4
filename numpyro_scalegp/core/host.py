"""Values of arrays on the host, and host calls that are made once for all members of a batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Num


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
def _(_axis_size: int, _in_batched: list[bool], value: Array) -> tuple[Array, bool]:
    return largest_of_batch(jnp.max(value)), False


def call_where(flag: Bool[Array, ""], function: Callable[..., None], *values: ArrayLike) -> None:
    """Call a function on the host if a flag is set, once for all members of a batch."""
    if isinstance(flag, jax.core.Tracer):
        flag = largest_of_batch(flag)
        jax.lax.cond(flag, lambda: jax.debug.callback(function, *values), lambda: None)
    elif flag:  # `jax.lax.cond` outside of compiled code would compile at each call
        function(*values)
