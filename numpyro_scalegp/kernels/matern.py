"""The Matern kernels."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels import damped
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS
from numpyro_scalegp.kernels.state_space import AbstractStateSpace
from numpyro_scalegp.kernels.stationary import AbstractStationary, check_single_column

# The largest logarithm of a precision in the mixture of RBF kernels that is a Matern kernel, and
# the number of intervals of the logarithm of the squared distance, each with a polynomial.
_MAX_LOG_PRECISION = 36.0
_NUM_INTERVALS = 512
# Gamma(x + 1/2) / Gamma(x) / sqrt(x) - 1 as a polynomial in 1 / x, after steps to larger x.
_NUM_STEPS = 16
_HALF_STEP = (869 / 2**22, -399 / 2**18, -21 / 2**15, 5 / 2**10, 1 / 2**7, -1 / 2**3, 0.0)


class _Matern(AbstractStationary):
    """The Matern family: its spectral density is a multivariate t with 2 nu degrees of freedom."""

    _smoothness: ClassVar[float]  # the order nu
    _form: ClassVar[Any]  # the class of the state-space form

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def sample_precisions(
        self, key: Key[Array, ""], num: int, dtype: jnp.dtype
    ) -> Float[Array, " num"]:
        """Draw from the inverse gamma distribution of the multivariate t density."""
        return _precisions(key, self._smoothness, num, dtype)

    def radial_density(self, squared: Float[Array, " num"], d: int) -> Float[Array, " num"]:
        """A power of 2 nu + w^2 (Rasmussen and Williams, eq. 4.15)."""
        nu, half = self._smoothness, 0.5 * d
        log_factor = math.lgamma(nu + half) - math.lgamma(nu) + nu * math.log(2.0 * nu)
        factor = math.exp(log_factor) * (4.0 * math.pi) ** half
        return factor * (2.0 * nu + squared) ** -(nu + half)

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """The function and its derivatives; see `AbstractKernel.state_space`."""
        lengthscale = check_single_column("lengthscale", self.lengthscale)
        return self._form(math.sqrt(2.0 * self._smoothness) / lengthscale, self.variance)


class Matern12(_Matern):
    """The Matern kernel of order 1/2 (exponential), for continuous, rough functions.

    k(x, z) = variance * exp(-r), with r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2. It has no
    derivative at r = 0, where the gradient is set to zero. Arguments and errors are the same as for
    `RBF`.

    References:
        Rasmussen and Williams (2006), eq. 4.14 with nu = 1/2.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.Matern12(lengthscale=0.5) + 0.1 * sgp.kernels.RBF(2.0)
    """

    _smoothness = 0.5
    _form = damped.Exponential

    @property
    def by_differences(self) -> bool:
        """True: the correlation has a kink at zero."""
        return True

    def rough_columns(self, d: int) -> frozenset[int]:
        """All columns: functions with this kernel are not differentiable."""
        return frozenset(range(d))

    def correlation(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance."""
        return _exponential(squared)


