"""Random walks in continuous time: the local level and the local trend."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS, AbstractKernel
from numpyro_scalegp.kernels.state_space import (
    AbstractStateSpace,
    Blocks,
    FirstEntry,
    Transition,
    matrix,
)


class _Walk(AbstractKernel):
    """A process that starts from zero at `origin`."""

    variance: eqx.AbstractVar[Float[Array, "..."]]
    origin: eqx.AbstractVar[Float[Array, "..."]]

    def __check_init__(self) -> None:
        checks.positive("variance", self.variance)
        checks.finite("origin", self.origin)
        _ = self.batch_shape  # raises unless batch shapes fit together

    def _since_origin(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        if X.shape[1] != 1:
            raise ValueError(
                f"`{type(self).__name__}` is a kernel of one input column, got {X.shape[1]}: write "
                "`kernel.on((0,))`."
            )
        return jnp.maximum(X[:, 0] - self.origin, 0.0)


class Wiener(_Walk):
    """Brownian motion, a random walk in continuous time: the local level model.

    k(x, z) = variance * min(x, z), of times since `origin`. The function is zero at the origin and
    before it: add a `Constant` for an unknown level there. Increments over equal times have equal
    variance, `variance` for a unit of time, however far from the origin.

    Args:
        variance: variance of the increment over a unit of the input, in squared units of the
            function, positive; shape () or (*batch,).
        origin: where the walk starts, such as the first time; shape () or (*batch,).

    Raises:
        ValueError: if `variance` is not positive, `origin` not finite, shapes do not fit together
            or, when called, the inputs have several columns.

    References:
        Durbin and Koopman (2012), Time Series Analysis by State Space Methods, section 2.1.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> level = sgp.kernels.Constant(10.0) + sgp.kernels.Wiener(0.5, origin=1990.0)
    """

    hyperparameter_ndims = {"variance": 0, "origin": 0}

    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)
    origin: Float[Array, "..."] = eqx.field(
        converter=lambda value: checks.as_float(value, "origin"), default=0.0
    )

    def rough_columns(self, d: int) -> frozenset[int]:
        """The time: functions with this kernel are not differentiable."""
        return frozenset(range(d))

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        return self.variance * jnp.minimum(self._since_origin(X)[:, None], self._since_origin(Z))

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        return self.variance * self._since_origin(X)

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """The function itself; see `AbstractKernel.state_space`."""
        return Walk(self.variance, self.origin, 1)


class IntegratedWiener(_Walk):
    """The integral of Brownian motion: a trend whose slope is a random walk.

    k(x, z) = variance * (m^3 / 3 + m^2 |x - z| / 2), of times since `origin`, with m the smaller
    one. The posterior mean is a cubic smoothing spline. Function and slope are zero at the origin,
    and the function is zero before it: add `Constant` and `Linear` for an unknown level and slope
    there, and `Wiener` for a level that wanders as well, which gives the local linear trend model.

    Args:
        variance: variance of the increment of the slope over a unit of the input, in squared units
            of the slope, positive; shape () or (*batch,).
        origin: where the walk starts, such as the first time; shape () or (*batch,).

    Raises:
        ValueError: as for `Wiener`.

    References:
        Wahba (1978), Improper Priors, Spline Smoothing and the Problem of Guarding Against Model
        Errors in Regression; Durbin and Koopman (2012), section 3.2.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> trend = sgp.kernels.Linear(1.0, bias=10.0) + sgp.kernels.IntegratedWiener(0.01)
    """

    hyperparameter_ndims = {"variance": 0, "origin": 0}

    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)
    origin: Float[Array, "..."] = eqx.field(
        converter=lambda value: checks.as_float(value, "origin"), default=0.0
    )

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        x, z = self._since_origin(X)[:, None], self._since_origin(Z)[None, :]
        # By a choice, not a minimum, whose second derivatives are wrong at equal inputs.
        first, last = jnp.where(x <= z, x, z), jnp.where(x <= z, z, x)
        return self.variance * jnp.square(first) * (3.0 * last - first) / 6.0

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        return self.variance * self._since_origin(X) ** 3 / 3.0

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """The function and its slope; see `AbstractKernel.state_space`."""
        return Walk(self.variance, self.origin, 2)


class Walk(FirstEntry):
    """Brownian motion, of one state variable, or its integral, of two."""

    variance: Float[Array, ""]
    origin: Float[Array, ""]
    num_variables: int = eqx.field(static=True)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The function or, for the integral, the function and its slope."""
        return (self.num_variables,)

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """What the noise has added up to since the origin."""
        return (self._noise(jnp.maximum(time - self.origin, 0.0)),)

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """The slope carries on; there is no noise before the origin."""
        one, zero = jnp.ones_like(elapsed), jnp.zeros_like(elapsed)
        after = jnp.minimum(elapsed, jnp.maximum(start + elapsed - self.origin, 0.0))
        rows = [[one, elapsed], [zero, one]] if self.num_variables == 2 else [[one]]
        return Transition((matrix(rows),), (self._noise(after),))

    def _noise(self, time: Float[Array, ""]) -> Any:
        v = self.variance
        if self.num_variables == 1:
            return matrix([[v * time]])
        rows = [[time**3 / 3.0, time**2 / 2.0], [time**2 / 2.0, time]]
        return matrix([[v * entry for entry in row] for row in rows])
