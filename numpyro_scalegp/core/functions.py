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
from numpyro_scalegp.core.fingerprints import Computation, is_pure
from numpyro_scalegp.core.reads import with_copied_arrays

# How many columns a function may take of which nobody knows it, and rows that it is traced with.
MAX_COLUMNS = 8
_NUM_ROWS = 16
# What the same function is traced to depends on these.
_SETTINGS = (
    "jax_disable_jit", "jax_default_matmul_precision", "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion", "jax_default_prng_impl",
)  # fmt: skip


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
        is_float64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        first = [] if num_columns is None else [num_columns]
        for width in (*first, *range(1, MAX_COLUMNS + 1)):
            made = _Made.of(self, width, is_float64=is_float64)
            if made is not None:
                # Each trace of a callback that is made inside is another one.
                return self if made.differs(self) else dataclasses.replace(self, made=made)
        return self

    @property
    def _function(self) -> Callable[..., Any]:
        if self.structure is None:
            return self.arrays
        return eqx.combine(self.arrays, self.structure)


class _Made(NamedTuple):
    """What a function computed when it was `fixed`, whatever its parameters are."""

    num_columns: int
    is_float64: bool  # whether that was the default precision
    context: Hashable  # what else a traced function depends on
    computation: Computation

    @classmethod
    def of(cls, function: RowsFunction, num_columns: int, *, is_float64: bool) -> "_Made | None":
        """None of a function that takes other rows, or that cannot be compared."""
        arrays = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), function.arrays
        )

        # A function of its own for each call: JAX keeps what it traced of one that it has seen.
        def evaluate(arrays: Any, X: Array) -> Any:
            now = dataclasses.replace(with_copied_arrays(function), arrays=arrays)
            return now.evaluate(X)

        with jax.enable_x64(is_float64):
            rows = jax.ShapeDtypeStruct((_NUM_ROWS, num_columns), jnp.result_type(float))
            try:
                computation = Computation(jax.make_jaxpr(evaluate)(arrays, rows))
            except Exception:  # of a function that raises what it likes of other rows
                return None
        return cls(num_columns, is_float64, _context(function), computation)

    def differs(self, function: RowsFunction) -> bool:
        """Whether a function computes something else by now, where that can be compared."""
        if self.context != _context(function):
            return False
        return self != _Made.of(function, self.num_columns, is_float64=self.is_float64)


def _context(function: RowsFunction) -> Hashable:
    """The types of a function's parameters, and settings of JAX."""
    leaves = jax.tree.leaves(function.arrays)
    settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
    mesh = jax.sharding.get_abstract_mesh()
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves), settings, mesh


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
