"""The posterior of a Gaussian process by pathwise conditioning, from linear solves."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks, summary
from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.solver import AbstractSolver, Solution, warn_unless_converged
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.function_samples import KernelFunctionSamples, zero_function
from numpyro_scalegp.processes.posterior import AbstractInChunks, Inputs
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction


class PathwisePosterior(AbstractInChunks):
    """The posterior f | y as functions: prior draws plus kernel functions at the data.

    With H v = y - m(X), and H u_j = xi_j for noisy observations xi_j at X of a prior draw f_j:
    mean m(x) + k(x, X) v; samples m(x) + f_j(x) + k(x, X)(v - u_j). The variance is the mean square
    of f_j(x) - k(x, X) u_j over s samples: never negative, with a relative standard error of
    sqrt(2 / s).

    Made by `GaussianProcess.condition` with an iterative estimator; immutable. Moments and samples
    at m inputs cost O(n m (d + s)), in chunks of rows, and need no further solve.

    References:
        Wilson et al. (2020), Efficiently Sampling Functions from Gaussian Process Posteriors,
        eq. 13; Lin et al. (2024), eq. 3.
    """

    kernel: AbstractKernel
    X: Float[Array, "n d"]
    y: Float[Array, " n"]
    noise_variance: Float[Array, "..."]
    mean_function: RowsFunction
    solver: AbstractSolver
    solution: Solution  # columns v, u_1 .. u_s
    draws: PriorDraws
    component_kernel: AbstractKernel | None = None  # covariance of a component with f

    # The devices of a mesh share the training rows, not the rows of new inputs.
    _shares_rows: ClassVar[bool] = False

    def _summary(self) -> list[str]:
        parts = [repr(self.solver), summary.counted(self.num_samples, "sample")]
        if isinstance(self.solution.residual, jax.Array):
            names = ("residual", "epochs")
            parts += [f"{name} {summary.shown(self.diagnostics[name])}" for name in names]
        return parts

    @property
    def representer_weights(self) -> Float[Array, " n"]:
        """The solution v = H^-1 (y - m(X)), shape (n,)."""
        return self.solution.value[:, 0]

    @property
    def num_samples(self) -> int:
        """The number s of posterior samples that are stored."""
        return self.draws.num_draws

    @property
    def diagnostics(self) -> dict[str, Array]:
        """Residuals and outcome of the solve.

        `residual` is the relative residual for the data, `sample_residual` the mean relative
        residual over the samples, and `epochs` the epochs that this conditioning took, 0 if it
        reused the solution of a state. `converged` is whether the solve reached its tolerance, and
        `reason` one of `sgp.solvers.StopReason`: 0 if the solve converged, 1 if the budget ended
        first, 2 if rounding errors prevent further progress, 3 if it failed.
        """
        residual = self.solution.residual
        return {
            "residual": residual[0],
            "sample_residual": jnp.mean(residual[1:]),
            "epochs": self.solution.epochs,
            "converged": self.solution.converged,
            "reason": self.solution.reason,
        }

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "PathwisePosterior":
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        zero = zero_function(self.solution.value.dtype)
        return dataclasses.replace(
            self, component_kernel=change(self._target_kernel), mean_function=zero
        )

    @property
    def _target_kernel(self) -> AbstractKernel:
        return self.kernel if self.component_kernel is None else self.component_kernel

    @property
    def _row_width(self) -> int:
        return self.X.shape[0]

    def _centered_mean(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        X, weights = divided((self.X, self.representer_weights), mesh_of(self.X))
        return matmul(self._target_kernel.evaluate(rows, X), weights)

    def _marginal_variance(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        return jnp.mean(jnp.square(self._deviations(rows)), axis=1)

    def _deviations(self, rows: Float[Array, "r d"]) -> Float[Array, "r s"]:
        """The samples minus the posterior mean, f_j - k(., X) u_j."""
        U = self.solution.value[:, 1:]
        # The draws are different functions in another dtype.
        X, rows = self.X.astype(U.dtype), rows.astype(U.dtype)
        X, U = divided((X, U), mesh_of(X))
        return self.draws(self._target_kernel, rows) - matmul(
            self._target_kernel.evaluate(rows, X), U
        )

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        deviations = self._map(self._deviations, Xs, None)
        return matmul(deviations, deviations.T) / self.num_samples

    def sample(
        self,
        key: Key[Array, ""],
        Xs: Inputs,
        num_samples: int = 1,
        *,
        chunk_size: int | None = None,
    ) -> Float[Array, "num_samples m"]:
        """Draw functions jointly at all rows of Xs; see `AbstractPosterior.sample`.

        Up to `self.num_samples` draws are stored samples, chosen by the key without repetition: the
        same key gives the same functions at other inputs too. More draws take one batched solve.

        Args:
            key: a typed JAX key.
            Xs: inputs, shape (m, d).
            num_samples: number of draws.
            chunk_size: rows evaluated at a time, as in `mean`.

        Returns:
            Draws of f without observation noise, shape (num_samples, m), in O(n m (d + s)).
        """
        chunk_size = checks.count_or_none("chunk_size", chunk_size)
        Xs, num_samples = self._check(Xs), checks.count("num_samples", num_samples)
        return self._functions(checks.as_key(key), num_samples)._values(Xs, chunk_size)

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        return self._functions(key, num_samples)._values(Xs, None)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None = None
    ) -> KernelFunctionSamples:
        """Stored samples as functions, or new ones from one batched solve."""
        source, stored = self, self.draws.num_features
        if num_samples > self.num_samples or num_features not in (None, stored):
            source = self._resampled(key, num_samples, num_features or stored)
        value = source.solution.value
        columns = jax.random.permutation(key, source.num_samples)[:num_samples]
        X = self.X.astype(value.dtype)
        weights = value[:, :1] - value[:, 1 + columns]
        return KernelFunctionSamples(
            self._target_kernel, self.mean_function, source.draws, columns, X, weights
        )

    def resampled(self, key: Key[Array, ""], num_samples: int) -> "PathwisePosterior":
        """The same posterior with new stored samples, from one batched solve.

        Args:
            key: a typed JAX key.
            num_samples: number of samples to store; the variance's relative standard error is
                sqrt(2 / num_samples).

        Returns:
            A `PathwisePosterior` with the same mean.
        """
        num_samples = checks.count("num_samples", num_samples)
        return self._resampled(key, num_samples, self.draws.num_features)

    @compiled
    def _resampled(
        self,
        key: Array,
        num_samples: int,
        num_features: int,
        operator: KernelOperator | None = None,
    ) -> "PathwisePosterior":
        if operator is None:
            operator = KernelOperator.from_checked(self.kernel, self.X, self.noise_variance)
        solver_key, draw_key = jax.random.split(key)
        draws = PriorDraws.from_key(draw_key, num_samples, num_features, self.X)
        targets = draws.observations(self.kernel, self.X, operator.noise())
        sampled = self.solver.to_tolerance.solve(
            operator, targets, key=solver_key, num_averaged=targets.shape[1]
        )
        warn_unless_converged(sampled)
        value = jnp.concatenate([self.solution.value[:, :1], sampled.value], axis=1)
        residual = jnp.concatenate([self.solution.residual[:1], sampled.residual])
        converged = sampled.converged & self.solution.converged
        reason = jnp.where(sampled.converged, self.solution.reason, sampled.reason)
        solution = sampled._replace(
            value=value, residual=residual, converged=converged, reason=reason
        )
        return eqx.tree_at(lambda p: (p.solution, p.draws), self, (solution, draws))

    def at_data(self) -> dist.Normal:
        """The predictive distribution at the training inputs, for replicates of y; shape (n,).

        K v = (y - m(X)) - noise v gives the moments in O(n s), without evaluating the kernel.
        """
        noise = jnp.broadcast_to(self.noise_variance, self.y.shape)
        noise = noise.astype(self.solution.value.dtype)
        # Likewise f_j(X) - K u_j = noise u_j - sqrt(noise) w_j: the draws themselves cancel.
        deviations = noise[:, None] * self.solution.value[:, 1:] - self.draws.errors(noise)
        mean = self.y - noise * self.representer_weights
        return dist.Normal(mean, jnp.sqrt(jnp.mean(jnp.square(deviations), axis=1) + noise))

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given all other observations.

        Mean y_i - v_i / P_ii and variance 1 / P_ii with P = H^-1. The mean square of the samples'
        u_j ~ N(0, H^-1) estimates the diagonal of P with a relative standard error of sqrt(2 / s).

        Returns:
            A `numpyro.distributions.Normal` of batch shape (n,), in O(n s).

        References:
            Rasmussen and Williams (2006), eq. 5.12.
        """
        precision = jnp.mean(jnp.square(self.solution.value[:, 1:]), axis=1)
        # The variance of y_i given the others lies between its noise and its prior variance.
        noise = jnp.broadcast_to(self.noise_variance, self.y.shape)
        precision = jnp.clip(
            precision, 1.0 / (noise + self.kernel.evaluate_diag(self.X)), 1.0 / noise
        )
        mean = self.y - self.representer_weights / precision
        return dist.Normal(mean, precision**-0.5)
