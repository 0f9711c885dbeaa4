"""Decisions that are one for all members of a batch, and calls of the host that rest on them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Num


@jax.custom_batching.custom_vmap
def largest_of_batch(value: Num[Array, ""] | Bool[Array, ""]) -> Array:
    """A value; under `vmap` the largest of all members, so that it is one for all of the batch.

    A condition with a value of its own for each member would run all of its branches.
    """
    return value


@largest_of_batch.def_vmap
def _(_axis_size: int, _in_batched: list[bool], value: Array) -> tuple[Array, bool]:
    return largest_of_batch(jnp.max(value)), False


def call_where(flag: Bool[Array, ""], function: Callable[[], None]) -> None:
    """Call a function on the host if a flag is set, once for all members of a batch."""
    jax.lax.cond(largest_of_batch(flag), lambda: jax.debug.callback(function), lambda: None)
