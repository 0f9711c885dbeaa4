"""Optimizers for rows of large parameters, of which a step touches a few."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core import checks

Schedule = float | Callable[[Int[Array, ""]], Array]


class RowOptimizer(NamedTuple):
    """A pair of functions that update rows on their own, so that others need no update.

    `init(param)` gives a pytree of arrays with a leading axis of rows, and
    `update(grads, state, params, step)` the new rows of parameter and state, from the same rows of
    gradient, state and parameter, and the number of steps so far.
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
        Where each gradient belongs, shape (sets * num,), with places from `size` on for those that
        are counted elsewhere; and the gradients, with one leading axis. O(num log num).
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
    # Places beyond the end are all different, as unique indices must be.
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
    whole: tuple[dict[str, Array], dict[str, Any]],
    step: Int[Array, ""],
    good: Bool[Array, ""],
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Any], Bool[Array, "sets num"]]:
    """Update some rows of parameters and of their optimizers' states, and put them in place.

    Args:
        choose: the optimizer of a parameter.
        index: which rows.
        grads: of the rows, by name.
        rows: of the parameters.
        whole: parameters and states.
        step: number of steps so far.
        good: whether anything changes.

    Returns:
        The new rows, shaped as before, the new parameters and the new states; and which rows
        count, that is, are in no earlier set.
    """
    (params, states), flat = whole, index.reshape(-1)
    size = next(iter(params[name].shape[0] for name in rows), 0)
    places, grads = merge_rows(index, grads, size)

    def put(array: Array, values: Array) -> Array:
        new = values.astype(array.dtype)
        return array.at[places].set(new, mode="drop", unique_indices=True)

    new_rows, new_params, new_states = {}, {}, {}
    for name, some in rows.items():
        before = some.reshape(flat.shape + some.shape[2:])
        old = jax.tree.map(lambda leaf: leaf[flat], states[name])
        new = choose(name).update(grads[name], old, before, step)
        new, state = where(good, new, (before, old))
        new_rows[name] = new.reshape(some.shape)
        new_params[name] = put(params[name], new)
        new_states[name] = jax.tree.map(put, states[name], state)
    return new_rows, new_params, new_states, (places < size).reshape(index.shape)


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether all entries of a tree of arrays are finite."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves))


def where(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
    """The one or the other of two trees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def by_rows(transformation: optax.GradientTransformation, learning_rate: Schedule) -> RowOptimizer:
    """An optax transformation applied to each row by itself, with a state for each.

    Args:
        transformation: what makes of gradients the direction to descend in.
        learning_rate: a number, or a function of the step, which counts those of all rows.
    """

    def update(grads: Array, state: Any, params: Array, step: Array) -> tuple[Array, Any]:
        direction, state = jax.vmap(transformation.update)(grads, state, params)
        rate = learning_rate(step) if callable(learning_rate) else learning_rate
        return params - rate * direction, state

    return RowOptimizer(jax.vmap(transformation.init), update)


def row_adagrad(
    learning_rate: Schedule = 0.1, *, initial_accumulator: float = 0.1, epsilon: float = 1e-7
) -> RowOptimizer:
    """AdaGrad: each entry's step is its gradient over the root of the sum of squares so far.

    Rows that a step does not touch have a gradient of zero, for which AdaGrad does nothing: updates
    of rows are those of the whole parameter.

    Args:
        learning_rate: a number, or a function of the step.
        initial_accumulator: what the sums of squares begin at, positive.
        epsilon: added to the sum.

    Returns:
        The optimizer, with one more array of its shape.

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
    """Adam in its lazy form: the moments of a row are updated only when the row is touched.

    The correction for their start counts the touches of each row. Where every step touches all
    rows, this is Adam.

    Args:
        learning_rate: a number, or a function of the step; by default 0.01 / sqrt(1 + step / 1000).
        b1: decay of the mean of gradients, in touches.
        b2: decay of the mean of squares, in touches.
        epsilon: added to the root.

    Returns:
        The optimizer, with two more arrays of its shape and a count for each row.

    References:
        Kingma and Ba (2015), Adam; its lazy form is that of TensorFlow's `LazyAdam`, but for the
        count.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> optimizer = sgp.infer.row_adam(lambda step: 0.01 * 0.999**step)
    """
    checks.rate("learning_rate", learning_rate, "(0, inf)")
    checks.number("b1", b1, "[0, 1)")
    checks.number("b2", b2, "[0, 1)")
    checks.number("epsilon", epsilon, "[0, inf)")

    return by_rows(optax.scale_by_adam(b1, b2, epsilon), learning_rate)
