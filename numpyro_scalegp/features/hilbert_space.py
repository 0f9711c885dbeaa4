"""The Hilbert-space basis of a stationary kernel, and the Fourier series of a periodic one."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.features.feature_map import AbstractKernelFeatures
from numpyro_scalegp.kernels.kernel import AbstractKernel, ActiveDims, Scaled, as_single
from numpyro_scalegp.kernels.matern import Matern32, Matern52
from numpyro_scalegp.kernels.periodic import Periodic
from numpyro_scalegp.kernels.stationary import RBF
from numpyro_scalegp.numerics.trigonometry import cos_of_turns

# The most entries of a basis that becomes a constant of the compiled program: 16 MiB in float32.
_MAX_CONSTANTS = 2**22


class HilbertSpace(AbstractKernelFeatures):
    """A Hilbert-space basis on a box, weighted by a kernel's spectral density S.

    phi_j(x) = sqrt(S(w_j)) prod_k sqrt(2 / l_k) sin(w_jk (x_k - a_k)) on the box from a to b, with
    l = b - a and w_jk = pi j_k / l_k, for j_k = 1, ..., m_k: the eigenfunctions of the Laplacian.
    phi(x)'phi(z) tends to k(x, z) as the box and m grow; near the ends of the box it is too small.
    The hyperparameters determine the amplitudes sqrt(S(w_j)) alone, not the sines. The map has m_1
    m_2 ... features, and suits NUTS with a stationary kernel in one to three dimensions.

    For a `Periodic` kernel of one input dimension the features are its Fourier series instead,
    cos(2 pi j x / period) and sines, with j < m: 2 m - 1 features, or 2 m - 2 if the kernel has no
    constant. There is no box, and the error falls faster than exponentially in m.

    `box_and_num_basis` chooses `box` and `num_basis` from data and the range of a lengthscale;
    `error` compares phi(x)'phi(z) with the kernel.

    Args:
        kernel: RBF, Matern or rational quadratic, a multiple or a sum of these, or `Periodic`;
            `.on(columns)` applies it to these input dimensions only.
        num_basis: m, one number or one for each input dimension of the kernel.
        box: ends of the box, shape (2, d) for d input dimensions of the kernel; None for
            `Periodic`.

    Raises:
        ValueError: if `num_basis` or `box` do not fit the kernel; when used, if inputs lie outside
            of the box (traced inputs give NaN), or the kernel has no spectral density.

    References:
        Solin and Särkkä (2020), Hilbert Space Methods for Reduced-Rank Gaussian Process Regression;
        Riutort-Mayol et al. (2023), Practical Hilbert Space Approximate Bayesian Gaussian Processes
        for Probabilistic Programming. All features: O(n d m).

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> box = jnp.array([[-0.5], [1.5]])
        >>> phi = sgp.features.HilbertSpace(sgp.kernels.Matern52(0.3), num_basis=20, box=box)
        >>> phi(X).shape
        (5, 20)
    """

    kernel: AbstractKernel
    num_basis: tuple[int, ...] = eqx.field(static=True, converter=lambda num: _as_numbers(num))
    box: Float[Array, "2 d"] | None = eqx.field(
        converter=lambda box: None if box is None else _as_box(box), default=None
    )

    def __check_init__(self) -> None:
        as_single("kernel", self.kernel)
        if _periodic(self.kernel) is not None:
            if self.box is not None or len(self.num_basis) > 1:
                raise ValueError(
                    "`box` must be None and `num_basis` one number for `Periodic`, got "
                    f"{checks.described(self.box)} and {self.num_basis}: its series is for "
                    "one column."
                )
            return
        shape = () if self.box is None else self.box.shape
        if self.box is None or shape[:1] != (2,) or len(shape) != 2:
            described = None if self.box is None else f"shape {shape}"
            remedy = " For one column write box=[[lower], [upper]]." if shape == (2,) else ""
            raise ValueError(
                "`box` must have shape (2, d), the lower and the upper end of each column, got "
                f"{described}.{remedy}"
            )
        if len(self.num_basis) not in (1, shape[1]):
            raise ValueError(
                f"`num_basis` must be one number, or one for each of {shape[1]} columns of the "
                f"box, got {self.num_basis}."
            )
        checks.finite("box", self.box)
        if checks.is_concrete(self.box):
            lower, upper = as_numpy(self.box)
            if (wrong := np.flatnonzero(~(lower < upper))).size:
                raise ValueError(
                    "`box` must have upper ends above the lower ones, got a lower end of "
                    f"{lower[wrong[0]]} and an upper one of {upper[wrong[0]]} in column {wrong[0]}."
                )

    @staticmethod
    def box_and_num_basis(
        X: Float[ArrayLike, "n d"],
        lengthscales: tuple[ArrayLike, ArrayLike],
        kernel: AbstractKernel | type[AbstractKernel] | None = None,
    ) -> tuple[Float[Array, "2 d"], tuple[int, ...]]:
        """A box around the data, and a size of the basis, that suffice for a range of lengthscales.

        The longest lengthscale determines how far the box extends beyond the data, the shortest
        lengthscale the size of the basis. Include the inputs to predict at in X.

        Args:
            X: inputs of the kernel, shape (n, d).
            lengthscales: the shortest and the longest, such as the 1 % and the 99 % quantile of a
                prior, each of shape () or (d,).
            kernel: the kernel or its class; there are rules for `RBF`, `Matern52` and `Matern32`.
                All others, and None, take the rule for `Matern32`.

        Returns:
            `box` and `num_basis`, for an error of a few percent of the variance with these three
            kernels, and of a tenth with `Matern12`; `error` computes the error.

        Raises:
            ValueError: if the lengthscales are not positive, or the first is longer than the last.

        References:
            Riutort-Mayol et al. (2023), eq. 20 to 22.
        """
        X = checks.inputs("X", X)
        d = X.shape[1]
        short, long = (
            np.broadcast_to(as_numpy(jnp.asarray(value)), (d,)) for value in lengthscales
        )
        if not (np.all(short > 0) and np.all(short <= long) and np.isfinite(long).all()):
            raise ValueError(
                "`lengthscales` must be positive, the shortest first, got "
                f"{short.tolist()} and {long.tolist()}."
            )
        rows = as_numpy(X).astype(float)
        ends = np.stack([rows.min(axis=0), rows.max(axis=0)])
        # The box of a constant column depends on its lengthscale alone.
        half = np.maximum(0.5 * (ends[1] - ends[0]), 1e-6 * long)
        kind = kernel if isinstance(kernel, type) else type(kernel)
        margin, number = _RULES.get(kind, _RULES[Matern32])
        factor = np.maximum(margin * long / half, 1.2)
        middle, width = ends.mean(axis=0), factor * half
        box = jnp.asarray(np.stack([middle - width, middle + width]), X.dtype)
        return box, tuple(int(m) for m in np.ceil(number * width / short))

    def error(self, X: Float[ArrayLike, "n d"]) -> Float[Array, ""]:
        """The largest difference between phi(x)'phi(z) and the kernel over pairs of rows.

        An error below 0.01 hardly matters. If it is larger, take a larger basis for short
        lengthscales, and a wider box with a larger basis for long lengthscales.

        Args:
            X: inputs, shape (n, d), such as the extremes of the data and points in between.

        Returns:
            The largest difference, relative to the largest variance, shape (), in O(n^2 m).
        """
        X = checks.inputs("X", X)
        self.kernel.check_inputs("X", X)
        Phi, K = self(X), self.kernel.evaluate_covariance(X)
        approximation = jnp.matmul(Phi, Phi.T, precision="highest")
        return jnp.max(jnp.abs(approximation - K)) / jnp.max(jnp.diagonal(K))

    @property
    def num_features(self) -> int:
        """The number of features."""
        if (periodic := _periodic(self.kernel)) is not None:
            return 2 * self.num_basis[0] - 2 + periodic.constant
        return math.prod(self._basis_sizes)

    def size(self, X: Float[Array, "n d"]) -> int:
        """The number of features."""
        return self.num_features

    @property
    def _basis_sizes(self) -> tuple[int, ...]:
        """The number of basis functions in each input dimension."""
        assert self.box is not None
        d = self.box.shape[1]
        return self.num_basis * d if len(self.num_basis) == 1 else self.num_basis

    def __call__(self, X: Float[ArrayLike, "n d"]) -> Float[Array, "n m"]:
        """All features, shape (n, m); the basis at concrete inputs is computed once."""
        waves, amplitudes = self.basis_and_amplitudes(X)
        return amplitudes * waves

    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index`, shape (n, num)."""
        waves, amplitudes = self._factors(X, index)
        return amplitudes * waves

    def basis_and_amplitudes(
        self, X: Float[ArrayLike, "n d"]
    ) -> tuple[Float[Array, "n m"], Float[Array, " m"]]:
        """The basis functions, and the square roots of their spectral densities."""
        X = checks.inputs("X", X)
        with checks.known_values(X):
            index = jnp.arange(self.num_features)
        return self._factors(X, index)

    def _factors(
        self, X: Float[Array, "n d"], index: Int[Array, " num"]
    ) -> tuple[Float[Array, "n num"], Float[Array, " num"]]:
        kernel, scale = self.kernel, None
        while isinstance(kernel, ActiveDims | Scaled):
            if isinstance(kernel, Scaled):
                scale = kernel.scale if scale is None else scale * kernel.scale
            with checks.known_values(X):
                X = kernel._inputs_of_parts(X)
            kernel = kernel.kernel
        if isinstance(kernel, Periodic):
            waves, amplitudes = self._fourier_series(kernel, X, index)
        else:
            waves, amplitudes = self._sines(kernel, X, index)
        return waves, amplitudes if scale is None else jnp.sqrt(scale) * amplitudes

    def _sines(
        self, kernel: AbstractKernel, X: Float[Array, "n d"], index: Int[Array, " num"]
    ) -> tuple[Float[Array, "n num"], Float[Array, " num"]]:
        # Concrete inputs are not traced, so that a sampler's gradient takes a single product.
        is_small = len(X) * len(index) <= _MAX_CONSTANTS
        with checks.known_values(X, self.box, index) if is_small else contextlib.nullcontext():
            sines, frequencies = self._sines_and_frequencies(X, index)
        return sines, _root(kernel.spectral_density(frequencies))

    def _sines_and_frequencies(
        self, X: Float[Array, "n d"], index: Int[Array, " num"]
    ) -> tuple[Float[Array, "n num"], Float[Array, "num d"]]:
        assert self.box is not None
        X = self.inside_box(X)
        lower, width = self.box[0], self.box[1] - self.box[0]
        columns, frequencies = [], []
        for k, number in enumerate(jnp.unravel_index(index, self._basis_sizes)):
            j = (number + 1).astype(X.dtype)
            # A sine is a cosine a quarter of a turn later.
            turns = 0.5 * ((X[:, k] - lower[k]) / width[k])[:, None] * j - 0.25
            columns.append(jnp.sqrt(2.0 / width[k]) * cos_of_turns(turns))
            frequencies.append(j * (math.pi / width[k]))
        return math.prod(columns[1:], start=columns[0]), jnp.stack(frequencies, axis=1)

    def _fourier_series(
        self, kernel: Periodic, X: Float[Array, "n 1"], index: Int[Array, " num"]
    ) -> tuple[Float[Array, "n num"], Float[Array, " num"]]:
        if X.shape[1] != 1:
            raise ValueError(
                f"`Periodic` has a series of one column, got inputs of {X.shape[1]}: write "
                "`kernel.on((0,))`, and multiply the features of several columns."
            )
        # A constant, if the kernel has one, then pairs of a cosine and a sine.
        position = index if kernel.constant else index + 1
        number = (position + 1) // 2
        weights = kernel.fourier_weights(self.num_basis[0])[number]
        amplitude = _root(kernel.variance * weights * jnp.where(number > 0, 2.0, 1.0))
        # The remainder is exact, while a quotient of many periods has few digits.
        period = kernel.period.reshape(())
        is_small = len(X) * len(index) <= _MAX_CONSTANTS
        with checks.known_values(X, period, index) if is_small else contextlib.nullcontext():
            turns = (jnp.fmod(X, period) / period) * number
            is_sine = (position > 0) & (position % 2 == 0)
            waves = cos_of_turns(turns - jnp.where(is_sine, 0.25, 0.0).astype(X.dtype))
        return waves, amplitude

    def inside_box(self, X: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Raise if inputs lie outside of the box; NaN where traced inputs do."""
        assert self.box is not None
        if X.shape[1] != self.box.shape[1]:
            raise ValueError(
                f"`box` must have an end for each of the {X.shape[1]} columns of the kernel, "
                f"got shape {self.box.shape}."
            )
        inside = (self.box[0] <= X) & (self.box[1] >= X)
        if checks.is_concrete(inside) and not np.all(as_numpy(inside)):
            rows = np.flatnonzero(~as_numpy(inside).all(axis=1))
            raise ValueError(
                f"`X` has {len(rows)} row(s) outside of the box, the first at {int(rows[0])}: the "
                "features are not valid there. Take a wider `box`, with a basis larger by the same "
                "factor."
            )
        return jnp.where(inside, X, jnp.nan)

    def with_kernel(self, kernel: AbstractKernel) -> "HilbertSpace":
        """The same basis with another kernel.

        Raises:
            ValueError: if `kernel` is a component of a sum: its features are not features of the
                sum.
        """
        if kernel.is_component:
            raise ValueError(
                "features of a sum of kernels have no components: add the features of its terms, "
                "`HilbertSpace(first, ...) + HilbertSpace(second, ...)`, which has them."
            )
        return HilbertSpace(kernel, self.num_basis, self.box)

    def hyperparameters(self) -> list[Array]:
        """The hyperparameters of the kernel; the box never changes."""
        return jax.tree.leaves(self.kernel)

    def with_hyperparameters(self, hyperparameters: list[Array]) -> "HilbertSpace":
        """The same basis with another kernel's hyperparameters."""
        structure = jax.tree.structure(self.kernel)
        return self.with_kernel(jax.tree.unflatten(structure, hyperparameters))


# The half width of a box in longest lengthscales, and the number of basis functions for each
# shortest lengthscale in it.
_RULES: dict[type, tuple[float, float]] = {
    RBF: (3.2, 1.75),
    Matern52: (4.1, 2.65),
    Matern32: (4.5, 3.42),
}


def _root(power: Float[Array, " num"]) -> Float[Array, " num"]:
    """The square root, with a derivative of zero at zero."""
    is_positive = power > 0.0
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, power, 1.0)), power)


def _as_numbers(value: Any) -> tuple[int, ...]:
    entries = tuple(value) if isinstance(value, Sequence | np.ndarray) else (value,)
    return tuple(checks.count("num_basis", entry) for entry in entries)


def _as_box(value: ArrayLike) -> Float[Array, "..."]:
    with checks.known_values(value):
        return checks.as_float(value, "box")


def _periodic(kernel: AbstractKernel) -> Periodic | None:
    while isinstance(kernel, ActiveDims | Scaled):
        kernel = kernel.kernel
    return kernel if isinstance(kernel, Periodic) else None
