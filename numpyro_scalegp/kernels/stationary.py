"""Stationary kernels, each with its spectral density."""

import abc
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.distances import reciprocal, squared_distances
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS, AbstractKernel
from numpyro_scalegp.kernels.spectrum import Origin
from numpyro_scalegp.kernels.state_space import AbstractStateSpace, Fixed
from numpyro_scalegp.numerics.rounding import at_most

# Nodes of a quadrature, and the negative exponent at which it cuts off the integrand.
_NUM_NODES = 257
_DECAY = 60.0
# Replaces a squared frequency of zero, where the density is a limit.
_LEAST_SQUARE = 1e-30


def check_lengthscale_and_variance(
    lengthscale: Float[Array, "..."], variance: Float[Array, "..."]
) -> None:
    """Raise unless both are positive."""
    checks.positive("lengthscale", lengthscale)
    checks.positive("variance", variance)


def check_columns(name: str, value: Array, d: int) -> None:
    """Raise unless there is one value for each of d columns, or one for all."""
    if value.shape not in ((), (1,), (d,)):  # (1,): a member of a batch of shape (*batch, 1)
        checks.shape(name, value, (), (d,), why="one value for each input dimension")


def check_single_column(name: str, value: Float[Array, "..."]) -> Float[Array, ""]:
    """The value for a single input column, for a state-space form."""
    if value.size != 1:
        raise ValueError(
            f"a state-space form is for one input column, the time, got `{name}` of shape "
            f"{value.shape}: take one value, and name the column by `kernel.on((0,))`."
        )
    return value.reshape(())


