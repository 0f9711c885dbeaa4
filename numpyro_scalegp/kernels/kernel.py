"""The interface of a covariance function, and how two of them compose."""

import abc
import math
import operator
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.trigonometry import cos_sin_of_turns, turns_of


class AbstractKernel(eqx.Module):
    """A covariance function k(x, z) with array hyperparameters.

    `k(X, Z)` is the matrix of all pairs and `k.diag(X)` its diagonal. Kernels compose with `+`, `*`
    and positive scalars, and `k.on((0, 3))` lets a kernel see some of the input columns only.
    Hyperparameters are arrays without priors or constraints: those belong to the model.
    """

    def __call__(
        self, X: Float[ArrayLike, "n d"], Z: Float[ArrayLike, "m d"]
    ) -> Float[Array, "n m"]:
        """Evaluate the kernel for all pairs of rows.

        Args:
            X: inputs, shape (n, d).
            Z: inputs, shape (m, d).

        Returns:
            The (n, m) matrix of k(x_i, z_j) in the common dtype of inputs and hyperparameters.

        Raises:
            ValueError: if `X` or `Z` is not of rank 2, holds NaN or infinity, or the widths differ.
        """
        X = checks.inputs("X", X, may_be_empty=True)
        Z = checks.inputs("Z", Z, width=X.shape[1], may_be_empty=True)
        return self._gram(X, Z)

    def diag(self, X: Float[ArrayLike, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,), in O(n d)."""
        return self._diag(checks.inputs("X", X, may_be_empty=True))

    def covariance(self, X: Float[ArrayLike, "n d"]) -> Float[Array, "n n"]:
        """The matrix K(X, X) with exactly the variances `diag(X)` on its diagonal, shape (n, n)."""
        X = checks.inputs("X", X, may_be_empty=True)
        diagonal = jnp.eye(X.shape[0], dtype=bool)
        return jnp.where(diagonal, self._diag(X)[:, None], self._gram(X, X))

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw angular frequencies from the normalised spectral density.

        They satisfy E[cos(w'(x - z))] = k(x, z) / k(x, x).

        Args:
            key: a typed JAX key.
            num: number of frequencies.
            d: number of input columns.

        Returns:
            Frequencies in radians per unit of the inputs, shape (num, d).

        Raises:
            ValueError: if the kernel is not stationary, so that it has no spectral density.
        """
        raise ValueError(
            f"`{type(self).__name__}` has no spectral density: only stationary kernels, their sums "
            "and their products have one. Use inducing points or an exact estimator instead."
        )

    @property
    def is_stationary(self) -> bool:
        """Whether k(x, z) depends on x - z alone, so that the kernel has a spectral density."""
        return False

    @property
    def has_smooth_features(self) -> bool:
        """Whether random features of a fixed key have a derivative in every hyperparameter.

        Not where one decides between discrete frequencies: the lengthscale of `Periodic`, or the
        variances of a sum inside of a product.
        """
        return self._has_smooth_frequencies

    @property
    def _has_smooth_frequencies(self) -> bool:
        return True

    def random_features(
        self,
        key: Key[Array, ""],
        X: Float[ArrayLike, "n d"],
        num_features: int,
        *,
        origin: Float[ArrayLike, " d"] | None = None,
    ) -> Float[Array, "n p"]:
        """Map inputs to random features that have the kernel as their expected inner product.

        E[phi(x)'phi(z)] = k(x, z) over keys. A stationary kernel has pairs of a cosine and a sine
        with frequencies from its spectral density; sums, products and mapped inputs combine the
        features of their parts, and a linear kernel has its own, exact ones. With the same key, the
        frequencies follow the hyperparameters (in steps where the spectrum is discrete, as that of
        `Periodic`), and each row's features depend on that row alone.

        Args:
            key: a typed JAX key; the features of other rows belong together if drawn with the same.
            X: inputs, shape (n, d).
            num_features: number of features wanted, an even number of at least 2.
            origin: a row at which every wave begins, shape (d,), zero by default. It does not
                change the expectation. Far from it a rounding of a frequency is another function:
                give a row of the data where features belong together that different programs
                compute, or that follow the hyperparameters, such as `X[0]`.

        Returns:
            Features, shape (n, p); p is `num_features` unless the kernel has a part with exact
            features. Time O(n d p), memory O(n p).

        Raises:
            ValueError: if the kernel is not stationary and not made of parts that have features.

        References:
            Rahimi and Recht (2007), Random Features for Large-Scale Kernel Machines; Sutherland and
            Schneider (2015), On the Error of Random Fourier Features: pairs beat random phases.
        """
        X, key = checks.inputs("X", X), checks.as_key(key)
        amplitude = jnp.sqrt(self._diag(X[:1]))
        if origin is not None:
            X = X - origin
        num_pairs = max(1, checks.count("num_features", num_features) // 2)
        frequencies = self.sample_frequencies(key, num_pairs, X.shape[1]) / (2.0 * math.pi)
        cosines, sines = cos_sin_of_turns(turns_of(X, frequencies.astype(X.dtype)))
        return amplitude / math.sqrt(num_pairs) * jnp.concatenate([cosines, sines], axis=1)

    def on(self, dims: Sequence[int]) -> "ActiveDims":
        """The same kernel on the input columns `dims` only, each named once."""
        return ActiveDims(self, _as_dims(dims))

    def __add__(self, other: "AbstractKernel") -> "Sum":
        return Sum(self, other) if isinstance(other, AbstractKernel) else NotImplemented

    def __mul__(self, other: "AbstractKernel | ArrayLike") -> "AbstractKernel":
        if isinstance(other, AbstractKernel):
            return Product(self, other)
        return Scaled(self, checks.as_float(other, "scale"))

    def __rmul__(self, other: ArrayLike) -> "Scaled":
        return Scaled(self, checks.as_float(other, "scale"))

    # NumPy arrays must leave `array * kernel` to `__rmul__` instead of looping over their entries.
    __array_ufunc__ = None

    @abc.abstractmethod
    def _gram(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]: ...

    @abc.abstractmethod
    def _diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]: ...


class Sum(AbstractKernel):
    """The sum of two kernels, k(x, z) = k_1(x, z) + k_2(x, z)."""

    left: AbstractKernel
    right: AbstractKernel

    def __check_init__(self) -> None:
        checks.instance("left", self.left, AbstractKernel)
        checks.instance("right", self.right, AbstractKernel)

    def _gram(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        return self.left._gram(X, Z) + self.right._gram(X, Z)

    def _diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return self.left._diag(X) + self.right._diag(X)

    @property
    def is_stationary(self) -> bool:
        """Whether both kernels are stationary."""
        return self.left.is_stationary and self.right.is_stationary

    @property
    def has_smooth_features(self) -> bool:
        """Whether both kernels' features are smooth."""
        return self.left.has_smooth_features and self.right.has_smooth_features

    @property
    def _has_smooth_frequencies(self) -> bool:
        return False  # each is one kernel's or the other's

    def random_features(
        self,
        key: Key[Array, ""],
        X: Float[ArrayLike, "n d"],
        num_features: int,
        *,
        origin: Float[ArrayLike, " d"] | None = None,
    ) -> Float[Array, "n p"]:
        """Both kernels' features, half of the number each, side by side."""
        left_key, right_key = jax.random.split(key)
        share = max(2, num_features // 2)
        left = self.left.random_features(left_key, X, share, origin=origin)
        right = self.right.random_features(right_key, X, share, origin=origin)
        return jnp.concatenate([left, right], axis=1)

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw from the mixture of both spectral densities, weighed by the variances."""
        choice_key, left_key, right_key = jax.random.split(key, 3)
        left = self.left.sample_frequencies(left_key, num, d)
        right = self.right.sample_frequencies(right_key, num, d)
        origin = jnp.zeros((1, d), left.dtype)
        left_variance, right_variance = self.left._diag(origin), self.right._diag(origin)
        uniform = jax.random.uniform(choice_key, (num, 1), left.dtype)
        is_left = uniform * (left_variance + right_variance) < left_variance
        return jnp.where(is_left, left, right)


class Product(AbstractKernel):
    """The product of two kernels, k(x, z) = k_1(x, z) k_2(x, z)."""

    left: AbstractKernel
    right: AbstractKernel

    def __check_init__(self) -> None:
        checks.instance("left", self.left, AbstractKernel)
        checks.instance("right", self.right, AbstractKernel)

    def _gram(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        return self.left._gram(X, Z) * self.right._gram(X, Z)

    def _diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return self.left._diag(X) * self.right._diag(X)

    @property
    def is_stationary(self) -> bool:
        """Whether both kernels are stationary."""
        return self.left.is_stationary and self.right.is_stationary

    @property
    def has_smooth_features(self) -> bool:
        """Whether the frequencies, or else both kernels' features, are smooth."""
        if self.is_stationary:
            return self._has_smooth_frequencies
        return self.left.has_smooth_features and self.right.has_smooth_features

    @property
    def _has_smooth_frequencies(self) -> bool:
        return self.left._has_smooth_frequencies and self.right._has_smooth_frequencies

    def random_features(
        self,
        key: Key[Array, ""],
        X: Float[ArrayLike, "n d"],
        num_features: int,
        *,
        origin: Float[ArrayLike, " d"] | None = None,
    ) -> Float[Array, "n p"]:
        """Fourier features of a stationary product; else products of both kernels' features.

        With standard normal G and H, the columns of (Phi_1 G) * (Phi_2 H) / sqrt(p) have the
        expected inner product k_1 k_2.
        """
        if self.is_stationary:
            return super().random_features(key, X, num_features, origin=origin)
        keys = jax.random.split(key, 4)
        left = self.left.random_features(keys[0], X, num_features, origin=origin)
        right = self.right.random_features(keys[1], X, num_features, origin=origin)
        # In the hyperparameters' dtype, as frequencies are: the same for inputs of another one.
        dtype = jnp.result_type(*jax.tree.leaves(eqx.filter(self, eqx.is_inexact_array)))
        G = jax.random.normal(keys[2], (left.shape[1], num_features), dtype)
        H = jax.random.normal(keys[3], (right.shape[1], num_features), dtype)
        return matmul(left, G) * matmul(right, H) / math.sqrt(num_features)

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw from the convolution of both spectral densities: frequencies add up."""
        left_key, right_key = jax.random.split(key)
        left = self.left.sample_frequencies(left_key, num, d)
        return left + self.right.sample_frequencies(right_key, num, d)


class Scaled(AbstractKernel):
    """A kernel times a positive number, k(x, z) = scale * k_1(x, z).

    Raises:
        ValueError: if `scale` is not a positive scalar.
    """

    kernel: AbstractKernel
    scale: Float[Array, ""] = eqx.field(converter=checks.to_positive("scale"))

    def __check_init__(self) -> None:
        checks.instance("kernel", self.kernel, AbstractKernel)
        checks.shape("scale", self.scale, (), why="a kernel is multiplied by one number")
        checks.positive("scale", self.scale)

    def _gram(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        return self.scale * self.kernel._gram(X, Z)

    def _diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return self.scale * self.kernel._diag(X)

    @property
    def is_stationary(self) -> bool:
        """Whether the kernel itself is stationary."""
        return self.kernel.is_stationary

    @property
    def has_smooth_features(self) -> bool:
        """Whether the kernel's own features are smooth."""
        return self.kernel.has_smooth_features

    @property
    def _has_smooth_frequencies(self) -> bool:
        return self.kernel._has_smooth_frequencies

    def random_features(
        self,
        key: Key[Array, ""],
        X: Float[ArrayLike, "n d"],
        num_features: int,
        *,
        origin: Float[ArrayLike, " d"] | None = None,
    ) -> Float[Array, "n p"]:
        """The kernel's features times the root of the scale."""
        return jnp.sqrt(self.scale) * self.kernel.random_features(
            key, X, num_features, origin=origin
        )

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw the kernel's own frequencies: a scale does not change the normalised density."""
        return self.kernel.sample_frequencies(key, num, d)


class ActiveDims(AbstractKernel):
    """A kernel that sees the input columns `dims` only, k(x, z) = k_1(x[dims], z[dims]).

    Raises:
        TypeError: if `dims` is not a sequence of integers.
        ValueError: if `dims` is empty, negative or names a column twice, or, on evaluation, lies
            beyond the inputs' width.
    """

    kernel: AbstractKernel
    dims: tuple[int, ...] = eqx.field(static=True, converter=lambda dims: _as_dims(dims))

    def __check_init__(self) -> None:
        checks.instance("kernel", self.kernel, AbstractKernel)
        if not self.dims or min(self.dims) < 0:
            raise ValueError(
                f"`dims` must name at least one column, counted from 0, got {self.dims}."
            )
        if len(set(self.dims)) < len(self.dims):
            raise ValueError(f"`dims` must name each column once, got {self.dims}.")

    def _columns(self, X: Float[Array, "n d"]) -> Float[Array, "n k"]:
        if max(self.dims) >= X.shape[1]:
            raise ValueError(
                f"`dims` must lie in 0..{X.shape[1] - 1} for inputs of shape {X.shape}, "
                f"got {self.dims}."
            )
        return X[:, jnp.array(self.dims)]

    def _gram(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        return self.kernel._gram(self._columns(X), self._columns(Z))

    def _diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return self.kernel._diag(self._columns(X))

    @property
    def is_stationary(self) -> bool:
        """Whether the kernel itself is stationary."""
        return self.kernel.is_stationary

    @property
    def has_smooth_features(self) -> bool:
        """Whether the kernel's own features are smooth."""
        return self.kernel.has_smooth_features

    @property
    def _has_smooth_frequencies(self) -> bool:
        return self.kernel._has_smooth_frequencies

    def random_features(
        self,
        key: Key[Array, ""],
        X: Float[ArrayLike, "n d"],
        num_features: int,
        *,
        origin: Float[ArrayLike, " d"] | None = None,
    ) -> Float[Array, "n p"]:
        """The kernel's features of the active columns."""
        active = self._columns(checks.inputs("X", X))
        if origin is not None:
            origin = self._columns(jnp.asarray(origin)[None])[0]
        return self.kernel.random_features(key, active, num_features, origin=origin)

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw frequencies for the active columns; those of the others are zero."""
        if max(self.dims) >= d:
            raise ValueError(f"`dims` must lie in 0..{d - 1} for d = {d}, got {self.dims}.")
        active = self.kernel.sample_frequencies(key, num, len(self.dims))
        return jnp.zeros((num, d), active.dtype).at[:, jnp.array(self.dims)].set(active)


def _as_dims(dims: Any) -> tuple[int, ...]:
    try:
        entries = tuple(dims)
        if any(np.asarray(entry).dtype == bool for entry in entries):
            raise TypeError  # a mask, which as numbers would name columns 0 and 1
        return tuple(operator.index(entry) for entry in entries)
    except TypeError:
        raise TypeError(
            f"`dims` must be a sequence of integers such as (0, 3), got {dims!r}: the numbers of "
            "the columns, not a mask (for which write `np.flatnonzero(mask)`)."
        ) from None


def refuse_kernel(name: str, function: object) -> None:
    """Raise for a kernel where the argument `name` is a map of inputs: both are callable."""
    if isinstance(function, AbstractKernel):
        raise TypeError(
            f"`{name}` must be a function of inputs, got the kernel `{type(function).__name__}`: "
            "a kernel is an argument of its own."
        )
