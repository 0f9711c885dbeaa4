"""Joint draws of a process from its state-space form, in linear time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.integrated.state_space.matrices import Arrays
from numpyro_scalegp.integrated.state_space.parts import Parts, each_after_the_other
from numpyro_scalegp.integrated.state_space.passes import algebra_of, transition
from numpyro_scalegp.integrated.state_space.rows import Series
from numpyro_scalegp.kernels.state_space import single_lane


def draw(
    key: Key[Array, ""],
    series: Series,
    num_samples: int,
) -> Float[Array, "num_samples n"]:
    """Draw the function at the times of a series, in their order.

    Each part of the times is first drawn from a state of zero before it; its end then says how the
    state before each part moves those after it.

    Args:
        key: a typed JAX key.
        series: the process and the times.
        num_samples: number of draws.

    Returns:
        Draws, shape (num_samples, n), in O(n s^3 + num_samples n s^2).
    """
    form, times = series.form, series.times
    ops, size, dtype = algebra_of(form), form.size, times.dtype
    parts = Parts(len(times), size)
    before = jnp.concatenate([times[:1], times[:-1]])
    start, elapsed = parts.cut(before), parts.cut(times - before)
    first_key, key = jax.random.split(key)
    keys = jax.random.split(key, parts.steps)
    lane = jnp.zeros(parts.lanes, dtype)

    def moved(state: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        """The states after a row, from those before it, and the transition."""
        start, elapsed, key = row
        A, Q = transition(form, start, elapsed)
        A, L = ops.array(ops.full(A, lane)), ops.array(ops.factor(ops.full(Q, lane)))
        normal = jax.random.normal(key, state.shape, dtype)
        return _apply(A, state) + _apply(L, normal), A

    def summary(carry: tuple[Array, Array], row: tuple) -> tuple[tuple[Array, Array], None]:
        state, product = carry
        state, A = moved(state, row)
        return (state, Arrays.product(A, product)), None

    like = jnp.zeros(1, dtype)
    covariance = ops.full(ops.from_blocks(single_lane(form.covariance(times[0]))), like)
    normal = jax.random.normal(first_key, (size, 1, num_samples), dtype)
    first = _apply(ops.array(ops.factor(covariance)), normal)
    if parts.lanes > 1:
        zeros = jnp.zeros((size, parts.lanes, num_samples), dtype)
        none = (zeros, Arrays.identity(size, lane))
        (ends, products), _ = jax.lax.scan(summary, none, (start, elapsed, keys))

        def through(state: Array, part: tuple[Array, Array]) -> Array:
            end, product = part
            return _apply(product, state[:, None, :, 0])[..., None][:, 0] + end

        states = jnp.moveaxis(first, 1, -1)
        first = each_after_the_other(through, states, (jnp.moveaxis(ends, 1, -1), products))
        first = jnp.moveaxis(first, -1, 1)

    def observed(state: Array, row: tuple) -> tuple[Array, Array]:
        *transition_row, h = row
        state, _ = moved(state, tuple(transition_row))
        return state, jnp.sum(h.T[:, :, None] * state, axis=0)

    vectors = parts.cut(jnp.broadcast_to(series.h, (len(times), size)))
    values = jax.lax.scan(observed, first, (start, elapsed, keys, vectors))[1]
    return parts.joined(values).T


def _apply(
    A: Float[Array, "s s lanes"], states: Float[Array, "s lanes k"]
) -> Float[Array, "s lanes k"]:
    """The product with a vector for each lane and draw."""
    return sum((A[:, j, :, None] * states[j] for j in range(len(A))), jnp.zeros_like(states))
