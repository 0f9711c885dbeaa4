"""Random Fourier features that are computed one column at a time."""

import math
import numbers
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.features.feature_map import AbstractKernelFeatures
from numpyro_scalegp.kernels.kernel import AbstractKernel, Scaled, as_single
from numpyro_scalegp.kernels.matern import Matern12, Matern32, Matern52
from numpyro_scalegp.kernels.spectrum import Waves
from numpyro_scalegp.kernels.stationary import RBF
from numpyro_scalegp.numerics.trigonometry import cos_of_turns, turns_of


class RandomFourier(AbstractKernelFeatures):
    """Cosines and sines at frequencies from a stationary kernel's spectral density.

    phi_2r(x) = c cos(w_r'x) and phi_2r+1(x) = c sin(w_r'x) with c^2 = 2 k(x, x) / m, so that
    phi(x)'phi(z) is k(x, z) on average over seeds; the weights are standard normal a priori. The
    frequency of each pair has a separate random stream, so that any features can be computed again
    when needed, and none are stored. With the same seed, the features are a function of the
    hyperparameters.

    Args:
        kernel: a stationary kernel.
        num_features: the number m of features, even.
        seed: an integer, or a typed JAX key.
        table: the stored frequencies, set by `stored`.
        origin: the point from which the phases of all features are measured, shape (d,), zero by
            default. If the data lie thousands of lengthscales away from zero, give a point near the
            data: otherwise rounding errors of a frequency, or a small step of the lengthscale,
            change the features.

    Raises:
        ValueError: if `num_features` is not even and positive; when called, if the kernel is not
            stationary.

    References:
        Rahimi and Recht (2007), Random Features for Large-Scale Kernel Machines.
        `columns`: O(n d num) time, including num frequencies in d dimensions.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.5), 10_000_000, seed=0)
        >>> phi.columns(jnp.zeros((3, 2)), jnp.array([0, 9_999_998])).shape
        (3, 2)
    """

    kernel: AbstractKernel
    num_features: int = eqx.field(static=True, converter=checks.plain)
    seed: Key[Array, ""] = eqx.field(converter=lambda seed: _as_key(seed))
    table: Float[Array, "pairs d"] | None = None
    origin: Float[Array, " d"] | None = eqx.field(
        converter=lambda origin: None if origin is None else checks.as_float(origin), default=None
    )

    def __check_init__(self) -> None:
        as_single("kernel", self.kernel)
        checks.count("num_features", self.num_features, 2, even=True)

    def size(self, X: Float[Array, "n d"]) -> int:
        """The number of features, `num_features`."""
        return self.num_features

    def stored(self, num_columns: int) -> "RandomFourier":
        """The same features with stored frequencies, which are otherwise drawn when needed.

        Call it once, outside of the model, and set the kernel in the model with `with_kernel`. It
        is worthwhile for many input dimensions, and for kernels whose frequencies are expensive to
        draw (Matern).

        Args:
            num_columns: the number d of input dimensions.

        Returns:
            Features that hold an array of shape (m / 2, d), in units of one over the lengthscale.

        Raises:
            ValueError: if the kernel is not `RBF`, a Matern kernel or a multiple of one of these:
                the frequencies of other kernels are not inversely proportional to a lengthscale.
        """
        checks.count("num_columns", num_columns)
        waves = self._waves(jnp.arange(self.num_features // 2), num_columns)
        table = waves.frequencies * _lengthscale(self.kernel)
        return RandomFourier(self.kernel, self.num_features, self.seed, table, self.origin)

    def with_kernel(self, kernel: AbstractKernel) -> "RandomFourier":
        """The same features for other hyperparameters.

        Args:
            kernel: a kernel of the same kind. With a `component` of this kernel, the component's
                features are unchanged, and all other features are zero.

        Returns:
            Features with the same seed and the same stored frequencies, if there are any.

        Raises:
            ValueError: if the stored frequencies are for another kind of kernel.
        """
        as_single("kernel", kernel)
        if self.table is not None and type(_inner(kernel)) is not type(_inner(self.kernel)):
            raise ValueError(
                f"the stored frequencies are for `{type(_inner(self.kernel)).__name__}`, not for "
                f"`{type(_inner(kernel)).__name__}`: make features for that kernel."
            )
        return RandomFourier(kernel, self.num_features, self.seed, self.table, self.origin)

    def _waves(self, pairs: Int[Array, " p"], d: int) -> Waves:
        def wave(pair: Array) -> Waves:
            waves = self.kernel.sample_waves(jax.random.fold_in(self.seed, pair), 1, d)
            return Waves(waves.frequencies[0], waves.variance, waves.active[0])

        return jax.vmap(wave, out_axes=Waves(0, None, 0))(pairs)  # type: ignore[arg-type]

    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index`, shape (n, num)."""
        pairs = index // 2
        if self.origin is not None:
            checks.shape("origin", self.origin, X.shape[1:], why="one row of inputs")
        if self.table is None:
            frequencies, variance, active = self._waves(pairs, X.shape[1])
        else:
            frequencies = self.table[pairs] / _lengthscale(self.kernel)
            variance, active = self.kernel.evaluate_diag(X[:1]), jnp.ones(pairs.shape, bool)
        turns = turns_of(X, (frequencies / (2.0 * math.pi)).astype(X.dtype), self.origin)
        # A sine is a cosine a quarter of a turn later.
        waves = cos_of_turns(turns - 0.25 * (index % 2).astype(X.dtype))
        return jnp.where(active, jnp.sqrt(variance * (2.0 / self.num_features)), 0.0) * waves

    def covariance(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The kernel itself, the average of phi(x)'phi(z) over seeds, shape (n, m)."""
        return self.kernel.evaluate(X, Z)

    def hyperparameters(self) -> list[Array]:
        """The hyperparameters of the kernel; the seed and stored frequencies never change."""
        return jax.tree.leaves(self.kernel)

    def with_hyperparameters(self, hyperparameters: list[Array]) -> "RandomFourier":
        """The same features with another kernel's hyperparameters."""
        structure = jax.tree.structure(self.kernel)
        return self.with_kernel(jax.tree.unflatten(structure, hyperparameters))


def _as_key(seed: Any) -> Key[Array, ""]:
    if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
        return jax.random.key(int(seed))
    return checks.as_key(seed, "seed")


def _inner(kernel: AbstractKernel) -> AbstractKernel:
    return _inner(kernel.kernel) if isinstance(kernel, Scaled) else kernel


def _lengthscale(kernel: AbstractKernel) -> Float[Array, "..."]:
    kernel = _inner(kernel)
    if not isinstance(kernel, RBF | Matern12 | Matern32 | Matern52):
        raise ValueError(
            f"the frequencies of `{type(kernel).__name__}` cannot be stored: only RBF and Matern "
            "kernels have frequencies inversely proportional to a lengthscale. Use the features "
            "without `stored`."
        )
    return kernel.lengthscale
