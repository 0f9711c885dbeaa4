"""`StateSpace`: the exact log marginal likelihood of a function of time, in linear time."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.integrated.state_space import recursions, simulation
from numpyro_scalegp.integrated.state_space.posterior import StateSpacePosterior
from numpyro_scalegp.integrated.state_space.rows import form_of, in_order
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction


class StateSpace(AbstractEstimator):
    """The exact log marginal likelihood and posterior of a function of time, in linear time.

    For kernels of one input column, time, that have a state-space form (`kernel.state_space()`):
    `Matern12`, `Matern32`, `Matern52`, `Harmonic`, `Cosine`, `Periodic`, `Constant`, `Linear`,
    `Wiener`, `IntegratedWiener`, and their sums, products and multiples. The rows may be in any
    order, unequally spaced, and several at the same time; each may have its own noise variance.

    A Kalman filter computes the value of `Cholesky` without the n x n matrix. First derivatives
    come from the smoother, not from differentiating the filter, and cost about as much as three
    values. Derivatives of every order exist, so the estimator works with NUTS, Laplace
    approximations and line searches.

    The function f(t) = h'x(t) is a part of a state x of s numbers, two for `Matern32`. Sums of
    kernels add up their s, products multiply them. Times are cut into about sqrt(n) parts, on which
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
        form, column = form_of(operator.kernel, operator.X, self.num_harmonics)
        residual = residual.astype(operator.dtype)

        def density(values: Array) -> Array:
            return recursions.log_density(form, *in_order(form, column, operator, values)[1:])

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
        form, column = form_of(operator.kernel, operator.X, self.num_harmonics)
        residual = (y - mean_function(operator.X)).astype(operator.dtype)
        order, times, *rows = in_order(form, column, operator, residual)
        return StateSpacePosterior(
            kernel=operator.kernel,
            X=operator.X,
            y=y,
            noise_variance=operator.noise_variance,
            mean_function=mean_function,
            times=times,
            order=order,
            smoothed=recursions.smooth(form, times, *rows),
            num_harmonics=self.num_harmonics,
        )

    @compiled
    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, H) exactly, in O(n s^2) for each draw after O(n s^3)."""
        form, column = form_of(operator.kernel, operator.X, self.num_harmonics)
        state_key, noise_key = jax.random.split(key)
        zeros = jnp.zeros(operator.size, operator.dtype)
        order, times, _, noise, h = in_order(form, column, operator, zeros)
        functions = simulation.draw(state_key, form, times, h, num_samples)
        normal = jax.random.normal(noise_key, functions.shape, functions.dtype)
        return jnp.zeros_like(functions).at[:, order].set(functions + jnp.sqrt(noise) * normal)
