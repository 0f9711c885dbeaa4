"""Functions f = Phi w with a chevron law of the weights, through all features in blocks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core.chevron import dense_columns, sparse_diagonal
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.features import AbstractFeatures

# Features worked on at a time.
BLOCK = 4096


class Chevron(NamedTuple):
    """The law N(loc, C C') of m weights; C has k dense columns and a diagonal."""

    loc: Float[Array, " m"]
    scale_diag: Float[Array, " m"]  # of all of C
    scale_columns: Float[Array, "m k"]  # of which the entries below the diagonal count

    @property
    def rank(self) -> int:
        """The number k of dense columns."""
        return self.scale_columns.shape[-1]

    def rows(
        self, index: Int[Array, " r"]
    ) -> tuple[Float[Array, "r one_plus_k"], Float[Array, " r"]]:
        """The mean beside the dense columns, and the diagonal besides these, at some rows."""
        diagonal = self.scale_diag[index]
        columns = dense_columns(index, diagonal, self.scale_columns[index])
        directions = jnp.concatenate([self.loc[index][:, None], columns], axis=1)
        return directions, sparse_diagonal(index, diagonal, self.rank)


def blocks_of(size: int) -> Int[Array, "blocks block"]:
    """All indices below `size` in blocks; the last is filled up with `size` itself."""
    block = min(size, BLOCK)
    index = jnp.arange(-(-size // block) * block, dtype=jnp.int32)
    return jnp.minimum(index, size).reshape(-1, block)


def projections(
    features: AbstractFeatures, X: Float[Array, "n d"], law: Chevron
) -> tuple[Float[Array, "n one_plus_k"], Float[Array, " n"]]:
    """What the law of the weights is for f at the rows of X.

    Args:
        features: phi, with m features.
        X: inputs, shape (n, d).
        law: of the weights.

    Returns:
        Phi [loc, C_k], shape (n, 1 + k), for the k dense columns; and what the diagonal adds to the
        variance of f. Time O(n m (d + k)), memory O(n (BLOCK + k)).
    """
    size = law.loc.shape[0]

    def add(total: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
        inside = index < size
        index = jnp.minimum(index, size - 1)
        directions, diagonal = law.rows(index)
        Phi = jnp.where(inside, features.columns(X, index), 0.0)
        projected = matmul(Phi, directions)
        variance = matmul(jnp.square(Phi), jnp.square(diagonal))
        return (total[0] + projected, total[1] + variance), None

    dtype = jnp.result_type(X, law.loc)
    zero = jnp.zeros((X.shape[0], 1 + law.rank), dtype), jnp.zeros(X.shape[0], dtype)
    # One block is no loop; of several, the features are made once more on the way back.
    blocks = blocks_of(size)
    if len(blocks) == 1:
        return add(zero, blocks[0])[0]
    return jax.lax.scan(jax.checkpoint(add), zero, blocks)[0]
