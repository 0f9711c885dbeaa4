"""The periodic kernel."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.distances import reciprocal, squared_distances
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS
from numpyro_scalegp.kernels.rotations import Rotations
from numpyro_scalegp.kernels.state_space import AbstractStateSpace
from numpyro_scalegp.kernels.stationary import (
    AbstractStationary,
    check_columns,
    check_single_column,
)

# Above this mean a difference of two Poisson variables is drawn as a rounded normal variable: JAX's
# Poisson draws lose accuracy in float32, and fail above 2^31.
_MAX_RATE = 1000.0
# Without a constant harmonics are drawn from a table, which holds all but a share of 1e-7 of the
# spectrum for lengthscales above 0.011.
_NUM_HARMONICS = 512
# exp(-c) I_0(c) = sum_k (-1)^k (2k)! / (2^k k!^3) c^k, the last term first.
_SERIES = [
    -((-1.0) ** k) * math.factorial(2 * k) / (2**k * math.factorial(k) ** 3)
    for k in range(16, 0, -1)
] + [0.0]
# The recursion for ratios of Bessel functions starts this many orders above the largest one.
_MORE_RATIOS = 40


class Periodic(AbstractStationary):
    """The periodic kernel, for functions that repeat in each input dimension.

    k(x, z) = variance * exp(-2 sum_i sin^2(pi (x_i - z_i) / period_i) / lengthscale_i^2).

    Args:
        lengthscale: relative to the period, without units, positive; shapes as for `RBF`.
        period: in units of the inputs, positive; shapes as for `lengthscale`.
        variance: the amplitude squared, in squared units of the function, positive; shape () or
            (*batch,).
        constant: whether the function may have a nonzero mean over a period. False removes the
            constant Fourier term, for one input dimension only, which leaves
            variance (k - a_0) / (1 - a_0), with a_0 = exp(-c) I_0(c), c = lengthscale^-2, and k the
            kernel above at variance 1. In a sum of kernels, the other terms then model the level.

    Raises:
        ValueError: if a hyperparameter is not positive, or shapes do not fit together; when called,
            if `constant` is False and there are several input dimensions.

    References:
        MacKay (1998), Introduction to Gaussian Processes, eq. 47. The spectrum is discrete: the
        Fourier weights exp(-c) I_j(c), c = lengthscale^-2, are the probabilities that two Poisson
        variables of mean c / 2 differ by j; above c = 2000 a rounded normal variable replaces the
        difference, within 5e-5.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> yearly = sgp.kernels.Periodic(lengthscale=1.0, period=1.0) * sgp.kernels.RBF(30.0)
    """

    hyperparameter_ndims = {**AbstractStationary.hyperparameter_ndims, "period": 1}

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    period: Float[Array, "..."] = eqx.field(converter=checks.to_positive("period"))
    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)
    constant: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        checks.positive("period", self.period)

    def scaled_inputs(
        self, X: Float[Array, "... n d"]
    ) -> list[tuple[Float[Array, "..."], Float[Array, "... n d"]]]:
        """Empty, since the lengthscale is relative to the period."""
        return []

    def _check_width(self, d: int) -> None:
        super()._check_width(d)
        check_columns("period", self.period, d)
        if not self.constant and d != 1:
            raise ValueError(
                f"a `Periodic` with `constant=False` needs inputs of one dimension, got {d}: write "
                "`kernel.on((0,))`, and multiply the kernels of several."
            )

    def _squared_distances(
        self, X: Float[Array, "n d"], Z: Float[Array, "m d"]
    ) -> Float[Array, "n m"]:
        # On a circle of radius 1 the squared chord is 4 sin^2(.).
        scale = jnp.tile(jnp.broadcast_to(self.lengthscale, X.shape[1:]), 2)
        return squared_distances(self._circle(X), self._circle(Z), scale)

    def _circle(self, X: Float[Array, "n d"]) -> Float[Array, "n two_d"]:
        period = jnp.broadcast_to(self.period, (1, X.shape[1]))
        # The remainder is exact; X / period would lose digits over many periods.
        angle = 2.0 * jnp.pi * jnp.fmod(X, period) * reciprocal(period)
        return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=1)

    def correlation(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance."""
        if self.constant:
            return jnp.exp(-0.5 * squared)
        return 1.0 + jnp.expm1(-0.5 * squared) / _without_constant(self.lengthscale.reshape(()))

    def fourier_weights(self, num: int) -> Float[Array, " num"]:
        """The Fourier weights a_j, j < num, in one dimension: k(t) = a_0 + 2 sum_j a_j cos(j t)."""
        weights = _fourier_weights(self.lengthscale.reshape(()), num)
        if self.constant:
            return weights
        return weights.at[0].set(0.0) / _without_constant(self.lengthscale.reshape(()))

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """A rotation for each Fourier term; see `AbstractKernel.state_space`.

        The terms beyond the first `num_harmonics` are left out, and their variance is missing.
        """
        period = check_single_column("period", self.period)
        check_single_column("lengthscale", self.lengthscale)
        weights = self.variance * self.fourier_weights(num_harmonics + 1)
        weights = jnp.concatenate([weights[:1], 2.0 * weights[1:]])
        return Rotations(weights, period, num_harmonics, self.constant)

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw from the discrete spectrum: multiples of 2 pi / period in each column."""
        self._check_width(d)
        if not self.constant:
            return self._sample_harmonics(key, num) * (2.0 * jnp.pi / self.period.reshape(()))
        frequency = 2.0 * jnp.pi / jnp.broadcast_to(self.period, (1, d))
        inverse = jnp.broadcast_to(1.0 / self.lengthscale, (num, d))
        rate = 0.5 * jnp.square(inverse)
        up_key, down_key, normal_key = jax.random.split(key, 3)
        up, down = (jax.random.poisson(k, jnp.minimum(rate, _MAX_RATE)) for k in (up_key, down_key))
        normal = jax.random.normal(normal_key, (num, d), inverse.dtype)
        difference = (up - down).astype(inverse.dtype)
        harmonic = jnp.where(rate <= _MAX_RATE, difference, jnp.round(normal * inverse))
        return harmonic * frequency

    def _sample_harmonics(self, key: Key[Array, ""], num: int) -> Float[Array, "num 1"]:
        number_key, sign_key = jax.random.split(key)
        weights = self.fourier_weights(_NUM_HARMONICS)[1:]
        number = 1 + jax.random.categorical(number_key, jnp.log(weights), shape=(num, 1))
        sign = jax.random.rademacher(sign_key, (num, 1), weights.dtype)
        return sign * number.astype(weights.dtype)

    @property
    def has_smooth_frequencies(self) -> bool:
        """False: the frequencies are discrete."""
        return False


def _fourier_weights(lengthscale: Float[Array, ""], num: int) -> Float[Array, " num"]:
    """exp(-c) I_j(c), c = lengthscale^-2, for j < num: the series of exp(c (cos(t) - 1)).

    From the continued fraction of I_j / I_(j - 1), which damps errors toward small j.
    """
    c = 1.0 / jnp.square(lengthscale)
    last = num + _MORE_RATIOS
    # Accurate for large j.
    start = c / (last + jnp.sqrt(last**2 + jnp.square(c)))

    def step(following: Array, j: Array) -> tuple[Array, Array]:
        ratio = c / (2.0 * j + c * following)
        return ratio, ratio

    down = jnp.arange(last - 1, 0, -1).astype(c.dtype)
    ratios = jax.lax.scan(step, start, down)[1][::-1][: num - 1]
    return jax.scipy.special.i0e(c) * jnp.cumprod(jnp.concatenate([jnp.ones(1, c.dtype), ratios]))


def _without_constant(lengthscale: Float[Array, ""]) -> Float[Array, ""]:
    """1 - exp(-c) I_0(c), c = lengthscale^-2; for small c by its series, which keeps all digits."""
    c = 1.0 / jnp.square(lengthscale)
    is_small = c < 0.5
    small = jnp.where(is_small, c, 0.0)
    # Python numbers, which keep a weak type weak.
    series = functools.reduce(lambda total, coefficient: total * small + coefficient, _SERIES)
    return jnp.where(is_small, series, 1.0 - jax.scipy.special.i0e(jnp.where(is_small, 1.0, c)))
