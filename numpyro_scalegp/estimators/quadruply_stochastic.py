"""Unbiased estimates about f = Phi w and its weights from two random sets of features.

With q of m features in a set and s = m / q, the set i sees f_i = s Phi_i loc_i and
G_i = s Phi_i C_i. Independent sets i and j make E[<f_i, f_j>] = ||Phi loc||^2 and
E[<G_i, G_j>] = ||Phi C||_F^2; one set used twice does not.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import linalg
from numpyro_scalegp.core.chevron import dense_columns, sparse_diagonal
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.rows import Rows
from numpyro_scalegp.estimators.chevron import Chevron, projections
from numpyro_scalegp.estimators.index_sampling import stratified_indices
from numpyro_scalegp.features import AbstractFeatures

# What the support's covariance gets on its diagonal, relative to its mean.
_RIDGE = 1e-3


def draw_sets(
    key: Key[Array, ""], size: int, num: int, num_sets: int = 2
) -> Int[Array, "sets num"]:
    """Draw independent stratified sets of `num` of `size` features, in O(num)."""
    keys = jax.random.split(key, num_sets)
    return jnp.stack([stratified_indices(key, size, num) for key in keys])


class WeightRows(eqx.Module):
    """The rows of a chevron law of m weights that the sets hold."""

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
        return dataclasses.replace(self, directions=_some_columns(self.directions, columns))


def weight_rows(
    index: Int[Array, "sets num"],
    loc: Float[Array, " m"] | Rows,
    scale_diag: Float[Array, " m"] | Rows,
    scale_columns: Float[Array, "m k"] | Rows,
) -> WeightRows:
    """The rows `index` of a chevron law, of whole arrays or of rows that hold just these."""
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
    """The function at n rows as each set of features sees it."""

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
        rows: of the law of the weights; where S is dense, of two sets or of one with all features.
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


class ControlVariate(eqx.Module):
    """What lowers the variance of <f_i, f_j>: a product at support points, less its mean.

    Of the values f_p at r support points, f_p'M f_p predicts the mean of f^2 over the data, and
    c'f_p that of y f: M = B B' / s and c = B y / s with B = K(p, p)^-1 K(p, t), so that B'f_p are
    the values at s rows t of the data given those at the support. The means of both come from
    a = Phi_p [loc, C_k], which `moved` keeps up to date at the cost of the rows that a step has
    changed. The features are those of the hyperparameters at the last `fit`.

    References:
        Evans and Nair (2020), Quadruply Stochastic Gaussian Processes, eq. 3, proposition 3 and
        appendix F, where the support points are rows, and M is the identity over r: with the
        regression, half as many do. The gradient of the mean is estimated from the same sets, half
        from each.
    """

    X: Float[Array, "r d"]  # support points
    data: Float[Array, "s d"]  # rows of the data
    targets: Float[Array, " s"]  # what f is observed as there, or zero
    projected: Float[Array, "r one_plus_k"]  # a
    moments: Float[Array, " r"]  # c
    root: Float[Array, "t r"]  # M = root'root
    whitening: Float[Array, "u u"]  # L^-1 of K(p, p) = L L' where S is dense, else empty
    hyperparameters: Any

    @classmethod
    def fit(
        cls,
        features: AbstractFeatures,
        X: Float[Array, "r d"],
        data: Float[Array, "s d"],
        targets: Float[Array, " s"],
        law: Chevron,
        *,
        dense_precision: bool,
    ) -> "ControlVariate":
        """Make it anew, in O(r m (d + k) + r^2 (r + s)), without a derivative."""
        features, law = jax.lax.stop_gradient((features, law))
        W = linalg.inverse_cholesky(linalg.add_jitter(features.covariance(X, X), _RIDGE))
        predictor = matmul(W.T, matmul(W, features.covariance(X, data)))
        root = jnp.linalg.qr(predictor.T / data.shape[0] ** 0.5, mode="r")
        whitening = W if dense_precision else jnp.zeros((0, 0), W.dtype)
        moments = matmul(predictor, targets) / data.shape[0]
        projected = projections(features, X, law)[0]
        # Copies, since parameters whose buffers are donated must not share them.
        hyperparameters = jax.tree.map(jnp.copy, features.hyperparameters())
        return cls(X, data, targets, projected, moments, root, whitening, hyperparameters)

    def _features(self, features: AbstractFeatures) -> AbstractFeatures:
        """The features of the last `fit`."""
        return jax.lax.stop_gradient(features.with_hyperparameters(self.hyperparameters))

    def views(
        self, features: AbstractFeatures, rows: WeightRows
    ) -> Float[Array, "sets r one_plus_k"]:
        """What each set sees at the support rows, s Phi_p,i [loc_i, C_i]."""
        return views(self._features(features), self.X, rows).projected

    def some_columns(self, columns: Int[Array, " c"]) -> "ControlVariate":
        """Keep the dense columns that `WeightRows.some_columns` keeps."""
        return dataclasses.replace(self, projected=_some_columns(self.projected, columns))

    def of_residuals(self, seen: Float[Array, "sets r one_plus_k"]) -> Float[Array, ""]:
        """A term of mean zero to add to a row's mean of (y - f_i) (y - f_j) + <G_i, G_j>."""
        # The gradient of this part is that of its mean, half from each set: together none.
        excess = jnp.sum(jax.lax.stop_gradient(seen[..., 0]), axis=0) - 2.0 * self.projected[:, 0]
        product = self._less_its_mean(self.root, seen, self.projected)
        return product + matmul(self.moments, excess)

    def of_precision(self, seen: Float[Array, "sets r one_plus_k"]) -> Float[Array, ""]:
        """A term of mean zero to add to s^2 tr([loc_j, C_j]'S_ji [loc_i, C_i]), for a dense S.

        It takes the Nystrom approximation Phi_p'K(X, X)^-1 Phi_p in place of S.
        """
        return self._less_its_mean(self.whitening, seen, self.projected)

    @staticmethod
    def _less_its_mean(
        root: Float[Array, "t r"],
        seen: Float[Array, "sets r c"],
        whole: Float[Array, "r c"],
    ) -> Float[Array, ""]:
        """<A, A> - <A_i, A_j>, with the gradient of the first term estimated from A_i and A_j."""
        i, j = (matmul(root, one) for one in seen)
        whole = jax.lax.stop_gradient(matmul(root, whole))
        change = i - jax.lax.stop_gradient(i) + j - jax.lax.stop_gradient(j)
        return jnp.sum(whole * (whole + change)) - jnp.sum(i * j)

    def moved(
        self,
        features: AbstractFeatures,
        index: Int[Array, "sets num"],
        change: Float[Array, "sets num one_plus_k"],
    ) -> "ControlVariate":
        """Follow a change of some rows of [loc, C_k]; a row in both sets changes by both."""
        features, projected = self._features(features), self.projected
        for rows, of_rows in zip(index, change, strict=True):
            projected = projected + matmul(features.columns(self.X, rows), of_rows)
        return dataclasses.replace(self, projected=projected)


def _some_columns(
    directions: Float[Array, "*sets num one_plus_k"], columns: Int[Array, " c"]
) -> Float[Array, "*sets num one_plus_c"]:
    loc, dense = directions[..., :1], directions[..., 1:]
    scale = (dense.shape[-1] / columns.shape[0]) ** 0.5
    return jnp.concatenate([loc, scale * dense[..., columns]], axis=-1)
