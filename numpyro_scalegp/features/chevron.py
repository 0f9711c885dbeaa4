"""Functions f = Phi w whose weights have a covariance C C' with C a chevron."""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.mesh import is_divisible, mesh_of, sum_shares
from numpyro_scalegp.core.rows import Rows
from numpyro_scalegp.features.feature_map import AbstractFeatures


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


# Features worked on at a time.
BLOCK = 4096


class Chevron(NamedTuple):
    """The distribution N(loc, C C') of m weights; C has k dense columns and a diagonal."""

    loc: Float[Array, " m"]
    scale_diag: Float[Array, " m"]  # of all of C
    scale_columns: Float[Array, "m k"]  # of which the entries below the diagonal count

    @property
    def rank(self) -> int:
        """The number k of dense columns."""
        return self.scale_columns.shape[-1]

    def rows(
        self, index: Int[Array, " r"], number: Int[Array, " r"] | None = None
    ) -> tuple[Float[Array, "r one_plus_k"], Float[Array, " r"]]:
        """The mean beside the dense columns, and the diagonal besides these, at some rows.

        Args:
            index: which rows of the arrays.
            number: which weights these are, where the arrays are a part of a larger chevron.
        """
        number = index if number is None else number
        diagonal = self.scale_diag[index]
        columns = dense_columns(number, diagonal, self.scale_columns[index])
        directions = jnp.concatenate([self.loc[index][:, None], columns], axis=1)
        return directions, sparse_diagonal(number, diagonal, self.rank)


