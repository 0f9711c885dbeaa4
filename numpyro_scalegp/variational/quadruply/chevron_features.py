"""Functions f = Phi w with a chevron factor C of the weights' covariance C C'.

A chevron is a lower triangular matrix with k dense columns and a diagonal.
"""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core.mesh import is_divisible, mesh_of, sum_shares
from numpyro_scalegp.features.feature_map import AbstractFeatures
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.variational.quadruply.rows import Rows


def dense_columns(
    index: Int[Array, "*sets num"],
    scale_diag: Float[Array, "*sets num"],
    scale_columns: Float[Array, "*sets num k"],
) -> Float[Array, "*sets num k"]:
    """Rows of the k dense columns of C: entries below the diagonal, the diagonal, zeros above.

    Args:
        index: indices of the rows.
        scale_diag: diagonal entries of these rows.
        scale_columns: entries of these rows in the dense columns; only entries below the diagonal
            are used.
    """
    row = index[..., None]
    column = jnp.arange(scale_columns.shape[-1], dtype=index.dtype)
    on_diagonal = jnp.where(row == column, scale_diag[..., None], 0.0)
    return jnp.where(row > column, scale_columns, on_diagonal)


def sparse_diagonal(
    index: Int[Array, "*sets num"], scale_diag: Float[Array, "*sets num"], rank: int
) -> Float[Array, "*sets num"]:
    """The diagonal entries, zero in the `rank` dense columns."""
    return jnp.where(index >= rank, scale_diag, 0.0)


# Number of features that are evaluated at a time.
BLOCK = 4096


class Chevron(NamedTuple):
    """The distribution N(loc, C C') of m weights; C has k dense columns and a diagonal."""

    loc: Float[Array, " m"]
    scale_diag: Float[Array, " m"]
    scale_columns: Float[Array, "m k"]  # only entries below the diagonal are used

    @property
    def rank(self) -> int:
        """The number k of dense columns."""
        return self.scale_columns.shape[-1]

    def rows(
        self, index: Int[Array, " r"], weight_index: Int[Array, " r"] | None = None
    ) -> tuple[Float[Array, "r one_plus_k"], Float[Array, " r"]]:
        """Rows of [loc, C_k], for the k dense columns, and of the diagonal outside of these.

        Args:
            index: indices of the rows in the arrays.
            weight_index: indices of the weights, if the arrays hold a part of a larger chevron.
        """
        weight_index = index if weight_index is None else weight_index
        diagonal = self.scale_diag[index]
        columns = dense_columns(weight_index, diagonal, self.scale_columns[index])
        directions = jnp.concatenate([self.loc[index][:, None], columns], axis=1)
        return directions, sparse_diagonal(weight_index, diagonal, self.rank)


