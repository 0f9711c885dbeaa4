"""User functions as pytrees, so that a model object holding one passes through JAX transforms."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float


class StaticFunction(eqx.Module):
    """A plain function as a pytree without leaves."""

    function: Callable[..., Array] = eqx.field(static=True)

    def __call__(self, X: ArrayLike) -> Array:
        """Call the function."""
        return self.function(X)


def as_pytree(function: Callable[..., Array], name: str) -> Callable[..., Array]:
    """Return `function` as a pytree whose leaves are its parameters, if it has any to show.

    Raises:
        ValueError: if `function` is not callable; the message calls it `name`.
    """
    if not callable(function):
        raise ValueError(f"`{name}` must be callable, got {type(function).__name__}.")
    if isinstance(function, functools.partial) and not isinstance(function, jax.tree_util.Partial):
        return jax.tree_util.Partial(function.func, *function.args, **function.keywords)
    return StaticFunction(function) if jax.tree_util.all_leaves([function]) else function


def maps_single_rows(function: Callable[..., Array]) -> bool:
    """Whether `function` takes one input row, as Equinox networks do, and not the whole matrix."""
    return isinstance(function, eqx.Module) and not isinstance(function, StaticFunction)


def constant_function(constant: Float[Array, ""]) -> Callable[[Array], Array]:
    """The function that maps (n, d) inputs to n times the same number."""
    return jax.tree_util.Partial(_repeat, constant)


def _repeat(constant: Float[Array, ""], X: Float[Array, "n d"]) -> Float[Array, " n"]:
    return jnp.broadcast_to(constant, X.shape[:1])
