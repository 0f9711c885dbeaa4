"""Lower triangular matrices with a few dense columns and a diagonal: chevrons."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def dense_columns(
    index: Int[Array, "*sets num"],
    scale_diag: Float[Array, "*sets num"],
    scale_columns: Float[Array, "*sets num k"],
) -> Float[Array, "*sets num k"]:
    """Rows of the k dense columns of C: entries below the diagonal, the diagonal, zeros above.

    Args:
        index: which rows these are.
        scale_diag: the diagonal's entries of these rows.
        scale_columns: entries of these rows in the dense columns, of which only those below the
            diagonal count.
    """
    row = index[..., None]
    column = jnp.arange(scale_columns.shape[-1], dtype=index.dtype)
    on_diagonal = jnp.where(row == column, scale_diag[..., None], 0.0)
    return jnp.where(row > column, scale_columns, on_diagonal)


def sparse_diagonal(
    index: Int[Array, "*sets num"], scale_diag: Float[Array, "*sets num"], rank: int
) -> Float[Array, "*sets num"]:
    """The diagonal's entries outside of the `rank` dense columns, zero in these."""
    return jnp.where(index >= rank, scale_diag, 0.0)
