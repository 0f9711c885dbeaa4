"""The posterior of inducing points, with nearest neighbors for what these leave unexplained."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core import rounding
from numpyro_scalegp.core.chunks import map_rows, sum_rows
from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.row_values import in_chunks_and_whole
from numpyro_scalegp.features.linear_model import Statistics, Weights, posterior, statistics_of
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors import conditionals
from numpyro_scalegp.posteriors.collapsed import WhitenedPoints
from numpyro_scalegp.posteriors.function_samples import (
    AbstractFunctionSamples,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.posteriors.posterior import AbstractConditioned
from numpyro_scalegp.posteriors.vecchia import Neighbors, draw_in_turn, rows_at_a_time


class Decorrelated(NamedTuple):
    """Rows minus what their neighbors say: independent of each other given the weights."""

    features: Float[Array, "r M"]
    values: Float[Array, "r s"]
    variance: Float[Array, " r"]
    weights: Float[Array, "r k"]  # of the neighbors


class Residual(eqx.Module):
    """f minus its features, of which observations are known: k(x, z) - phi(x)'phi(z) and noise."""

    known: Neighbors
    features: WhitenedPoints
    Phi: Float[Array, "n M"]  # of the known rows

    def decorrelated(
        self,
        near: Int[Array, "r k"],
        rows: Float[Array, "r d"],
        values: Float[Array, "n s"],
        own: Float[Array, "r s"],
        noise: Float[Array, " r"],
        of_f: WhitenedPoints | None = None,
        is_part: Bool[Array, "r k"] | None = None,
    ) -> Decorrelated:
        """What rows have beyond their neighbors.

        Args:
            near: their neighbors; n in place of those that a row lacks.
            rows: their inputs.
            values: of the known rows.
            own: of these rows.
            noise: their noise variances.
            of_f: the features of a part of f, where these rows are of that.
            is_part: which neighbors are of that part, too.
        """
        points = self.features if of_f is None else of_f
        is_given = near < len(self.Phi)
        given = jnp.where(is_given[..., None], self.Phi[jnp.where(is_given, near, 0)], 0.0)
        part = None if of_f is None else of_f.of_f
        found = self.known.systems(near, rows, part, is_part)
        phi = points(rows).astype(given.dtype)
        H = found.H - jnp.einsum("bkm,blm->bkl", given, given, precision="highest")
        C = found.C - jnp.einsum("bkm,bm->bk", given, phi, precision="highest")
        left = rounding.remaining_variance(found.variance, jnp.sum(phi * phi, axis=1))
        variance = left + noise
        b, variance = conditionals.weights(conditionals.Systems(H, C, variance))
        seen = jnp.where(is_given[..., None], values[jnp.where(is_given, near, 0)], 0.0)
        return Decorrelated(
            phi - jnp.einsum("bk,bkm->bm", b, given, precision="highest"),
            own - jnp.einsum("bk,bks->bs", b, seen, precision="highest"),
            variance,
            b,
        )

    def rows_at_a_time(self, most: int | None = None) -> int:
        """Rows of a chunk."""
        k = self.known.num
        return rows_at_a_time(k, 4 * (k + 1) * self.Phi.shape[1], most)

    def of_rows(self, near: Int[Array, "n k"], values: Float[Array, "n s"]) -> Decorrelated:
        """What the known rows have beyond their neighbors."""

        def of_chunk(chunk: tuple[Array, Array]) -> Decorrelated:
            index, near = chunk
            own = values[index], self.known.noise[index]
            return self.decorrelated(near, self.known.X[index], values, *own)

        every = jnp.arange(len(near), dtype=near.dtype)
        return map_rows(of_chunk, (every, near), self.rows_at_a_time())

    def statistics(
        self, near: Int[Array, "n k"], values: Float[Array, "n s"]
    ) -> tuple[Statistics, Float[Array, ""]]:
        """The linear model of the decorrelated known rows, and the sum of log variances."""

        def of_chunk(
            chunk: tuple[Array, Array, Array],
        ) -> tuple[Statistics, Array, conditionals.Trouble]:
            index, near, counts = chunk
            # Rows that fill a chunk have no neighbors.
            near = jnp.where(counts[:, None] > 0, near, len(self.Phi))
            rows, own = self.known.X[index], values[index]
            found = self.decorrelated(near, rows, values, own, self.known.noise[index])
            statistics = statistics_of(found.features, counts / found.variance, found.values)
            logs = jnp.where(counts > 0, jnp.log(found.variance), 0.0)
            whole = self.known.kernel.diag(rows).astype(logs.dtype)
            return (
                statistics,
                jnp.sum(logs),
                conditionals.few_digits(whole, found.variance, self.known.num),
            )

        every = jnp.arange(len(near), dtype=near.dtype)
        chunk = every, near, jnp.ones(len(near), values.dtype)
        kept = (conditionals.SOLUTIONS,)
        found, logs, trouble = sum_rows(of_chunk, chunk, self.rows_at_a_time(), kept=kept)
        trouble.warn()
        return found, logs


