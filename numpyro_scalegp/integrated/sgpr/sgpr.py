"""The collapsed bound of a sparse GP, with the optimal distribution of the inducing values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.chunks import rows_per_chunk, sum_rows
from numpyro_scalegp.features.linear_model import Statistics, log_densities, statistics_of
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.integrated.sgpr.posterior import CollapsedPosterior, WhitenedPoints
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction


class SGPR(AbstractEstimator):
    """Sparse GP regression: a lower bound on the log marginal likelihood from inducing points.

    With Q = K(X, Z) K(Z, Z)^-1 K(Z, X) and D the noise variances, the bound is
    log N(y; m, Q + D) - sum_i log(1 + (k_ii - q_ii) / D_i) / 2. It is the evidence lower bound of a
    sparse variational GP with a normal likelihood, at the optimal q of the inducing values and, if
    `tight`, the optimal variance of f given the inducing values.

    The bound is deterministic and has derivatives of every order, so it works with NUTS and line
    searches; the posterior of the hyperparameters is then proportional to the prior times the
    exponential of the bound. Inducing points may be learned: `numpyro.param("points", Z)` in a
    model for SVI.

    Args:
        inducing_points: Z, shape (M, d), such as `sgp.features.kmeans_points(key, X, M)`.
        tight: whether to use the bound of Titsias (2025). False uses the bound of Titsias (2009),
            with -sum_i (k_ii - q_ii) / D_i / 2, which is lower and overestimates the noise more.
        jitter: added to the diagonal of K(Z, Z), relative to its mean; None for 100 times machine
            epsilon.

    Raises:
        ValueError: if `inducing_points` is not a finite matrix, or `jitter` is negative; when used,
            if X has a different number of columns.

    References:
        Titsias (2009), Variational Learning of Inducing Variables in Sparse Gaussian Processes;
        Titsias (2025), New Bounds for Sparse Variational Gaussian Processes. Time O(n M^2 + M^3),
        memory O(n d + M^2) plus one chunk of rows.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 10_000)[:, None]
        >>> points = sgp.features.kmeans_points(jax.random.key(0), X, 20)
        >>> estimator = sgp.estimators.SGPR(points)
        >>> gp = sgp.GaussianProcess(sgp.kernels.RBF(0.2), X, 0.1, estimator=estimator)
        >>> gp.condition(jnp.sin(6.0 * X[:, 0])).mean(X[:3]).shape
        (3,)
    """

    inducing_points: Float[Array, "M d"] = eqx.field(
        converter=lambda points: checks.inputs("inducing_points", points)
    )
    tight: bool = eqx.field(static=True, default=True)
    jitter: float | None = eqx.field(static=True, converter=checks.plain, default=None)

    def __check_init__(self) -> None:
        checks.instance("tight", self.tight, bool, "True or False")
        checks.jitter(self.jitter)

    @compiled
    def log_prob(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"], **options: Any
    ) -> Float[Array, "*batch"]:
        """The bound for each row of `residual`; see `AbstractEstimator.log_prob`."""
        noise, features = operator.noise(), self._features(operator)

        def of_chunk(rows: tuple[Array, Array, Array]) -> tuple[Statistics, Array]:
            X, precision, y = rows
            Phi = features(X).astype(operator.dtype)
            ratio = precision * features.unexplained(X, Phi)
            penalty = jnp.sum(jnp.log1p(ratio) if self.tight else ratio)
            return statistics_of(Phi, precision, y), penalty

        columns = residual.reshape(-1, residual.shape[-1]).T.astype(operator.dtype)
        width = rows_per_chunk(len(self.inducing_points))
        statistics, penalty = sum_rows(of_chunk, (operator.X, 1.0 / noise, columns), width)
        return (log_densities(statistics, noise) - 0.5 * penalty).reshape(residual.shape[:-1])

    def condition(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        **options: Any,
    ) -> CollapsedPosterior:
        """The posterior under the optimal q, in O(n M^2 + M^3)."""
        return self._posterior(operator, y, mean_function)

    @compiled
    def _posterior(
        self, operator: KernelOperator, y: Float[Array, " n"], mean_function: RowsFunction
    ) -> CollapsedPosterior:
        data = operator.X, y, operator.noise_variance, mean_function, operator.dtype
        features, size = self._features(operator), len(self.inducing_points)
        return CollapsedPosterior.from_features(features, size, *data)

    @compiled
    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, Q + diag(k - q) + D), with the variances of H, in O(n M) per draw."""
        weight_key, row_key = jax.random.split(key)
        features = self._features(operator)
        Phi = features(operator.X)
        weights = jax.random.normal(weight_key, (num_samples, Phi.shape[1]), Phi.dtype)
        scale = jnp.sqrt(features.unexplained(operator.X, Phi) + operator.noise())
        return matmul(weights, Phi.T) + scale * jax.random.normal(
            row_key, (num_samples, len(Phi)), Phi.dtype
        )

    def with_inputs(self, change: Callable[[Array], Array]) -> "SGPR":
        """See `AbstractEstimator.with_inputs`."""
        return dataclasses.replace(self, inducing_points=change(self.inducing_points))

    def _features(self, operator: KernelOperator) -> WhitenedPoints:
        Z = self.inducing_points
        checks.inputs("inducing_points", Z, width=operator.X.shape[1])
        K = linalg.add_jitter(
            operator.kernel.evaluate_covariance(Z).astype(operator.dtype), self.jitter
        )
        return WhitenedPoints(operator.kernel, Z, linalg.inverse_cholesky(K))
