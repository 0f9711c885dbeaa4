"""A control variate of the quadruply stochastic bound."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core import linalg
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.features import AbstractFeatures
from numpyro_scalegp.features.chevron import Chevron, WeightRows, projections, some_columns, views

# What the support's covariance gets on its diagonal, relative to its mean.
_RIDGE = 1e-3


class ControlVariate(eqx.Module):
    """What lowers the variance of <f_i, f_j>: a product at support points, less its mean.

    Of the values f_p at r support points, f_p'M f_p predicts the mean of f^2 over the data, and
    c'f_p that of y f: M = B B' / s and c = B y / s with B = K(p, p)^-1 K(p, t), so that B'f_p are
    the values at s rows t of the data given those at the support. The means of both come from
    a = Phi_p [loc, C_k], which `updated` keeps up to date at the cost of the rows that a step has
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
        weights: Chevron,
        *,
        dense_precision: bool,
    ) -> "ControlVariate":
        """Fit it, in O(r m (d + k) + r^2 (r + s)), without a derivative."""
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

    def views(
        self, features: AbstractFeatures, rows: WeightRows
    ) -> Float[Array, "sets r one_plus_k"]:
        """The projections of each set at the support rows, s Phi_p,i [loc_i, C_i]."""
        return views(self._features(features), self.X, rows).projected

    def some_columns(self, columns: Int[Array, " c"]) -> "ControlVariate":
        """Keep the dense columns that `WeightRows.some_columns` keeps."""
        return dataclasses.replace(self, projected=some_columns(self.projected, columns))

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

    def updated(
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
