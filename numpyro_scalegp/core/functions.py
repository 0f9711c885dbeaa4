"""User functions as pytrees, so that a model object holding one passes through JAX transforms."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.closures import Closure, hoisted
from numpyro_scalegp.core.fingerprints import fingerprint_of_values, is_pure

# How many columns a function may take of which nobody knows it.
_MAX_COLUMNS = 8


class RowsFunction(eqx.Module):
    """A function of an (n, d) matrix of inputs whose leaves are its array parameters alone.

    One of single rows is applied to each matrix of a batch, any other to the whole array.
    """

    arrays: Any
    structure: Any = eqx.field(static=True)
    maps_single_rows: bool = eqx.field(static=True)
    made: Any = eqx.field(static=True, default=None, metadata={"is_saved": False})  # a `_Made`

    def __call__(self, X: Float[Array, "*rows d"]) -> Any:
        """Apply the function to all rows.

        Raises:
            ValueError: if it is `fixed`, and reads something else by now.
        """
        if self.made is not None and self.made.differs(self):
            raise ValueError(
                f"`{_name(self._function)}` computes something else than when this posterior was "
                "made: it reads a variable, an attribute or an object that has changed since. "
                "Condition again, or give the function its own value, by a default argument or "
                "`functools.partial`."
            )
        return self.evaluate(X)

    def evaluate(self, X: Float[Array, "*rows d"]) -> Any:
        """What the function gives now."""
        function = self._function
        if not self.maps_single_rows:
            return function(X)
        for _ in X.shape[:-1]:
            function = jax.vmap(function)
        return function(X)

    def fixed(self, num_columns: int | None) -> "RowsFunction":
        """The function, which raises once it computes something else than now.

        Args:
            num_columns: of the inputs that it takes, as far as that is known.
        """
        if self.made is not None or is_pure(jax.tree.structure(self)):
            return self
        for width in (num_columns, *range(1, _MAX_COLUMNS + 1)):
            if width is not None and (made := _made(self, width)) is not None:
                return dataclasses.replace(self, made=made)
        return self

    @property
    def _function(self) -> Callable[..., Any]:
        if self.structure is None:
            return self.arrays
        return eqx.combine(self.arrays, self.structure)


class _Made(NamedTuple):
    """What a function computed of two rows when it was `fixed`, whatever its parameters are."""

    num_columns: int
    types: Hashable  # of the parameters, and of the rows
    program: Hashable

    def differs(self, function: RowsFunction) -> bool:
        """Whether a function of the same types computes something else by now."""
        if self.types != _types(function):
            return False
        return self != _made(function, self.num_columns)


def _types(function: RowsFunction) -> Hashable:
    leaves = jax.tree.leaves(function.arrays)
    return jnp.result_type(float), tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _made(function: RowsFunction, num_columns: int) -> _Made | None:
    """None of a function that takes other rows, or that cannot be compared."""
    rows = jax.ShapeDtypeStruct((2, num_columns), jnp.result_type(float))
    try:
        shapes = jax.eval_shape(lambda: function)
        closed = jax.make_jaxpr(lambda function, X: function.evaluate(X))(shapes, rows)
        return _Made(num_columns, _types(function), fingerprint_of_values(closed))
    except Exception:  # of a function that raises what it likes of other rows
        return None


def with_fixed_functions(tree: Any, num_columns: int | None) -> Any:
    """A pytree in which all functions of the user's are `fixed`."""

    def is_function(node: Any) -> bool:
        return isinstance(node, RowsFunction)

    def fixed(node: Any) -> Any:
        return node.fixed(num_columns) if is_function(node) else node

    return jax.tree.map(fixed, tree, is_leaf=is_function)


def _name(function: Any) -> str:
    """Of a user's function, for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, Closure):
        function = function.skeleton
    return getattr(function, "__qualname__", type(function).__qualname__)


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
