"""User functions as pytrees, so that a model object holding one passes through JAX transforms."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks


class RowsFunction(eqx.Module):
    """A function of an (n, d) matrix of inputs whose leaves are its array parameters alone."""

    arrays: Any
    structure: Any = eqx.field(static=True)
    maps_single_rows: bool = eqx.field(static=True)

    def __call__(self, X: Float[Array, "n d"]) -> Array:
        """Apply the function to all rows."""
        function = self.arrays
        if self.structure is not None:
            function = eqx.combine(self.arrays, self.structure)
        return jax.vmap(function)(X) if self.maps_single_rows else function(X)


def as_pytree(function: Callable[..., Array], name: str) -> RowsFunction:
    """Wrap a user's function.

    An Equinox module is applied row by row, as Equinox networks are written; anything else to the
    whole matrix.

    Raises:
        TypeError: if `function` is not callable; the message calls it `name`.
    """
    if isinstance(function, RowsFunction):
        return function
    checks.function(name, function)
    maps_single_rows = isinstance(function, eqx.Module)
    if isinstance(function, functools.partial) and not isinstance(function, jax.tree_util.Partial):
        function = jax.tree_util.Partial(function.func, *function.args, **function.keywords)
    if all(eqx.is_array(leaf) for leaf in jax.tree.leaves(function)):
        return RowsFunction(function, None, maps_single_rows)
    # Activations of an Equinox network and plain functions are no arrays: they stay static.
    return RowsFunction(*eqx.partition(function, eqx.is_array), maps_single_rows)


def traced_closures(tree: Any) -> list[str]:
    """Names of traced values that functions in a pytree close over: no leaf has them.

    Functions of a `Partial` are not looked at: those of Flax modules close over traced values which
    their arguments replace.
    """
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, RowsFunction))
    static = [node.structure for node in nodes if isinstance(node, RowsFunction)]
    leaves = [leaf for leaf in jax.tree.leaves(static) if isinstance(leaf, FunctionType)]
    return [name for function in leaves for name in _traced(function, set())]


def _traced(function: FunctionType, seen: set[int]) -> list[str]:
    """Names of the variables of a function, and of functions among them, with traced values."""
    if id(function) in seen:
        return []
    seen.add(id(function))
    names = list(function.__code__.co_freevars)
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = function.__defaults__ or ()
    count = function.__code__.co_argcount
    names += function.__code__.co_varnames[count - len(defaults) : count]
    found = []
    for name, value in zip(names, [*values, *defaults], strict=True):
        if isinstance(value, FunctionType):
            found += _traced(value, seen)
        elif any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            found.append(name)
    return found


def constant_function(constant: Float[Array, ""]) -> RowsFunction:
    """The function that maps (n, d) inputs to n times the same number."""
    return as_pytree(functools.partial(_repeat, constant), "constant")


def _repeat(constant: Float[Array, ""], X: Float[Array, "n d"]) -> Float[Array, " n"]:
    return jnp.broadcast_to(constant.astype(jnp.result_type(constant, X)), X.shape[:1])
