"""Calls of the host from within compiled code, such as warnings."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


@jax.custom_batching.custom_vmap
def anywhere(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """A flag; under `vmap` whether it is set for any member, one for all of the batch.

    With a flag of its own for each member both branches of a condition would run.
    """
    return flag


@anywhere.def_vmap
def _(_axis_size: int, _in_batched: list[bool], flag: Array) -> tuple[Array, bool]:
    return anywhere(jnp.any(flag)), False


def call_where(flag: Bool[Array, ""], function: Callable[[], None]) -> None:
    """Call a function on the host if a flag is set, once for all members of a batch."""
    jax.lax.cond(anywhere(flag), lambda: jax.debug.callback(function), lambda: None)
