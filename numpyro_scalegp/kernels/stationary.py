"""Stationary kernels, each with its spectral density."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.distances import reciprocal, squared_distances
from numpyro_scalegp.kernels.kernel import AbstractKernel

# Means above which a difference of two Poisson numbers is drawn as a rounded normal one: JAX's
# Poisson numbers lose accuracy in float32, and above 2^31 there are none.
_MAX_RATE = 1000.0


def check_lengthscale_and_variance(
    lengthscale: Float[Array, "..."], variance: Float[Array, "..."]
) -> None:
    """Raise unless both are positive, with at most one lengthscale a column and one variance."""
    if lengthscale.ndim > 1:
        raise ValueError(f"`lengthscale` must have shape () or (d,), got {lengthscale.shape}.")
    checks.positive("lengthscale", lengthscale)
    checks.shape("variance", variance, (), why="the amplitude squared")
    checks.positive("variance", variance)


class _Stationary(AbstractKernel):
    """k(x, z) = variance * profile(||(x - z) / lengthscale||^2)."""

    lengthscale: eqx.AbstractVar[Float[Array, "..."]]
    variance: eqx.AbstractVar[Float[Array, ""]]

    def __check_init__(self) -> None:
        check_lengthscale_and_variance(self.lengthscale, self.variance)

    @property
    def is_stationary(self) -> bool:
        """True."""
        return True

    def _check_width(self, d: int) -> None:
        checks.shape(
            "lengthscale", self.lengthscale, (), (d,), why="one value for each input column"
        )

    @property
    def _by_differences(self) -> bool:
        return False

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        self._check_width(X.shape[1])
        distances = squared_distances(X, Z, self.lengthscale, by_differences=self._by_differences)
        return self.variance * self._profile(distances)

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        self._check_width(X.shape[1])
        dtype = jnp.result_type(X, self.lengthscale, self.variance)
        # Rows that are not finite have no variance: else one row alone would pass for a good one.
        return jnp.where(jnp.isnan(X).any(axis=1), jnp.nan, self.variance.astype(dtype))

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw angular frequencies, shape (num, d); see `AbstractKernel.sample_frequencies`."""
        self._check_width(d)
        normal_key, mixing_key = jax.random.split(checks.as_key(key))
        dtype = self.lengthscale.dtype
        normal = jax.random.normal(normal_key, (num, d), dtype)
        # One scale for a whole vector: the density is isotropic in d dimensions, not a product.
        scale = jnp.sqrt(self._mixing(mixing_key, num, dtype))[:, None]
        return scale * normal / jnp.broadcast_to(self.lengthscale, (1, d))

    @abc.abstractmethod
    def _profile(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance."""

    @abc.abstractmethod
    def _mixing(self, key: Key[Array, ""], num: int, dtype: jnp.dtype) -> Float[Array, " num"]:
        """Draw t in the Gaussian scale mixture profile(r^2) = E[exp(-t r^2 / 2)]."""


class RBF(_Stationary):
    """The squared-exponential kernel, for functions with derivatives of every order.

    k(x, z) = variance * exp(-r^2 / 2), with r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2.

    Args:
        lengthscale: in units of the inputs, positive; shape () or, one a column, (d,).
        variance: the amplitude squared, in squared units of the function, positive; shape ().

    Raises:
        ValueError: if a hyperparameter is not positive or has another shape.

    References:
        Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, eq. 4.9.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.RBF(lengthscale=2.0, variance=9.0)
        >>> kernel(jnp.zeros((1, 1)), jnp.array([[0.0], [2.0]])).round(3).tolist()
        [[9.0, 5.459000110626221]]
    """

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    variance: Float[Array, ""] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def _profile(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        return jnp.exp(-0.5 * squared)

    def _mixing(self, key: Key[Array, ""], num: int, dtype: jnp.dtype) -> Float[Array, " num"]:
        return jnp.ones(num, dtype)


class _Matern(_Stationary):
    """The Matern family: its spectral density is a multivariate t with 2 nu degrees of freedom."""

    @property
    @abc.abstractmethod
    def _smoothness(self) -> float:
        """The order nu."""

    def _mixing(self, key: Key[Array, ""], num: int, dtype: jnp.dtype) -> Float[Array, " num"]:
        return self._smoothness / jax.random.gamma(key, self._smoothness, (num,), dtype)


class Matern12(_Matern):
    """The Matern kernel of order 1/2 (exponential), for continuous, rough functions.

    k(x, z) = variance * exp(-r), with r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2. It has no
    derivative at r = 0, where the gradient is taken to be zero.

    Args:
        lengthscale: in units of the inputs, positive; shape () or, one a column, (d,).
        variance: the amplitude squared, in squared units of the function, positive; shape ().

    Raises:
        ValueError: if a hyperparameter is not positive or has another shape.

    References:
        Rasmussen and Williams (2006), eq. 4.14 with nu = 1/2.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.Matern12(lengthscale=0.5) + 0.1 * sgp.kernels.RBF(2.0)
    """

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    variance: Float[Array, ""] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    @property
    def _smoothness(self) -> float:
        return 0.5

    @property
    def _by_differences(self) -> bool:
        return True

    def _profile(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        return _exponential(squared)


class Matern32(_Matern):
    """The Matern kernel of order 3/2, for functions with one derivative.

    k(x, z) = variance * (1 + sqrt(3) r) exp(-sqrt(3) r), with
    r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2.

    Args:
        lengthscale: in units of the inputs, positive; shape () or, one a column, (d,).
        variance: the amplitude squared, in squared units of the function, positive; shape ().

    Raises:
        ValueError: if a hyperparameter is not positive or has another shape.

    References:
        Rasmussen and Williams (2006), eq. 4.17.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.Matern32(lengthscale=[0.5, 2.0], variance=1.5)
    """

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    variance: Float[Array, ""] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    @property
    def _smoothness(self) -> float:
        return 1.5

    def _profile(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        return _once_smooth(3.0 * squared)


class Matern52(_Matern):
    """The Matern kernel of order 5/2, for functions with two derivatives.

    k(x, z) = variance * (1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r), with
    r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2.

    Args:
        lengthscale: in units of the inputs, positive; shape () or, one a column, (d,).
        variance: the amplitude squared, in squared units of the function, positive; shape ().

    Raises:
        ValueError: if a hyperparameter is not positive or has another shape.

    References:
        Rasmussen and Williams (2006), eq. 4.17.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> kernel = 2.0 * sgp.kernels.Matern52(lengthscale=0.3).on((1,))
    """

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    variance: Float[Array, ""] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    @property
    def _smoothness(self) -> float:
        return 2.5

    def _profile(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        return _twice_smooth(5.0 * squared)


class RationalQuadratic(_Stationary):
    """The rational quadratic kernel, a mixture of RBF kernels over lengthscales.

    k(x, z) = variance * (1 + r^2 / (2 alpha))^(-alpha), with
    r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2. It tends to `RBF` as alpha grows.

    Args:
        lengthscale: in units of the inputs, positive; shape () or, one a column, (d,).
        alpha: weight of small against large scales, positive; shape ().
        variance: the amplitude squared, in squared units of the function, positive; shape ().

    Raises:
        ValueError: if a hyperparameter is not positive or has another shape.

    References:
        Rasmussen and Williams (2006), eq. 4.19.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.RationalQuadratic(lengthscale=1.0, alpha=0.5)
    """

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    alpha: Float[Array, ""] = eqx.field(converter=checks.to_positive("alpha"))  # type: ignore[misc]
    variance: Float[Array, ""] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def __check_init__(self) -> None:
        checks.shape("alpha", self.alpha, ())
        checks.positive("alpha", self.alpha)

    def _profile(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        ratio = 0.5 * squared * reciprocal(self.alpha)
        ratio = jnp.minimum(ratio, jnp.finfo(ratio.dtype).max)  # its logarithm is finite
        return jnp.exp(-self.alpha * jnp.log1p(ratio))

    def _mixing(self, key: Key[Array, ""], num: int, dtype: jnp.dtype) -> Float[Array, " num"]:
        return jax.random.gamma(key, self.alpha, (num,), dtype) / self.alpha


class Periodic(_Stationary):
    """The periodic kernel: a function that repeats itself in each input column.

    k(x, z) = variance * exp(-2 sum_i sin^2(pi (x_i - z_i) / period_i) / lengthscale_i^2).

    Args:
        lengthscale: relative to the period, without unit, positive; shape () or (d,).
        period: in units of the inputs, positive; shape () or (d,).
        variance: the amplitude squared, in squared units of the function, positive; shape ().

    Raises:
        ValueError: if a hyperparameter is not positive or has another shape.

    References:
        MacKay (1998), Introduction to Gaussian Processes, eq. 47. Its spectrum is discrete: the
        Fourier weights exp(-c) I_j(c), c = lengthscale^-2, are those of the difference of two
        Poisson numbers of mean c / 2; above c = 2000, of a rounded normal, within 5e-5.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> yearly = sgp.kernels.Periodic(lengthscale=1.0, period=1.0) * sgp.kernels.RBF(30.0)
    """

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    period: Float[Array, "..."] = eqx.field(converter=checks.to_positive("period"))  # type: ignore[misc]
    variance: Float[Array, ""] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def __check_init__(self) -> None:
        if self.period.ndim > 1:
            raise ValueError(f"`period` must have shape () or (d,), got {self.period.shape}.")
        checks.positive("period", self.period)

    def _check_width(self, d: int) -> None:
        super()._check_width(d)
        checks.shape("period", self.period, (), (d,), why="one value for each input column")

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        # On a circle of radius 1 the squared chord is 4 sin^2(.).
        self._check_width(X.shape[1])
        scale = jnp.tile(jnp.broadcast_to(self.lengthscale, X.shape[1:]), 2)
        distances = squared_distances(self._circle(X), self._circle(Z), scale)
        return self.variance * self._profile(distances)

    def _circle(self, X: Float[Array, "n d"]) -> Float[Array, "n two_d"]:
        period = jnp.broadcast_to(self.period, (1, X.shape[1]))
        # A remainder is exact, while many periods leave few digits to a quotient.
        angle = 2.0 * jnp.pi * jnp.fmod(X, period) * reciprocal(period)
        return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=1)

    def _profile(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        return jnp.exp(-0.5 * squared)

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw from the discrete spectrum: multiples of 2 pi / period in each column."""
        self._check_width(d)
        frequency = 2.0 * jnp.pi / jnp.broadcast_to(self.period, (1, d))
        inverse = jnp.broadcast_to(1.0 / self.lengthscale, (num, d))
        rate = 0.5 * jnp.square(inverse)
        up_key, down_key, normal_key = jax.random.split(key, 3)
        up, down = (jax.random.poisson(k, jnp.minimum(rate, _MAX_RATE)) for k in (up_key, down_key))
        normal = jax.random.normal(normal_key, (num, d), inverse.dtype)
        few = (up - down).astype(inverse.dtype)
        harmonic = jnp.where(rate <= _MAX_RATE, few, jnp.round(normal * inverse))
        return harmonic * frequency

    @property
    def has_smooth_frequencies(self) -> bool:
        """False: they are discrete."""
        return False

    def _mixing(self, key: Key[Array, ""], num: int, dtype: jnp.dtype) -> Float[Array, " num"]:
        raise NotImplementedError("the periodic kernel's spectrum is no mixture of Gaussians")


class Constant(AbstractKernel):
    """The covariance of an unknown constant, k(x, z) = variance.

    Args:
        variance: the amplitude squared, in squared units of the function, positive; shape ().

    Raises:
        ValueError: if `variance` is not a positive scalar.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.RBF(1.0) + sgp.kernels.Constant(10.0)
    """

    variance: Float[Array, ""] = eqx.field(converter=checks.to_positive("variance"))

    def __check_init__(self) -> None:
        checks.shape("variance", self.variance, ())
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
        """True."""
        return True

    def random_features(
        self,
        key: Key[Array, ""],
        X: Float[ArrayLike, "n d"],
        num_features: int,
        *,
        origin: Float[ArrayLike, " d"] | None = None,
    ) -> Float[Array, "n p"]:
        """The one exact feature, sqrt(variance)."""
        X = checks.inputs("X", X)
        dtype = jnp.result_type(X, self.variance)
        return jnp.broadcast_to(jnp.sqrt(self.variance).astype(dtype), (X.shape[0], 1))

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Return zeros: all the power of a constant lies at frequency zero."""
        return jnp.zeros((num, d), self.variance.dtype)


# Matern profiles in s = (sqrt(2 nu) r)^2. As functions of s they differentiate into each other, so
# that no square root is differentiated and the derivatives at s = 0 are the right, finite ones.


@jax.custom_jvp
def _exponential(s: Float[Array, "n m"]) -> Float[Array, "n m"]:
    return jnp.exp(-jnp.sqrt(s))


@jax.custom_jvp
def _once_smooth(s: Float[Array, "n m"]) -> Float[Array, "n m"]:
    r = jnp.sqrt(s)
    return (1.0 + r) * jnp.exp(-r)


@jax.custom_jvp
def _twice_smooth(s: Float[Array, "n m"]) -> Float[Array, "n m"]:
    r = jnp.sqrt(s)
    return (1.0 + r + s / 3.0) * jnp.exp(-r)


@_exponential.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (s,), (ds,) = primals, tangents
    value = _exponential(s)
    r = jnp.sqrt(jnp.where(s > 0, s, 1.0))
    return value, jnp.where(s > 0, -0.5 * value / r, 0.0) * ds


@_once_smooth.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (s,), (ds,) = primals, tangents
    return _once_smooth(s), -0.5 * _exponential(s) * ds


@_twice_smooth.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (s,), (ds,) = primals, tangents
    return _twice_smooth(s), -_once_smooth(s) / 6.0 * ds
