"""The log marginal likelihood with the kernel approximated by random Fourier features."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.features.linear_model import log_densities, statistics
from numpyro_scalegp.features.prior_draws import PriorDraws, center
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.processes.feature import FeaturePosterior
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction


class KernelFeatures(eqx.Module):
    """Random features of a kernel as a function of X: see its `random_features`."""

    kernel: AbstractKernel
    key: Key[Array, ""]
    num_features: int = eqx.field(static=True)
    origin: Float[Array, " d"]

    def __call__(self, X: Float[Array, "n d"]) -> Float[Array, "n p"]:
        """The features, shape (n, p)."""
        return self.kernel.evaluate_features(self.key, X, self.num_features, self.origin)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "KernelFeatures":
        """The features of the kernel that `change` returns, such as one term of a sum."""
        return KernelFeatures(change(self.kernel), self.key, self.num_features, self.origin)


class RandomFourier(AbstractEstimator):
    """The exact log marginal likelihood of an approximate kernel, phi(x)'phi(z) with p features.

    A fast approximation, linear in the number of observations; `condition` gives the posterior
    under the same approximate kernel. Compared with the kernel itself, the estimator underestimates
    log|H| and overestimates y'H^-1 y on average, so that a fit overestimates the roughness of the
    function. For a fixed key the density is a smooth function of the hyperparameters, so NUTS and
    line searches work, given that one draw of the frequencies. Kernels without smooth features
    (`kernel.has_smooth_features`) raise an error, since their gradients would be wrong.

    Args:
        num_features: number p of features, even; if it is not well below n, `Cholesky` costs less.

    Raises:
        ValueError: if `num_features` is not even and positive.

    References:
        Rahimi and Recht (2007), Random Features for Large-Scale Kernel Machines; for the bias,
        Potapczynski et al. (2021), theorem 2. Time O(n p^2 + p^3), memory O(n d + p^2). The
        quadratic form is a difference of terms of size y'y / noise; a warning is issued if float32
        has too few digits for it. With little noise or many observations, use float64.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> estimator = sgp.estimators.RandomFourier(num_features=500)
    """

    is_stochastic: ClassVar[bool] = True

    num_features: int = eqx.field(static=True, converter=checks.plain, default=1000)

    def __check_init__(self) -> None:
        checks.count("num_features", self.num_features, 2, even=True)

    def check_frozen_key(self) -> None:
        """Accept it: given the frequencies, the density is smooth and its gradient is exact."""

    @compiled
    def log_prob(
        self,
        operator: KernelOperator,
        residual: Float[Array, "*batch n"],
        *,
        key: Key[Array, ""] | None = None,
        **options: Any,
    ) -> Float[Array, "*batch"]:
        """The log density of `residual` under N(0, Phi Phi' + noise).

        Raises:
            ValueError: if there is no key, or the kernel has no smooth random features.
        """
        if not operator.kernel.has_smooth_features:
            raise ValueError(
                f"`kernel`, here `{type(operator.kernel).__name__}`, has a hyperparameter that "
                "decides between discrete frequencies: the gradient by random features would be "
                "wrong. Expand products of sums into sums, and use another estimator for "
                "`Periodic`."
            )
        features, dtype, noise = self._features(operator, key), operator.dtype, operator.noise()
        feature_statistics = statistics(
            lambda rows: features(rows).astype(dtype),
            self.num_features,
            operator.X,
            noise,
            residual.reshape(-1, residual.shape[-1]).T.astype(dtype),
        )
        return log_densities(feature_statistics, noise).reshape(residual.shape[:-1])

    def condition(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        *,
        key: Key[Array, ""] | None = None,
        **options: Any,
    ) -> FeaturePosterior:
        """The posterior of the feature weights, in O(n p^2 + p^3).

        Raises:
            ValueError: if there is no key, or the kernel has no random features.
        """
        data = operator.X, y, operator.noise_variance, mean_function, operator.dtype
        return FeaturePosterior.from_features(
            self._features(operator, key), self.num_features, *data
        )

    @compiled
    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, H) by random features, in O(n num_features) per draw."""
        draws = PriorDraws.from_key(key, num_samples, self.num_features, operator.X)
        return draws.observations(operator.kernel, operator.X, operator.noise()).T

    def _features(self, operator: KernelOperator, key: Key[Array, ""] | None) -> KernelFeatures:
        key = self.required_key(key)
        return KernelFeatures(operator.kernel, key, self.num_features, center(operator.X))
