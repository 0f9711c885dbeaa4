"""The full-scale estimator: inducing points, and nearest neighbors for the residual."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.features.linear_model import log_densities_given
from numpyro_scalegp.integrated.sgpr.posterior import WhitenedPoints
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.neighbors.full_scale_posterior import FullScalePosterior, Residual
from numpyro_scalegp.neighbors.graph import NeighborGraph, Ordering
from numpyro_scalegp.neighbors.vecchia import AbstractNeighbors, sequential_draws
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction


class FullScale(AbstractNeighbors):
    """The density from inducing points, with nearest neighbors for the residual process.

    f = phi(x)'w + r(x), where phi(x) = L^-1 k(Z, x) are the features of inducing points Z, with
    K(Z, Z) = L L'. The residual r is independent of w and has the covariance
    k(x, z) - phi(x)'phi(z). Each observation of r is conditioned on its nearest neighbors before
    it, as in `Vecchia`. Inducing points model smooth, long-range variation and neighbors model
    rough, local variation. So this estimator works in more input dimensions than `Vecchia`, and has
    less bias with the same number of neighbors.

    The density is deterministic, with derivatives of every order. Neighbors are found as in
    `Vecchia`. There are no mini-batches, since all observations share the weights w.

    Args:
        inducing_points: Z, shape (M, d), such as `sgp.features.kmeans_points(key, X, M)`.
        num_neighbors: m, positive.
        ordering: see `Vecchia`.
        graph: the neighbors, set by `find_neighbors`.
        jitter: added to the diagonal of K(Z, Z), relative to its mean; None for 100 times machine
            epsilon.

    Raises:
        ValueError: as for `Vecchia`; if `inducing_points` is not a finite matrix or, when used, has
            a different number of columns than X.

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
        statistics, log_variances = self._residual(operator).statistics(nearest, values)
        density = log_densities_given(statistics, log_variances, operator.size)
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
        """Draw from the approximation, one row after another, in O(n (m + M)) for each draw."""
        graph = self._graph_of(operator)
        check = graph.check(operator.X)
        return self._draws(operator, key, num_samples, graph) + check

    @compiled
    def _draws(
        self, operator: KernelOperator, key: Array, num_samples: int, graph: NeighborGraph
    ) -> Float[Array, "num_samples n"]:
        residual = self._residual(operator)
        weight_key, key = jax.random.split(key)
        n, M = residual.Phi.shape
        w = jax.random.normal(weight_key, (num_samples, M), residual.Phi.dtype)
        # No values: the weights of the neighbors depend on inputs only.
        rows = residual.of_rows(graph.nearest, residual.Phi[:, :0])
        white = jax.random.normal(key, (num_samples, n), residual.Phi.dtype)
        drawn = sequential_draws(graph.order, graph.nearest, rows.weights, rows.variance, white)
        return matmul(w, residual.Phi.T) + drawn

    def _residual(self, operator: KernelOperator) -> Residual:
        Z, dtype = self.inducing_points, operator.dtype
        checks.inputs("inducing_points", Z, width=operator.X.shape[1])
        K = linalg.add_jitter(operator.kernel.evaluate_covariance(Z).astype(dtype), self.jitter)
        features = WhitenedPoints(operator.kernel, Z, linalg.inverse_cholesky(K))
        Phi = map_rows(
            lambda rows: features(rows).astype(dtype), operator.X, rows_per_chunk(len(Z))
        )
        return Residual(self._data(operator), features, Phi)
