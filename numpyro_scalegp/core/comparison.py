"""Whether arrays and trees of them are the same."""

import functools
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.fingerprints import is_pure
from numpyro_scalegp.core.host import as_numpy

_PyTreeDef: Any = type(jax.tree.structure(0))


def is_alike(one: Any, other: Any) -> bool:
    """Whether two pytrees have the same structure, and their leaves the same shapes."""

    def described(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
        return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]

    return described(one) == described(other)


def is_of_kind(one: Any, other: Any) -> bool:
    """Whether `is_alike` holds but for users' functions, of which the code alone must be the same.

    A model makes its functions again in each run. What they read may differ.
    """

    def described(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
        leaves, structure = jax.tree.flatten(tree)
        return _kind(structure), [jnp.shape(leaf) for leaf in leaves]

    return described(one) == described(other)


def _kind(value: Any) -> Any:
    """A structure with the code of functions in their place."""
    if isinstance(value, _PyTreeDef):
        return _kind(value.node_data()), tuple(map(_kind, value.children()))
    if isinstance(value, functools.partial):
        return _kind((value.func, value.args, tuple(value.keywords.items())))
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_kind, value))
    return value.__code__ if isinstance(value, FunctionType) else value


def is_same(one: Any, other: Any) -> Bool[Array, ""]:
    """Whether two pytrees of arrays have the same structure, types and values."""
    same = jnp.ones((), bool)
    if not (is_alike(one, other) and is_pure(jax.tree.structure(one))):
        return ~same  # a user's function may read something else by now
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
