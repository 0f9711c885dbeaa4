"""The exact log marginal likelihood by a dense Cholesky factorization."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.integrated.laplace import dense
from numpyro_scalegp.integrated.laplace.estimator import AbstractLaplaceEstimator, LaplaceProblem
from numpyro_scalegp.integrated.laplace.search import Sites
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.numerics import linalg, memory
from numpyro_scalegp.processes.exact import ExactPosterior
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction


class Cholesky(AbstractLaplaceEstimator):
    """The exact log marginal likelihood and its exact gradient.

    log p(y) = -(y'H^-1 y + log|H| + n log 2 pi) / 2 with H = K(X, X) + diag(noise_variance).
    The gradient, a'dH a / 2 - tr(H^-1 dH) / 2 with a = H^-1 y, reuses the factor of H.

    The value is deterministic and has derivatives of every order, so it works with NUTS, Laplace
    approximations and line searches.

    Args:
        jitter: added to the diagonal of H, relative to the mean of the diagonal. If None, jitter of
            10, 100, 1,000 or 10,000 times machine epsilon is added only if the factorization fails
            without it, with a warning. A number is always added, and a failed factorization gives
            NaN.

    Raises:
        ValueError: if `jitter` is negative.

    References:
        Rasmussen and Williams (2006), algorithm 2.1 and eq. 5.9. Time O(n^3), memory O(n^2).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> estimator = sgp.estimators.Cholesky(jitter=1e-6)
    """

    jitter: float | None = eqx.field(static=True, converter=checks.plain, default=None)

    def __check_init__(self) -> None:
        checks.jitter(self.jitter)

    def covariance(self, operator: KernelOperator) -> Float[Array, "n n"]:
        """The matrix H to factorize, including the jitter if `jitter` is a number."""
        memory.warn_of_size(
            "Cholesky",
            operator.size,
            operator.X.dtype,
            "use estimator=sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients()), whose memory "
            "is linear in the data points",
        )
        gram = operator.kernel.evaluate_covariance(operator.X).astype(operator.dtype)
        H = gram + jnp.diag(operator.noise())
        return H if self.jitter is None else linalg.add_jitter(H, self.jitter)

    def factorize(
        self, H: Float[Array, "n n"], noise_variance: Float[Array, "..."] | None = None
    ) -> linalg.Factor:
        """The Cholesky factor of H and the total jitter on the diagonal of H.

        A warning about added jitter compares it with `noise_variance`, unless that is None.
        """
        factor = linalg.factorize(H, escalate=self.jitter is None, noise=noise_variance)
        if self.jitter is None:
            return factor
        added = self.jitter / (1.0 + self.jitter) * jnp.mean(jnp.diagonal(H))
        return linalg.Factor(factor.tril, factor.jitter + added)

    def log_prob(
        self,
        operator: KernelOperator,
        residual: Float[Array, "*batch n"],
        **options: Any,
    ) -> Float[Array, "*batch"]:
        """The log density of `residual` under N(0, H); see `AbstractEstimator.log_prob`.

        One factorization serves all rows of `residual`. The result is NaN, with a warning, if H is
        not positive definite.
        """
        return self._log_density(operator, residual)

    # NUTS searches for its initial values outside of compiled code: this makes it one program.
    @compiled
    def _log_density(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"]
    ) -> Float[Array, "*batch"]:
        H = self.covariance(operator)
        factor = self.factorize(H, operator.noise_variance)
        return linalg.gaussian_log_density(H, residual, factor)

    def condition(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        **options: Any,
    ) -> ExactPosterior:
        """The exact posterior, from one factorization; see `AbstractEstimator.condition`."""
        return self._posterior(operator, y, mean_function)

    @compiled
    def _posterior(
        self, operator: KernelOperator, y: Float[Array, " n"], mean_function: RowsFunction
    ) -> ExactPosterior:
        H = self.covariance(operator)
        factor = self.factorize(H, operator.noise_variance)
        factorized = linalg.with_jitter(H, factor) if self.jitter is None else H
        return ExactPosterior.from_factor(
            operator.kernel,
            operator.X,
            y,
            y - mean_function(operator.X),
            operator.noise_variance,
            mean_function,
            factor._replace(tril=linalg.cholesky_given(H, factor.tril)),
            factorized,
        )

    @compiled
    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, H) exactly, in O(n^3); see `AbstractEstimator.sample_prior`."""
        H = self.covariance(operator)
        normal = jax.random.normal(key, (num_samples, operator.size), H.dtype)
        return linalg.matmul(normal, linalg.cholesky(H).T)

    def laplace_log_prob(self, problem: LaplaceProblem) -> Float[Array, "*batch"]:
        """See `AbstractLaplaceEstimator.laplace_log_prob`; time O(n^3), memory O(n^2)."""
        kernel, X, entries, mean, data, _ = problem
        return dense.log_marginal(entries, self._gram(kernel, X, mean), mean, data)

    def laplace_sites(self, problem: LaplaceProblem) -> Sites:
        """See `AbstractLaplaceEstimator.laplace_sites`."""
        kernel, X, entries, mean, data, _ = problem
        return dense.normal_sites(entries, self._gram(kernel, X, mean), mean, data)

    def laplace_posterior(
        self,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        sites: Sites,
        mean: Float[Array, " n"],
        mean_function: RowsFunction,
        key: Key[Array, ""],
        num_samples: int | None,
    ) -> ExactPosterior:
        """See `AbstractLaplaceEstimator.laplace_posterior`."""
        L: Any = sites.tril
        linalg.warn_of_rounding(L)
        return ExactPosterior(
            kernel=kernel,
            X=X,
            y=sites.f,
            noise_variance=None,
            mean_function=mean_function,
            factor=linalg.Factor(L, jnp.zeros((), L.dtype)),
            representer_weights=sites.weights,
        )

    def _gram(
        self, kernel: AbstractKernel, X: Float[Array, "... n d"], mean: Float[Array, "*batch n"]
    ) -> Float[Array, "*batch n n"]:
        memory.warn_of_size(
            "LaplaceGP",
            X.shape[-2],
            X.dtype,
            "for a function of time use estimator=sgp.estimators.StateSpace(); else train a "
            "`sgp.LatentGP` with a guide such as sgp.guides.AutoSparseGP. Neither needs such a "
            "matrix",
        )
        K = kernel.each(lambda kernel, X: kernel.evaluate_covariance(X), X)
        if self.jitter is not None:
            K = batches.mapped(lambda K: linalg.add_jitter(K, self.jitter), 2)(K)
        return jnp.broadcast_to(K, (*mean.shape, mean.shape[-1]))
