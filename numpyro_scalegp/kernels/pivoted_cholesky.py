"""Partial Cholesky factors of a kernel matrix, from a few of its rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core.linalg import matmul, solve_lower
from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.core.programs import compiled_unless_traced
from numpyro_scalegp.kernels.kernel import AbstractKernel

# Pivots proposed at a time: enough for the rate of a matrix product, few enough to be accepted.
_PROPOSALS = 128


@compiled_unless_traced
def pivoted_cholesky(
    kernel: AbstractKernel, X: Float[Array, "n d"], rank: int
) -> tuple[Float[Array, "rank n"], Int[Array, " rank"]]:
    """Approximate K(X, X) ~ L'L, pivoting on the row with the largest remaining variance.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        rank: number of pivots, at most n.

    Returns:
        L, shape (rank, n), and the pivots, distinct rows, shape (rank,). Time O(n rank (rank + d)),
        memory O(n rank). Once no variance is left beyond rounding, the rows of L are zero and
        the pivots are taken as they come.

    References:
        Harbrecht, Peters and Schneider (2012), On the low-rank approximation by the pivoted
        Cholesky decomposition, algorithm 1.
    """
    variance = kernel.diag(X)
    negligible = jnp.finfo(variance.dtype).eps * jnp.max(variance)

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        remaining, rows, pivots = state
        # As an array of one index: of a single one, devices that share the rows would gather all.
        pivot, largest = jnp.argmax(remaining)[None], jnp.max(remaining)
        row = (kernel(X[pivot], X) - matmul(rows[:, pivot].T, rows))[0]
        left = jnp.maximum(largest, negligible)
        # So that NaN stays.
        row = jnp.where(largest <= negligible, 0.0, row * jax.lax.rsqrt(left))
        remaining = (remaining - jnp.square(row)).at[pivot].set(-jnp.inf)
        return remaining, rows.at[i].set(row), pivots.at[i].set(pivot[0])

    nothing = divided(jnp.zeros((rank, X.shape[0]), variance.dtype), mesh_of(X), axis=1)
    start = (variance, nothing, jnp.zeros(rank, int))
    _, rows, pivots = jax.lax.fori_loop(0, rank, step, start)
    return rows, pivots


@compiled_unless_traced
def randomly_pivoted_cholesky(
    kernel: AbstractKernel, X: Float[Array, "n d"], rank: int, key: Key[Array, ""]
) -> tuple[Float[Array, "rank n"], Int[Array, " rank"]]:
    """Approximate K(X, X) ~ L'L with pivots drawn in proportion to the remaining variances.

    The expected error of the trace is close to that of the best approximation of this rank, where
    the largest remaining variance goes after outliers. Pivots are proposed in blocks and rejected
    so that they follow the same distribution as one at a time; all that depends on n is products of
    matrices.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        rank: number of pivots, at most n.
        key: a typed JAX key.

    Returns:
        L, shape (rank, n), and the pivots, shape (rank,), with -1 and rows of zeros from where
        no variance is left beyond rounding. Time O(n rank (rank + d)), memory O(n rank).

    References:
        Chen, Epperly, Tropp and Webber (2025), Randomly pivoted Cholesky; Epperly, Tropp and Webber
        (2024), Embrace rejection, algorithm 2.
    """
    n, size = X.shape[0], min(_PROPOSALS, rank)
    variance = kernel.diag(X)
    negligible = jnp.finfo(variance.dtype).eps * jnp.max(variance)

    def is_unfinished(state: _Pivoting) -> Bool[Array, ""]:
        return (state.accepted < rank) & jnp.any(state.remaining > negligible)

    def propose(state: _Pivoting) -> _Pivoting:
        key, draw_key, accept_key = jax.random.split(state.key, 3)
        # By the inverse of the distribution function, in O(n + size log n).
        total = jnp.cumsum(state.remaining)
        uniform = jax.random.uniform(draw_key, (size,), total.dtype) * total[-1]
        chosen = jnp.minimum(jnp.searchsorted(total, uniform, side="right"), n - 1).astype(int)
        known = state.rows[:, chosen]
        block = kernel(X[chosen], X[chosen]) - matmul(known.T, known)
        T, is_accepted = _rejection_cholesky(block, negligible, accept_key)
        left = kernel(X[chosen], X) - matmul(known.T, state.rows)
        left = jnp.where(is_accepted[:, None], left, 0.0)
        new = solve_lower(T, left)
        # The zeros of what is rejected come last, where the next block overwrites them.
        order = jnp.argsort(~is_accepted, stable=True)
        pivots = jnp.where(is_accepted, chosen, -1)
        remaining = state.remaining - jnp.sum(jnp.square(new), axis=0)
        # Where rounding left something, and the row itself nothing: each block ends some rows.
        is_done = is_accepted | ~(jnp.diagonal(block) > negligible)
        remaining = remaining.at[jnp.where(is_done, chosen, n)].set(0.0, mode="drop")
        return _Pivoting(
            jnp.where(remaining > negligible, remaining, 0.0),
            _written(state.rows, new, order, state.accepted),
            _written(state.pivots, pivots, order, state.accepted),
            state.accepted + jnp.sum(is_accepted),
            key,
        )

    start = _Pivoting(
        jnp.where(variance > negligible, variance, 0.0),
        divided(jnp.zeros((rank, n), variance.dtype), mesh_of(X), axis=1),
        jnp.full(rank, -1),
        jnp.zeros((), int),
        key,
    )
    end = jax.lax.while_loop(is_unfinished, propose, start)
    return end.rows, end.pivots


def _written(known: Array, new: Array, order: Int[Array, " b"], start: Int[Array, ""]) -> Array:
    """`known` with as many rows of `new`, in an order, as there is room for from `start` on."""
    size = len(order)
    first = jnp.minimum(start, len(known) - size)
    place = jnp.arange(size) - (start - first)
    is_new = jnp.reshape(place >= 0, (-1,) + (1,) * (new.ndim - 1))
    old = jax.lax.dynamic_slice_in_dim(known, first, size)
    rows = jnp.where(is_new, new[order[jnp.maximum(place, 0)]], old)
    return jax.lax.dynamic_update_slice_in_dim(known, rows, first, 0)


class _Pivoting(NamedTuple):
    remaining: Float[Array, " n"]  # variances
    rows: Float[Array, "rank n"]
    pivots: Int[Array, " rank"]
    accepted: Int[Array, ""]
    key: Key[Array, ""]


def _rejection_cholesky(
    block: Float[Array, "b b"], negligible: Float[Array, ""], key: Key[Array, ""]
) -> tuple[Float[Array, "b b"], Bool[Array, " b"]]:
    """Accept each proposal with the part of its variance that those before it leave.

    Returns:
        The Cholesky factor of the accepted rows and columns, with those of the identity for the
        others, shape (b, b), and which ones are accepted, shape (b,).
    """
    size = block.shape[0]
    threshold = jax.random.uniform(key, (size,), block.dtype) * jnp.diagonal(block)
    threshold = jnp.maximum(threshold, negligible)

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        left, T, accepted = state
        is_accepted = left[i, i] > threshold[i]
        column = left[:, i] * jax.lax.rsqrt(jnp.maximum(left[i, i], negligible))
        column = jnp.where(is_accepted & (jnp.arange(size) >= i), column, 0.0)
        left = left - jnp.outer(column, column)
        return left, T.at[:, i].set(column), accepted.at[i].set(is_accepted)

    start = block, jnp.zeros_like(block), jnp.zeros(size, bool)
    _, T, accepted = jax.lax.fori_loop(0, size, step, start)
    return jnp.where(accepted[:, None], T, jnp.eye(size, dtype=T.dtype)), accepted
