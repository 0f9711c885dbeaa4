"""Random Fourier features whose columns are made one by one."""

import math
import numbers
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.trigonometry import cos_of_turns, turns_of
from numpyro_scalegp.features.feature_map import AbstractKernelFeatures
from numpyro_scalegp.kernels import RBF, AbstractKernel, Matern12, Matern32, Matern52
from numpyro_scalegp.kernels.kernel import Scaled, as_single
from numpyro_scalegp.kernels.spectrum import Waves


class RandomFourier(AbstractKernelFeatures):
    """Cosines and sines at frequencies from a stationary kernel's spectral density.

    phi_2r(x) = c cos(w_r'x) and phi_2r+1(x) = c sin(w_r'x) with c^2 = 2 k(x, x) / m, so that
    phi(x)'phi(z) is k(x, z) on average over seeds; the weights are standard normal a priori. A
    pair's frequency comes from a random stream of its own: any columns can be made at any time,
    always the same, and none are kept. With the same seed they follow the hyperparameters.

    Args:
        kernel: a stationary kernel.
        num_features: the number m of features, even.
        seed: an integer, or a typed JAX key.
        table: what `stored` keeps.
        origin: a row at which every wave begins, shape (d,), zero by default. Where data lie
            thousands of lengthscales away from zero, give one near them: a frequency's rounding,
            or a small step of the lengthscale, would make other functions.

    Raises:
        ValueError: if `num_features` is not even and positive; when called, if the kernel is not
            stationary.

    References:
        Rahimi and Recht (2007), Random Features for Large-Scale Kernel Machines.
        `columns`: O(n d num) time, and the random numbers of num times d frequencies.

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
        """The same features with their frequencies kept, instead of drawn when they are needed.

        Make it once, outside of the model, and give the model's kernel with `with_kernel`: worth it
        for inputs of many columns, and for kernels whose frequencies are dear to draw (Matern).

        Args:
            num_columns: the number d of input columns.

        Returns:
            Features that hold an array of shape (m / 2, d), in units of one over the lengthscale.

        Raises:
            ValueError: if the kernel is not `RBF` or a Matern kernel, or a multiple of one: then
                frequencies are not inversely proportional to a lengthscale.
        """
        checks.count("num_columns", num_columns)
        waves = self._waves(jnp.arange(self.num_features // 2), num_columns)
        table = waves.frequencies * _lengthscale(self.kernel)
        return RandomFourier(self.kernel, self.num_features, self.seed, table, self.origin)

    def with_kernel(self, kernel: AbstractKernel) -> "RandomFourier":
        """The same features for other hyperparameters.

        Args:
            kernel: a kernel of the same kind. For a `component` of this kernel the columns are the
                same where the wave is its own, and zero elsewhere.

        Returns:
            Features with the same seed and the same frequencies kept, if any are.

        Raises:
            ValueError: if frequencies of another kind of kernel are kept.
        """
        as_single("kernel", kernel)
        if self.table is not None and type(_inner(kernel)) is not type(_inner(self.kernel)):
            raise ValueError(
                f"the frequencies kept are those of `{type(_inner(self.kernel)).__name__}`, not of "
                f"`{type(_inner(kernel)).__name__}`: make features for that kernel."
            )
        return RandomFourier(kernel, self.num_features, self.seed, self.table, self.origin)

    def _waves(self, pairs: Int[Array, " p"], d: int) -> Waves:
        def one(pair: Array) -> Waves:
            waves = self.kernel.sample_waves(jax.random.fold_in(self.seed, pair), 1, d)
            return Waves(waves.frequencies[0], waves.variance, waves.active[0])

        return jax.vmap(one, out_axes=Waves(0, None, 0))(pairs)  # type: ignore[arg-type]

    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index`, shape (n, num)."""
        pairs = index // 2
        if self.origin is not None:
            checks.shape("origin", self.origin, X.shape[1:], why="one row of inputs")
        if self.table is None:
            frequencies, variance, active = self._waves(pairs, X.shape[1])
        else:
            frequencies = self.table[pairs] / _lengthscale(self.kernel)
            variance, active = self.kernel.diag(X[:1]), jnp.ones(pairs.shape, bool)
        turns = turns_of(X, (frequencies / (2.0 * math.pi)).astype(X.dtype), self.origin)
        # A sine is a cosine a quarter of a turn later.
        waves = cos_of_turns(turns - 0.25 * (index % 2).astype(X.dtype))
        return jnp.where(active, jnp.sqrt(variance * (2.0 / self.num_features)), 0.0) * waves

    def covariance(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The kernel itself, which the features have on average, shape (n, m)."""
        return self.kernel(X, Z)

    def hyperparameters(self) -> list[Array]:
        """The kernel's: seed and stored frequencies never change."""
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
            f"the frequencies of `{type(kernel).__name__}` cannot be stored: only those of RBF and "
            "Matern kernels are inversely proportional to a lengthscale. Leave them to be drawn."
        )
    return kernel.lengthscale
