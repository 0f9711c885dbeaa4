"""The log marginal likelihood with random Fourier features in place of the kernel."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.estimators.estimator import AbstractEstimator, key_of
from numpyro_scalegp.estimators.solver_state import SolverState
from numpyro_scalegp.features.linear_model import (
    Statistics,
    Weights,
    log_densities,
    posterior,
    refined,
    statistics,
)
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.solvers import KernelOperator


class KernelFeatures(eqx.Module):
    """Random features of a kernel as a function of the rows of X: see its `random_features`."""

    kernel: AbstractKernel
    key: Key[Array, ""]
    num_features: int = eqx.field(static=True)
    origin: Float[Array, " d"]

    def __call__(self, X: Float[Array, "n d"]) -> Float[Array, "n p"]:
        """The features, shape (n, p)."""
        return self.kernel.random_features(self.key, X, self.num_features, origin=self.origin)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "KernelFeatures":
        """The features of a part of the kernel."""
        return KernelFeatures(change(self.kernel), self.key, self.num_features, self.origin)


class RandomFourier(AbstractEstimator):
    """The exact log marginal likelihood of an approximate kernel, phi(x)'phi(z) of p features.

    A fast approximation, linear in the number of rows, with its own posterior from `condition`. It
    is biased against the kernel itself: it underestimates log|H| and overestimates y'H^-1 y in the
    mean, and a fit with it takes the function for rougher than it is. For a fixed key it is a
    smooth function of the hyperparameters, so NUTS and line searches are possible, under that one
    draw of the frequencies. Kernels without smooth features (`kernel.has_smooth_features`) are
    refused: their gradients would be wrong.

    Args:
        num_features: number p of features, even; well below n, or `Cholesky` costs less.

    Raises:
        ValueError: if `num_features` is not even and positive.

    References:
        Rahimi and Recht (2007), Random Features for Large-Scale Kernel Machines; for the bias,
        Potapczynski et al. (2021), theorem 2. Time O(n p^2 + p^3), memory O(n d + p^2). Its
        quadratic form is a difference of terms of size y'y / noise, and where float32 has too few
        digits for it, a warning says so: for little noise, or very many rows, in float64.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> estimator = sgp.estimators.RandomFourier(num_features=500)
    """

    num_features: int = eqx.field(static=True, converter=checks.plain, default=1000)

    def __check_init__(self) -> None:
        checks.count("num_features", self.num_features, 2, even=True)

    @property
    def is_stochastic(self) -> bool:
        """True."""
        return True

    def check_frozen_key(self) -> None:
        """Pass: under one draw of the frequencies the density is smooth, and has its gradient."""

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
        """The log density of `residual` under N(0, Phi Phi' + noise); no state is used.

        Raises:
            ValueError: if there is no key, or the kernel has no smooth random features.
        """
        if not kernel.has_smooth_features:
            raise ValueError(
                f"`kernel`, here `{type(kernel).__name__}`, has a hyperparameter that decides "
                "between discrete frequencies: the gradient by its random features would be wrong. "
                "Expand products of sums into sums, and use another estimator for `Periodic`."
            )
        operator = KernelOperator(kernel, X, noise_variance)
        rows = residual.reshape(-1, residual.shape[-1])
        found = self._statistics(operator, rows.T, key)[1]
        return log_densities(found, operator.noise()).reshape(residual.shape[:-1])

    def condition(
        self,
        operator: KernelOperator,
        residual: Float[Array, " n"],
        *,
        key: Key[Array, ""] | None,
    ) -> tuple[KernelFeatures, Weights]:
        """The features of a key, and the posterior of their weights, in O(n p^2 + p^3).

        Args:
            operator: H, whose kernel the features replace.
            residual: observations minus the mean, shape (n,).
            key: a typed JAX key for the frequencies.

        Returns:
            The features as a function of rows, and the law of the weights, of p entries.

        Raises:
            ValueError: if there is no key, or the kernel has no random features.
        """
        features, found = self._statistics(operator, residual[:, None], key)
        dtype = operator.dtype
        map_rows = lambda rows: features(rows).astype(dtype)  # noqa: E731
        rows = operator.X, operator.noise(), residual.astype(dtype)
        return features, refined(posterior(found), map_rows, *rows)

    def _statistics(
        self, operator: KernelOperator, residual: Float[Array, "n m"], key: Key[Array, ""] | None
    ) -> tuple[KernelFeatures, Statistics]:
        origin = jax.lax.stop_gradient(operator.X[0])
        features = KernelFeatures(operator.kernel, key_of(self, key), self.num_features, origin)
        dtype = operator.dtype
        found = statistics(
            lambda rows: features(rows).astype(dtype),
            self.num_features,
            operator.X,
            operator.noise(),
            residual.astype(dtype),
        )
        return features, found
