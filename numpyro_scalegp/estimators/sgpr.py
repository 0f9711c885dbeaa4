"""The collapsed bound of a sparse GP, with the optimal distribution over the inducing values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks, linalg
from numpyro_scalegp.core.chunks import rows_per_chunk, sum_rows
from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.estimators.estimator import AbstractEstimator
from numpyro_scalegp.features.linear_model import Statistics, log_densities, statistics_of
from numpyro_scalegp.posteriors.collapsed import CollapsedPosterior, WhitenedPoints
from numpyro_scalegp.solvers import KernelOperator


class SGPR(AbstractEstimator):
    """A lower bound of the log marginal likelihood from inducing points, sparse GP regression.

    With q(x, x) = k(x, Z) K(Z, Z)^-1 k(Z, x) at the rows of X, and D the noise variances, it is
    log N(y; m, Q + D) - sum_i log(1 + (k_ii - q_ii) / D_i) / 2: the evidence lower bound of an SVGP
    with a normal likelihood, at the optimal q over its inducing values and, where it is tight, the
    best variance of what these leave unexplained.

    It is deterministic and has derivatives of every order, so it serves NUTS and line searches,
    where the posterior over hyperparameters is that of the bound. Inducing points may be learned:
    `numpyro.param("points", Z)` in a model for SVI.

    Args:
        inducing_points: Z, shape (M, d), such as `sgp.features.kmeans_points(key, X, M)`.
        tight: whether to take the bound of 2025. False takes that of 2009, with
            -sum_i (k_ii - q_ii) / D_i / 2, which is lower and pulls the noise up.
        jitter: what K(Z, Z) gets on its diagonal, relative to its mean; None for 100 `eps`.

    Raises:
        ValueError: if `inducing_points` is no finite matrix, or `jitter` is negative; when used, if
            X has another number of columns.

    References:
        Titsias (2009), Variational Learning of Inducing Variables in Sparse Gaussian Processes;
        Titsias (2025), New Bounds for Sparse Variational Gaussian Processes. Time O(n M^2 + M^3),
        memory O(n d + M^2) beside chunks of rows.

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
            lost = jnp.sum(jnp.log1p(ratio) if self.tight else ratio)
            return statistics_of(Phi, precision, y), lost

        columns = residual.reshape(-1, residual.shape[-1]).T.astype(operator.dtype)
        width = rows_per_chunk(len(self.inducing_points))
        found, lost = sum_rows(of_chunk, (operator.X, 1.0 / noise, columns), width)
        return (log_densities(found, noise) - 0.5 * lost).reshape(residual.shape[:-1])

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
        given = operator.X, y, operator.noise_variance, mean_function, operator.dtype
        features, size = self._features(operator), len(self.inducing_points)
        return CollapsedPosterior.from_features(features, size, *given)

    @compiled
    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, Q + diag(k - q) + D), whose variances are those of H, in O(n M) a draw."""
        points, rows = jax.random.split(key)
        features = self._features(operator)
        Phi = features(operator.X)
        weights = jax.random.normal(points, (num_samples, Phi.shape[1]), Phi.dtype)
        rest = jnp.sqrt(features.unexplained(operator.X, Phi) + operator.noise())
        return matmul(weights, Phi.T) + rest * jax.random.normal(
            rows, (num_samples, len(Phi)), Phi.dtype
        )

    def with_inputs(self, change: Callable[[Array], Array]) -> "SGPR":
        """The same with inducing points that are changed alike."""
        return dataclasses.replace(self, inducing_points=change(self.inducing_points))

    def _features(self, operator: KernelOperator) -> WhitenedPoints:
        Z = self.inducing_points
        checks.inputs("inducing_points", Z, width=operator.X.shape[1])
        K = linalg.add_jitter(operator.kernel.covariance(Z).astype(operator.dtype), self.jitter)
        return WhitenedPoints(operator.kernel, Z, linalg.inverse_cholesky(K))
