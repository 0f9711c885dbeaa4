"""The squared norm of a function sum_i a_i k(., z_i) in the kernel's own space."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core.chunks import rows_per_chunk, sum_rows
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.estimators.index_sampling import stratified_indices
from numpyro_scalegp.kernels import AbstractKernel


def squared_norm(
    kernel: AbstractKernel,
    points: Float[Array, "M d"],
    weights: Float[Array, "*batch M"],
    *,
    num_columns: int | None = None,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "*batch"]:
    """The squared norm a'K(Z, Z) a, or an unbiased estimate of it from some columns of K.

    Args:
        kernel: covariance function.
        points: Z, shape (M, d).
        weights: a, shape (M,), or (*batch, M) for several functions.
        num_columns: how many columns are drawn, by `stratified_indices`; None for all.
        key: a typed JAX key for them.

    Returns:
        One number for each function, whose gradient is unbiased, too. They share the columns.
        O(M num_columns d), in chunks.

    Raises:
        ValueError: if columns are to be drawn, and there is no key or not so many of them.

    References:
        Cheng and Boots (2017), section 3.4, for the subset of columns.
    """
    M = points.shape[0]
    functions = weights.reshape(-1, M).T
    columns, factors, scale = points, functions, 1.0
    if num_columns is not None and num_columns != M:
        if key is None:
            raise ValueError("`key` must be given where `num_columns` are drawn at random.")
        index = stratified_indices(key, M, num_columns)
        columns, factors, scale = points[index], functions[index], M / num_columns

    def of_chunk(rows: tuple[Array, Array]) -> Array:
        Z, a = rows
        return jnp.sum(a * matmul(kernel(Z, columns), factors), axis=0)

    total = sum_rows(of_chunk, (points, functions), rows_per_chunk(columns.shape[0]))
    return scale * total.reshape(weights.shape[:-1])