class FullScalePosterior(AbstractConditioned):
    """The posterior of f = phi(x)'w + r(x), with r at each input given the nearest observations.

    With w ~ N(0, I) the whitened inducing values, and the neighbors' weights b of r: mean m(x) +
    b'y_N + psi'E[w] and variance v + psi'Cov[w] psi, where psi = phi(x) - Phi_N'b and v is what
    neighbors leave of the variance of r. Joint draws share w, and r is drawn one input after the
    other, as in `VecchiaPosterior`.

    Made by `GaussianProcess.condition` with `FullScale`; immutable. Moments at m inputs cost
    O(m (k^3 + k M + M^2 + log n)) with k neighbors and M inducing points.

    References:
        Gyger, Furrer and Sigrist (2025), Vecchia-Inducing-Points Full-Scale Approximations for
        Gaussian Processes.
    """

    residual: Residual
    near: Int[Array, "n k"]  # before each row
    X: Float[Array, "n d"]
    y: Float[Array, " n"]
    noise_variance: Float[Array, "..."] | None
    mean_function: RowsFunction
    values: Float[Array, " n"]  # y - m(X)
    weights: Weights
    part: WhitenedPoints | None = None  # the features of a part of f

    @classmethod
    def from_residual(
        cls,
        residual: Residual,
        near: Int[Array, "n k"],
        y: Float[Array, " n"],
        noise_variance: Float[Array, "..."],
        mean_function: RowsFunction,
    ) -> "FullScalePosterior":
        """Find the weights' posterior, in O(n (k^3 + k M + M^2) + M^3)."""
        X = residual.known.X
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
        """What the factorization took: `jitter`, relative to the unit prior of the weights."""
        return {"jitter": self.weights.jitter}

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "FullScalePosterior":
        """The posterior of a part of f; see `AbstractPosterior.restrict`."""
        own = self.residual.features if self.part is None else self.part
        zero = zero_function(self.values.dtype)
        return dataclasses.replace(self, part=own.restrict(change), mean_function=zero)

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[0]

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[1]

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        return self._moments(Xs, self.residual.known.nearest(Xs), chunk_size)

    def _beyond(self, near: Array, rows: Array) -> Decorrelated:
        """F at some rows beyond their neighbors; its values are minus what these say."""
        nothing = jnp.zeros(len(rows), self.values.dtype)
        values = self.values[:, None]
        return self.residual.decorrelated(near, rows, values, nothing[:, None], nothing, self.part)

    @compiled
    def _moments(self, Xs: Array, near: Array, chunk_size: int | None) -> tuple[Array, Array]:
        in_chunks, whole = in_chunks_and_whole(self.mean_function)

        def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            rows, near = chunk
            found = self._beyond(near, rows)
            mean = matmul(found.features, self.weights.mean) - found.values[:, 0]
            spread = matmul(found.features, self.weights.whitening.T)
            variance = jnp.maximum(found.variance, 0.0) + jnp.sum(jnp.square(spread), axis=1)
            return in_chunks(rows) + mean, variance

        size = self.residual.rows_at_a_time(chunk_size)
        mean, variance = map_rows(of_chunk, (Xs, near), size)
        return whole(Xs) + mean, variance

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given all others, under the approximation.

        From the precision P of all observations: with B the rows minus their neighbors, P =
        B'(D^-1 - D^-1 Psi A^-1 Psi'D^-1) B, of which the diagonal is a sum over the rows that have
        i among their neighbors.
        """
        mean, variance = self._left_out()
        return dist.Normal(mean, jnp.sqrt(variance))

    @compiled
    def _left_out(self) -> tuple[Array, Array]:
        found = self.residual.of_rows(self.near, self.values[:, None])
        precision = 1.0 / found.variance
        W = self.weights.whitening

        def scattered(own: Array, others: Array) -> Array:
            """Sums over rows for themselves and, with their weights, for their neighbors."""
            total = jnp.concatenate([own, jnp.zeros_like(own[:1])])
            return total.at[self.near].add(others)[:-1]

        b = found.weights
        white = precision[:, None] * matmul(found.features, W.T)
        through = scattered(white, -b[..., None] * white[:, None])
        diagonal = scattered(precision, jnp.square(b) * precision[:, None])
        diagonal = diagonal - jnp.sum(jnp.square(through), axis=1)
        rest = found.values[:, 0] - matmul(found.features, self.weights.mean)
        alpha = scattered(precision * rest, -b * (precision * rest)[:, None])
        return self.y - alpha / diagonal, 1.0 / diagonal

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        order, near = self.residual.known.in_turn(Xs)
        return self._drawn(key, Xs[order], near, num_samples)[:, np.argsort(order)]

    def _weights(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "M num_samples"]:
        white = jax.random.normal(key, (self.weights.mean.size, num_samples), self.values.dtype)
        return self.weights.mean[:, None] + matmul(self.weights.whitening.T, white)

    @compiled
    def _drawn(self, key: Array, Xs: Array, near: Array, num_samples: int) -> Array:
        weight_key, key = jax.random.split(key)
        w, n = self._weights(weight_key, num_samples), len(self.values)
        of_f = self.residual.features if self.part is None else self.part
        phi = of_f(Xs).astype(w.dtype)
        both = dataclasses.replace(
            self.residual,
            known=self.residual.known.with_rows(Xs, of_f.of_f),
            Phi=jnp.concatenate([self.residual.Phi, phi]),
        )
        nothing = jnp.zeros((n + len(Xs), 1), w.dtype)

        def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            rows, near = chunk
            none = jnp.zeros(len(rows), w.dtype)
            found = both.decorrelated(
                near, rows, nothing, none[:, None], none, self.part, near >= n
            )
            return found.weights, found.variance

        b, variance = map_rows(of_chunk, (Xs, near), self.residual.rows_at_a_time())
        rest = self.values[:, None] - matmul(self.residual.Phi, w)
        drawn = draw_in_turn(key, b, variance, near, rest, num_samples)
        return self.mean_function(Xs) + matmul(phi, w).T + drawn

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> "FullScaleFunctionSamples":
        weight_key, key = jax.random.split(key)
        w, known = self._weights(weight_key, num_samples), self.residual.known
        X = known.X.astype(w.dtype)
        draws = prior_draws(key, known.kernel, num_samples, num_features, X)
        features = self.residual.features
        at_points = matmul(features.whitening, draws(known.kernel, features.points.astype(w.dtype)))
        observed = draws.observations(known.kernel, X, known.noise)
        explained = matmul(self.residual.Phi, w - at_points)
        rest = self.values[:, None] - explained - observed
        parts = self.part, self.mean_function, draws, w - at_points, rest
        return FullScaleFunctionSamples(self.residual, *parts)


class FullScaleFunctionSamples(AbstractFunctionSamples):
    """Prior draws p_j, updated by the weights' posterior and by what nearest observations say.

    f_j(x) = m(x) + p_j(x) + phi(x)'u_j + b'(y_N - Phi_N u_j - p_j(X_N) - e_j), where u_j is a draw
    of the weights minus the prior draw's own.
    """

    residual: Residual
    part: WhitenedPoints | None
    mean_function: RowsFunction
    draws: PriorDraws
    weights: Float[Array, "M num_samples"]  # u_j
    rest: Float[Array, "n num_samples"]

    @property
    def _num_columns(self) -> int:
        return self.residual.known.X.shape[1]

    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._at(Xs, self.residual.known.nearest(Xs), chunk_size)

    @compiled
    def _at(self, Xs: Array, near: Array, chunk_size: int | None) -> Array:
        of_f = self.residual.features if self.part is None else self.part

        def of_chunk(chunk: tuple[Array, Array]) -> Array:
            rows, near = chunk
            none = jnp.zeros((len(rows), self.rest.shape[1]), self.rest.dtype)
            found = self.residual.decorrelated(near, rows, self.rest, none, none[:, 0], self.part)
            drawn = self.draws(of_f.of_f, rows.astype(self.rest.dtype))
            update = matmul(of_f(rows).astype(self.rest.dtype), self.weights) - found.values
            return self.mean_function(rows)[:, None] + drawn + update

        return map_rows(of_chunk, (Xs, near), self.residual.rows_at_a_time(chunk_size)).T
