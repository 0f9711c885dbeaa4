"""Partial Cholesky factors of a kernel matrix, from a few of its rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics.linalg import matmul, solve_lower
from numpyro_scalegp.programs.compiled import compiled_unless_traced

# Pivots proposed at a time: enough for fast matrix products, few enough to be accepted.
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
        memory O(n rank). Once the remaining variances are rounding errors, the rows of L are zero
        and the pivots arbitrary.

    References:
        Harbrecht, Peters and Schneider (2012), On the low-rank approximation by the pivoted
        Cholesky decomposition, algorithm 1.
    """
    variance = kernel.evaluate_diag(X)
    negligible = jnp.finfo(variance.dtype).eps * jnp.max(variance)

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        remaining, rows, pivots = state
        # An array of one index: with a scalar, devices that share the rows would gather all rows.
        pivot, largest = jnp.argmax(remaining)[None], jnp.max(remaining)
        row = (kernel.evaluate(X[pivot], X) - matmul(rows[:, pivot].T, rows))[0]
        # The comparison is false for NaN, which stays in the row.
        scale = jax.lax.rsqrt(jnp.maximum(largest, negligible))
        row = jnp.where(largest <= negligible, 0.0, row * scale)
        remaining = (remaining - jnp.square(row)).at[pivot].set(-jnp.inf)
        return remaining, rows.at[i].set(row), pivots.at[i].set(pivot[0])

    zeros = divided(jnp.zeros((rank, X.shape[0]), variance.dtype), mesh_of(X), axis=1)
    start = (variance, zeros, jnp.zeros(rank, int))
    _, rows, pivots = jax.lax.fori_loop(0, rank, step, start)
    return rows, pivots


@compiled_unless_traced
def randomly_pivoted_cholesky(
    kernel: AbstractKernel, X: Float[Array, "n d"], rank: int, key: Key[Array, ""]
) -> tuple[Float[Array, "rank n"], Int[Array, " rank"]]:
    """Approximate K(X, X) ~ L'L with pivots drawn in proportion to the remaining variances.

    The expected error of the trace is close to the smallest possible at this rank; pivoting on the
    largest remaining variance would select outliers. Pivots are proposed in blocks and rejected so
    that they have the same distribution as pivots drawn one at a time; all work that depends on n
    is matrix products.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        rank: number of pivots, at most n.
        key: a typed JAX key.

    Returns:
        L, shape (rank, n), and the pivots, shape (rank,), with -1 and rows of zeros once the
        remaining variances are rounding errors. Time O(n rank (rank + d)), memory O(n rank).

    References:
        Chen, Epperly, Tropp and Webber (2025), Randomly pivoted Cholesky; Epperly, Tropp and Webber
        (2024), Embrace rejection, algorithm 2.
    """
    n, size = X.shape[0], min(_PROPOSALS, rank)
    variance = kernel.evaluate_diag(X)
    negligible = jnp.finfo(variance.dtype).eps * jnp.max(variance)

    def is_unfinished(state: _Pivoting) -> Bool[Array, ""]:
        return (state.accepted < rank) & jnp.any(state.remaining > negligible)

    def propose(state: _Pivoting) -> _Pivoting:
        key, draw_key, accept_key = jax.random.split(state.key, 3)
        # Inverse transform sampling, in O(n + size log n).
        total = jnp.cumsum(state.remaining)
        uniform = jax.random.uniform(draw_key, (size,), total.dtype) * total[-1]
        chosen = jnp.minimum(jnp.searchsorted(total, uniform, side="right"), n - 1).astype(int)
        L = state.rows[:, chosen]
        block = kernel.evaluate(X[chosen], X[chosen]) - matmul(L.T, L)
        T, is_accepted = _rejection_cholesky(block, negligible, accept_key)
        residual = kernel.evaluate(X[chosen], X) - matmul(L.T, state.rows)
        new = solve_lower(T, jnp.where(is_accepted[:, None], residual, 0.0))
        # The zero rows of rejected proposals come last, where the next block overwrites them.
        order = jnp.argsort(~is_accepted, stable=True)
        pivots = jnp.where(is_accepted, chosen, -1)
        remaining = state.remaining - jnp.sum(jnp.square(new), axis=0)
        # Rows with a variance of rounding errors alone are done, too: each block ends some rows.
        is_done = is_accepted | ~(jnp.diagonal(block) > negligible)
        remaining = remaining.at[jnp.where(is_done, chosen, n)].set(0.0, mode="drop")
        return _Pivoting(
            jnp.where(remaining > negligible, remaining, 0.0),
            _with_rows_written(state.rows, new, order, state.accepted),
            _with_rows_written(state.pivots, pivots, order, state.accepted),
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


def _with_rows_written(
    stored: Array, new: Array, order: Int[Array, " b"], start: Int[Array, ""]
) -> Array:
    """`stored` with the rows of `new`, in an order, from `start` on, without rows past its end."""
    size = len(order)
    first = jnp.minimum(start, len(stored) - size)
    place = jnp.arange(size) - (start - first)
    is_new = jnp.reshape(place >= 0, (-1,) + (1,) * (new.ndim - 1))
    old = jax.lax.dynamic_slice_in_dim(stored, first, size)
    rows = jnp.where(is_new, new[order[jnp.maximum(place, 0)]], old)
    return jax.lax.dynamic_update_slice_in_dim(stored, rows, first, 0)


class _Pivoting(NamedTuple):
    remaining: Float[Array, " n"]  # variances
    rows: Float[Array, "rank n"]
    pivots: Int[Array, " rank"]
    accepted: Int[Array, ""]
    key: Key[Array, ""]


def _rejection_cholesky(
    block: Float[Array, "b b"], negligible: Float[Array, ""], key: Key[Array, ""]
) -> tuple[Float[Array, "b b"], Bool[Array, " b"]]:
    """Accept each proposal with the fraction of its variance that remains as the probability.

    Returns:
        The Cholesky factor of the accepted rows and columns, with rows and columns of the identity
        for rejected proposals, shape (b, b), and which proposals are accepted, shape (b,).
    """
    size = block.shape[0]
    threshold = jax.random.uniform(key, (size,), block.dtype) * jnp.diagonal(block)
    threshold = jnp.maximum(threshold, negligible)

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        remaining, T, accepted = state
        is_accepted = remaining[i, i] > threshold[i]
        column = remaining[:, i] * jax.lax.rsqrt(jnp.maximum(remaining[i, i], negligible))
        column = jnp.where(is_accepted & (jnp.arange(size) >= i), column, 0.0)
        remaining = remaining - jnp.outer(column, column)
        return remaining, T.at[:, i].set(column), accepted.at[i].set(is_accepted)

    start = block, jnp.zeros_like(block), jnp.zeros(size, bool)
    _, T, accepted = jax.lax.fori_loop(0, size, step, start)
    return jnp.where(accepted[:, None], T, jnp.eye(size, dtype=T.dtype)), accepted
