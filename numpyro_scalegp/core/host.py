"""What the host sees: values of arrays, and calls that are one for all members of a batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Num


def as_numpy(value: ArrayLike) -> np.ndarray:
    """The values of an array, of one that several processes hold the whole in each of them."""
    sharding = value.sharding if isinstance(value, jax.Array) else None
    if isinstance(sharding, NamedSharding) and not (
        sharding.is_fully_addressable or sharding.is_fully_replicated
    ):
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        with jax.ensure_compile_time_eval():
            value = jax.jit(lambda array: array, out_shardings=whole)(value)
    return np.asarray(value)


@jax.custom_batching.custom_vmap
def largest_of_batch(value: Num[Array, ""] | Bool[Array, ""]) -> Array:
    """A value; under `vmap` the largest of all members, so that it is one for all of the batch.

    A condition with a value of its own for each member would run all of its branches.
    """
    return value


@largest_of_batch.def_vmap
def _(_axis_size: int, _in_batched: list[bool], value: Array) -> tuple[Array, bool]:
    return largest_of_batch(jnp.max(value)), False


def call_where(flag: Bool[Array, ""], function: Callable[..., None], *values: ArrayLike) -> None:
    """Call a function of values on the host if a flag is set, once for all members of a batch."""
    if isinstance(flag, jax.core.Tracer):
        flag = largest_of_batch(flag)
        jax.lax.cond(flag, lambda: jax.debug.callback(function, *values), lambda: None)
    elif flag:  # a condition outside of compiled code would be compiled at each call
        function(*values)
