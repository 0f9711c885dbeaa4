"""The posterior of the full-scale estimator."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core.chunks import map_rows, sum_rows
from numpyro_scalegp.features.linear_model import Statistics, Weights, posterior, statistics_of
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.integrated.sgpr.posterior import WhitenedPoints
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.neighbors import conditionals
from numpyro_scalegp.neighbors.posterior import Neighbors, draw_sequentially, rows_at_a_time
from numpyro_scalegp.numerics import rounding
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.function_samples import (
    AbstractFunctionSamples,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.processes.posterior import AbstractConditioned
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction, in_chunks_and_whole


class Decorrelated(NamedTuple):
    """Observations minus their predictions from neighbors, independent given the weights w."""

    features: Float[Array, "r M"]
    values: Float[Array, "r s"]
    variance: Float[Array, " r"]
    weights: Float[Array, "r k"]  # of the neighbors in the predictions


class Residual(eqx.Module):
    """The residual process f - phi'w, with the covariance k(x, z) - phi(x)'phi(z), and its data."""

    data: Neighbors
    features: WhitenedPoints
    Phi: Float[Array, "n M"]  # features of the data

    def decorrelated(
        self,
        near: Int[Array, "r k"],
        rows: Float[Array, "r d"],
        neighbor_values: Float[Array, "n s"],
        values: Float[Array, "r s"],
        noise: Float[Array, " r"],
        component: WhitenedPoints | None = None,
        is_component: Bool[Array, "r k"] | None = None,
    ) -> Decorrelated:
        """Values at r inputs minus their predictions from neighbors.

        Args:
            near: neighbors of each input, indices of the data; n for padding.
            rows: the inputs.
            neighbor_values: values of the data.
            values: values at the inputs.
            noise: noise variances at the inputs.
            component: the features of a component of f, if the values are of that component.
            is_component: which neighbors are values of that component, too.
        """
        features = self.features if component is None else component
        is_neighbor = near < len(self.Phi)
        index = jnp.where(is_neighbor, near, 0)
        Phi = jnp.where(is_neighbor[..., None], self.Phi[index], 0.0)
        kernel = None if component is None else component.of_f
        system = self.data.systems(near, rows, kernel, is_component)
        phi = features(rows).astype(Phi.dtype)
        H = system.H - jnp.einsum("bkm,blm->bkl", Phi, Phi, precision="highest")
        C = system.C - jnp.einsum("bkm,bm->bk", Phi, phi, precision="highest")
        remaining = rounding.remaining_variance(system.variance, jnp.sum(phi * phi, axis=1))
        b, variance = conditionals.weights(conditionals.Systems(H, C, remaining + noise))
        of_neighbors = jnp.where(is_neighbor[..., None], neighbor_values[index], 0.0)
        return Decorrelated(
            phi - jnp.einsum("bk,bkm->bm", b, Phi, precision="highest"),
            values - jnp.einsum("bk,bks->bs", b, of_neighbors, precision="highest"),
            variance,
            b,
        )

    def rows_at_a_time(self, most: int | None = None) -> int:
        """The number of rows in a chunk, at most `most`."""
        k = self.data.num
        return rows_at_a_time(k, 4 * (k + 1) * self.Phi.shape[1], most)

    def of_rows(self, near: Int[Array, "n k"], values: Float[Array, "n s"]) -> Decorrelated:
        """The data minus their predictions from neighbors."""

        def of_chunk(chunk: tuple[Array, Array]) -> Decorrelated:
            index, near = chunk
            noise = self.data.noise[index]
            return self.decorrelated(near, self.data.X[index], values, values[index], noise)

        every = jnp.arange(len(near), dtype=near.dtype)
        return map_rows(of_chunk, (every, near), self.rows_at_a_time())

    def statistics(
        self, near: Int[Array, "n k"], values: Float[Array, "n s"]
    ) -> tuple[Statistics, Float[Array, ""]]:
        """The linear model of the decorrelated data, and the sum of log variances."""

        def of_chunk(
            chunk: tuple[Array, Array, Array],
        ) -> tuple[Statistics, Array, conditionals.FactorizationIssues]:
            index, near, counts = chunk
            # Padding has no neighbors.
            near = jnp.where(counts[:, None] > 0, near, len(self.Phi))
            rows, noise = self.data.X[index], self.data.noise[index]
            model = self.decorrelated(near, rows, values, values[index], noise)
            statistics = statistics_of(model.features, counts / model.variance, model.values)
            logs = jnp.where(counts > 0, jnp.log(model.variance), 0.0)
            prior_variance = self.data.kernel.evaluate_diag(rows).astype(logs.dtype)
            return (
                statistics,
                jnp.sum(logs),
                conditionals.few_digits(prior_variance, model.variance, self.data.num),
            )

        every = jnp.arange(len(near), dtype=near.dtype)
        chunk = every, near, jnp.ones(len(near), values.dtype)
        statistics, logs, issues = sum_rows(
            of_chunk, chunk, self.rows_at_a_time(), saved_names=(conditionals.SOLUTIONS,)
        )
        issues.warn()
        return statistics, logs


class FullScalePosterior(AbstractConditioned):
    """The posterior of f = phi(x)'w + r(x), with r at each input given the nearest observations.

    Let w ~ N(0, I) be the whitened inducing values, and b the weights of the neighbors N in the
    conditional mean of r(x). Then f(x) has the mean m(x) + b'y_N + psi'E[w] and the variance
    v + psi'Cov[w] psi, where psi = phi(x) - Phi_N'b and v is the conditional variance of r(x). All
    values of a joint draw share w, and r is drawn sequentially, as in `VecchiaPosterior`.

    `GaussianProcess.condition` returns it for `FullScale`; it is immutable. Moments at m inputs
    cost O(m (k^3 + k M + M^2 + log n)) with k neighbors and M inducing points.

    References:
        Gyger, Furrer and Sigrist (2025), Vecchia-Inducing-Points Full-Scale Approximations for
        Gaussian Processes.
    """

    residual: Residual
    near: Int[Array, "n k"]  # neighbors before each row
    X: Float[Array, "n d"]
    y: Float[Array, " n"]
    noise_variance: Float[Array, "..."] | None
    mean_function: RowsFunction
    values: Float[Array, " n"]  # y - m(X)
    weights: Weights
    component_features: WhitenedPoints | None = None  # for the posterior of a component of f

    @classmethod
    def from_residual(
        cls,
        residual: Residual,
        near: Int[Array, "n k"],
        y: Float[Array, " n"],
        noise_variance: Float[Array, "..."],
        mean_function: RowsFunction,
    ) -> "FullScalePosterior":
        """Compute the posterior of the weights, in O(n (k^3 + k M + M^2) + M^3)."""
        X = residual.data.X
        values = (y - mean_function(X)).astype(residual.Phi.dtype)
        weights = posterior(residual.statistics(near, values[:, None])[0], warn=True)
        return cls(
            residual=residual,
            near=near,
            X=X,
            y=y,
            noise_variance=noise_variance,
            mean_function=mean_function,
            values=values,
            weights=weights,
        )

    @property
    def diagnostics(self) -> dict[str, Array]:
        """The `jitter` added to the factorization, relative to the unit prior of the weights."""
        return {"jitter": self.weights.jitter}

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "FullScalePosterior":
        """The posterior of a component of f; see `AbstractPosterior.restrict`."""
        features = self._features.restrict(change)
        zero = zero_function(self.values.dtype)
        return dataclasses.replace(self, component_features=features, mean_function=zero)

    @property
    def _features(self) -> WhitenedPoints:
        """The features of f, or of its component."""
        features = self.component_features
        return self.residual.features if features is None else features

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[0]

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[1]

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        return self._moments(Xs, self.residual.data.nearest(Xs), chunk_size)

    def _decorrelated(self, near: Array, rows: Array) -> Decorrelated:
        """Zeros at r inputs, minus the predictions of f from neighbors."""
        zeros = jnp.zeros(rows.shape[0], self.values.dtype)
        return self.residual.decorrelated(
            near, rows, self.values[:, None], zeros[:, None], zeros, self.component_features
        )

    @compiled
    def _moments(self, Xs: Array, near: Array, chunk_size: int | None) -> tuple[Array, Array]:
        in_chunks, at_once = in_chunks_and_whole(self.mean_function)

        def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            rows, near = chunk
            model = self._decorrelated(near, rows)
            mean = matmul(model.features, self.weights.mean) - model.values[:, 0]
            spread = matmul(model.features, self.weights.whitening.T)
            variance = jnp.maximum(model.variance, 0.0) + jnp.sum(jnp.square(spread), axis=1)
            return in_chunks(rows) + mean, variance

        size = self.residual.rows_at_a_time(chunk_size)
        mean, variance = map_rows(of_chunk, (Xs, near), size)
        return at_once(Xs) + mean, variance

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given all other observations.

        The approximation has the precision P = B'(D^-1 - D^-1 Psi A^-1 Psi'D^-1) B, where B maps
        observations to prediction errors given neighbors. Entry i of its diagonal is a sum over i
        and the rows that have i as a neighbor.
        """
        mean, variance = self._leave_one_out()
        return dist.Normal(mean, jnp.sqrt(variance))

    @compiled
    def _leave_one_out(self) -> tuple[Array, Array]:
        model = self.residual.of_rows(self.near, self.values[:, None])
        precision = 1.0 / model.variance
        W = self.weights.whitening

        def scattered(of_rows: Array, of_neighbors: Array) -> Array:
            """Add each row's value to the row, and its values for neighbors to these."""
            total = jnp.concatenate([of_rows, jnp.zeros_like(of_rows[:1])])
            return total.at[self.near].add(of_neighbors)[:-1]

        b = model.weights
        white = precision[:, None] * matmul(model.features, W.T)
        low_rank = scattered(white, -b[..., None] * white[:, None])
        diagonal = scattered(precision, jnp.square(b) * precision[:, None])
        diagonal = diagonal - jnp.sum(jnp.square(low_rank), axis=1)
        scaled = precision * (model.values[:, 0] - matmul(model.features, self.weights.mean))
        alpha = scattered(scaled, -b * scaled[:, None])
        return self.y - alpha / diagonal, 1.0 / diagonal

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        order, near = self.residual.data.coarse_to_fine(Xs)
        return self._draw(key, Xs[order], near, num_samples)[:, np.argsort(order)]

    def _weights(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "M num_samples"]:
        white = jax.random.normal(key, (self.weights.mean.size, num_samples), self.values.dtype)
        return self.weights.mean[:, None] + matmul(self.weights.whitening.T, white)

    @compiled
    def _draw(self, key: Array, Xs: Array, near: Array, num_samples: int) -> Array:
        weight_key, key = jax.random.split(key)
        w, n = self._weights(weight_key, num_samples), len(self.values)
        features = self._features
        phi = features(Xs).astype(w.dtype)
        extended = dataclasses.replace(
            self.residual,
            data=self.residual.data.with_rows(Xs, features.of_f),
            Phi=jnp.concatenate([self.residual.Phi, phi]),
        )
        # The weights of the neighbors do not depend on their values.
        neighbor_values = jnp.zeros((n + len(Xs), 1), w.dtype)

        def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            rows, near = chunk
            zeros, component = jnp.zeros(len(rows), w.dtype), self.component_features
            model = extended.decorrelated(
                near, rows, neighbor_values, zeros[:, None], zeros, component, near >= n
            )
            return model.weights, model.variance

        b, variance = map_rows(of_chunk, (Xs, near), self.residual.rows_at_a_time())
        residuals = self.values[:, None] - matmul(self.residual.Phi, w)
        drawn = draw_sequentially(key, b, variance, near, residuals, num_samples)
        return self.mean_function(Xs) + matmul(phi, w).T + drawn

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> "FullScaleFunctionSamples":
        weight_key, key = jax.random.split(key)
        w, data = self._weights(weight_key, num_samples), self.residual.data
        X = data.X.astype(w.dtype)
        draws = prior_draws(key, data.kernel, num_samples, num_features, X)
        features = self.residual.features
        at_points = draws(data.kernel, features.points.astype(w.dtype))
        weights = w - matmul(features.whitening, at_points)
        observed = draws.observations(data.kernel, X, data.noise)
        residuals = self.values[:, None] - matmul(self.residual.Phi, weights) - observed
        return FullScaleFunctionSamples(
            self.residual, self.component_features, self.mean_function, draws, weights, residuals
        )


