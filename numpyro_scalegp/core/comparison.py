"""Whether arrays and trees of them are the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy


def is_alike(one: Any, other: Any) -> bool:
    """Whether two pytrees have the same structure, and their leaves the same shapes."""

    def described(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
        return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]

    return described(one) == described(other)


def is_same(one: Any, other: Any) -> Bool[Array, ""]:
    """Whether two pytrees of arrays have the same structure, types and values."""
    same = jnp.ones((), bool)
    if not is_alike(one, other):
        return ~same
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        same &= (a.dtype == b.dtype) & jnp.all(a == b)
    return same


def begins_with(X: Float[Array, "n d"], first: Float[Array, "m c"]) -> bool:
    """Whether X has the rows `first` before all others; values count only where concrete.

    Of two types the one with fewer digits counts.
    """
    if X.shape[1] != first.shape[1] or X.shape[0] < first.shape[0]:
        return False
    if not checks.is_concrete((X, first)):
        return True
    dtype = min(X.dtype, first.dtype, key=lambda one: one.itemsize)
    ours, theirs = (as_numpy(one).astype(dtype) for one in (X, first))
    return np.array_equal(ours[: len(theirs)], theirs)
