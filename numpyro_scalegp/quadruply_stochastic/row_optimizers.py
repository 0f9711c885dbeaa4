"""Optimizers for rows of large parameters, of which a step touches a few."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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


def _at(learning_rate: Schedule, step: Array) -> Any:
    return learning_rate(step) if callable(learning_rate) else learning_rate


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
        The optimizer, with one more number for each entry.

    References:
        Duchi, Hazan and Singer (2011), Adaptive Subgradient Methods.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> optimizer = sgp.infer.row_adagrad(0.1)
    """
    checks.rate("learning_rate", learning_rate, "(0, inf)")
    checks.number("initial_accumulator", initial_accumulator, "[0, inf)")
    checks.number("epsilon", epsilon, "[0, inf)")

    def init(param: Array) -> Array:
        return jnp.full_like(param, initial_accumulator)

    def update(grads: Array, sums: Array, params: Array, step: Array) -> tuple[Array, Array]:
        sums = sums + jnp.square(grads)
        return params - _at(learning_rate, step) * grads / jnp.sqrt(sums + epsilon), sums

    return RowOptimizer(init, update)


class _Moments(NamedTuple):
    mean: Float[Array, "m *row"]
    square: Float[Array, "m *row"]
    touches: Int[Array, " m"]  # updates of each row


def row_adam(
    learning_rate: Schedule = 1e-3, *, b1: float = 0.9, b2: float = 0.999, epsilon: float = 1e-8
) -> RowOptimizer:
    """Adam in its lazy form: the moments of a row move when the row is touched, and only then.

    The correction for their start counts the touches of each row. Where every step touches all
    rows, this is Adam.

    Args:
        learning_rate: a number, or a function of the step.
        b1: decay of the mean of gradients, in touches.
        b2: decay of the mean of squares, in touches.
        epsilon: added to the root.

    Returns:
        The optimizer, with two more numbers for each entry and one for each row.

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

    def init(param: Array) -> _Moments:
        zero = jnp.zeros_like(param)
        return _Moments(zero, jnp.zeros_like(param), jnp.zeros(param.shape[0], jnp.int32))

    def update(grads: Array, state: _Moments, params: Array, step: Array) -> tuple[Array, _Moments]:
        count = state.touches + 1
        mean = b1 * state.mean + (1.0 - b1) * grads
        square = b2 * state.square + (1.0 - b2) * jnp.square(grads)
        number = count.astype(grads.dtype).reshape(-1, *[1] * (grads.ndim - 1))
        ratio = (mean / (1.0 - b1**number)) / (jnp.sqrt(square / (1.0 - b2**number)) + epsilon)
        return params - _at(learning_rate, step) * ratio, _Moments(mean, square, count)

    return RowOptimizer(init, update)
