"""The exact log marginal likelihood by a dense Cholesky factorisation."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks, linalg, memory
from numpyro_scalegp.estimators.estimator import AbstractEstimator
from numpyro_scalegp.estimators.solver_state import SolverState
from numpyro_scalegp.kernels import AbstractKernel


class Cholesky(AbstractEstimator):
    """The exact log marginal likelihood and its exact gradient.

    log p(y) = -(y'H^-1 y + log|H| + n log 2 pi) / 2 with H = K(X, X) + diag(noise_variance).
    The gradient, a'dH a / 2 - tr(H^-1 dH) / 2 with a = H^-1 y, reuses the factor of H.

    It is deterministic and has derivatives of every order, so it serves NUTS, Laplace
    approximations and line searches alike.

    Args:
        jitter: what to add to the diagonal of H, relative to its mean. None adds nothing unless the
            factorisation fails, then 10, 100, 1,000 or 10,000 times `eps`, with a warning. A number
            is always added, and a failure gives NaN.

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

    @property
    def is_stochastic(self) -> bool:
        """False."""
        return False

    def covariance(
        self,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        noise_variance: Float[Array, "..."],
    ) -> Float[Array, "n n"]:
        """The matrix H that is factorised, a fixed jitter included."""
        memory.warn_of_size(
            "Cholesky",
            X.shape[0],
            X.dtype,
            "use estimator=sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients()), whose memory "
            "is linear in the rows",
        )
        gram = kernel.covariance(X)
        dtype = jnp.result_type(gram, noise_variance)
        noise = jnp.broadcast_to(noise_variance.astype(dtype), X.shape[:1])
        H = gram.astype(dtype) + jnp.diag(noise)
        return H if self.jitter is None else linalg.add_jitter(H, self.jitter)

    def factorise(
        self, H: Float[Array, "n n"], noise_variance: Float[Array, "..."] | None = None
    ) -> linalg.Factor:
        """The Cholesky factor of H and all the jitter that it has on its diagonal.

        A warning of jitter compares it with the noise variance, where that is given.
        """
        factor = linalg.factorise(H, escalate=self.jitter is None, noise=noise_variance)
        if self.jitter is None:
            return factor
        added = self.jitter / (1.0 + self.jitter) * jnp.mean(jnp.diagonal(H))
        return linalg.Factor(factor.tril, factor.jitter + added)

    def log_prob(
        self,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        noise_variance: Float[Array, "..."],
        residual: Float[Array, "*batch n"],
        *,
        key: Key[Array, ""] | None = None,
        state: SolverState | None = None,
    ) -> Float[Array, "*batch"]:
        """The log density of `residual` under N(0, H); see `AbstractEstimator.log_prob`.

        One factorisation serves the whole batch; neither the key nor the state is used. NaN, with a
        warning, where H is not positive definite.
        """
        H = self.covariance(kernel, X, noise_variance)
        return linalg.gaussian_log_density(H, residual, self.factorise(H, noise_variance))
