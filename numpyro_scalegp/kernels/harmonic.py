"""Kernels of functions of time that oscillate."""

import abc
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.damped import Oscillator, damped_motion
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS, AbstractKernel
from numpyro_scalegp.kernels.rotations import Rotations
from numpyro_scalegp.kernels.spectrum import Origin
from numpyro_scalegp.kernels.state_space import AbstractStateSpace

# Proposals for a frequency, all of which are rejected with a probability of about 1e-10.
_NUM_TRIES = 32


class AbstractOfTime(AbstractKernel):
    """A stationary kernel of one input column, by its values at time differences."""

    if TYPE_CHECKING:  # type checkers make an `AbstractVar` the first argument of all subclasses

        @property
        def variance(self) -> Float[Array, "..."]: ...  # noqa: D102
    else:
        variance: eqx.AbstractVar[Float[Array, "..."]]

    def __check_init__(self) -> None:
        for name in self.hyperparameter_ndims:
            checks.positive(name, getattr(self, name))
        _ = self.batch_shape  # raises unless batch shapes fit together

    @property
    def is_stationary(self) -> bool:
        """True: k(x, z) depends on x - z alone."""
        return True

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        self._check_width(X.shape[1])
        return self.variance * self._correlation(X[:, 0, None] - Z[:, 0])

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        self._check_width(X.shape[1])
        dtype = jnp.result_type(X, *(getattr(self, name) for name in self.hyperparameter_ndims))
        # NaN for rows with NaN, which k(x, x) = variance alone would hide.
        return jnp.where(jnp.isnan(X[:, 0]), jnp.nan, self.variance.astype(dtype))

    @abc.abstractmethod
    def _correlation(self, difference: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation at differences of times."""

    def _check_width(self, d: int) -> None:
        if d != 1:
            raise ValueError(
                f"`{type(self).__name__}` is a kernel of one input column, got {d}: write "
                "`kernel.on((0,))`."
            )


class Harmonic(AbstractOfTime):
    """A damped oscillator driven by white noise, for vibrations that lose their phase.

    k(x, z) = variance * exp(-a t) (cos(b t) + a sin(b t) / b), with t = |x - z|,
    a = frequency / (2 quality) and b^2 = frequency^2 - a^2. Below a quality of 1/2 the oscillator
    is overdamped, and hyperbolic functions replace sine and cosine; at 1/2 it is `Matern32` with a
    lengthscale of sqrt(3) / frequency. Functions have one derivative.

    Args:
        frequency: the angular frequency without damping, in radians per unit of the input,
            positive; shape () or (*batch,).
        quality: how long an oscillation lasts, positive: after `quality` / pi periods its amplitude
            has fallen by a factor of e; shapes as for `frequency`.
        variance: the amplitude squared, in squared units of the function, positive; shape () or
            (*batch,).

    Raises:
        ValueError: if a hyperparameter is not positive, shapes do not fit together or, when called,
            the inputs have several columns.

    References:
        Foreman-Mackey et al. (2017), Fast and Scalable Gaussian Process Modeling with Applications
        to Astronomical Time Series, eq. 20 to 24.

    Example:
        >>> import math
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.Harmonic(2 * math.pi / 0.3, quality=5.0, variance=0.5)
        >>> kernel.state_space().size
        2
    """

    hyperparameter_ndims = {"frequency": 0, "quality": 0, "variance": 0}

    frequency: Float[Array, "..."] = eqx.field(converter=checks.to_positive("frequency"))
    quality: Float[Array, "..."] = eqx.field(converter=checks.to_positive("quality"))
    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def _correlation(self, difference: Float[Array, "n m"]) -> Float[Array, "n m"]:
        C, S = damped_motion(self.frequency, self.quality, jnp.abs(difference))
        return C + 0.5 * self.frequency / self.quality * S

    def spectral_density(self, frequencies: Float[Array, "num d"]) -> Float[Array, " num"]:
        """Foreman-Mackey et al. (2017), eq. 20; see `AbstractKernel.spectral_density`."""
        self._check_width(frequencies.shape[1])
        w, w0 = frequencies[:, 0], self.frequency
        resonance = (w * w - w0 * w0) ** 2 + (w * w0 / self.quality) ** 2
        return 2.0 * self.variance * w0**3 / self.quality / resonance

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw from the spectral density, a product of two Cauchy densities, by rejection.

        A draw from one of them, or from a mixture of both, is accepted at a rate of 1/2 or more on
        average.
        """
        self._check_width(d)
        shape = (num, _NUM_TRIES)
        cauchy_key, sign_key, uniform_key = jax.random.split(checks.as_key(key), 3)
        dtype = jnp.result_type(self.frequency, self.quality)
        cauchy = jax.random.cauchy(cauchy_key, shape, dtype)
        sign = jax.random.rademacher(sign_key, shape, dtype)
        # In units of the frequency: the width a or, if overdamped, the widths of the two factors.
        a = 0.5 / self.quality
        root = jnp.sqrt(jnp.abs(1.0 - a * a))
        is_overdamped = a > 1.0
        narrow = 1.0 / (a + root)
        proposal = jnp.where(is_overdamped, narrow * cauchy, sign * root + a * cauchy)
        width = jnp.where(is_overdamped, a + root, 1.0)
        accepted = jax.random.uniform(uniform_key, shape, dtype) < width**2 / (
            proposal**2 + width**2
        )
        first = jnp.argmax(accepted, axis=1)
        return self.frequency * jnp.take_along_axis(proposal, first[:, None], axis=1)

    @property
    def has_smooth_frequencies(self) -> bool:
        """False: the hyperparameters decide which proposals are accepted."""
        return False

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """The function and its derivative; see `AbstractKernel.state_space`."""
        return Oscillator(self.frequency, self.quality, self.variance)


class Cosine(AbstractOfTime):
    """A cosine wave of a known period, with random amplitude and phase.

    k(x, z) = variance * cos(2 pi (x - z) / period).

    Args:
        period: in units of the input, positive; shape () or (*batch,).
        variance: the mean square of the wave, in squared units of the function, positive; shape ()
            or (*batch,).

    Raises:
        ValueError: if a hyperparameter is not positive, shapes do not fit together or, when called,
            the inputs have several columns.

    References:
        Solin and Sarkka (2014), Explicit Link Between Periodic Covariance Functions and State Space
        Models, section 3.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> tide = sgp.kernels.Cosine(period=12.42) * sgp.kernels.Matern32(500.0)
    """

    hyperparameter_ndims = {"period": 0, "variance": 0}

    period: Float[Array, "..."] = eqx.field(converter=checks.to_positive("period"))
    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def _angle(self, times: Float[Array, "..."]) -> Float[Array, "..."]:
        # The remainder is exact; times / period would lose digits over many periods.
        return 2.0 * jnp.pi * jnp.fmod(times, self.period) / self.period

    def _correlation(self, difference: Float[Array, "n m"]) -> Float[Array, "n m"]:
        return jnp.cos(self._angle(difference))

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The two exact features, cosine and sine."""
        self._check_width(X.shape[1])
        angle = self._angle(X[:, 0])
        return jnp.sqrt(self.variance) * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """The one frequency, with random signs."""
        self._check_width(d)
        frequency = 2.0 * jnp.pi / self.period
        return frequency * jax.random.rademacher(key, (num, 1), frequency.dtype)

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """One rotation; see `AbstractKernel.state_space`."""
        weights = jnp.stack([jnp.zeros_like(self.variance), self.variance])
        return Rotations(weights, self.period, 1, False)