class Matern32(_Matern):
    """The Matern kernel of order 3/2, for functions with one derivative.

    k(x, z) = variance * (1 + sqrt(3) r) exp(-sqrt(3) r), with
    r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2. Arguments and errors are the same as for `RBF`.

    References:
        Rasmussen and Williams (2006), eq. 4.17.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.Matern32(lengthscale=[0.5, 2.0], variance=1.5)
    """

    _smoothness = 1.5
    _form = damped.CriticallyDamped

    def correlation(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance."""
        return _once_smooth(3.0 * squared)


class Matern52(_Matern):
    """The Matern kernel of order 5/2, for functions with two derivatives.

    k(x, z) = variance * (1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r), with
    r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2. Arguments and errors are the same as for `RBF`.

    References:
        Rasmussen and Williams (2006), eq. 4.17.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> kernel = 2.0 * sgp.kernels.Matern52(lengthscale=0.3).on((1,))
    """

    _smoothness = 2.5
    _form = damped.TwiceSmooth

    def correlation(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance."""
        return _twice_smooth(5.0 * squared)


class Matern(AbstractStationary):
    """The Matern kernel of any smoothness, which may be estimated with the other hyperparameters.

    k(x, z) = variance * 2^(1 - nu) / Gamma(nu) * t^nu K_nu(t), with t = sqrt(2 nu) r,
    r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2, nu the smoothness and K_nu the modified Bessel
    function of the second kind. Functions have as many derivatives as there are integers below nu.
    `Matern12`, `Matern32` and `Matern52` are the cases 1/2, 3/2 and 5/2, in a half to a quarter of
    the time.

    Args:
        lengthscale: as for `RBF`.
        smoothness: nu, positive; shape () or (*batch,). Data tell little about values above 3, so
            give it a prior.
        variance: as for `RBF`.

    Raises:
        ValueError: as for `RBF`.

    References:
        Rasmussen and Williams (2006), eq. 4.14. The kernel is a mixture of RBF kernels, whose
        precisions have an inverse gamma distribution. The trapezoidal rule on a logarithmic scale
        makes it a mixture of 64 (in float64 128), differentiable in nu, which is interpolated in
        the distance. For r above 1e-7 and nu of at least 1/2, errors are below 4e-6 of the
        variance, in float64 1e-10; for smaller nu, below 2e-5. Functions are equal below 1e-8.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.Matern(lengthscale=2.0, smoothness=1.2)
        >>> kernel(jnp.zeros((1, 1)), jnp.array([[0.0], [2.0]])).round(3).tolist()
        [[1.0, 0.46300002932548523]]
    """

    hyperparameter_ndims = {**AbstractStationary.hyperparameter_ndims, "smoothness": 0}

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    smoothness: Float[Array, "..."] = eqx.field(converter=checks.to_positive("smoothness"))
    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def __check_init__(self) -> None:
        checks.positive("smoothness", self.smoothness)

    @property
    def by_differences(self) -> bool:
        """True: the correlation may have a kink at zero."""
        return True

    def rough_columns(self, d: int) -> frozenset[int]:
        """All columns: functions with this kernel may not be differentiable."""
        return frozenset(range(d))

    def correlation(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance."""
        dtype = jnp.result_type(squared, self.smoothness)
        return _mixture(_weights, squared.astype(dtype), self.smoothness.astype(dtype))

    def sample_precisions(
        self, key: Key[Array, ""], num: int, dtype: jnp.dtype
    ) -> Float[Array, " num"]:
        """Draw from the inverse gamma distribution of the multivariate t density."""
        return _precisions(key, self.smoothness, num, dtype)

    @property
    def has_smooth_frequencies(self) -> bool:
        """False: their derivatives in the smoothness have no finite variance up to 1."""
        return False

    def radial_density(self, squared: Float[Array, " num"], d: int) -> Float[Array, " num"]:
        """(2 pi / nu)^(d / 2) Gamma(nu + d / 2) / Gamma(nu) (1 + w^2 / (2 nu))^-(nu + d / 2)."""
        nu = self.smoothness
        log_tail = -(nu + 0.5 * d) * jnp.log1p(0.5 * squared / nu)
        return (2.0 * math.pi) ** (0.5 * d) * jnp.exp(_log_gamma_ratio(nu, d) + log_tail)


def _precisions(key: Key[Array, ""], nu: Any, num: int, dtype: Any) -> Float[Array, " num"]:
    drawn = jax.random.gamma(key, nu, (num,), dtype)
    return nu / jnp.maximum(drawn, nu * math.exp(-_MAX_LOG_PRECISION))


def _log_gamma_ratio(nu: Float[Array, ""], d: int) -> Float[Array, ""]:
    """The logarithm of nu^(-d / 2) Gamma(nu + d / 2) / Gamma(nu), accurate for large nu too."""
    total = jnp.sum(jnp.log1p(jnp.arange(d // 2, dtype=nu.dtype) / nu))
    if d % 2 == 0:
        return total
    # A half step from x: the recurrence Gamma(x + 1) = x Gamma(x), then a series in 1 / x.
    steps = jnp.arange(_NUM_STEPS, dtype=nu.dtype)
    x = nu + d // 2
    total = total - jnp.sum(jnp.log1p(0.5 / (x + steps))) + 0.5 * jnp.log1p(d // 2 / nu)
    far = x + _NUM_STEPS
    total = total + 0.5 * jnp.log1p(_NUM_STEPS / x)
    return total + jnp.log1p(jnp.polyval(jnp.array(_HALF_STEP, x.dtype), 1.0 / far))


# A mixture of RBF correlations, sum_j w_j exp(-exp(-x_j) s / 2), where s is the squared distance:
# exp(x) is gamma distributed with shape nu and mean one. The nodes x_j cover all but a share of
# the mass, so they follow nu, but as the sum does not depend on them, derivatives do not.


def _precision(nu: Array) -> tuple[int, float, int]:
    """The number of terms, the largest relevant exponent, and the degree of polynomials."""
    return (128, 40.0, 6) if nu.dtype == jnp.float64 else (64, 20.0, 3)


def _nodes(nu: Float[Array, ""]) -> Float[Array, " num"]:
    # The density is proportional to exp(-nu (exp(x) - 1 - x)); bounds of where that is negligible.
    range_ = -math.log(float(jnp.finfo(nu.dtype).eps)) / jax.lax.stop_gradient(nu)
    left = 0.5 * (range_ + jnp.sqrt(range_ * (range_ + 8.0)))
    right = jnp.minimum(jnp.sqrt(2.0 * range_), jnp.log(2.0 * range_ + 2.0))
    unit = jnp.linspace(0.0, 1.0, _precision(nu)[0], dtype=nu.dtype)
    left = jnp.minimum(left, _MAX_LOG_PRECISION)
    return -left + unit * (left + right)


def _weights(nu: Float[Array, ""]) -> Float[Array, " num"]:
    x = _nodes(nu)
    logits = nu * (x - jnp.expm1(x))
    # Beyond the first node the density falls like exp(nu x).
    tail = jnp.log(0.5 + 1.0 / (nu * (x[1] - x[0])))
    return jax.nn.softmax(logits.at[0].add(tail))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mixture(
    weights: Callable[[Array], Array], s: Float[Array, "n m"], nu: Float[Array, ""]
) -> Float[Array, "n m"]:
    """The sum over j of weights(nu)_j exp(-exp(-x_j) s / 2), by interpolation in log(s)."""
    num_exponents, degree = _precision(nu)[1:]
    rates, scales = 0.5 * jnp.exp(-_nodes(nu)), weights(nu)
    # Below the first distance all terms are one; beyond the last one, all are negligible.
    start = -_MAX_LOG_PRECISION
    end = jnp.log(2.0 * num_exponents + 0.5 * num_exponents**2 / jax.lax.stop_gradient(nu))
    width = (end - start) / _NUM_INTERVALS
    # Chebyshev's nodes in each interval, and the coefficients of the interpolating polynomial.
    order = np.arange(degree + 1)
    angles = np.pi * (order + 0.5) / (degree + 1)
    to_coefficients = np.cos(np.outer(order, angles)) * np.where(order, 2.0, 1.0)[:, None]
    to_coefficients = jnp.asarray(to_coefficients / (degree + 1), s.dtype)
    places = np.arange(_NUM_INTERVALS) + 0.5 * (1.0 + np.cos(angles))[:, None]
    at_nodes = jnp.exp(start + width * jnp.asarray(places, s.dtype))
    values = jnp.sum(scales * jnp.exp(-rates * at_nodes[..., None]), axis=-1)
    table = jnp.matmul(to_coefficients, values, precision="highest")

    place = (jnp.log(s) - start) / width
    interval = jnp.clip(place.astype(jnp.int32), 0, _NUM_INTERVALS - 1)
    t = 2.0 * (place - interval.astype(s.dtype)) - 1.0
    last, before = jnp.zeros_like(t), jnp.zeros_like(t)
    for k in range(degree, 0, -1):  # Clenshaw's recurrence
        last, before = table[k][interval] + 2.0 * t * last - before, last
    between = jnp.where(place < _NUM_INTERVALS, table[0][interval] + t * last - before, 0.0 * place)
    return jnp.where(place <= 0.0, jnp.sum(scales), between)


@_mixture.defjvp
def _(weights: Callable, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    (s, nu), (ds, dnu) = primals, tangents

    def of_s(nu: Array) -> Array:
        return -0.5 * jnp.exp(-_nodes(nu)) * weights(nu)

    def of_nu(nu: Array) -> Array:
        return jax.jvp(weights, (nu,), (jnp.ones_like(nu),))[1]

    value = _mixture(weights, s, nu)
    return value, _mixture(of_s, s, nu) * ds + _mixture(of_nu, s, nu) * dnu


# Matern correlations as functions of s = (sqrt(2 nu) r)^2. The derivative of each is a multiple of
# the next rougher one, so no square root is differentiated and derivatives at s = 0 are finite.


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
    value = _once_smooth(s)
    return value, -0.5 * _exponential_given(s, value) * ds


@_twice_smooth.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (s,), (ds,) = primals, tangents
    value = _twice_smooth(s)
    return value, -_once_smooth_given(s, value) / 6.0 * ds


# The same from the next smoother correlation, which a gradient needs as well: a division and a
# square root cost less than another exponential, or than storing its value.


@jax.custom_jvp
def _exponential_given(
    s: Float[Array, "n m"], once_smooth: Float[Array, "n m"]
) -> Float[Array, "n m"]:
    return once_smooth / (1.0 + jnp.sqrt(s))


@jax.custom_jvp
def _once_smooth_given(
    s: Float[Array, "n m"], twice_smooth: Float[Array, "n m"]
) -> Float[Array, "n m"]:
    r = jnp.sqrt(s)
    return twice_smooth * ((1.0 + r) / (1.0 + r + s / 3.0))


@_exponential_given.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return jax.jvp(_exponential, primals[:1], tangents[:1])


@_once_smooth_given.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return jax.jvp(_once_smooth, primals[:1], tangents[:1])
