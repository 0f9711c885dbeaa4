"""Kernels of space and time that are no products of a kernel of each."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.kernels.distances import squared_distances
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.stationary import AbstractStationary
from numpyro_scalegp.numerics.rounding import at_most


class Gneiting(AbstractKernel):
    """Gneiting's nonseparable kernel of space and time: far places forget more slowly.

    k((h, u)) = psi^-(time_decay + interaction d / 2) k_1(h / psi^(interaction / 2)), with
    psi = 1 + (|u| / time_lengthscale)^(2 time_power), h the difference of the d columns of space
    and u of the last column, time. At `interaction=0` it is the product of k_1 and a kernel of
    time; at 1, correlations in space reach as much farther as the times are apart.

    Args:
        space: k_1, a stationary kernel of the columns before the last one that is valid in any
            dimension: `RBF`, `RationalQuadratic` or a Matern kernel. Its variance is the kernel's.
        time_lengthscale: in units of time, positive; shape ().
        interaction: between 0 and 1; shape ().
        time_decay: the exponent of the decay in time that a product with space would have,
            not negative; shape ().
        time_power: between 0 (excluded) and 1, at which functions are smooth in time; shape ().

    Raises:
        ValueError: if a hyperparameter is out of range, which inside `jit` gives NaN; when called,
            if inputs have fewer than two columns.
        TypeError: if `space` is not a stationary kernel that is valid in any dimension.

    References:
        Gneiting (2002), Nonseparable, Stationary Covariance Functions for Space-Time Data, eq. 14.
        It has no random features: use inducing points, neighbors or an exact estimator.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> space = sgp.kernels.Matern32(lengthscale=2.0)
        >>> kernel = sgp.kernels.Gneiting(space, time_lengthscale=3.0, interaction=0.8)
        >>> X = jnp.array([[0.0, 0.0, 0.0], [1.0, 1.0, 3.0]])  # two columns of space, then time
        >>> kernel(X[:1], X).round(3).tolist()
        [[1.0, 0.21900001168251038]]
    """

    hyperparameter_ndims = {
        "time_lengthscale": 0,
        "interaction": 0,
        "time_decay": 0,
        "time_power": 0,
    }

    space: AbstractStationary
    time_lengthscale: Float[Array, "..."] = eqx.field(
        converter=checks.to_positive("time_lengthscale")
    )
    interaction: Float[Array, "..."] = eqx.field(
        converter=checks.to_positive("interaction", or_zero=True), default=1.0
    )
    time_decay: Float[Array, "..."] = eqx.field(
        converter=checks.to_positive("time_decay", or_zero=True), default=1.0
    )
    time_power: Float[Array, "..."] = eqx.field(
        converter=checks.to_positive("time_power"), default=1.0
    )

    def __check_init__(self) -> None:
        checks.instance("space", self.space, AbstractStationary)
        # Mixtures of RBF kernels, whose precisions can be drawn, are valid in any dimension.
        if type(self.space).sample_precisions is AbstractStationary.sample_precisions:
            raise TypeError(
                "`space` must be a kernel that is valid in any dimension, `RBF`, "
                f"`RationalQuadratic` or a Matern kernel, got `{type(self.space).__name__}`."
            )
        for name in ("time_lengthscale", "time_power"):
            checks.positive(name, getattr(self, name))
        for name in ("interaction", "time_decay"):
            checks.positive(name, getattr(self, name), or_zero=True)
        for name in ("interaction", "time_power"):
            value = getattr(self, name)
            if checks.is_concrete(value) and (largest := float(as_numpy(value).max())) > 1.0:
                raise ValueError(f"`{name}` must be at most 1, got {largest:g}.")
        _ = self.batch_shape  # raises unless batch shapes fit together

    @property
    def is_stationary(self) -> bool:
        """True: k(x, z) depends on x - z alone."""
        return True

    def _check_width(self, d: int) -> None:
        if d < 2:
            raise ValueError(
                "`Gneiting` is a kernel of space and time and needs at least two input columns, "
                f"time the last, got {d}."
            )

    def _inputs_of_parts(self, X: Float[Array, "... n d"]) -> Float[Array, "... n k"]:
        self._check_width(X.shape[-1])
        return X[..., :-1]

    def scaled_inputs(
        self, X: Float[Array, "... n d"]
    ) -> list[tuple[Float[Array, "..."], Float[Array, "... n k"]]]:
        """The lengthscales of space and time; see `AbstractKernel.scaled_inputs`."""
        of_space = super().scaled_inputs(X)
        return [*of_space, (self.time_lengthscale[..., None], X[..., -1:])]

    def rough_columns(self, d: int) -> frozenset[int]:
        """Time, and the columns in which functions of space are not differentiable."""
        return self.space.rough_columns(d - 1) | {d - 1}

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        places = self._inputs_of_parts(X), self._inputs_of_parts(Z)
        d = places[0].shape[1]
        log_psi = self._log_psi(squared_distances(X[:, -1:], Z[:, -1:], self.time_lengthscale))
        self.space._check_width(d)
        squared = self.space._squared_distances(*places) * jnp.exp(-self.interaction * log_psi)
        decay = jnp.exp(-(self.time_decay + 0.5 * d * self.interaction) * log_psi)
        is_valid = (self.interaction <= 1.0) & (self.time_power <= 1.0)
        decay = jnp.where(is_valid, decay, jnp.nan)
        return self.space.variance * self.space.correlation(squared) * decay

    def _log_psi(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The logarithm of psi from squared differences of time over the lengthscale."""
        is_apart = squared > 0.0
        power = jnp.exp(self.time_power * jnp.log(jnp.where(is_apart, squared, 1.0)))
        power = at_most(power, jnp.finfo(power.dtype).max)
        return jnp.log1p(jnp.where(is_apart, power, squared))

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        dtype = jnp.result_type(X, *jax.tree.leaves(self))
        variance = self.space.evaluate_diag(self._inputs_of_parts(X)).astype(dtype)
        return jnp.where(jnp.isnan(X[:, -1]), jnp.nan, variance)

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Not available; see `AbstractKernel.sample_frequencies`."""
        raise ValueError(
            "`Gneiting` has no spectral density in closed form: use inducing points, neighbors or "
            "an exact estimator instead."
        )
