"""The periodic kernel."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.distances import reciprocal, squared_distances
from numpyro_scalegp.kernels.stationary import AbstractStationary, check_columns

# Means above which a difference of two Poisson numbers is drawn as a rounded normal one: JAX's
# Poisson numbers lose accuracy in float32, and above 2^31 there are none.
_MAX_RATE = 1000.0


class Periodic(AbstractStationary):
    """The periodic kernel: a function that repeats itself in each input column.

    k(x, z) = variance * exp(-2 sum_i sin^2(pi (x_i - z_i) / period_i) / lengthscale_i^2).

    Args:
        lengthscale: relative to the period, without unit, positive; shapes as of `RBF`.
        period: in units of the inputs, positive; shapes as of `lengthscale`.
        variance: the amplitude squared, in squared units of the function, positive; shape () or
            (*batch,).

    Raises:
        ValueError: if a hyperparameter is not positive, or shapes do not fit together.

    References:
        MacKay (1998), Introduction to Gaussian Processes, eq. 47. Its spectrum is discrete: the
        Fourier weights exp(-c) I_j(c), c = lengthscale^-2, are those of the difference of two
        Poisson numbers of mean c / 2; above c = 2000, of a rounded normal, within 5e-5.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> yearly = sgp.kernels.Periodic(lengthscale=1.0, period=1.0) * sgp.kernels.RBF(30.0)
    """

    hyperparameter_ndims = {**AbstractStationary.hyperparameter_ndims, "period": 1}

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    period: Float[Array, "..."] = eqx.field(converter=checks.to_positive("period"))  # type: ignore[misc]
    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)

    def __check_init__(self) -> None:
        checks.positive("period", self.period)

    def scaled_inputs(
        self, X: Float[Array, "... n d"]
    ) -> list[tuple[Float[Array, "..."], Float[Array, "... n d"]]]:
        """Nothing: the lengthscale is relative to the period."""
        return []

    def _check_width(self, d: int) -> None:
        super()._check_width(d)
        check_columns("period", self.period, d)

    def _squared_distances(
        self, X: Float[Array, "n d"], Z: Float[Array, "m d"]
    ) -> Float[Array, "n m"]:
        # On a circle of radius 1 the squared chord is 4 sin^2(.).
        scale = jnp.tile(jnp.broadcast_to(self.lengthscale, X.shape[1:]), 2)
        return squared_distances(self._circle(X), self._circle(Z), scale)

    def _circle(self, X: Float[Array, "n d"]) -> Float[Array, "n two_d"]:
        period = jnp.broadcast_to(self.period, (1, X.shape[1]))
        # A remainder is exact, while many periods leave few digits to a quotient.
        angle = 2.0 * jnp.pi * jnp.fmod(X, period) * reciprocal(period)
        return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=1)

    def correlation(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance."""
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
