"""Users' functions as pytrees, so that an object with such a field can be transformed by JAX."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.programs.fingerprints import Computation, is_pure
from numpyro_scalegp.programs.reads import Closure, hoisted, with_copied_arrays

# A function is traced for inputs with this number of rows and, if the number of columns is unknown,
# for up to this number of columns.
MAX_COLUMNS = 8
_NUM_ROWS = 16
# Settings on which the trace of a function depends.
_SETTINGS = (
    "jax_disable_jit", "jax_default_matmul_precision", "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion", "jax_default_prng_impl",
)  # fmt: skip


class RowsFunction(eqx.Module):
    """A function of an (n, d) matrix of inputs, as a pytree whose leaves are its parameters.

    A function of single rows is mapped over all leading axes; any other gets the whole array.
    """

    arrays: Any
    structure: Any = eqx.field(static=True)
    maps_single_rows: bool = eqx.field(static=True)
    fixed_as: Any = eqx.field(static=True, default=None, metadata={"is_saved": False})

    def __repr__(self) -> str:
        function = self.arrays if self.structure is None else self.structure
        return _name(function).rpartition(".")[2]

    def __call__(self, X: Float[Array, "*rows d"]) -> Any:
        """Apply the function to all rows.

        Raises:
            ValueError: if it is `fixed`, and what it reads has changed.
        """
        if self.fixed_as is not None and self.fixed_as.differs(self):
            raise ValueError(
                f"`{_name(self._function)}` computes something else than when this posterior was "
                "made: it reads a variable, an attribute or an object that has changed since. "
                "Condition again, or bind the value by a default argument or `functools.partial`."
            )
        return self.evaluate(X)

    def evaluate(self, X: Float[Array, "*rows d"]) -> Any:
        """Apply the function without this check."""
        function = self._function
        if not self.maps_single_rows:
            return function(X)
        for _ in X.shape[:-1]:
            function = jax.vmap(function)
        return function(X)

    def fixed(self, num_columns: int | None) -> "RowsFunction":
        """This function, made to raise if it ever computes something else than now.

        Args:
            num_columns: the number of input columns, if it is known.
        """
        if self.fixed_as is not None or is_pure(jax.tree.structure(self)):
            return self
        is_float64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        first = [] if num_columns is None else [num_columns]
        for width in (*first, *range(1, MAX_COLUMNS + 1)):
            traced = _FixedComputation.of(self, width, is_float64=is_float64)
            if traced is not None:
                # A callback that is defined within the function differs between traces.
                return self if traced.differs(self) else dataclasses.replace(self, fixed_as=traced)
        return self

    @property
    def _function(self) -> Callable[..., Any]:
        if self.structure is None:
            return self.arrays
        return eqx.combine(self.arrays, self.structure)


class _FixedComputation(NamedTuple):
    """What a function computed when it was `fixed`, for any values of its parameters."""

    num_columns: int
    is_float64: bool  # whether the default precision was float64
    context: Hashable  # what else a traced function depends on
    computation: Computation

    @classmethod
    def of(
        cls, function: RowsFunction, num_columns: int, *, is_float64: bool
    ) -> "_FixedComputation | None":
        """Trace a function; None if it refuses such inputs, or cannot be compared."""
        arrays = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), function.arrays
        )

        # A new function for each call, because JAX caches the traces of a function.
        def evaluate(arrays: Any, X: Array) -> Any:
            copied = dataclasses.replace(with_copied_arrays(function), arrays=arrays)
            return copied.evaluate(X)

        with jax.enable_x64(is_float64):
            rows = jax.ShapeDtypeStruct((_NUM_ROWS, num_columns), jnp.result_type(float))
            try:
                computation = Computation(jax.make_jaxpr(evaluate)(arrays, rows))
            except Exception:  # a function may raise any error for inputs of another width
                return None
        return cls(num_columns, is_float64, _context(function), computation)

    def differs(self, function: RowsFunction) -> bool:
        """Whether a function now computes something else; False in a different context."""
        if self.context != _context(function):
            return False
        traced = _FixedComputation.of(function, self.num_columns, is_float64=self.is_float64)
        return self != traced


def _context(function: RowsFunction) -> Hashable:
    """The shapes and dtypes of a function's parameters, and settings of JAX."""
    leaves = jax.tree.leaves(function.arrays)
    settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
    mesh = jax.sharding.get_abstract_mesh()
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves), settings, mesh


