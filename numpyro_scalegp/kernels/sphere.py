"""Kernels of places on a sphere, such as the Earth."""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.kernels.distances import reciprocal, squared_distances
from numpyro_scalegp.kernels.kernel import AbstractKernel, AbstractMapped
from numpyro_scalegp.kernels.matern import Matern12
from numpyro_scalegp.kernels.spectrum import Origin
from numpyro_scalegp.kernels.wendland import Wendland

# Degrees of longitude and latitude.
_RANGES = {0: (-180.0, 360.0), 1: (-90.0, 90.0)}
# Below this square of half a chord, arcsin is its first terms.
_SMALL = 1e-4
_ROUNDING = 1.0 + 1e-6


class OnSphere(AbstractMapped):
    """A kernel of places on a sphere, from longitudes and latitudes in degrees.

    By default k(x, z) = k_1(p(x), p(z)), where p maps a place to its point in space: distances are
    chords, straight lines through the sphere, and any kernel k_1 of three inputs is valid. Up to
    1,000 km on the Earth a chord is about 0.1 percent shorter than the great circle, or less. With
    `great_circle=True`, k_1 is a function of the distance along the surface; few kernels of that
    are positive definite, and those are rough at zero or have compact support.

    Args:
        kernel: k_1, with lengthscales in the units of `radius`. For great circles, `Matern12` or a
            `Wendland` with `max_dims` of at least 3, whose support reaches at most around half the
            sphere, pi * radius; with a single lengthscale.
        radius: the sphere's radius; the Earth's in kilometers by default.
        great_circle: whether distances are measured along the surface.

    Raises:
        ValueError: if `kernel` is not positive definite for great circles; when called, if inputs
            have not two columns, longitude between -180 and 360 degrees and latitude between -90
            and 90. Inside `jit`, where neither this nor a support beyond pi * radius can raise,
            covariances are NaN.
        TypeError: if `kernel` is not a kernel.

    References:
        Gneiting (2013), Strictly and Non-Strictly Positive Definite Functions on Spheres, theorem
        1 and table 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.OnSphere(sgp.kernels.Matern32(500.0))
        >>> london, paris = jnp.array([[-0.13, 51.51]]), jnp.array([[2.35, 48.86]])
        >>> kernel(london, paris).round(2).tolist()
        [[0.6699999570846558]]
    """

    kernel: AbstractKernel
    radius: float = eqx.field(static=True, converter=checks.plain, default=6371.0)
    great_circle: bool = eqx.field(static=True, converter=checks.plain, default=False)

    def __check_init__(self) -> None:
        checks.instance("kernel", self.kernel, AbstractKernel)
        checks.number("radius", self.radius, "(0, inf)")
        checks.instance("great_circle", self.great_circle, bool, "True or False")
        if self.great_circle:
            self._check_great_circle()

    def _check_great_circle(self) -> None:
        kernel: Any = self.kernel
        is_compact = isinstance(kernel, Wendland) and kernel.max_dims >= 3
        if not (isinstance(kernel, Matern12) or is_compact):
            raise ValueError(
                "`great_circle=True` needs `Matern12` or `Wendland` with `max_dims` of at least 3, "
                f"got `{type(kernel).__name__}`: others are not positive definite as functions of "
                "this distance. Leave out `great_circle`, and distances are chords."
            )
        if jnp.shape(kernel.lengthscale)[-1:] not in ((), (1,)):
            raise ValueError(
                "`great_circle=True` needs a kernel with one lengthscale for all directions, got "
                f"shape {jnp.shape(kernel.lengthscale)}."
            )
        if is_compact and checks.is_concrete(kernel.lengthscale):
            largest, limit = float(as_numpy(kernel.lengthscale).max()), math.pi * self.radius
            if largest > limit * _ROUNDING:
                raise ValueError(
                    "`great_circle=True` needs a `Wendland` with a lengthscale of at most "
                    f"{limit:.6g}, half the circumference, got {largest:.6g}: take `Matern12`, or "
                    "leave out `great_circle`."
                )

    def ranges(self, d: int) -> dict[int, tuple[float, float]]:
        """Degrees of longitude and latitude; see `AbstractKernel.ranges`."""
        self._check_width(d)
        return dict(_RANGES)

    def _check_width(self, d: int) -> None:
        if d != 2:
            raise ValueError(
                f"`OnSphere` is a kernel of two input columns, longitude and latitude, got {d}: "
                "name them by `kernel.on((0, 1))`."
            )

    def _inputs_of_parts(self, X: Float[Array, "... n d"]) -> Float[Array, "... n three"]:
        self._check_width(X.shape[-1])
        valid = [(low <= X[..., j]) & (X[..., j] <= high) for j, (low, high) in _RANGES.items()]
        X = jnp.where((valid[0] & valid[1])[..., None], X, jnp.nan)
        longitude, latitude = jnp.deg2rad(X[..., 0]), jnp.deg2rad(X[..., 1])
        across = jnp.cos(latitude)
        point = across * jnp.cos(longitude), across * jnp.sin(longitude), jnp.sin(latitude)
        return self.radius * jnp.stack(point, axis=-1)

    def rough_columns(self, d: int) -> frozenset[int]:
        """Both columns, if the kernel is rough in any direction."""
        return frozenset(range(d) if self.kernel.rough_columns(3) else ())

    def categories(self, d: int) -> dict[int, tuple[int, ...]]:
        """No categories."""
        return {}

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        if not self.great_circle:
            return super().evaluate(X, Z)
        points = self._inputs_of_parts(X), self._inputs_of_parts(Z)
        kernel: Any = self.kernel
        lengthscale = kernel.lengthscale.reshape(())
        if isinstance(kernel, Wendland):
            is_valid = lengthscale <= math.pi * self.radius * _ROUNDING
            lengthscale = jnp.where(is_valid, lengthscale, jnp.nan)
        near = 0.25 * squared_distances(points[0], points[1], self.radius)
        opposite = 0.25 * squared_distances(points[0], -points[1], self.radius)
        inverse = jnp.square(self.radius * reciprocal(lengthscale))
        return kernel.variance * kernel.correlation(inverse * _squared_angle(near, opposite))

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The features of the points in space."""
        if self.great_circle:
            raise ValueError(
                "`OnSphere(..., great_circle=True)` has no spectral density: leave out "
                "`great_circle`, or use inducing points, neighbors or an exact estimator."
            )
        return super().evaluate_features(key, X, num_features, origin)


def _squared_angle(near: Float[Array, "n m"], opposite: Float[Array, "n m"]) -> Float[Array, "n m"]:
    """The squared angle of points of the unit sphere.

    At opposite places, where it has no derivative, that is set to zero.

    Args:
        near: the square of half the distance of two points.
        opposite: the same for the first point and the opposite of the second.
    """
    is_small, is_far, is_opposite = near < _SMALL, near > 0.5, opposite <= 0.0
    inside = jnp.where(is_far, opposite, near)
    inside = jnp.where(is_small | is_opposite, 0.25, inside)
    angle = 2.0 * jnp.arcsin(jnp.sqrt(inside))
    angle = jnp.where(is_opposite, math.pi, jnp.where(is_far, math.pi - angle, angle))
    first_terms = 4.0 * near * (1.0 + near / 3.0 + 8.0 / 45.0 * near**2)
    return jnp.where(is_small, first_terms, jnp.square(angle))
