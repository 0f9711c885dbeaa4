"""User functions as pytrees, so that a model object holding one passes through JAX transforms."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.closures import Closure, hoisted


class RowsFunction(eqx.Module):
    """A function of an (n, d) matrix of inputs whose leaves are its array parameters alone.

    One of single rows is applied to each matrix of a batch, any other to the whole array.
    """

    arrays: Any
    structure: Any = eqx.field(static=True)
    maps_single_rows: bool = eqx.field(static=True)

    def __call__(self, X: Float[Array, "*rows d"]) -> Any:
        """Apply the function to all rows."""
        function = self.arrays
        if self.structure is not None:
            function = eqx.combine(self.arrays, self.structure)
        if not self.maps_single_rows:
            return function(X)
        for _ in X.shape[:-1]:
            function = jax.vmap(function)
        return function(X)


def as_pytree(function: Callable[..., Array], name: str) -> RowsFunction:
    """Wrap a user's function.

    An Equinox module is applied row by row, as Equinox networks are written; anything else to the
    whole matrix. What a function closes over is learned like what a `Partial` holds.

    Raises:
        TypeError: if `function` is not callable; the message calls it `name`.
    """
    if isinstance(function, RowsFunction):
        return function
    checks.function(name, function)
    maps_single_rows = isinstance(function, eqx.Module)
    if isinstance(function, functools.partial) and not isinstance(function, jax.tree_util.Partial):
        function = jax.tree_util.Partial(function.func, *function.args, **function.keywords)
    function = hoisted(function)
    if isinstance(function, jax.tree_util.Partial):
        inner = hoisted(function.func)
        called = (_call, inner) if isinstance(inner, Closure) else (inner,)
        function = jax.tree_util.Partial(*called, *function.args, **function.keywords)
    if all(eqx.is_array(leaf) for leaf in jax.tree.leaves(function)):
        return RowsFunction(function, None, maps_single_rows)
    # Activations of an Equinox network and plain functions are no arrays: they stay static.
    return RowsFunction(*eqx.partition(function, eqx.is_array), maps_single_rows)


def constant_function(constant: Float[Array, "..."]) -> RowsFunction:
    """The function that maps (n, d) inputs to n times the same number, one for each of a batch."""
    return as_pytree(functools.partial(_repeat, constant), "constant")


def _repeat(constant: Float[Array, "..."], X: Float[Array, "... n d"]) -> Float[Array, "... n"]:
    column = constant.astype(jnp.result_type(constant, X))[..., None]
    return jnp.broadcast_to(column, jnp.broadcast_shapes(column.shape, X.shape[:-1]))


def constant_rows(row: Float[Array, " p"]) -> RowsFunction:
    """The function that maps (n, d) inputs to n times the same row, (n, p)."""
    return as_pytree(functools.partial(_rows_of, row), "row")


def _rows_of(row: Float[Array, " p"], X: Float[Array, "n d"]) -> Float[Array, "n p"]:
    row = row.astype(jnp.result_type(row, X))
    return jnp.broadcast_to(row, (X.shape[0], row.size))


def _call(function: Callable[..., Array], *args: Any, **kwargs: Any) -> Array:
    return function(*args, **kwargs)
