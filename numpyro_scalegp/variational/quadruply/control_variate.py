"""A control variate of the quadruply stochastic bound."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from numpyro_scalegp.features.feature_map import AbstractFeatures
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.variational.quadruply.chevron_features import (
    Chevron,
    WeightRows,
    projections,
    set_projections,
    subsample_columns,
)

# Added to the diagonal of the support points' covariance, relative to its mean.
_RIDGE = 1e-3


class ControlVariate(eqx.Module):
    """A control variate of <f_i, f_j>: a prediction from support points, minus its mean.

    From the values f_p at r support points, f_p'M f_p predicts the mean of f^2 over the data, and
    c'f_p predicts the mean of y f. Here M = B B' / s and c = B y / s with B = K(p, p)^-1 K(p, t),
    so that B'f_p predicts f at s data points t. The means of both predictions follow from
    a = Phi_p [loc, C_k], which `updated` corrects for the rows that a step changes. The features
    have the hyperparameters of the last `fit`.

    References:
        Evans and Nair (2020), Quadruply Stochastic Gaussian Processes, eq. 3, proposition 3 and
        appendix F. There the support points are data points, and M is the identity over r; the
        regression needs half as many. The gradient of the mean is estimated from the same sets,
        half from each.
    """

    X: Float[Array, "r d"]  # support points
    data: Float[Array, "s d"]  # inputs t
    targets: Float[Array, " s"]  # observations y of f there, or zero
    projected: Float[Array, "r one_plus_k"]  # a
    moments: Float[Array, " r"]  # c
    root: Float[Array, "t r"]  # M = root'root
    whitening: Float[Array, "u u"]  # L^-1 of K(p, p) = L L' if S is dense, else empty
    hyperparameters: Any

    @classmethod
    def fit(
        cls,
        features: AbstractFeatures,
        X: Float[Array, "r d"],
        data: Float[Array, "s d"],
        targets: Float[Array, " s"],
        weights: Chevron,
        *,
        dense_precision: bool,
    ) -> "ControlVariate":
        """Fit a control variate, without gradients, in O(r m (d + k) + r^2 (r + s))."""
        features, weights = jax.lax.stop_gradient((features, weights))
        W = linalg.inverse_cholesky(linalg.add_jitter(features.covariance(X, X), _RIDGE))
        predictor = matmul(W.T, matmul(W, features.covariance(X, data)))
        root = jnp.linalg.qr(predictor.T / data.shape[0] ** 0.5, mode="r")
        whitening = W if dense_precision else jnp.zeros((0, 0), W.dtype)
        moments = matmul(predictor, targets) / data.shape[0]
        projected = projections(features, X, weights)[0]
        # Copies, since parameters whose buffers are donated must not share them.
        hyperparameters = jax.tree.map(jnp.copy, features.hyperparameters())
        return cls(X, data, targets, projected, moments, root, whitening, hyperparameters)

    def _features(self, features: AbstractFeatures) -> AbstractFeatures:
        """The features of the last `fit`."""
        return jax.lax.stop_gradient(features.with_hyperparameters(self.hyperparameters))

    def set_projections(
        self, features: AbstractFeatures, rows: WeightRows
    ) -> Float[Array, "sets r one_plus_k"]:
        """The projections of each set at the support points, s Phi_p,i [loc_i, C_i]."""
        return set_projections(self._features(features), self.X, rows).projected

    def subsample_columns(self, columns: Int[Array, " c"]) -> "ControlVariate":
        """Keep the dense columns that `WeightRows.subsample_columns` keeps."""
        return dataclasses.replace(self, projected=subsample_columns(self.projected, columns))

    def of_residuals(self, of_sets: Float[Array, "sets r one_plus_k"]) -> Float[Array, ""]:
        """A term with mean zero, to add to the data's mean of (y - f_i) (y - f_j) + <G_i, G_j>."""
        # No gradient of the linear term: its mean's gradient is estimated from the same sets, so
        # that the two cancel.
        linear = jnp.sum(jax.lax.stop_gradient(of_sets[..., 0]), axis=0)
        linear = linear - 2.0 * self.projected[:, 0]
        product = self._mean_less_product(self.root, of_sets, self.projected)
        return product + matmul(self.moments, linear)

    def of_precision(self, of_sets: Float[Array, "sets r one_plus_k"]) -> Float[Array, ""]:
        """A term with mean zero, to add to s^2 tr([loc_j, C_j]'S_ji [loc_i, C_i]), for a dense S.

        It uses the Nystrom approximation Phi_p'K(X, X)^-1 Phi_p of S.
        """
        return self._mean_less_product(self.whitening, of_sets, self.projected)

    @staticmethod
    def _mean_less_product(
        root: Float[Array, "t r"],
        of_sets: Float[Array, "sets r c"],
        projected: Float[Array, "r c"],
    ) -> Float[Array, ""]:
        """<A, A> - <A_i, A_j>, with the gradient of the first term estimated from A_i and A_j."""
        i, j = (matmul(root, of_set) for of_set in of_sets)
        A = jax.lax.stop_gradient(matmul(root, projected))
        change = i - jax.lax.stop_gradient(i) + j - jax.lax.stop_gradient(j)
        return jnp.sum(A * (A + change)) - jnp.sum(i * j)

    def updated(
        self,
        features: AbstractFeatures,
        index: Int[Array, "sets num"],
        change: Float[Array, "sets num one_plus_k"],
    ) -> "ControlVariate":
        """Update for changed rows of [loc, C_k]; changes of a row in both sets add up."""
        features, projected = self._features(features), self.projected
        for rows, change_of_rows in zip(index, change, strict=True):
            projected = projected + matmul(features.columns(self.X, rows), change_of_rows)
        return dataclasses.replace(self, projected=projected)
