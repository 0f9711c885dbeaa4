"""Kernels that are zero beyond a distance."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.stationary import AbstractStationary


class Wendland(AbstractStationary):
    """Wendland's kernels, which are exactly zero from r = 1 on: compactly supported polynomials.

    With q the smoothness, l = floor(dims / 2) + q + 1 and r^2 = sum_i ((x_i - z_i) /
    lengthscale_i)^2, k(x, z) is variance times

    - q = 0: (1 - r)^l,
    - q = 1: (1 - r)^(l + 1) ((l + 1) r + 1),
    - q = 2: (1 - r)^(l + 2) (((l + 1)(l + 3) r^2 + 3 (l + 2) r) / 3 + 1)

    for r < 1, and zero beyond. Functions with it have q derivatives, as with a Matern kernel of
    order q + 1/2.

    Args:
        lengthscale: the distance beyond which values are independent, in units of the inputs;
            shapes as for `RBF`.
        variance: as for `RBF`.
        smoothness: q, 0, 1 or 2.
        max_dims: the largest number of input dimensions; the kernel is not positive definite in
            more. One function of the distance for all inputs with up to so many.

    Raises:
        TypeError: if `smoothness` or `max_dims` is not an integer.
        ValueError: as for `RBF`; if `smoothness` or `max_dims` is not one of these; when called, if
            inputs have more than `max_dims` columns.

    References:
        Wendland (2005), Scattered Data Approximation, table 9.1; Rasmussen and Williams (2006), eq.
        4.21. It has no random features: use inducing points, neighbors or an exact estimator.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.Wendland(lengthscale=2.0)
        >>> kernel(jnp.zeros((1, 1)), jnp.array([[1.0], [2.0]])).tolist()
        [[0.1875, 0.0]]
    """

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)
    smoothness: int = eqx.field(static=True, converter=checks.plain, default=1)
    max_dims: int = eqx.field(static=True, converter=checks.plain, default=3)

    def __check_init__(self) -> None:
        if checks.integer("smoothness", self.smoothness) not in (0, 1, 2):
            raise ValueError(f"`smoothness` must be 0, 1 or 2, got {self.smoothness}.")
        checks.count("max_dims", self.max_dims)

    @property
    def by_differences(self) -> bool:
        """Whether the correlation has a kink at zero."""
        return self.smoothness == 0

    def rough_columns(self, d: int) -> frozenset[int]:
        """All columns, if functions with this kernel are not differentiable."""
        return frozenset(range(d) if self.smoothness == 0 else ())

    def _check_width(self, d: int) -> None:
        super()._check_width(d)
        if d > self.max_dims:
            raise ValueError(
                f"this `Wendland` is for up to {self.max_dims} input dimensions, got {d}: write "
                f"`Wendland(..., max_dims={d})`, or name the columns by `kernel.on((0, 1))`."
            )

    def correlation(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation as a function of the scaled squared distance."""
        power = self.max_dims // 2 + self.smoothness + 1
        inside = squared < 1.0
        value = _polynomial(self.smoothness, power, jnp.where(inside, squared, 1.0))
        return jnp.where(squared >= 1.0, 0.0, jnp.where(inside, value, squared))  # NaN stays NaN


def _polynomial(smoothness: int, power: int, s: Float[Array, "n m"]) -> Float[Array, "n m"]:
    """The polynomials as functions of s = r^2, r <= 1.

    The derivative of each is a multiple of the next rougher one, so no square root is
    differentiated; at r = 0, where the roughest has no derivative, it is set to zero.
    """

    @jax.custom_jvp
    def value(s: Array) -> Array:
        r = jnp.sqrt(s)
        near = 1.0 - r
        if smoothness == 0:
            return near**power
        if smoothness == 1:
            return near ** (power + 1) * ((power + 1) * r + 1.0)
        square = (power + 1) * (power + 3) * s
        return near ** (power + 2) * ((square + 3.0 * (power + 2) * r) / 3.0 + 1.0)

    @value.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        (s,), (ds,) = primals, tangents
        if smoothness == 0:
            r = jnp.sqrt(jnp.where(s > 0.0, s, 1.0))
            slope = jnp.where(s > 0.0, -0.5 * power * (1.0 - r) ** (power - 1) / r, 0.0)
        elif smoothness == 1:
            slope = -0.5 * (power + 1) * (power + 2) * _polynomial(0, power, s)
        else:
            slope = -(power + 3) * (power + 4) / 6.0 * _polynomial(1, power, s)
        return value(s), slope * ds

    return value(s)