def blocks_of(size: int) -> Int[Array, "blocks block"]:
    """All indices below `size` in blocks; the last is padded with `size` itself."""
    block = min(size, BLOCK)
    index = jnp.arange(-(-size // block) * block, dtype=jnp.int32)
    return jnp.minimum(index, size).reshape(-1, block)


def projections(
    features: AbstractFeatures, X: Float[Array, "n d"], chevron: Chevron
) -> tuple[Float[Array, "n one_plus_k"], Float[Array, " n"]]:
    """Project the distribution of the weights to f at X.

    Args:
        features: phi, with m features.
        X: inputs, shape (n, d).
        chevron: distribution of the weights.

    Returns:
        Phi [loc, C_k], shape (n, 1 + k), for the k dense columns; and the variance of f that the
        diagonal adds. Time O(n m (d + k)), memory O(n (BLOCK + k)); each device of a mesh works on
        the weights that it holds.
    """
    index = jnp.arange(chevron.loc.shape[0], dtype=jnp.int32)
    of_weights = functools.partial(_projections, features, X)
    mesh = mesh_of(chevron)
    if mesh is not None and is_divisible(len(index), mesh):
        return sum_shares(mesh, of_weights, index, chevron)
    return of_weights(index, chevron)


def _projections(
    features: AbstractFeatures,
    X: Float[Array, "n d"],
    weight_index: Int[Array, " m"],
    chevron: Chevron,
) -> tuple[Float[Array, "n one_plus_k"], Float[Array, " n"]]:
    """The terms of the projections from the weights with these indices."""
    size = chevron.loc.shape[0]

    def add(total: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
        inside = index < size
        index = jnp.minimum(index, size - 1)
        directions, diagonal = chevron.rows(index, weight_index[index])
        Phi = jnp.where(inside, features.columns(X, weight_index[index]), 0.0)
        projected = matmul(Phi, directions)
        variance = matmul(jnp.square(Phi), jnp.square(diagonal))
        return (total[0] + projected, total[1] + variance), None

    dtype = jnp.result_type(X, chevron.loc)
    zero = jnp.zeros((X.shape[0], 1 + chevron.rank), dtype), jnp.zeros(X.shape[0], dtype)
    # One block needs no loop. With several, the backward pass evaluates the features again.
    blocks = blocks_of(size)
    if len(blocks) == 1:
        return add(zero, blocks[0])[0]
    return jax.lax.scan(jax.checkpoint(add), zero, blocks)[0]


class WeightRows(eqx.Module):
    """Rows of a chevron distribution of m weights, for sets of features."""

    index: Int[Array, "sets num"]
    size: int = eqx.field(static=True)  # m
    directions: Float[Array, "sets num one_plus_k"]  # of [loc, C_k]
    log_diagonal: Float[Array, "sets num"]  # of C
    diagonal: Float[Array, "sets num"]  # of C, zero in the dense columns

    @property
    def scale(self) -> float:
        """The ratio s = m / num, which scales sums over a set to sums over all weights."""
        return self.size / self.index.shape[1]

    def subsample_columns(self, columns: Int[Array, " c"]) -> "WeightRows":
        """Keep randomly drawn dense columns; see `subsample_columns`."""
        return dataclasses.replace(self, directions=subsample_columns(self.directions, columns))


def weight_rows(
    index: Int[Array, "sets num"],
    loc: Float[Array, " m"] | Rows,
    scale_diag: Float[Array, " m"] | Rows,
    scale_columns: Float[Array, "m k"] | Rows,
) -> WeightRows:
    """The rows `index` of a chevron distribution, from full arrays or `Rows` with this index."""
    mean, diagonal, columns = (Rows.of(a, index).values for a in (loc, scale_diag, scale_columns))
    directions = [mean[..., None], dense_columns(index, diagonal, columns)]
    return WeightRows(
        index,
        loc.shape[0],
        jnp.concatenate(directions, axis=-1),
        jnp.log(diagonal),
        sparse_diagonal(index, diagonal, columns.shape[-1]),
    )


class SetProjections(NamedTuple):
    """The projections to f at n inputs, estimated from each set of features."""

    projected: Float[Array, "sets n one_plus_k"]  # s Phi_i [loc_i, C_i]
    diagonal: Float[Array, "sets n"]  # s sum_{r in i} phi_r^2 c_rr^2 outside of the dense columns


def set_projections(
    features: AbstractFeatures, X: Float[Array, "n d"], rows: WeightRows
) -> SetProjections:
    """Estimate the projections to f at X from each set, in O(n num (d + k)) for each."""
    projected, variances = [], []
    for index, directions, diagonal in zip(rows.index, rows.directions, rows.diagonal, strict=True):
        Phi = features.columns(X, index)
        projected.append(rows.scale * matmul(Phi, directions))
        variances.append(rows.scale * jnp.sum(jnp.square(Phi * diagonal), axis=1))
    return SetProjections(jnp.stack(projected), jnp.stack(variances))


def prior_divergence(
    features: AbstractFeatures,
    rows: WeightRows,
    precision: Float[Array, " m"] | Rows | None,
    log_determinant: Float[Array, ""],
) -> Float[Array, ""]:
    """An unbiased estimate of KL(N(loc, C C') || N(0, S^-1)).

    Args:
        features: phi, which defines S if `precision` is None.
        rows: of the weights' distribution; if S is dense, for two sets or for one with all
            features.
        precision: the diagonal of S, or None.
        log_determinant: log|S|, used if S is dense.

    Returns:
        The estimate, in O(num k), or O(num^2 (d + k)) if S is dense.
    """
    squares = jnp.sum(jnp.square(rows.directions), axis=-1) + jnp.square(rows.diagonal)
    if precision is None and features.has_dense_precision:
        # With one set of all features, the first and the last set are the same.
        block = matmul(features.precision(rows.index[-1], rows.index[0]), rows.directions[0])
        quadratic = rows.scale**2 * jnp.sum(rows.directions[-1] * block)
        s = features.precision_diagonal(rows.index)
        terms = s * jnp.square(rows.diagonal) - 1.0 - 2.0 * rows.log_diagonal
        return 0.5 * (quadratic + _estimated_sum(rows, terms) - log_determinant)
    if precision is None:
        terms = squares - 1.0 - 2.0 * rows.log_diagonal
    else:
        s = Rows.of(precision, rows.index).values
        terms = s * squares - 1.0 - jnp.log(s) - 2.0 * rows.log_diagonal
    return 0.5 * _estimated_sum(rows, terms)


def _estimated_sum(rows: WeightRows, terms: Float[Array, "sets num"]) -> Float[Array, ""]:
    """Estimate a sum over all weights from the terms of the sets."""
    return rows.scale * jnp.sum(terms) / rows.index.shape[0]


def subsample_columns(
    directions: Float[Array, "*sets num one_plus_k"], columns: Int[Array, " c"]
) -> Float[Array, "*sets num one_plus_c"]:
    """Keep the mean and randomly drawn dense columns, scaled so that C C' is unbiased."""
    loc, dense = directions[..., :1], directions[..., 1:]
    scale = (dense.shape[-1] / columns.shape[0]) ** 0.5
    return jnp.concatenate([loc, scale * dense[..., columns]], axis=-1)
