"""`StateSpace`: the exact log marginal likelihood of a function of time, in linear time."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.laplace.estimator import AbstractLaplaceEstimator, LaplaceProblem
from numpyro_scalegp.integrated.laplace.search import Sites
from numpyro_scalegp.integrated.state_space import laplace, recursions, simulation
from numpyro_scalegp.integrated.state_space.posterior import StateSpacePosterior
from numpyro_scalegp.integrated.state_space.prior import Prior
from numpyro_scalegp.integrated.state_space.rows import Series
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS, AbstractKernel
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction


class StateSpace(AbstractLaplaceEstimator):
    """The exact log marginal likelihood and posterior of a function of time, in linear time.

    For kernels of one input column, time, that have a state-space form (`kernel.state_space()`):
    `Matern12`, `Matern32`, `Matern52`, `Harmonic`, `Cosine`, `Periodic`, `Constant`, `Linear`,
    `Wiener`, `IntegratedWiener`, and their sums, products and multiples. Products with `Coregion`
    of another column are several series that share components, and `WithDerivatives` has rates of
    change. The rows may be in any order, unequally spaced, and several at the same time; each may
    have its own noise variance.

    A Kalman filter computes the value of `Cholesky` without the n x n matrix. First derivatives
    come from the smoother, not from differentiating the filter, and cost about as much as three
    values. Derivatives of every order exist, so the estimator works with NUTS, Laplace
    approximations and line searches. `LaplaceGP` takes it for counts and other observations.

    The function f(t) = h'x(t) is a part of a state x of s numbers, two for `Matern32`. Sums of
    kernels add up their s, products multiply them, by r + p for `Coregion` of r factors and p
    categories. Times are cut into about sqrt(n) parts, on which
    the filter works at the same moment.

    Args:
        num_harmonics: the number of Fourier terms of each `Periodic` kernel, besides the constant.
            The terms left out are missing in the variance: with eight terms 4e-9 of it for a
            lengthscale of 1, 1e-4 for 0.5, 0.01 for 0.3. Above 0.01 there is a warning;
            `posterior.diagnostics` has the share.

    Raises:
        ValueError: if `num_harmonics` is not positive; when used, if the kernel has no state-space
            form, or the time is one of several columns and no `kernel.on((0,))` names it.

    References:
        Hartikainen and Sarkka (2010), Kalman Filtering and Smoothing Solutions to Temporal Gaussian
        Process Regression Models; Koopman and Shephard (1992), Exact Score for Time Series Models
        in State Space Form; Sarkka and Garcia-Fernandez (2021), Temporal Parallelization of
        Bayesian Smoothers. Time O(n s^3), memory O(n), and O(n s^2) for a gradient or a posterior.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 100.0, 10_000)[:, None]
        >>> kernel = sgp.kernels.Matern32(2.0) + sgp.kernels.Harmonic(6.0, quality=3.0)
        >>> gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=sgp.estimators.StateSpace())
        >>> posterior = gp.condition(jnp.sin(X[:, 0]))
        >>> posterior.mean(jnp.array([[0.05], [101.0]])).shape
        (2,)
    """

    num_harmonics: int = eqx.field(static=True, converter=checks.plain, default=NUM_HARMONICS)

    def __check_init__(self) -> None:
        checks.count("num_harmonics", self.num_harmonics)

    def log_prob(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"], **options: Any
    ) -> Float[Array, "*batch"]:
        """The log density of `residual` under N(0, H); see `AbstractEstimator.log_prob`."""
        return self._log_density(operator, residual)

    @compiled
    def _log_density(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"]
    ) -> Float[Array, "*batch"]:
        series = self._series(operator)
        noise = series.in_order(operator.noise_variance)

        def density(values: Array) -> Array:
            return recursions.log_density(series, series.in_order(values), noise)

        flat = residual.reshape(-1, residual.shape[-1])
        densities = density(flat[0])[None] if len(flat) == 1 else jax.vmap(density)(flat)
        return densities.reshape(residual.shape[:-1])

    def condition(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        **options: Any,
    ) -> StateSpacePosterior:
        """The exact posterior; see `AbstractEstimator.condition`."""
        return self._posterior(operator, y, mean_function)

    @compiled
    def _posterior(
        self, operator: KernelOperator, y: Float[Array, " n"], mean_function: RowsFunction
    ) -> StateSpacePosterior:
        residual = y - mean_function(operator.X)
        return StateSpacePosterior.of(
            self._series(operator),
            operator.kernel,
            operator.X,
            residual,
            operator.noise_variance,
            y,
            mean_function,
            self.num_harmonics,
        )

    def laplace_log_prob(self, problem: LaplaceProblem) -> Float[Array, "*batch"]:
        """See `AbstractLaplaceEstimator.laplace_log_prob`; time O(n s^3), memory O(n s^2)."""
        kernel, X, entries, mean, data, _ = problem
        prior = Prior.of(kernel, X, self.num_harmonics, mean)
        return laplace.log_marginal(entries, prior, mean, data)

    def laplace_sites(self, problem: LaplaceProblem) -> Sites:
        """See `AbstractLaplaceEstimator.laplace_sites`."""
        kernel, X, entries, mean, data, _ = problem
        prior = Prior.of(kernel, X, self.num_harmonics, mean)
        return laplace.normal_sites(entries, prior, mean, data)

    def laplace_posterior(
        self,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        sites: Sites,
        mean: Float[Array, " n"],
        mean_function: RowsFunction,
        key: Key[Array, ""],
        num_samples: int | None,
    ) -> StateSpacePosterior:
        """See `AbstractLaplaceEstimator.laplace_posterior`."""
        series = Series.of(kernel, X, self.num_harmonics, sites.f.dtype)
        noise = 1.0 / sites.precision
        residual = sites.f - mean + sites.weights * noise
        return StateSpacePosterior.of(
            series, kernel, X, residual, noise, sites.f, mean_function, self.num_harmonics
        )

    @compiled
    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, H) exactly, in O(n s^2) for each draw after O(n s^3)."""
        series = self._series(operator)
        state_key, noise_key = jax.random.split(key)
        values = simulation.draw(state_key, series, num_samples)
        normal = jax.random.normal(noise_key, values.shape, values.dtype)
        return series.by_row(values) + jnp.sqrt(operator.noise()) * normal

    def _series(self, operator: KernelOperator) -> Series:
        return Series.of(operator.kernel, operator.X, self.num_harmonics, operator.dtype)
