"""The posterior of an exact Gaussian process."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics import lapack, linalg, rounding
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.numerics.summation import pairwise_product
from numpyro_scalegp.processes.function_samples import (
    KernelFunctionSamples,
    draws_with_covariance,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.processes.posterior import AbstractInChunks
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction


class ExactPosterior(AbstractInChunks):
    """The posterior f | y of an exact Gaussian process, from one factorization of its covariance.

    With H = K(X, X) + noise = L L' and a = H^-1 (y - m(X)):
    mean m(x) + k(x, X) a, covariance k(x, z) - k(x, X) H^-1 k(X, z).

    Made by `GaussianProcess.condition` and `LatentGP.condition`; immutable. Moments at m inputs
    cost O(n m d) for the mean and O(n^2 m) for the variance, in chunks of rows; joint samples cost
    O(n^2 m + m^3).

    References:
        Rasmussen and Williams (2006), eq. 2.25 and 2.26; leave-one-out: eq. 5.12.
    """

    kernel: AbstractKernel
    X: Float[Array, "n d"]
    y: Float[Array, " n"]
    noise_variance: Float[Array, "..."] | None
    mean_function: RowsFunction
    factor: linalg.Factor
    representer_weights: Float[Array, " n"]  # a = H^-1 (y - m(X))
    component_kernel: AbstractKernel | None = None  # covariance of a component with f
    of_values: bool = eqx.field(static=True, default=False)  # whether y are values of f

    @classmethod
    def from_factor(
        cls,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        y: Float[ArrayLike, " n"],
        residual: Float[Array, " n"],
        noise_variance: Float[Array, "..."] | None,
        mean_function: RowsFunction,
        factor: linalg.Factor,
        covariance: Float[Array, "n n"] | None = None,
    ) -> "ExactPosterior":
        """Solve for the representer weights, in O(n^2).

        With `covariance`, the factorized matrix with its jitter, a step of iterative refinement
        follows.
        """
        weights = lapack.cholesky_solve(factor.tril, residual)
        if covariance is not None:
            remaining = residual - pairwise_product(covariance, weights)
            weights = weights + lapack.cholesky_solve(factor.tril, remaining)
        return cls(
            kernel=kernel,
            X=X,
            y=jnp.asarray(y),
            noise_variance=noise_variance,
            mean_function=mean_function,
            factor=factor,
            representer_weights=weights,
        )

    @property
    def diagnostics(self) -> dict[str, Array]:
        """Jitter and accuracy of the factorization.

        `jitter` is the value added to the diagonal, in the units of the covariance. With noisy
        observations, `jitter_to_noise` is its ratio to the mean noise variance: unless the ratio is
        small, y is treated as noisier than in the model. `digits` is the number of accurate decimal
        digits of the solution, at most six to seven in float32; below 1.7 there is a warning.
        """
        jitter = self.factor.jitter
        digits = rounding.digits_left(rounding.relative_rounding(self.factor.tril))
        if self.noise_variance is None:
            return {"jitter": jitter, "digits": digits}
        ratio = jnp.where(jitter > 0, jitter / jnp.mean(self.noise_variance), 0.0)
        return {"jitter": jitter, "jitter_to_noise": ratio, "digits": digits}

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "ExactPosterior":
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        zero = zero_function(self.representer_weights.dtype)
        return dataclasses.replace(
            self, component_kernel=self._target_kernel.restrict(change), mean_function=zero
        )

    @property
    def _is_of_values(self) -> bool:
        return self.of_values

    @property
    def _target_kernel(self) -> AbstractKernel:
        return self.kernel if self.component_kernel is None else self.component_kernel

    @property
    def _row_width(self) -> int:
        return self.X.shape[0]

    def _centered_mean(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        return pairwise_product(
            self._target_kernel.evaluate(rows, self.X), self.representer_weights
        )

    def _white(self, rows: Float[Array, "r d"]) -> Float[Array, "n r"]:
        """L^-1 k(X, x) for each row x."""
        return lapack.solve_lower(self.factor.tril, self._target_kernel.evaluate(rows, self.X).T)

    def _marginal_variance(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        white = self._white(rows)
        reduction = jnp.sum(jnp.square(white), axis=0)
        return rounding.remaining_variance(self._target_kernel.evaluate_diag(rows), reduction)

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        white = self._white(Xs)
        return self._target_kernel.evaluate_covariance(Xs) - matmul(white.T, white)

    @compiled
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        parts = self.mean(Xs), self._covariance(Xs), self._target_kernel.evaluate_diag(Xs)
        # Given values of f, the variance at the data is about the jitter: no reason to warn.
        warn = not self.of_values
        return self._joint_sample(key, *parts, num_samples, warn=warn)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> KernelFunctionSamples:
        L, a = self.factor.tril, self.representer_weights
        X = self.X.astype(L.dtype)
        draws = prior_draws(key, self.kernel, num_samples, num_features, X)
        observed = draws_with_covariance(draws, self.kernel, X, L)
        weights = a[:, None] - lapack.cholesky_solve(L, observed)
        columns = jnp.arange(num_samples)
        return KernelFunctionSamples(
            self._target_kernel, self.mean_function, draws, columns, X, weights
        )

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given all other observations.

        Computed without refitting: mean y_i - a_i / P_ii and variance 1 / P_ii with P = H^-1.
        `leave_one_out().log_prob(y)` gives the pointwise log-likelihoods that PSIS leave-one-out
        needs for a model whose observations are not independent given its parameters.

        Returns:
            A `numpyro.distributions.Normal` of batch shape (n,), in O(n^3).

        Raises:
            ValueError: if the posterior is conditioned on values of f, not on noisy observations.

        References:
            Rasmussen and Williams (2006), eq. 5.12; Buerkner, Gabry and Vehtari (2021), Efficient
            leave-one-out cross-validation for Bayesian non-factorized normal and Student-t models.
        """
        self._refuse_unknown_observations()
        precision = self._precision()
        return dist.Normal(self.y - self.representer_weights / precision, precision**-0.5)

    @compiled
    def _precision(self) -> Float[Array, " n"]:
        """The diagonal of H^-1."""
        return jnp.sum(jnp.square(linalg.triangular_inverse(self.factor.tril)), axis=0)
