"""The Matern kernels."""

import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels import damped
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS
from numpyro_scalegp.kernels.state_space import AbstractStateSpace
from numpyro_scalegp.kernels.stationary import AbstractStationary, check_single_column


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
        return self._smoothness / jax.random.gamma(key, self._smoothness, (num,), dtype)

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
