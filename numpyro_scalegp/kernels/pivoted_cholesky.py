"""Partial Cholesky factors of a kernel matrix, from one row of it at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.kernels.kernel import AbstractKernel


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
        pivot = jnp.argmax(remaining)
        row = kernel(X[pivot][None], X)[0] - matmul(rows[:, pivot], rows)
        left = jnp.maximum(remaining[pivot], negligible)
        # So that NaN stays.
        row = jnp.where(remaining[pivot] <= negligible, 0.0, row * jax.lax.rsqrt(left))
        remaining = (remaining - jnp.square(row)).at[pivot].set(-jnp.inf)
        return remaining, rows.at[i].set(row), pivots.at[i].set(pivot)

    start = (variance, jnp.zeros((rank, X.shape[0]), variance.dtype), jnp.zeros(rank, int))
    _, rows, pivots = jax.lax.fori_loop(0, rank, step, start)
    return rows, pivots
