"""Optimal weights of a chevron process, given the likelihood's curvature at each row."""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float

from numpyro_scalegp.core import chunks
from numpyro_scalegp.core.linalg import factorize, matmul
from numpyro_scalegp.core.programs import compiled_unless_traced
from numpyro_scalegp.families.chevron import ChevronGP
from numpyro_scalegp.families.weight_space import WeightSpaceGP
from numpyro_scalegp.features.chevron import BLOCK, Chevron, blocks_of, projections


def _prior_precision(p: WeightSpaceGP) -> Float[Array, " m"]:
    """The diagonal of the weights' prior precision."""
    if p.precision is not None:
        return p.precision
    features = p.features
    return features.precision_diagonal(jnp.arange(features.size(p.X)))


def projected(p: WeightSpaceGP, loc: Float[Array, " m"]) -> Float[Array, " n"]:
    """Phi loc, in blocks of features and chunks of rows."""
    zero = jnp.zeros_like(loc)
    return projections(p.features, p.X, Chevron(loc, zero, zero[:, None][:, :0]))[0][:, 0]


def quadratic_form(p: WeightSpaceGP, weights: Float[Array, " m"]) -> Float[Array, ""]:
    """W'S w, for the prior's precision S."""
    if not p.has_dense_precision:
        return jnp.sum(_prior_precision(p) * jnp.square(weights))
    index = jnp.arange(weights.shape[0])
    return weights.dot(matmul(p.features.precision(index, index), weights))


@compiled_unless_traced
def optimal_loc(
    p: WeightSpaceGP, targets: Float[Array, " n"], precision: Float[Array, " n"]
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """The posterior mean of the weights given noisy values of f at the rows.

    Args:
        p: the prior at the rows.
        targets: the values.
        precision: of their noise, l.

    Returns:
        The mean, and the residual of the direct solve, relative to its right-hand side. With n
        rows, O(n^2 m + n^3) and memory O(n^2); where m < n or S is dense, O(n m^2 + m^3) and
        O(m^2 + n m).
    """
    few = p.features.size(p.X) < p.X.shape[0] or p.has_dense_precision
    return (_mean_by_features if few else _mean_by_rows)(p, targets, precision)


@compiled_unless_traced
def optimal_diagonal(
    p: WeightSpaceGP, q: ChevronGP, weights: Float[Array, " n"]
) -> Float[Array, " m"]:
    """The diagonal of C at which the bound is largest, all else as it is in q.

    Args:
        p: the prior at the rows.
        q: the family.
        weights: minus the likelihood's expected curvature at each row, not negative.

    Returns:
        The diagonal, in O(n m (d + k)).
    """
    a = _prior_precision(p) + _weighted_squares(p, weights)
    k = q.scale_columns.shape[1]
    b = jnp.zeros_like(a).at[:k].set(_below_diagonal(p, q, weights))
    root = jnp.sqrt(jnp.square(b) + 4.0 * a)
    # Whichever form does not take the difference of two large numbers.
    return jnp.where(b < 0.0, (root - b) / (2.0 * a), 2.0 / (jnp.abs(b) + root))


def _solved(
    A: Float[Array, "k k"], b: Float[Array, " k"]
) -> tuple[Float[Array, " k"], Float[Array, ""]]:
    """A^-1 b, and the residual of it, relative to b."""
    x = cho_solve((factorize(A).tril, True), b)
    scale = jnp.linalg.norm(b)
    return x, jnp.linalg.norm(b - matmul(A, x)) / jnp.where(scale == 0, 1.0, scale)


def _mean_by_rows(
    p: WeightSpaceGP, targets: Float[Array, " n"], precision: Float[Array, " n"]
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """S^-1 Phi'(Phi S^-1 Phi' + diag(l)^-1)^-1 t for a diagonal S, in blocks of features."""
    features, X = p.features, p.X
    size, root = features.size(X), jnp.sqrt(precision)
    variance = 1.0 / _prior_precision(p)

    def columns(index: Array) -> Array:
        Phi = features.columns(X, jnp.minimum(index, size - 1))
        return jnp.where(index < size, root[:, None] * Phi, 0.0)

    def add(gram: Array, index: Array) -> tuple[Array, None]:
        Phi = columns(index)
        return gram + matmul(Phi * variance.at[index].get(mode="clip"), Phi.T), None

    blocks = blocks_of(size)
    gram = jax.lax.scan(add, jnp.eye(X.shape[0], dtype=X.dtype), blocks)[0]
    dual, residual = _solved(gram, root * targets)
    loc = jax.lax.map(lambda index: matmul(columns(index).T, dual), blocks).reshape(-1)[:size]
    return variance * loc, residual


def _mean_by_features(
    p: WeightSpaceGP, targets: Float[Array, " n"], precision: Float[Array, " n"]
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """(Phi'diag(l) Phi + S)^-1 Phi'diag(l) t, for any S."""
    features, X = p.features, p.X
    index = jnp.arange(features.size(X))
    Phi = features.columns(X, index)
    dense = p.has_dense_precision
    prior = features.precision(index, index) if dense else jnp.diag(_prior_precision(p))
    weighted = (precision[:, None] * Phi).T
    return _solved(matmul(weighted, Phi) + prior, matmul(weighted, targets))


def _weighted_squares(p: WeightSpaceGP, weights: Float[Array, " n"]) -> Float[Array, " m"]:
    """The sums over rows of l_i phi_r(x_i)^2, in blocks of features and chunks of rows."""
    features, X = p.features, p.X
    size = features.size(X)

    def of_block(index: Array) -> Array:
        index = jnp.minimum(index, size - 1)

        def of_rows(rows: tuple[Array, Array]) -> Array:
            return matmul(rows[1], jnp.square(features.columns(rows[0], index)))

        return chunks.sum_rows(of_rows, (X, weights), chunks.rows_per_chunk(index.shape[0]))

    return jax.lax.map(of_block, blocks_of(size)).reshape(-1)[:size]


def _below_diagonal(
    p: WeightSpaceGP, q: ChevronGP, weights: Float[Array, " n"]
) -> Float[Array, " k"]:
    """Of each dense column without its diagonal, the r-th entry of (Phi'diag(l) Phi + S) c_r."""
    k, m = q.scale_columns.shape[1], q.loc.shape[0]
    index, dense = jnp.arange(m), jnp.arange(k)
    columns = jnp.where(index[:, None] > dense, q.scale_columns, 0.0)
    own = Chevron(q.loc, jnp.zeros_like(q.scale_diag), columns)

    def of_rows(rows: tuple[Array, Array]) -> Array:
        X, weights = rows
        projected = projections(q.features, X, own)[0][:, 1:]
        return matmul(weights, q.features.columns(X, dense) * projected)

    total = chunks.sum_rows(of_rows, (p.X, weights), chunks.rows_per_chunk(BLOCK + k))
    if p.has_dense_precision:
        total += jnp.sum(q.features.precision(dense, index) * columns.T, axis=1)
    return total