class AbstractStationary(AbstractKernel):
    """The base class of k(x, z) = variance * correlation(||(x - z) / lengthscale||^2).

    A custom kernel has the fields `lengthscale` and `variance` and implements `correlation` and,
    for random features, `sample_precisions`.
    """

    hyperparameter_ndims: ClassVar[Mapping[str, int]] = {"lengthscale": 1, "variance": 0}

    if TYPE_CHECKING:  # type checkers make an `AbstractVar` the first argument of all subclasses

        @property
        def lengthscale(self) -> Float[Array, "..."]: ...  # noqa: D102

        @property
        def variance(self) -> Float[Array, "..."]: ...  # noqa: D102
    else:
        lengthscale: eqx.AbstractVar[Float[Array, "..."]]
        variance: eqx.AbstractVar[Float[Array, "..."]]

    def __check_init__(self) -> None:
        check_lengthscale_and_variance(self.lengthscale, self.variance)
        _ = self.batch_shape  # raises unless batch shapes fit together

    @abc.abstractmethod
    def correlation(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance, 1 at 0."""

    def sample_precisions(
        self, key: Key[Array, ""], num: int, dtype: jnp.dtype
    ) -> Float[Array, " num"]:
        """Draw precisions t, shape (num,), with correlation(r^2) = E[exp(-t r^2 / 2)].

        Every correlation that is valid in all dimensions is such a mixture of RBFs (Schoenberg,
        1938).
        """
        raise ValueError(
            f"`{type(self).__name__}` does not define how its frequencies are drawn: implement "
            "`sample_precisions`, or use inducing points or an exact estimator instead."
        )

    def radial_density(self, squared: Float[Array, " num"], d: int) -> Float[Array, " num"]:
        """The Fourier transform of the correlation in d dimensions, for lengthscales of one.

        Args:
            squared: squared norms of the frequencies, shape (num,).
            d: number of dimensions.
        """
        raise ValueError(
            f"`{type(self).__name__}` does not define its spectral density: implement "
            "`radial_density`, or take another kernel."
        )

    def spectral_density(self, frequencies: Float[Array, "num d"]) -> Float[Array, " num"]:
        """The spectral density; see `AbstractKernel.spectral_density`."""
        d = frequencies.shape[1]
        self._check_width(d)
        lengthscales = jnp.broadcast_to(self.lengthscale, (d,))
        squared = jnp.sum(jnp.square(frequencies * lengthscales), axis=1)
        density = checks.call_hook(self, "radial_density", squared.shape, squared, d)
        return self.variance * jnp.prod(lengthscales) * density

    @property
    def is_stationary(self) -> bool:
        """True: k(x, z) depends on x - z alone."""
        return True

    def scaled_inputs(
        self, X: Float[Array, "... n d"]
    ) -> list[tuple[Float[Array, "..."], Float[Array, "... n d"]]]:
        """The lengthscale and the inputs; see `AbstractKernel.scaled_inputs`."""
        return [(self.lengthscale, X)]

    @property
    def by_differences(self) -> bool:
        """Whether small distances must be accurate, because `correlation` is rough at zero."""
        return False

    def _check_width(self, d: int) -> None:
        check_columns("lengthscale", self.lengthscale, d)

    def _squared_distances(
        self, X: Float[Array, "n d"], Z: Float[Array, "m d"]
    ) -> Float[Array, "n m"]:
        return squared_distances(X, Z, self.lengthscale, by_differences=self.by_differences)

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        self._check_width(X.shape[1])
        return self.variance * self.correlation(self._squared_distances(X, Z))

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        self._check_width(X.shape[1])
        dtype = jnp.result_type(X, self.lengthscale, self.variance)
        # NaN for rows with NaN, which k(x, x) = variance alone would hide.
        return jnp.where(jnp.isnan(X).any(axis=1), jnp.nan, self.variance.astype(dtype))

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw angular frequencies, shape (num, d); see `AbstractKernel.sample_frequencies`."""
        self._check_width(d)
        normal_key, precision_key = jax.random.split(checks.as_key(key))
        dtype = self.lengthscale.dtype
        normal = jax.random.normal(normal_key, (num, d), dtype)
        # One scale for each vector: the density is isotropic in d dimensions, not a product.
        arguments = precision_key, num, dtype
        precisions = checks.call_hook(self, "sample_precisions", (num,), *arguments)
        scale = jnp.sqrt(precisions)[:, None]
        return scale * normal / jnp.broadcast_to(self.lengthscale, (1, d))


class RBF(AbstractStationary):
    """The squared-exponential kernel, for functions with derivatives of every order.

    k(x, z) = variance * exp(-r^2 / 2), with r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2.

    Args:
        lengthscale: in units of the inputs, positive; shape (), or (d,) with one value for each
            input dimension; for a batch of kernels (*batch, 1) or (*batch, d).
        variance: the amplitude squared, in squared units of the function, positive; shape () or
            (*batch,).

    Raises:
        ValueError: if a hyperparameter is not positive, or shapes do not fit together.

    References:
        Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, eq. 4.9.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.RBF(lengthscale=2.0, variance=9.0)
        >>> kernel(jnp.zeros((1, 1)), jnp.array([[0.0], [2.0]])).round(3).tolist()
        [[9.0, 5.459000110626221]]
        >>> of_groups = sgp.kernels.RBF(jnp.ones((5, 1)), variance=jnp.arange(1.0, 6.0))
        >>> of_groups(jnp.zeros((2, 1)), jnp.zeros((3, 1))).shape
        (5, 2, 3)
    """

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def correlation(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance."""
        return jnp.exp(-0.5 * squared)

    def sample_precisions(
        self, key: Key[Array, ""], num: int, dtype: jnp.dtype
    ) -> Float[Array, " num"]:
        """Ones, since the RBF is a single component of the mixture."""
        return jnp.ones(num, dtype)

    def radial_density(self, squared: Float[Array, " num"], d: int) -> Float[Array, " num"]:
        """(2 pi)^(d / 2) exp(-w^2 / 2)."""
        return (2.0 * math.pi) ** (0.5 * d) * jnp.exp(-0.5 * squared)


class RationalQuadratic(AbstractStationary):
    """The rational quadratic kernel, a mixture of RBF kernels over lengthscales.

    k(x, z) = variance * (1 + r^2 / (2 alpha))^(-alpha), with
    r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2. It tends to `RBF` as alpha grows.

    `lengthscale`, `variance` and errors are the same as for `RBF`.

    Args:
        alpha: relative weight of small and large lengthscales, positive; shape () or (*batch,).

    References:
        Rasmussen and Williams (2006), eq. 4.19.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.RationalQuadratic(lengthscale=1.0, alpha=0.5)
    """

    hyperparameter_ndims = {**AbstractStationary.hyperparameter_ndims, "alpha": 0}

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    alpha: Float[Array, "..."] = eqx.field(converter=checks.to_positive("alpha"))
    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def __check_init__(self) -> None:
        checks.positive("alpha", self.alpha)

    def correlation(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance."""
        ratio = 0.5 * squared * reciprocal(self.alpha)
        ratio = at_most(ratio, jnp.finfo(ratio.dtype).max)  # its logarithm is finite
        return jnp.exp(-self.alpha * jnp.log1p(ratio))

    def sample_precisions(
        self, key: Key[Array, ""], num: int, dtype: jnp.dtype
    ) -> Float[Array, " num"]:
        """Draw from the gamma distribution of shape alpha and mean one."""
        return jax.random.gamma(key, self.alpha, (num,), dtype) / self.alpha

    def radial_density(self, squared: Float[Array, " num"], d: int) -> Float[Array, " num"]:
        """The mean over t of the RBF densities (2 pi / t)^(d / 2) exp(-w^2 / (2 t)).

        It is infinite at zero frequency if alpha <= d / 2.
        """
        squared = jnp.maximum(squared, _LEAST_SQUARE)
        order, z = self.alpha - 0.5 * d, jnp.sqrt(2.0 * self.alpha * squared)
        log_scale = order * jnp.log(jnp.sqrt(0.5 * squared / self.alpha))
        log_factor = self.alpha * jnp.log(self.alpha) - jax.scipy.special.gammaln(self.alpha)
        log_density = math.log(2.0) + log_factor + log_scale + _log_bessel(order, z)
        return (2.0 * math.pi) ** (0.5 * d) * jnp.exp(log_density)


def _log_bessel(order: Float[Array, ""], z: Float[Array, " num"]) -> Float[Array, " num"]:
    """The logarithm of the modified Bessel function of the second kind, K_order(z), z > 0.

    The integral of exp(-z cosh(v)) cosh(order v) over v > 0, by the trapezoidal rule, whose error
    falls exponentially with the number of nodes.
    """
    reach = (_DECAY + 5.0 * jnp.abs(order)) / z
    end = jax.lax.stop_gradient(jnp.arccosh(1.0 + reach))[:, None]
    v = end * jnp.linspace(0.0, 1.0, _NUM_NODES, dtype=z.dtype)
    # cosh(order v) and cosh(v) - 1, without overflow or loss of digits.
    log_cosh = jnp.logaddexp(order * v, -order * v) - math.log(2.0)
    terms = log_cosh - 2.0 * z[:, None] * jnp.square(jnp.sinh(0.5 * v))
    total = jax.scipy.special.logsumexp(terms[:, 1:], axis=1)
    total = jnp.logaddexp(total, terms[:, 0] - math.log(2.0))
    return total + jnp.log(end[:, 0] / (_NUM_NODES - 1)) - z


class Constant(AbstractKernel):
    """The covariance of an unknown constant, k(x, z) = variance.

    Args:
        variance: the amplitude squared, in squared units of the function, positive; shape () or
            (*batch,).

    Raises:
        ValueError: if `variance` is not positive.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.RBF(1.0) + sgp.kernels.Constant(10.0)
    """

    hyperparameter_ndims = {"variance": 0}

    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"))

    def __check_init__(self) -> None:
        checks.positive("variance", self.variance)

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        dtype = jnp.result_type(X, Z, self.variance)
        return jnp.broadcast_to(self.variance.astype(dtype), (X.shape[0], Z.shape[0]))

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        return self.evaluate(X, X[:1])[:, 0]

    @property
    def is_stationary(self) -> bool:
        """True: k(x, z) is constant."""
        return True

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """A single exact feature, sqrt(variance)."""
        dtype = jnp.result_type(X, self.variance)
        return jnp.broadcast_to(jnp.sqrt(self.variance).astype(dtype), (X.shape[0], 1))

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """A state that never changes; see `AbstractKernel.state_space`."""
        return Fixed(self.variance)

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Return zeros: a constant has no other frequency."""
        return jnp.zeros((num, d), self.variance.dtype)