class FullScaleFunctionSamples(AbstractFunctionSamples):
    """Prior draws p_j, updated by the posterior of the weights and by the nearest observations.

    f_j(x) = m(x) + p_j(x) + phi(x)'u_j + b'(y_N - Phi_N u_j - p_j(X_N) - e_j), where u_j is a
    posterior draw of the weights minus the weights of p_j.
    """

    residual: Residual
    component_features: WhitenedPoints | None
    mean_function: RowsFunction
    draws: PriorDraws
    weights: Float[Array, "M num_samples"]  # u_j
    residuals: Float[Array, "n num_samples"]

    @property
    def _num_columns(self) -> int:
        return self.residual.data.X.shape[1]

    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._at(Xs, self.residual.data.nearest(Xs), chunk_size)

    @compiled
    def _at(self, Xs: Array, near: Array, chunk_size: int | None) -> Array:
        residuals, component = self.residuals, self.component_features
        features = self.residual.features if component is None else component

        def of_chunk(chunk: tuple[Array, Array]) -> Array:
            rows, near = chunk
            zeros = jnp.zeros((rows.shape[0], residuals.shape[1]), residuals.dtype)
            model = self.residual.decorrelated(near, rows, residuals, zeros, zeros[:, 0], component)
            drawn = self.draws(features.of_f, rows.astype(residuals.dtype))
            update = matmul(features(rows).astype(residuals.dtype), self.weights) - model.values
            return self.mean_function(rows)[:, None] + drawn + update

        return map_rows(of_chunk, (Xs, near), self.residual.rows_at_a_time(chunk_size)).T
