"""The interface of a covariance function, and how two of them compose."""

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.kernels.spectrum import AbstractSpectrum, Origin, Waves


class AbstractKernel(AbstractSpectrum):
    """A covariance function k(x, z) with array hyperparameters.

    `k(X, Z)` is the matrix of all pairs and `k.diag(X)` its diagonal. Kernels compose with `+`, `*`
    and positive scalars, and `k.on((0, 3))` restricts a kernel to some of the input columns.
    Hyperparameters are arrays without priors or constraints: those belong to the model.

    Hyperparameters with leading axes make a batch of kernels, such as one for each of G groups: a
    `variance` of shape (G,), a `lengthscale` of shape (G, 1) or (G, d). It has results with the
    same leading axes, also for inputs with a matrix for each member, (G, n, d).

    A kernel of one's own implements `evaluate` and `evaluate_diag`, for one member; where random
    features are wanted, `evaluate_features`, or, if it is stationary, `is_stationary` and
    `sample_frequencies`: `AbstractStationary` has these for a function of the scaled distance.
    Where it may be a batch, its `hyperparameter_ndims` say how many axes each hyperparameter of one
    member has.
    """

    hyperparameter_ndims: ClassVar[Mapping[str, int]] = {}

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of a batch of kernels, () for one.

        Raises:
            ValueError: if the leading axes of hyperparameters do not fit together.
        """
        shapes = {
            name: jnp.shape(getattr(self, name))[: max(0, jnp.ndim(getattr(self, name)) - ndim)]
            for name, ndim in self.hyperparameter_ndims.items()
        }
        shapes |= {name: kernel.batch_shape for name, kernel in self.parts.items()}
        name = type(self).__name__
        message = (
            f"the hyperparameters of a batch of `{name}` must have leading axes that fit together"
        )
        return batches.common_shape(message, **shapes)

    def as_batch(self) -> batches.Batch:
        """This kernel with the number of leading axes of each of its arrays."""
        leading = jax.tree.map(lambda _: 0, self)
        for name, ndim in self.hyperparameter_ndims.items():
            number = max(0, jnp.ndim(getattr(self, name)) - ndim)
            leading = eqx.tree_at(operator.attrgetter(name), leading, number)
        for name, kernel in self.parts.items():
            of_part = kernel.as_batch().leading
            leading = eqx.tree_at(operator.attrgetter(name), leading, of_part)
        return batches.Batch(self, leading)

    def _each(self, function: Callable[..., Array], *inputs: Float[Array, "..."]) -> Array:
        """A function of a kernel and of matrices of inputs, for each member of a batch."""
        batch_shape = self.batch_shape
        if not batch_shape and all(X.ndim == 2 for X in inputs):
            return function(self, *inputs)
        one = jax.ShapeDtypeStruct(inputs[0].shape[-2:], inputs[0].dtype)
        for lengthscale, seen in jax.eval_shape(self.scaled_inputs, one):
            d = seen.shape[-1]
            if batch_shape and lengthscale.shape == (d,) == batch_shape[-1:] and d > 1:
                raise ValueError(
                    f"`lengthscale` of shape ({d},) in a batch of shape {batch_shape} may be one "
                    f"for each of {d} input columns or for each member: write lengthscale[None, :] "
                    "for the former, lengthscale[:, None] for the latter."
                )
        members = (batches.Batch(X, X.ndim - 2) for X in inputs)
        return batches.each(function, self.as_batch(), *members)

    @abc.abstractmethod
    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j) for inputs that were checked, shape (n, m)."""

    def __call__(
        self, X: Float[ArrayLike, "... n d"], Z: Float[ArrayLike, "... m d"]
    ) -> Float[Array, "... n m"]:
        """Evaluate the kernel for all pairs of rows.

        Args:
            X: inputs, shape (n, d), or (*batch, n, d).
            Z: inputs, shape (m, d), or (*batch, m, d).

        Returns:
            The (n, m) matrix of k(x_i, z_j) in the common dtype of inputs and hyperparameters; of a
            batch (*batch, n, m).

        Raises:
            ValueError: if `X` or `Z` is no matrix, holds NaN or infinity, or the widths differ; if
                the shapes of a batch do not fit together.
        """
        X = checks.inputs("X", X, may_be_empty=True, may_be_batch=True)
        Z = checks.inputs("Z", Z, width=X.shape[-1], may_be_empty=True, may_be_batch=True)

        def of_one(kernel: AbstractKernel, X: Array, Z: Array) -> Array:
            return checks.call_hook(kernel, "evaluate", (X.shape[0], Z.shape[0]), X, Z)

        return self._each(of_one, X, Z)

    def diag(self, X: Float[ArrayLike, "... n d"]) -> Float[Array, "... n"]:
        """The variances k(x_i, x_i), shape (n,) or (*batch, n), in O(n d)."""
        X = checks.inputs("X", X, may_be_empty=True, may_be_batch=True)

        def of_one(kernel: AbstractKernel, X: Array) -> Array:
            return checks.call_hook(kernel, "evaluate_diag", X.shape[:1], X)

        return self._each(of_one, X)

    def covariance(self, X: Float[ArrayLike, "... n d"]) -> Float[Array, "... n n"]:
        """K(X, X) with exactly the variances `diag(X)` on its diagonal, shape (*batch, n, n)."""
        X = checks.inputs("X", X, may_be_empty=True, may_be_batch=True)
        diagonal = jnp.eye(X.shape[-2], dtype=bool)
        return jnp.where(diagonal, self.diag(X)[..., None], self(X, X))

    @property
    def parts(self) -> dict[str, "AbstractKernel"]:
        """The kernels that this one is made of, by the names of its fields."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: one for name, one in values.items() if isinstance(one, AbstractKernel)}

    def scaled_inputs(
        self, X: Float[Array, "... n d"]
    ) -> list[tuple[Float[Array, "..."], Float[Array, "... n k"]]]:
        """Each lengthscale within this kernel, and the inputs that it divides.

        Args:
            X: inputs, shape (n, d), or (*batch, n, d).

        Returns:
            Pairs of a lengthscale, shape () or (k,), or with leading axes of a batch, in units of
            its inputs, and these, (n, k).
        """
        seen = self._seen(X)
        return [pair for kernel in self.parts.values() for pair in kernel.scaled_inputs(seen)]

    def _seen(self, X: Float[Array, "... n d"]) -> Float[Array, "... n k"]:
        """The inputs as the parts of this kernel see them."""
        return X

    def categories(self, d: int) -> dict[int, tuple[int, ...]]:
        """The input columns that hold categories, and which integers these are.

        There is no derivative in such a column: inducing points and the like keep the categories
        that they start with.

        Args:
            d: number of input columns.

        Returns:
            Sorted categories by column.
        """
        found: dict[int, tuple[int, ...]] = {}
        for kernel in self.parts.values():
            for column, known in kernel.categories(d).items():
                found[column] = tuple(sorted(set(known).intersection(found.get(column, known))))
        return found

    def check_categories(self, name: str, X: Float[ArrayLike, "... n d"]) -> None:
        """Raise, calling X `name`, where a column of categories holds anything else."""
        for column, known in self.categories(jnp.shape(X)[-1]).items():
            checks.categories(name, X, column, known)

    def rough_columns(self, d: int) -> frozenset[int]:
        """The input columns, of d, in which functions with this kernel have no derivative."""
        return frozenset().union(*(kernel.rough_columns(d) for kernel in self.parts.values()))

    @property
    def is_component(self) -> bool:
        """Whether a sum in this kernel is reduced to one term; see `component`."""
        return any(kernel.is_component for kernel in self.parts.values())

    def component(self, part: "AbstractKernel") -> "AbstractKernel":
        """The kernel of one part of a sum: what is left where all other terms are zero.

        Every sum on the way to the part is reduced to the branch that holds it; factors and
        wrappers stay: of 2 (a + b) c, the component of a is 2 a c. A function with this kernel is
        the sum of independent functions, one for each component of a sum. With the same key, random
        features have the same columns as those of the whole, zero where they belong to other parts,
        so that with the same weights the components' functions add up to that of the whole.

        Args:
            part: an object within this kernel, such as `kernel.left` or `kernel.kernel.right`; of
                the kernel itself, the component is the kernel.

        Returns:
            A kernel of the same structure.

        Raises:
            TypeError: if `part` is not a kernel.
            ValueError: if `part` is not within this kernel, or in several places.
        """
        checks.instance("part", part, AbstractKernel)
        found = self._components(part)
        if len(found) != 1:
            places = "several places" if found else "none"
            raise ValueError(
                f"`part` must be an object in one place within this `{type(self).__name__}`, got a "
                f"`{type(part).__name__}` that is in {places}: take it from the very kernel, such "
                "as `kernel.left`, and let its terms be different objects."
            )
        return found[0]

    def restrict(self, change: Callable[["AbstractKernel"], "AbstractKernel"]) -> "AbstractKernel":
        """The kernel of a part of f: `change` of this one, or of the one that it is made of."""
        return change(self)

    def _components(self, part: "AbstractKernel") -> list["AbstractKernel"]:
        """This kernel reduced to the part, once for each place where that is."""
        if self is part:
            return [self]
        return [
            eqx.tree_at(operator.attrgetter(name), self, component)
            for name, kernel in self.parts.items()
            for component in kernel._components(part)
        ]

    def on(self, dims: Sequence[int]) -> "ActiveDims":
        """The same kernel on the input columns `dims` only, each named once."""
        return ActiveDims(self, _as_dims(dims))

    def __add__(self, other: "AbstractKernel") -> "Sum":
        return Sum(self, other) if isinstance(other, AbstractKernel) else NotImplemented

    def __radd__(self, other: Any) -> "AbstractKernel":
        # `sum(kernels)` starts with the number 0.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __mul__(self, other: "AbstractKernel | ArrayLike") -> "AbstractKernel":
        if isinstance(other, AbstractKernel):
            return Product(self, other)
        return Scaled(self, checks.as_float(other, "scale"))

    def __rmul__(self, other: ArrayLike) -> "Scaled":
        return Scaled(self, checks.as_float(other, "scale"))

    # NumPy arrays must leave `array * kernel` to `__rmul__` instead of looping over their entries.
    __array_ufunc__ = None


class AbstractComposite(AbstractKernel):
    """A kernel made of others, with the properties that all of these have."""

    def __check_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type is AbstractKernel:
                checks.instance(field.name, getattr(self, field.name), AbstractKernel)
        _ = self.batch_shape  # of parts that fit together

    @property
    def is_stationary(self) -> bool:
        """Whether all parts are stationary."""
        return all(kernel.is_stationary for kernel in self.parts.values())

    @property
    def has_smooth_features(self) -> bool:
        """Whether all parts' features are smooth."""
        return all(kernel.has_smooth_features for kernel in self.parts.values())

    @property
    def has_smooth_frequencies(self) -> bool:
        """Whether all parts' frequencies are smooth."""
        return all(kernel.has_smooth_frequencies for kernel in self.parts.values())

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw angular frequencies, shape (num, d); see `AbstractKernel.sample_frequencies`.

        Raises:
            ValueError: if a part is not stationary, or the kernel is a `component`.
        """
        if self.is_component:
            raise ValueError(
                "a component shares the random waves of the kernel it was taken from: call "
                "`sample_waves`, or build the kernel of this part by itself."
            )
        return self.sample_waves(key, num, d).frequencies

    @abc.abstractmethod
    def sample_waves(self, key: Key[Array, ""], num: int, d: int) -> Waves:
        """Draw random waves from those of the parts."""


class Sum(AbstractComposite):
    """The sum of two kernels, k(x, z) = k_1(x, z) + k_2(x, z).

    `active` selects the terms that count: both, unless it is a `component` of another sum.
    """

    left: AbstractKernel
    right: AbstractKernel
    active: tuple[bool, bool] = eqx.field(static=True, default=(True, True))

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """Add up the active terms' matrices."""
        return functools.reduce(operator.add, [kernel(X, Z) for kernel in self._terms])

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Add up the active terms' variances."""
        return functools.reduce(operator.add, [kernel.diag(X) for kernel in self._terms])

    @property
    def is_component(self) -> bool:
        """Whether this sum, or one within it, is reduced to one of its terms."""
        return not all(self.active) or super().is_component

    @property
    def _terms(self) -> list[AbstractKernel]:
        terms = zip((self.left, self.right), self.active, strict=True)
        return [kernel for kernel, is_active in terms if is_active]

    def _components(self, part: AbstractKernel) -> list[AbstractKernel]:
        if self is part:
            return [self]
        lefts = self.left._components(part) if self.active[0] else []
        rights = self.right._components(part) if self.active[1] else []
        found = [Sum(left, self.right, (True, False)) for left in lefts]
        return [*found, *(Sum(self.left, right, (False, True)) for right in rights)]

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """Both kernels' features, half of the number each, side by side; zero if not active."""

        def of_term(kernel: AbstractKernel, is_active: bool, key: Array) -> Array:
            def features() -> Array:
                return kernel.evaluate_features(key, X, max(2, num_features // 2), origin)

            return features() if is_active else jnp.zeros_like(jax.eval_shape(features))

        terms = zip((self.left, self.right), self.active, jax.random.split(key), strict=True)
        return jnp.concatenate([of_term(*term) for term in terms], axis=1)

    def spectral_density(self, frequencies: Float[Array, "num d"]) -> Float[Array, " num"]:
        """Add up the active terms' densities."""
        return functools.reduce(
            operator.add, [kernel.spectral_density(frequencies) for kernel in self._terms]
        )

    @property
    def has_smooth_frequencies(self) -> bool:
        """False: each wave is the one kernel's or the other's."""
        return False

    def sample_waves(self, key: Key[Array, ""], num: int, d: int) -> Waves:
        """Draw from the mixture of both spectral densities, weighed by the variances."""
        choice_key, left_key, right_key = jax.random.split(key, 3)
        left = self.left.sample_waves(left_key, num, d)
        right = self.right.sample_waves(right_key, num, d)
        variance = left.variance + right.variance
        uniform = jax.random.uniform(choice_key, (num,), left.frequencies.dtype)
        is_left = uniform * variance < left.variance
        return Waves(
            jnp.where(is_left[:, None], left.frequencies, right.frequencies),
            variance,
            jnp.where(is_left, left.active & self.active[0], right.active & self.active[1]),
        )


class Product(AbstractComposite):
    """The product of two kernels, k(x, z) = k_1(x, z) k_2(x, z)."""

    left: AbstractKernel
    right: AbstractKernel

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """Multiply both kernels' matrices entry by entry."""
        return self.left(X, Z) * self.right(X, Z)

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Multiply both kernels' variances."""
        return self.left.diag(X) * self.right.diag(X)

    @property
    def has_smooth_features(self) -> bool:
        """Whether the frequencies, or else both kernels' features, are smooth."""
        return self.has_smooth_frequencies if self.is_stationary else super().has_smooth_features

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """Fourier features of a stationary product; else products of both kernels' features.

        With standard normal G and H, the columns of (Phi_1 G) * (Phi_2 H) / sqrt(p) have the
        expected inner product k_1 k_2.
        """
        if self.is_stationary:
            return super().evaluate_features(key, X, num_features, origin)
        keys = jax.random.split(key, 4)
        left = self.left.evaluate_features(keys[0], X, num_features, origin)
        right = self.right.evaluate_features(keys[1], X, num_features, origin)
        # In the hyperparameters' dtype, as frequencies are: the same for inputs of another one.
        dtype = jnp.result_type(*jax.tree.leaves(eqx.filter(self, eqx.is_inexact_array)))
        G = jax.random.normal(keys[2], (left.shape[1], num_features), dtype)
        H = jax.random.normal(keys[3], (right.shape[1], num_features), dtype)
        return matmul(left, G) * matmul(right, H) / math.sqrt(num_features)

    def sample_waves(self, key: Key[Array, ""], num: int, d: int) -> Waves:
        """Draw from the convolution of both spectral densities: frequencies add up."""
        left_key, right_key = jax.random.split(key)
        left = self.left.sample_waves(left_key, num, d)
        right = self.right.sample_waves(right_key, num, d)
        return Waves(
            left.frequencies + right.frequencies,
            left.variance * right.variance,
            left.active & right.active,
        )


class Scaled(AbstractComposite):
    """A kernel times a positive number, k(x, z) = scale * k_1(x, z).

    Raises:
        ValueError: if `scale` is not positive.
    """

    hyperparameter_ndims = {"scale": 0}

    kernel: AbstractKernel
    scale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("scale"))

    def __check_init__(self) -> None:
        checks.positive("scale", self.scale)

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """Scale the kernel's matrix."""
        return self.scale * self.kernel.evaluate(X, Z)

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Scale the kernel's variances."""
        return self.scale * self.kernel.evaluate_diag(X)

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The kernel's features times the root of the scale."""
        features = self.kernel.evaluate_features(key, X, num_features, origin)
        return jnp.sqrt(self.scale) * features

    def spectral_density(self, frequencies: Float[Array, "num d"]) -> Float[Array, " num"]:
        """The kernel's density, scaled."""
        return self.scale * self.kernel.spectral_density(frequencies)

    def sample_waves(self, key: Key[Array, ""], num: int, d: int) -> Waves:
        """Draw the kernel's own waves, with a variance that is scaled."""
        waves = self.kernel.sample_waves(key, num, d)
        return waves._replace(variance=self.scale * waves.variance)


class ActiveDims(AbstractComposite):
    """A kernel of the input columns `dims` only, k(x, z) = k_1(x[dims], z[dims]).

    Raises:
        TypeError: if `dims` is not a sequence of integers.
        ValueError: if `dims` is empty, negative or names a column twice, or, on evaluation, lies
            beyond the inputs' width.
    """

    kernel: AbstractKernel
    dims: tuple[int, ...] = eqx.field(static=True, converter=lambda dims: _as_dims(dims))

    def __check_init__(self) -> None:
        if not self.dims or min(self.dims) < 0:
            raise ValueError(
                f"`dims` must name at least one column, counted from 0, got {self.dims}."
            )
        if len(set(self.dims)) < len(self.dims):
            raise ValueError(f"`dims` must name each column once, got {self.dims}.")

    def _seen(self, X: Float[Array, "... n d"]) -> Float[Array, "... n k"]:
        if max(self.dims) >= X.shape[-1]:
            raise ValueError(
                f"`dims` must lie in 0..{X.shape[-1] - 1} for inputs of shape {X.shape}, "
                f"got {self.dims}."
            )
        return X[..., jnp.array(self.dims)]

    def categories(self, d: int) -> dict[int, tuple[int, ...]]:
        """Those of the kernel, among the active columns."""
        found = self.kernel.categories(len(self.dims))
        return {self.dims[column]: known for column, known in found.items()}

    def rough_columns(self, d: int) -> frozenset[int]:
        """Those of the kernel, among the active columns."""
        found = self.kernel.rough_columns(len(self.dims))
        return frozenset(self.dims[column] for column in found)

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The kernel's matrix of the active columns."""
        return self.kernel.evaluate(self._seen(X), self._seen(Z))

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The kernel's variances of the active columns."""
        return self.kernel.evaluate_diag(self._seen(X))

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The kernel's features of the active columns."""
        origin = None if origin is None else self._seen(origin[None])[0]
        return self.kernel.evaluate_features(key, self._seen(X), num_features, origin)

    def sample_waves(self, key: Key[Array, ""], num: int, d: int) -> Waves:
        """Draw waves along the active columns; the frequencies of the others are zero."""
        if max(self.dims) >= d:
            raise ValueError(f"`dims` must lie in 0..{d - 1} for d = {d}, got {self.dims}.")
        waves = self.kernel.sample_waves(key, num, len(self.dims))
        zeros = jnp.zeros((num, d), waves.frequencies.dtype)
        frequencies = zeros.at[:, jnp.array(self.dims)].set(waves.frequencies)
        return waves._replace(frequencies=frequencies)


def as_single(name: str, kernel: Any) -> AbstractKernel:
    """Return `kernel`, or raise unless it is one kernel, and no batch."""
    checks.instance(name, kernel, AbstractKernel)
    if kernel.batch_shape:
        raise ValueError(
            f"`{name}` must be one kernel, got a batch of shape {kernel.batch_shape}: "
            "hyperparameters with leading axes are for `GaussianProcess`, `LatentGP` and "
            "`SparseGP`."
        )
    return kernel


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
