"""The collapsed family: a distribution over observations with the function integrated out."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints

from numpyro_scalegp.core import checks, functions, linalg
from numpyro_scalegp.distributions.rows import RowsDistribution
from numpyro_scalegp.estimators import Cholesky
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.predict import ExactPosterior


class GaussianProcess(RowsDistribution):
    """Noisy observations of a Gaussian process, y ~ N(m(X), K(X, X) + noise).

    `log_prob(y)` is the log marginal likelihood. The default estimator is exact.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        noise_variance: variance of the observation noise, positive, in squared units of y; shape ()
            or, one a row, (n,).
        mean: the mean function: None for zero, a number for a constant, or a callable that maps
            (n, d) inputs to (n,) values.
        estimator: how the log marginal likelihood is computed.

    Raises:
        ValueError: if an argument has the wrong shape or sign, or holds NaN or infinity.

    References:
        Rasmussen and Williams (2006), section 2.2. Cost with `Cholesky`: O(n^3) time and O(n^2)
        memory, nothing before `log_prob` or `sample` is called.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> gp = sgp.GaussianProcess(sgp.kernels.RBF(0.3), X, noise_variance=0.1)
        >>> gp.log_prob(jnp.zeros(5)).shape, gp.condition(jnp.ones(5)).mean(X).shape
        ((), (5,))
    """

    arg_constraints = {"noise_variance": constraints.positive}
    reparametrized_params = ["noise_variance"]
    pytree_data_fields = (
        "kernel", "X", "noise_variance", "mean_function", "estimator",
    )  # fmt: skip

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "n d"],
        noise_variance: Float[ArrayLike, "..."],
        *,
        mean: Callable[[Array], Array] | ArrayLike | None = None,
        estimator: Cholesky | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = kernel
        self.X = checks.inputs("X", X)
        n = self.X.shape[0]
        self.noise_variance = checks.as_positive(noise_variance)
        checks.shape(
            "noise_variance", self.noise_variance, (), (n,), why="one value, or one for each row"
        )
        checks.positive("noise_variance", self.noise_variance)
        self.mean_function = _as_mean_function(mean)
        self.estimator = Cholesky() if estimator is None else estimator
        super().__init__((), (n,), validate_args=validate_args)

    @property
    def mean(self) -> Float[Array, " n"]:
        """The mean of the observations, m(X)."""
        return self._mean_at_inputs()

    @property
    def variance(self) -> Float[Array, " n"]:
        """The marginal variance of the observations, k(x, x) + noise."""
        return self.kernel.diag(self.X) + self.noise_variance

    def _mean_at_inputs(self) -> Float[Array, " n"]:
        mean = self.mean_function(self.X)
        if jnp.shape(mean) != self.event_shape:
            raise ValueError(
                f"`mean` must map inputs of shape {self.X.shape} to shape {self.event_shape}, "
                f"got {jnp.shape(mean)}."
            )
        return mean

    def _residual(self, y: ArrayLike) -> Float[Array, "*batch n"]:
        y = checks.as_float(y)
        if y.shape[-1:] != self.event_shape:
            raise ValueError(
                f"`y` must have shape {self.event_shape}, got {y.shape}: one value for each row "
                f"of `X`."
            )
        checks.finite("y", y)
        return y - self._mean_at_inputs()

    def log_prob(
        self, value: Float[ArrayLike, "*batch n"], intermediates: list | None = None
    ) -> Float[Array, "*batch"]:
        """The log marginal likelihood of observations.

        Args:
            value: observations, shape (..., n); one factorisation serves all.
            intermediates: unused, part of NumPyro's interface.

        Returns:
            Log densities, shape (...).

        Raises:
            ValueError: if `value` has the wrong length, or holds NaN or infinity.
        """
        residual = self._residual(value)
        return self.estimator.log_prob(self.kernel, self.X, self.noise_variance, residual)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape n"]:
        """Draw observations from the prior, noise included: shape (*sample_shape, n), O(n^3)."""
        H = self.estimator.covariance(self.kernel, self.X, self.noise_variance)
        normal = jax.random.normal(key, (*sample_shape, *self.event_shape), H.dtype)
        return self._mean_at_inputs() + linalg.matmul(normal, linalg.cholesky(H).T)

    def condition(self, y: Float[ArrayLike, " n"]) -> ExactPosterior:
        """The posterior of f given observations.

        Args:
            y: observations, shape (n,).

        Returns:
            An `ExactPosterior`, from one factorisation in O(n^3).

        Raises:
            ValueError: if `y` has the wrong length, or holds NaN or infinity.
        """
        residual = self._residual(y)
        if residual.ndim != 1:
            raise ValueError(f"`y` must have shape {self.event_shape}, got {residual.shape}.")
        H = self.estimator.covariance(self.kernel, self.X, self.noise_variance)
        factor = self.estimator.factorise(H)
        return ExactPosterior.from_factor(
            self.kernel, self.X, y, residual, self.noise_variance, self.mean_function, factor
        )


def _as_mean_function(
    mean: Callable[[Array], Array] | ArrayLike | None,
) -> functions.RowsFunction:
    if callable(mean):
        return functions.as_pytree(mean, "mean")
    constant = checks.as_float(0.0 if mean is None else mean)
    checks.shape("mean", constant, (), why="a number, a callable or None")
    return functions.constant_function(constant)
