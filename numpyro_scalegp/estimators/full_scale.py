"""Inducing points for what is smooth, nearest neighbors for the rest."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks, linalg
from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.estimators.neighbor_graph import NeighborGraph, Ordering
from numpyro_scalegp.estimators.vecchia import AbstractNeighbors, in_order
from numpyro_scalegp.features.linear_model import log_densities_given
from numpyro_scalegp.posteriors.collapsed import WhitenedPoints
from numpyro_scalegp.posteriors.full_scale import FullScalePosterior, Residual
from numpyro_scalegp.solvers import KernelOperator


class FullScale(AbstractNeighbors):
    """The density by inducing points and, for what these leave unexplained, nearest neighbors.

    f = phi(x)'w + r(x) with the features L^-1 k(Z, x) of inducing points Z, K(Z, Z) = L L', and a
    residual r that is independent of w, with covariance k(x, z) - phi(x)'phi(z). Observations of r
    are each normal given their nearest ones before them, as in `Vecchia`. So inducing points have
    what is smooth and far, and neighbors what is rough and near: for more columns than `Vecchia`
    alone is good for, and for less bias at the same number of neighbors.

    Deterministic, with derivatives of every order. Neighbors are as of `Vecchia`. Mini-batches of
    rows are none of it: the weights are of all.

    Args:
        inducing_points: Z, shape (M, d), such as `sgp.features.kmeans_points(key, X, M)`.
        num_neighbors: m, positive.
        ordering: as of `Vecchia`.
        graph: of `find_neighbors`.
        jitter: what K(Z, Z) gets on its diagonal, relative to its mean; None for 100 `eps`.

    Raises:
        ValueError: as of `Vecchia`; if `inducing_points` is no finite matrix, or, when used, if X
            has another number of columns.

    References:
        Gyger, Furrer and Sigrist (2025), Vecchia-Inducing-Points Full-Scale Approximations for
        Gaussian Processes; Sang and Huang (2012), A Full Scale Approximation of Covariance
        Functions for Large Spatial Data Sets. Time O(n (m^3 + m^2 M + M^2) + M^3), memory
        O(n (m + M)).

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jax.random.uniform(jax.random.key(0), (2_000, 4))
        >>> points = sgp.features.kmeans_points(jax.random.key(1), X, 50)
        >>> estimator = sgp.estimators.FullScale(points, num_neighbors=10)
        >>> gp = sgp.GaussianProcess(sgp.kernels.Matern32(0.5), X, 0.1, estimator=estimator)
        >>> gp.condition(jnp.sin(6.0 * X[:, 0])).mean(X[:3]).shape
        (3,)
    """

    inducing_points: Float[Array, "M d"] = eqx.field(
        converter=lambda points: checks.inputs("inducing_points", points)
    )
    num_neighbors: int = eqx.field(static=True, converter=checks.plain, default=30)
    ordering: Ordering = eqx.field(static=True, default="maxmin")
    graph: NeighborGraph | None = None
    jitter: float | None = eqx.field(static=True, converter=checks.plain, default=None)

    def __check_init__(self) -> None:
        checks.jitter(self.jitter)

    def log_prob(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"], **options: Any
    ) -> Float[Array, "*batch"]:
        """The log density; see `AbstractEstimator.log_prob`."""
        graph = self._graph_of(operator)
        check = graph.check(operator.X)
        return self._log_density(operator, residual, graph.nearest) + check

    @compiled
    def _log_density(
        self,
        operator: KernelOperator,
        residual: Float[Array, "*batch n"],
        nearest: Int[Array, "n m"],
    ) -> Float[Array, "*batch"]:
        values = residual.reshape(-1, residual.shape[-1]).T.astype(operator.dtype)
        found, log_variances = self._residual(operator).statistics(nearest, values)
        density = log_densities_given(found, log_variances, operator.size)
        return density.reshape(residual.shape[:-1])

    def condition(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        **options: Any,
    ) -> FullScalePosterior:
        """The posterior, in O(n (m^3 + m^2 M + M^2) + M^3)."""
        graph = self._graph_of(operator)
        check = graph.check(operator.X)
        return self._posterior(operator, y + check, mean_function, graph.nearest)

    @compiled
    def _posterior(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        nearest: Int[Array, "n m"],
    ) -> FullScalePosterior:
        data = y, operator.noise_variance, mean_function
        return FullScalePosterior.from_residual(self._residual(operator), nearest, *data)

    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from the approximation, row after row, in O(n (m + M)) a draw."""
        graph = self._graph_of(operator)
        check = graph.check(operator.X)
        return self._draws(operator, key, num_samples, graph) + check

    @compiled
    def _draws(
        self, operator: KernelOperator, key: Array, num_samples: int, graph: NeighborGraph
    ) -> Float[Array, "num_samples n"]:
        rest = self._residual(operator)
        weight_key, key = jax.random.split(key)
        n, M = rest.Phi.shape
        w = jax.random.normal(weight_key, (num_samples, M), rest.Phi.dtype)
        # No values: the weights of neighbors are of inputs alone.
        found = rest.of_rows(graph.nearest, rest.Phi[:, :0])
        white = jax.random.normal(key, (num_samples, n), rest.Phi.dtype)
        drawn = in_order(graph.order, graph.nearest, found.weights, found.variance, white)
        return matmul(w, rest.Phi.T) + drawn

    def _residual(self, operator: KernelOperator) -> Residual:
        Z, dtype = self.inducing_points, operator.dtype
        checks.inputs("inducing_points", Z, width=operator.X.shape[1])
        K = linalg.add_jitter(operator.kernel.covariance(Z).astype(dtype), self.jitter)
        features = WhitenedPoints(operator.kernel, Z, linalg.inverse_cholesky(K))
        Phi = map_rows(
            lambda rows: features(rows).astype(dtype), operator.X, rows_per_chunk(len(Z))
        )
        return Residual(self._known(operator), features, Phi)