def with_fixed_functions(tree: Any, num_columns: int | None) -> Any:
    """Replace all users' functions in a pytree by `fixed` ones."""

    def is_function(node: Any) -> bool:
        return isinstance(node, RowsFunction)

    def fixed(node: Any) -> Any:
        return node.fixed(num_columns) if is_function(node) else node

    return jax.tree.map(fixed, tree, is_leaf=is_function)


def _name(function: Any) -> str:
    """The name of a user's function, for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, Closure):
        function = function.skeleton
    return getattr(function, "__qualname__", type(function).__qualname__)


def as_pytree(function: Callable[..., Array], name: str) -> RowsFunction:
    """Wrap a user's function.

    An Equinox module is applied row by row, as Equinox networks are written; any other function is
    applied to the matrix. Arrays in a function's closure are parameters, like those in a `Partial`.

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
    # Activations of an Equinox network and plain functions are not arrays: they stay static.
    return RowsFunction(*eqx.partition(function, eqx.is_array), maps_single_rows)


def constant_function(constant: Float[Array, "..."]) -> RowsFunction:
    """The function that maps inputs (*batch, n, d) to a constant for each member, (*batch, n)."""
    return as_pytree(functools.partial(_repeat, constant), "constant")


def _repeat(constant: Float[Array, "..."], X: Float[Array, "... n d"]) -> Float[Array, "... n"]:
    column = constant.astype(jnp.result_type(constant, X))[..., None]
    return jnp.broadcast_to(column, jnp.broadcast_shapes(column.shape, X.shape[:-1]))


def constant_rows(row: Float[Array, " p"]) -> RowsFunction:
    """The function that maps inputs (n, d) to n copies of a row, (n, p)."""
    return as_pytree(functools.partial(_rows_of, row), "row")


def _rows_of(row: Float[Array, " p"], X: Float[Array, "n d"]) -> Float[Array, "n p"]:
    row = row.astype(jnp.result_type(row, X))
    return jnp.broadcast_to(row, (X.shape[0], row.size))


def _call(function: Callable[..., Array], *args: Any, **kwargs: Any) -> Array:
    return function(*args, **kwargs)


ELSEWHERE = (
    "`mean` was given as its values at the rows of the fit, and is not known at other rows: give a "
    "callable of the inputs, as in `mean=lambda X: X[:, :2] @ beta`, with the covariates among the "
    "columns of `X` and a kernel that does not see them, `kernel.on(...)`."
)


def row_values(values: Float[Array, "..."], X: Float[Array, "... n d"]) -> RowsFunction:
    """The function with these values at X, which can be called for all rows of X only.

    It raises for other inputs or, if they are traced and of the same shape, returns NaN.
    """
    return as_pytree(functools.partial(_values_at, values, X), "mean")


def is_of_rows(function: RowsFunction) -> bool:
    """Whether a function is from `row_values`, so that it cannot be called in chunks of rows."""
    return isinstance(function.arrays, jax.tree_util.Partial) and function.arrays.func is _values_at


def holds_row_values(tree: Any) -> bool:
    """Whether a pytree contains a function from `row_values`."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, RowsFunction))
    return any(isinstance(leaf, RowsFunction) and is_of_rows(leaf) for leaf in leaves)


def in_chunks_and_whole(
    function: RowsFunction,
) -> tuple[Callable[[Array], Any], Callable[[Array], Any]]:
    """Split a mean function into a term for chunks of rows and a term for all rows at once."""
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
