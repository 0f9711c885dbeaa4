"""Comparisons of pytrees of arrays."""

import functools
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.programs.fingerprints import is_pure

_PyTreeDef: Any = type(jax.tree.structure(0))


def is_alike(left: Any, right: Any) -> bool:
    """Whether two pytrees have the same structure, and their leaves the same shapes."""

    def described(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
        return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]

    return described(left) == described(right)


def is_of_kind(left: Any, right: Any) -> bool:
    """Whether `is_alike` holds if functions with the same code count as equal.

    A model defines its functions again in each run, and they may read other values.
    """

    def described(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
        leaves, structure = jax.tree.flatten(tree)
        return _kind(structure), [jnp.shape(leaf) for leaf in leaves]

    return described(left) == described(right)


def _kind(value: Any) -> Any:
    """A structure with functions replaced by their code."""
    if isinstance(value, _PyTreeDef):
        return _kind(value.node_data()), tuple(map(_kind, value.children()))
    if isinstance(value, functools.partial):
        return _kind((value.func, value.args, tuple(value.keywords.items())))
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_kind, value))
    return value.__code__ if isinstance(value, FunctionType) else value


def is_same(left: Any, right: Any) -> Bool[Array, ""]:
    """Whether two pytrees of arrays have the same structure, dtypes and values."""
    same = jnp.ones((), bool)
    if not (is_alike(left, right) and is_pure(jax.tree.structure(left))):
        return ~same  # what a user's function reads may have changed
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        same &= (a.dtype == b.dtype) & jnp.all(a == b)
    return same


def begins_with(X: Float[Array, "n d"], first: Float[Array, "m c"]) -> bool:
    """Whether the first rows of X are `first`, in the narrower of their dtypes.

    Only shapes are compared if a value is traced.
    """
    if X.shape[1] != first.shape[1] or X.shape[0] < first.shape[0]:
        return False
    if not checks.is_concrete((X, first)):
        return True
    dtype = min(X.dtype, first.dtype, key=lambda dtype: dtype.itemsize)
    rows, first_rows = (as_numpy(array).astype(dtype) for array in (X, first))
    return np.array_equal(rows[: len(first_rows)], first_rows)