def blocks_of(size: int) -> Int[Array, "blocks block"]:
    """All indices below `size` in blocks; the last is padded with `size` itself."""
    block = min(size, BLOCK)
    index = jnp.arange(-(-size // block) * block, dtype=jnp.int32)
    return jnp.minimum(index, size).reshape(-1, block)


def projections(
    features: AbstractFeatures, X: Float[Array, "n d"], chevron: Chevron
) -> tuple[Float[Array, "n one_plus_k"], Float[Array, " n"]]:
    """What the distribution of the weights is for f at the rows of X.

    Args:
        features: phi, with m features.
        X: inputs, shape (n, d).
        chevron: distribution of the weights.

    Returns:
        Phi [loc, C_k], shape (n, 1 + k), for the k dense columns; and what the diagonal adds to the
        variance of f. Time O(n m (d + k)), memory O(n (BLOCK + k)); each device of a mesh takes the
        weights that it holds.
    """
    index = jnp.arange(chevron.loc.shape[0], dtype=jnp.int32)
    of_weights = functools.partial(_projections, features, X)
    mesh = mesh_of(chevron)
    if mesh is not None and is_divisible(len(index), mesh):
        return sum_shares(mesh, of_weights, index, chevron)
    return of_weights(index, chevron)


def _projections(
    features: AbstractFeatures, X: Float[Array, "n d"], number: Int[Array, " m"], chevron: Chevron
) -> tuple[Float[Array, "n one_plus_k"], Float[Array, " n"]]:
    """What the weights of these numbers add to the projections."""
    size = chevron.loc.shape[0]

    def add(total: tuple[Array, Array], place: Array) -> tuple[tuple[Array, Array], None]:
        inside = place < size
        place = jnp.minimum(place, size - 1)
        directions, diagonal = chevron.rows(place, number[place])
        Phi = jnp.where(inside, features.columns(X, number[place]), 0.0)
        projected = matmul(Phi, directions)
        variance = matmul(jnp.square(Phi), jnp.square(diagonal))
        return (total[0] + projected, total[1] + variance), None

    dtype = jnp.result_type(X, chevron.loc)
    zero = jnp.zeros((X.shape[0], 1 + chevron.rank), dtype), jnp.zeros(X.shape[0], dtype)
    # One block is no loop; of several, the features are made once more on the way back.
    blocks = blocks_of(size)
    if len(blocks) == 1:
        return add(zero, blocks[0])[0]
    return jax.lax.scan(jax.checkpoint(add), zero, blocks)[0]


class WeightRows(eqx.Module):
    """The rows of a chevron distribution of m weights that the sets hold."""

    index: Int[Array, "sets num"]
    size: int = eqx.field(static=True)  # m
    directions: Float[Array, "sets num one_plus_k"]  # the mean beside the dense columns
    log_diagonal: Float[Array, "sets num"]  # of all of C
    diagonal: Float[Array, "sets num"]  # of C besides the dense columns, zero in these

    @property
    def share(self) -> float:
        """The number of weights that each of a set stands for, s."""
        return self.size / self.index.shape[1]

    def some_columns(self, columns: Int[Array, " c"]) -> "WeightRows":
        """Keep some of the dense columns, drawn at random, scaled to stand for all."""
        return dataclasses.replace(self, directions=some_columns(self.directions, columns))


def weight_rows(
    index: Int[Array, "sets num"],
    loc: Float[Array, " m"] | Rows,
    scale_diag: Float[Array, " m"] | Rows,
    scale_columns: Float[Array, "m k"] | Rows,
) -> WeightRows:
    """The rows `index` of a chevron factor, of whole arrays or of rows that hold just these."""
    mean, diagonal, columns = (Rows.of(a, index).values for a in (loc, scale_diag, scale_columns))
    directions = [mean[..., None], dense_columns(index, diagonal, columns)]
    return WeightRows(
        index,
        loc.shape[0],
        jnp.concatenate(directions, axis=-1),
        jnp.log(diagonal),
        sparse_diagonal(index, diagonal, columns.shape[-1]),
    )


class Views(NamedTuple):
    """The function at n rows from each set of features."""

    projected: Float[Array, "sets n one_plus_k"]  # s Phi_i [loc_i, C_i]
    diagonal: Float[Array, "sets n"]  # s sum_{r in i} phi_r^2 c_rr^2 besides the dense columns


def views(features: AbstractFeatures, X: Float[Array, "n d"], rows: WeightRows) -> Views:
    """Evaluate the features of each set at X: O(n num (d + k)) for each."""
    projected, variances = [], []
    for index, directions, diagonal in zip(rows.index, rows.directions, rows.diagonal, strict=True):
        Phi = features.columns(X, index)
        projected.append(rows.share * matmul(Phi, directions))
        variances.append(rows.share * jnp.sum(jnp.square(Phi * diagonal), axis=1))
    return Views(jnp.stack(projected), jnp.stack(variances))


def prior_divergence(
    features: AbstractFeatures,
    rows: WeightRows,
    precision: Float[Array, " m"] | Rows | None,
    log_determinant: Float[Array, ""],
) -> Float[Array, ""]:
    """Estimate KL(N(loc, C C') || N(0, S^-1)), without bias.

    Args:
        features: phi, for its own precision.
        rows: of the weights' distribution; where S is dense, of two sets or of one with all
            features.
        precision: the diagonal of S; None for the features' own.
        log_determinant: log|S|, used where S is dense.

    Returns:
        The estimate, in O(num k), or O(num^2 (d + k)) where S is dense.
    """
    squares = jnp.sum(jnp.square(rows.directions), axis=-1) + jnp.square(rows.diagonal)
    if precision is None and features.has_dense_precision:
        # Of one set that has all features, the pair is the set itself.
        block = matmul(features.precision(rows.index[-1], rows.index[0]), rows.directions[0])
        quadratic = rows.share**2 * jnp.sum(rows.directions[-1] * block)
        variances = features.precision_diagonal(rows.index)
        terms = variances * jnp.square(rows.diagonal) - 1.0 - 2.0 * rows.log_diagonal
        return 0.5 * (quadratic + _sum_of_all(rows, terms) - log_determinant)
    if precision is None:
        terms = squares - 1.0 - 2.0 * rows.log_diagonal
    else:
        s = Rows.of(precision, rows.index).values
        terms = s * squares - 1.0 - jnp.log(s) - 2.0 * rows.log_diagonal
    return 0.5 * _sum_of_all(rows, terms)


def _sum_of_all(rows: WeightRows, terms: Float[Array, "sets num"]) -> Float[Array, ""]:
    """Estimate a sum over all weights from the sets' terms."""
    return rows.share * jnp.sum(terms) / rows.index.shape[0]


def some_columns(
    directions: Float[Array, "*sets num one_plus_k"], columns: Int[Array, " c"]
) -> Float[Array, "*sets num one_plus_c"]:
    """Keep some dense columns, scaled to stand for all, beside the mean."""
    loc, dense = directions[..., :1], directions[..., 1:]
    scale = (dense.shape[-1] / columns.shape[0]) ** 0.5
    return jnp.concatenate([loc, scale * dense[..., columns]], axis=-1)
