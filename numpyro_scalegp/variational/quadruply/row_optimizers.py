"""Optimizers for large parameters, of which a step updates a few rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.programs.compiled import compiled

Schedule = float | Callable[[Int[Array, ""]], Array]


class RowOptimizer(NamedTuple):
    """A pair of functions that update each row separately, so that a step can update a few rows.

    `init(param)` returns a pytree of arrays with a row for each row of the parameter.
    `update(grads, state, params, step)` maps rows of gradient, state and parameter, and the number
    of steps so far, to the new rows of parameter and state.
    """

    init: Callable[[Float[Array, "m *row"]], Any]
    update: Callable[..., tuple[Float[Array, "r *row"], Any]]


def merge_rows(
    index: Int[Array, "sets num"], grads: Any, size: int
) -> tuple[Int[Array, " r"], Any]:
    """Add up the gradients of rows that two sets share.

    Args:
        index: one set, or two, each without repetition.
        grads: a pytree of arrays with leading axes (sets, num).
        size: number of rows of the parameter.

    Returns:
        The row of each gradient, shape (sets * num,), at least `size` if the gradient is already
        added to another; and the gradients, with one leading axis. O(num log num).
    """
    if index.shape[0] == 1:
        return index[0], jax.tree.map(lambda leaf: leaf[0], grads)
    first, second = index
    num = first.shape[0]
    order = jnp.argsort(second)
    position = jnp.minimum(jnp.searchsorted(second[order], first), num - 1)
    partner = order[position]
    shared = second[partner] == first
    counted = jnp.zeros(num, bool).at[jnp.where(shared, partner, num)].set(True, mode="drop")
    # Different rows beyond the end, since indices must be unique.
    beyond = size + jnp.arange(num, dtype=index.dtype)
    places = jnp.concatenate([first, jnp.where(counted, beyond, second)])

    def add(leaf: Array) -> Array:
        mask = shared.reshape(-1, *[1] * (leaf.ndim - 2))
        return jnp.concatenate([leaf[0] + jnp.where(mask, leaf[1][partner], 0.0), leaf[1]])

    return places, jax.tree.map(add, grads)


def update_rows(
    choose: Callable[[str], RowOptimizer],
    index: Int[Array, "sets num"],
    grads: dict[str, Array],
    rows: dict[str, Array],
    full: tuple[dict[str, Array], dict[str, Any]],
    step: Int[Array, ""],
    accept: Bool[Array, ""],
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Any], Bool[Array, "sets num"]]:
    """Update rows of parameters and of their optimizer states, and write them back.

    Args:
        choose: maps a parameter's name to its optimizer.
        index: indices of the rows.
        grads: gradients of the rows, by name.
        rows: rows of the parameters, by name.
        full: full parameters and optimizer states, by name.
        step: number of steps so far.
        accept: whether to update.

    Returns:
        The new rows, shaped as before, the new parameters and the new states; and a mask of the
        rows that are in no earlier set.
    """
    (params, states), flat = full, index.reshape(-1)
    size = next(iter(params[name].shape[0] for name in rows), 0)
    places, grads = merge_rows(index, grads, size)

    def put(array: Array, values: Array) -> Array:
        new = values.astype(array.dtype)
        return array.at[places].set(new, mode="drop", unique_indices=True)

    new_rows, new_params, new_states = {}, {}, {}
    for name, old_rows in rows.items():
        old = old_rows.reshape(flat.shape + old_rows.shape[2:])
        old_state = jax.tree.map(lambda leaf: leaf[flat], states[name])
        updated = choose(name).update(grads[name], old_state, old, step)
        new, state = tree_where(accept, updated, (old, old_state))
        new_rows[name] = new.reshape(old_rows.shape)
        new_params[name] = put(params[name], new)
        new_states[name] = jax.tree.map(put, states[name], state)
    return new_rows, new_params, new_states, (places < size).reshape(index.shape)


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether all entries of a tree of arrays are finite."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves))


def tree_where(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`jnp.where` for two pytrees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def by_rows(transformation: optax.GradientTransformation, learning_rate: Schedule) -> RowOptimizer:
    """An optax transformation applied to each row separately, with a state for each.

    Args:
        transformation: maps gradients to the direction that is subtracted from the parameters.
        learning_rate: a number, or a function of the number of steps, of any rows.
    """

    def update(grads: Array, state: Any, params: Array, step: Array) -> tuple[Array, Any]:
        direction, state = jax.vmap(transformation.update)(grads, state, params)
        rate = learning_rate(step) if callable(learning_rate) else learning_rate
        return params - rate * direction, state

    return RowOptimizer(jax.vmap(transformation.init), update)


def row_adagrad(
    learning_rate: Schedule = 0.1, *, initial_accumulator: float = 0.1, epsilon: float = 1e-7
) -> RowOptimizer:
    """AdaGrad: each entry's step is its gradient over the root of the sum of squared gradients.

    Rows that a step does not use have a gradient of zero, for which AdaGrad changes nothing: so
    updating only the rows in use equals AdaGrad on the full parameter.

    Args:
        learning_rate: a number, or a function of the step.
        initial_accumulator: initial sums of squares, nonnegative.
        epsilon: added to the sum.

    Returns:
        The optimizer, whose state is an array of the parameter's shape.

    References:
        Duchi, Hazan and Singer (2011), Adaptive Subgradient Methods.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> optimizer = sgp.infer.row_adagrad(0.1)
    """
    checks.rate("learning_rate", learning_rate, "(0, inf)")
    checks.number("initial_accumulator", initial_accumulator, "[0, inf)")
    checks.number("epsilon", epsilon, "[0, inf)")

    return by_rows(optax.scale_by_rss(initial_accumulator, epsilon), learning_rate)


def decaying_rate(step: Int[Array, ""]) -> Float[Array, ""]:
    """The default rate of `row_adam`, 0.01 / sqrt(1 + step / 1000)."""
    return 0.01 / jnp.sqrt(1.0 + step / 1000)


def row_adam(
    learning_rate: Schedule = decaying_rate,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    epsilon: float = 1e-8,
) -> RowOptimizer:
    """Lazy Adam: a step updates only the moments of the rows that it uses.

    The bias correction counts the updates of each row. If every step uses all rows, this is Adam.

    Args:
        learning_rate: a number, or a function of the step; by default 0.01 / sqrt(1 + step / 1000).
        b1: decay of the mean of gradients, for each update of a row.
        b2: decay of the mean of squared gradients, for each update of a row.
        epsilon: added to the root.

    Returns:
        The optimizer, whose state is two arrays of the parameter's shape and a count for each row.

    References:
        Kingma and Ba (2015), Adam. TensorFlow's `LazyAdam` counts all steps instead.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> optimizer = sgp.infer.row_adam(lambda step: 0.01 * 0.999**step)
    """
    checks.rate("learning_rate", learning_rate, "(0, inf)")
    checks.number("b1", b1, "[0, 1)")
    checks.number("b2", b2, "[0, 1)")
    checks.number("epsilon", epsilon, "[0, inf)")

    return by_rows(optax.scale_by_adam(b1, b2, epsilon), learning_rate)


class DeclaredRows(Messenger):
    """Records the names of parameters that are declared with `rows=True`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        """Record the name of a parameter."""
        if msg["type"] == "param" and msg["kwargs"].get("rows"):
            self.names[msg["name"]] = None


def check_rows(
    params: dict[str, Array], num_features: int, constrain: Callable[[dict], dict]
) -> None:
    """Raise unless each parameter has a row for each feature, and its constraint acts by rows.

    Args:
        params: unconstrained parameters that are declared with `rows=True`, by name.
        num_features: number of features.
        constrain: maps unconstrained parameters to constrained parameters.
    """
    for name, param in params.items():
        if param.shape[:1] != (num_features,):
            raise ValueError(
                f"the parameter `{name}` is declared with rows=True and has the shape "
                f"{param.shape}: it must have a row for each of the {num_features} features."
            )
    index = np.arange(num_features)[:: max(1, num_features // 3)]

    def rows_of(params: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        rows_first = {name: param[index] for name, param in params.items()}
        constrained = constrain(params)
        return constrain(rows_first), {name: constrained[name][index] for name in params}

    rows, expected = compiled(rows_of)(params)
    for name in params:
        if rows[name].shape != expected[name].shape or not np.allclose(rows[name], expected[name]):
            raise ValueError(
                f"the constraint of the parameter `{name}`, declared with rows=True, does not "
                "act on each row by itself: take one that does, such as `positive`."
            )
