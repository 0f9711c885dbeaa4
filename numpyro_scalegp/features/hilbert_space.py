"""Sines on a box with amplitudes from a spectral density, and the series of a periodic kernel."""

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
from numpyro_scalegp.core.trigonometry import cos_of_turns
from numpyro_scalegp.features.feature_map import AbstractKernelFeatures
from numpyro_scalegp.kernels import RBF, AbstractKernel, Matern32, Matern52, Periodic
from numpyro_scalegp.kernels.kernel import ActiveDims, Scaled, as_single

# Entries up to which sines become a constant of what is compiled: 16 MiB in float32.
_MAX_KNOWN = 2**22
# Ratios of Bessel functions beyond the last one that is wanted, from which they are found.
_MORE_RATIOS = 40


class HilbertSpace(AbstractKernelFeatures):
    """Sines on a box, with amplitudes from a kernel's spectral density S: few features for NUTS.

    phi_j(x) = sqrt(S(w_j)) prod_k sqrt(2 / l_k) sin(w_jk (x_k - a_k)) on the box from a to b, with
    l = b - a and w_jk = pi j_k / l_k, for j_k = 1, ..., m_k: the eigenfunctions of the Laplacian.
    phi(x)'phi(z) tends to k(x, z) as the box and m grow; inside of the box, near its ends, it is
    too small. The sines do not depend on hyperparameters, which enter by the amplitudes alone. For
    a stationary kernel in one to three columns: there are m_1 m_2 ... features.

    A `Periodic` kernel of one column has its own series, cos(2 pi j x / period) and sines, with
    j < m: 2 m - 1 features, no box, and an error that falls faster than exponentially.

    `box_and_num_basis` chooses both from data and the range of a lengthscale; `error` says how far
    phi(x)'phi(z) is from the kernel at some rows.

    Args:
        kernel: RBF, Matern or rational quadratic, a multiple or a sum of such, or `Periodic`; one
            `.on(columns)` sees these alone.
        num_basis: m, one number or one for each column that the kernel sees.
        box: ends of the box, shape (2, d) for d columns that the kernel sees; None for `Periodic`.

    Raises:
        ValueError: if `num_basis` or `box` do not fit the kernel; when used, if inputs lie outside
            of the box (NaN where they are traced), or the kernel has no spectral density.

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
        if _is_periodic(self.kernel):
            if self.box is not None or len(self.num_basis) > 1:
                raise ValueError(
                    "`box` must be None and `num_basis` one number for `Periodic`, got "
                    f"{checks.described(self.box)} and {self.num_basis}: its series is of one "
                    "column."
                )
            return
        shape = () if self.box is None else self.box.shape
        if self.box is None or shape[:1] != (2,) or len(shape) != 2:
            found = None if self.box is None else f"shape {shape}"
            remedy = " For one column write box=[[lower], [upper]]." if shape == (2,) else ""
            raise ValueError(
                "`box` must have shape (2, d), the lower and the upper end of each column, got "
                f"{found}.{remedy}"
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
        """A box around data, and numbers of sines, that suffice for a range of lengthscales.

        The longest lengthscale decides how far the box goes beyond the data, the shortest one how
        many sines there are. Include the inputs that will be predicted at in X.

        Args:
            X: inputs that the kernel sees, shape (n, d).
            lengthscales: the shortest and the longest, such as the 1 % and the 99 % quantile of a
                prior, each of shape () or (d,).
            kernel: the kernel or its class; there are rules for `RBF`, `Matern52` and `Matern32`,
                and that of the last is taken for all others and for None.

        Returns:
            `box` and `num_basis`, for an error of a few per cent of the variance with one of these
            kernels, and of a tenth with `Matern12`; `error` says what it is.

        Raises:
            ValueError: if the lengthscales are not positive, or the first is the longer one.

        References:
            Riutort-Mayol et al. (2023), eq. 20 to 22.
        """
        X = checks.inputs("X", X)
        d = X.shape[1]
        short, long = (np.broadcast_to(as_numpy(jnp.asarray(one)), (d,)) for one in lengthscales)
        if not (np.all(short > 0) and np.all(short <= long) and np.isfinite(long).all()):
            raise ValueError(
                "`lengthscales` must be positive, the shortest first, got "
                f"{short.tolist()} and {long.tolist()}."
            )
        rows = as_numpy(X).astype(float)
        ends = np.stack([rows.min(axis=0), rows.max(axis=0)])
        # Columns of one value get a box of lengthscales.
        half = np.maximum(0.5 * (ends[1] - ends[0]), 1e-6 * long)
        kind = kernel if isinstance(kernel, type) else type(kernel)
        margin, number = _RULES.get(kind, _RULES[Matern32])
        factor = np.maximum(margin * long / half, 1.2)
        middle, width = ends.mean(axis=0), factor * half
        box = jnp.asarray(np.stack([middle - width, middle + width]), X.dtype)
        return box, tuple(int(m) for m in np.ceil(number * width / short))

    def error(self, X: Float[ArrayLike, "n d"]) -> Float[Array, ""]:
        """How far phi(x)'phi(z) is from the kernel, at most over pairs of rows.

        Below 0.01 it hardly matters. Where it is more, take more sines for short lengthscales, and
        a wider box, with more sines, for long ones.

        Args:
            X: inputs, shape (n, d), such as the data's extremes and some in between.

        Returns:
            The largest difference, relative to the largest variance, shape (), in O(n^2 m).
        """
        X = checks.inputs("X", X)
        Phi, K = self(X), self.kernel.covariance(X)
        found = jnp.matmul(Phi, Phi.T, precision="highest")
        return jnp.max(jnp.abs(found - K)) / jnp.max(jnp.diagonal(K))

    @property
    def num_features(self) -> int:
        """The number of features."""
        if _is_periodic(self.kernel):
            return 2 * self.num_basis[0] - 1
        return math.prod(self._numbers)

    def size(self, X: Float[Array, "n d"]) -> int:
        """The number of features."""
        return self.num_features

    @property
    def _numbers(self) -> tuple[int, ...]:
        """The number of sines of each column."""
        assert self.box is not None
        d = self.box.shape[1]
        return self.num_basis * d if len(self.num_basis) == 1 else self.num_basis

    def __call__(self, X: Float[ArrayLike, "n d"]) -> Float[Array, "n m"]:
        """All features, shape (n, m); of inputs that are known, sines are computed once."""
        waves, amplitudes = self.basis_and_amplitudes(X)
        return amplitudes * waves

    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index`, shape (n, num)."""
        waves, amplitudes = self._factors(X, index)
        return amplitudes * waves

    def basis_and_amplitudes(
        self, X: Float[ArrayLike, "n d"]
    ) -> tuple[Float[Array, "n m"], Float[Array, " m"]]:
        """The sines, and the roots of their spectral densities."""
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
                X = kernel._seen(X)
            kernel = kernel.kernel
        if isinstance(kernel, Periodic):
            waves, amplitudes = self._waves(kernel, X, index)
        else:
            waves, amplitudes = self._sines(kernel, X, index)
        return waves, amplitudes if scale is None else jnp.sqrt(scale) * amplitudes

    def _sines(
        self, kernel: AbstractKernel, X: Float[Array, "n d"], index: Int[Array, " num"]
    ) -> tuple[Float[Array, "n num"], Float[Array, " num"]]:
        # Not under a trace, where all is known: a sampler's gradient has one product then.
        few = len(X) * len(index) <= _MAX_KNOWN
        with checks.known_values(X, self.box, index) if few else contextlib.nullcontext():
            sines, frequencies = self._sines_and_frequencies(X, index)
        return sines, _root(kernel.spectral_density(frequencies))

    def _sines_and_frequencies(
        self, X: Float[Array, "n d"], index: Int[Array, " num"]
    ) -> tuple[Float[Array, "n num"], Float[Array, "num d"]]:
        assert self.box is not None
        X = self._inside(X)
        lower, width = self.box[0], self.box[1] - self.box[0]
        columns, frequencies = [], []
        for k, number in enumerate(jnp.unravel_index(index, self._numbers)):
            j = (number + 1).astype(X.dtype)
            # A sine is a cosine a quarter of a turn later.
            turns = 0.5 * ((X[:, k] - lower[k]) / width[k])[:, None] * j - 0.25
            columns.append(jnp.sqrt(2.0 / width[k]) * cos_of_turns(turns))
            frequencies.append(j * (math.pi / width[k]))
        return math.prod(columns[1:], start=columns[0]), jnp.stack(frequencies, axis=1)

    def _waves(
        self, kernel: Periodic, X: Float[Array, "n 1"], index: Int[Array, " num"]
    ) -> tuple[Float[Array, "n num"], Float[Array, " num"]]:
        if X.shape[1] != 1:
            raise ValueError(
                f"`Periodic` has a series of one column, got inputs of {X.shape[1]}: write "
                "`kernel.on((0,))`, and multiply the features of several."
            )
        number = (index + 1) // 2  # a constant, then pairs of a cosine and a sine
        weights = _fourier_weights(kernel.lengthscale.reshape(()), self.num_basis[0])[number]
        amplitude = _root(kernel.variance * weights * jnp.where(number > 0, 2.0, 1.0))
        # A remainder is exact, while many periods leave few digits to a quotient.
        period = kernel.period.reshape(())
        few = len(X) * len(index) <= _MAX_KNOWN
        with checks.known_values(X, period, index) if few else contextlib.nullcontext():
            turns = (jnp.fmod(X, period) / period) * number
            is_sine = (index > 0) & (index % 2 == 0)
            waves = cos_of_turns(turns - jnp.where(is_sine, 0.25, 0.0).astype(X.dtype))
        return waves, amplitude

    def _inside(self, X: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """The inputs, or an error; NaN where one that is traced lies outside."""
        assert self.box is not None
        if X.shape[1] != self.box.shape[1]:
            raise ValueError(
                f"`box` must have an end for each of {X.shape[1]} columns that the kernel sees, "
                f"got shape {self.box.shape}."
            )
        inside = (self.box[0] <= X) & (self.box[1] >= X)
        if checks.is_concrete(inside) and not np.all(as_numpy(inside)):
            rows = np.flatnonzero(~as_numpy(inside).all(axis=1))
            raise ValueError(
                f"`X` has {len(rows)} row(s) outside of the box, the first at {int(rows[0])}: the "
                "features mean nothing there. Take a wider `box`, with as many more sines."
            )
        return jnp.where(inside, X, jnp.nan)

    def with_kernel(self, kernel: AbstractKernel) -> "HilbertSpace":
        """The same basis with another kernel.

        Raises:
            ValueError: if it is a part of a sum, whose features are none of those of the sum.
        """
        if kernel.is_component:
            raise ValueError(
                "features of a sum of kernels have no components: add the features of its terms, "
                "`HilbertSpace(first, ...) + HilbertSpace(second, ...)`, and take those of the sum."
            )
        return HilbertSpace(kernel, self.num_basis, self.box)

    def hyperparameters(self) -> list[Array]:
        """The kernel's: the box never changes."""
        return jax.tree.leaves(self.kernel)

    def with_hyperparameters(self, hyperparameters: list[Array]) -> "HilbertSpace":
        """The same basis with another kernel's hyperparameters."""
        structure = jax.tree.structure(self.kernel)
        return self.with_kernel(jax.tree.unflatten(structure, hyperparameters))


# How many longest lengthscales the half width of a box must have, and the sines for each shortest
# lengthscale in it.
_RULES: dict[type, tuple[float, float]] = {
    RBF: (3.2, 1.75),
    Matern52: (4.1, 2.65),
    Matern32: (4.5, 3.42),
}


def _root(power: Float[Array, " num"]) -> Float[Array, " num"]:
    """The square root, with a derivative of zero where rounding has left nothing."""
    is_there = power > 0.0
    return jnp.where(is_there, jnp.sqrt(jnp.where(is_there, power, 1.0)), power)


def _as_numbers(value: Any) -> tuple[int, ...]:
    entries = tuple(value) if isinstance(value, Sequence | np.ndarray) else (value,)
    return tuple(checks.count("num_basis", entry) for entry in entries)


def _as_box(value: ArrayLike) -> Float[Array, "..."]:
    with checks.known_values(value):
        return checks.as_float(value, "box")


def _is_periodic(kernel: AbstractKernel) -> bool:
    while isinstance(kernel, ActiveDims | Scaled):
        kernel = kernel.kernel
    return isinstance(kernel, Periodic)


def _fourier_weights(lengthscale: Float[Array, ""], num: int) -> Float[Array, " num"]:
    """exp(-c) I_j(c), c = lengthscale^-2, for j < num: the series of exp(c (cos(t) - 1)).

    From ratios I_j / I_(j - 1) by their continued fraction, whose errors die out on the way down.
    """
    c = 1.0 / jnp.square(lengthscale)
    last = num + _MORE_RATIOS
    # Close for large j.
    start = c / (last + jnp.sqrt(last**2 + jnp.square(c)))

    def ratio(after: Array, j: Array) -> tuple[Array, Array]:
        found = c / (2.0 * j + c * after)
        return found, found

    down = jnp.arange(last - 1, 0, -1).astype(c.dtype)
    ratios = jax.lax.scan(ratio, start, down)[1][::-1][: num - 1]
    return jax.scipy.special.i0e(c) * jnp.cumprod(jnp.concatenate([jnp.ones(1, c.dtype), ratios]))
