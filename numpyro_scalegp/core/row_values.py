"""Mean functions of which the values at the rows of a fit are known, and nothing else."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.functions import RowsFunction, as_pytree

ELSEWHERE = (
    "`mean` was given as its values at the rows of the fit, and is not known at other rows: give a "
    "callable of the inputs, as in `mean=lambda X: X[:, :2] @ beta`, with the covariates among the "
    "columns of `X` and a kernel that does not see them, `kernel.on(...)`."
)


def row_values(values: Float[Array, "..."], X: Float[Array, "... n d"]) -> RowsFunction:
    """The function that has these values at the rows of X, all at once and in their order.

    Called with other rows it raises; where these are traced, it gives NaN if they are as many.
    """
    return as_pytree(functools.partial(_values_at, values, X), "mean")


def is_of_rows(function: RowsFunction) -> bool:
    """Whether a function is one of `row_values`, and cannot be called in chunks of rows."""
    return isinstance(function.arrays, jax.tree_util.Partial) and function.arrays.func is _values_at


def holds_row_values(tree: Any) -> bool:
    """Whether a pytree has such a function in it."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, RowsFunction))
    return any(isinstance(leaf, RowsFunction) and is_of_rows(leaf) for leaf in leaves)


def in_chunks_and_whole(
    function: RowsFunction,
) -> tuple[Callable[[Array], Any], Callable[[Array], Any]]:
    """What of a mean function is evaluated for rows of a chunk, and for all rows at once."""
    if is_of_rows(function):
        return _zero, function
    return function, _zero


def _zero(rows: Array) -> Array:
    return jnp.zeros((), rows.dtype)


def _values_at(values: Array, X: Array, rows: Array) -> Array:
    if rows.shape[-2:] != X.shape[-2:]:
        raise ValueError(ELSEWHERE)
    is_same = jnp.all(rows.astype(X.dtype) == X)
    if checks.is_concrete(is_same) and not is_same:
        raise ValueError(ELSEWHERE)
    return jnp.where(is_same, values, jnp.nan)
