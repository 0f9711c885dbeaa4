"""The interface of covariance functions, and their sums and products."""

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import batches, checks, summary
from numpyro_scalegp.kernels.spectrum import AbstractSpectrum, Origin, Waves
from numpyro_scalegp.kernels.state_space import (
    AbstractStateSpace,
    Kronecker,
    OnColumns,
    ScaledObservation,
    Stacked,
)
from numpyro_scalegp.numerics.linalg import matmul

# The number of Fourier terms of a periodic kernel in a state-space form, besides the constant: they
# hold all but 4e-9 of the variance for a lengthscale of 1, all but 0.01 for one of 0.3.
NUM_HARMONICS = 8


class AbstractKernel(AbstractSpectrum):
    """A covariance function k(x, z) with array hyperparameters.

    `k(X, Z)` is the matrix of all pairs k(x_i, z_j) and `k.diag(X)` the vector of k(x_i, x_i).
    Kernels compose with `+`, `*` and positive scalars, and `k.on((0, 3))` applies a kernel to input
    dimensions 0 and 3 only. Hyperparameters are arrays without priors or constraints: those belong
    to the model.

    `k(X, Z)`, `k.diag(X)` and `k.covariance(X)` check their inputs and work for batches.
    `evaluate`, `evaluate_diag` and `evaluate_covariance` compute the same for a single kernel,
    without checks; `each` maps a function of a single kernel over a batch.

    Hyperparameters with leading axes make a batch of kernels, such as one for each of G groups: a
    `variance` of shape (G,), a `lengthscale` of shape (G, 1) or (G, d). Results have the same
    leading axes. Inputs have shape (n, d), or (G, n, d) with a separate matrix for each kernel of
    the batch.

    A custom kernel implements `evaluate` and `evaluate_diag` for a single kernel. For random
    features it also implements `evaluate_features` or, if it is stationary, `is_stationary` and
    `sample_frequencies`; `AbstractStationary` has these two for functions of the scaled distance.
    To allow batches, it sets `hyperparameter_ndims`, the number of axes of each hyperparameter of a
    single kernel.
    """

    hyperparameter_ndims: ClassVar[Mapping[str, int]] = {}

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of a batch of kernels, () for a single kernel.

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
        """This kernel, with the number of leading batch axes of each of its arrays."""
        leading = jax.tree.map(lambda _: 0, self)
        for name, ndim in self.hyperparameter_ndims.items():
            num_leading = max(0, jnp.ndim(getattr(self, name)) - ndim)
            leading = eqx.tree_at(operator.attrgetter(name), leading, num_leading)
        for name, kernel in self.parts.items():
            leading_of_part = kernel.as_batch().leading
            leading = eqx.tree_at(operator.attrgetter(name), leading, leading_of_part)
        return batches.Batch(self, leading)

    def each(self, function: Callable[..., Any], *inputs: Float[Array, "..."]) -> Any:
        """Apply a function of a single kernel and input matrices to each member of a batch."""
        batch_shape = self.batch_shape
        if not batch_shape and all(X.ndim == 2 for X in inputs):
            return function(self, *inputs)
        single_input = jax.ShapeDtypeStruct(inputs[0].shape[-2:], inputs[0].dtype)
        for lengthscale, scaled in jax.eval_shape(self.scaled_inputs, single_input):
            d = scaled.shape[-1]
            if batch_shape and lengthscale.shape == (d,) == batch_shape[-1:] and d > 1:
                raise ValueError(
                    f"`lengthscale` of shape ({d},) in a batch of shape {batch_shape} may be one "
                    f"for each of {d} input dimensions or for each member: write "
                    "lengthscale[None, :] for the former, lengthscale[:, None] for the latter."
                )
        members = (batches.Batch(X, X.ndim - 2) for X in inputs)
        return batches.each(function, self.as_batch(), *members)

    @abc.abstractmethod
    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j) for inputs that were checked, shape (n, m)."""

    def __call__(
        self, X: Float[ArrayLike, "... n d"], Z: Float[ArrayLike, "... m d"]
    ) -> Float[Array, "... n m"]:
        """Evaluate the kernel for all pairs of points.

        Args:
            X: inputs, shape (n, d), or (*batch, n, d).
            Z: inputs, shape (m, d), or (*batch, m, d).

        Returns:
            The matrix of k(x_i, z_j), shape (n, m), or (*batch, n, m) for a batch, in the common
            dtype of inputs and hyperparameters.

        Raises:
            ValueError: if `X` or `Z` is not a matrix or holds NaN or infinity, if their numbers of
                columns differ, or if the shapes of a batch do not fit together.
        """
        X = self._checked("X", X)
        Z = self._checked("Z", Z, X.shape[-1])
        self._check_hook("evaluate", X, Z)
        return self.each(lambda kernel, X, Z: kernel.evaluate(X, Z), X, Z)

    def diag(self, X: Float[ArrayLike, "... n d"]) -> Float[Array, "... n"]:
        """The variances k(x_i, x_i), shape (n,) or (*batch, n), in O(n d)."""
        X = self._checked("X", X)
        self._check_hook("evaluate_diag", X)
        return self.each(lambda kernel, X: kernel.evaluate_diag(X), X)

    def covariance(self, X: Float[ArrayLike, "... n d"]) -> Float[Array, "... n n"]:
        """K(X, X) with exactly the variances `diag(X)` on its diagonal, shape (*batch, n, n)."""
        X = self._checked("X", X)
        self.check_hooks(X)
        return self.each(lambda kernel, X: kernel.evaluate_covariance(X), X)

    def evaluate_covariance(self, X: Float[Array, "n d"]) -> Float[Array, "n n"]:
        """`covariance` of inputs that were checked, shape (n, n)."""
        diagonal = jnp.eye(X.shape[0], dtype=bool)
        return jnp.where(diagonal, self.evaluate_diag(X)[:, None], self.evaluate(X, X))

    def _checked(
        self, name: str, X: Float[ArrayLike, "... n d"], width: int | None = None
    ) -> Float[Array, "... n d"]:
        X = checks.inputs(name, X, width, may_be_empty=True, may_be_batch=True)
        self.check_values(name, X)
        return X

    def check_inputs(self, name: str, X: Float[Array, "... n d"]) -> None:
        """Raise an error, with `name` for X, unless X is a valid input of this kernel."""
        self.check_values(name, X)
        self.check_hooks(X)

    def check_hooks(self, X: Float[Array, "... n d"]) -> None:
        """Raise if this kernel or a part of it is a custom kernel that returns a wrong shape.

        Its `evaluate` and `evaluate_diag` are traced for inputs like X; later evaluations do not
        check shapes again.
        """
        self._check_hook("evaluate", X, X)
        self._check_hook("evaluate_diag", X)

    def _check_hook(self, hook: str, *inputs: Float[Array, "..."]) -> None:
        if not self._has_user_hooks:
            return

        def check(kernel: AbstractKernel, *inputs: Array) -> list[Array]:
            kernel._call_hook(hook, *inputs)
            return []

        eqx.filter_eval_shape(lambda kernel, *inputs: kernel.each(check, *inputs), self, *inputs)

    def _call_hook(self, hook: str, *inputs: Float[Array, "..."]) -> None:
        if _is_user_defined(self):
            checks.call_hook(self, hook, tuple(len(X) for X in inputs), *inputs)
            return
        for kernel in self.parts.values():
            kernel._call_hook(hook, *map(self._inputs_of_parts, inputs))

    @property
    def _has_user_hooks(self) -> bool:
        return _is_user_defined(self) or any(
            kernel._has_user_hooks for kernel in self.parts.values()
        )

    @property
    def parts(self) -> dict[str, "AbstractKernel"]:
        """The kernels that this kernel is composed of, by field name."""
        return {
            field.name: kernel
            for field in dataclasses.fields(self)
            if isinstance(kernel := getattr(self, field.name), AbstractKernel)
        }

    def scaled_inputs(
        self, X: Float[Array, "... n d"]
    ) -> list[tuple[Float[Array, "..."], Float[Array, "... n k"]]]:
        """Each lengthscale within this kernel, with the inputs that it scales.

        Args:
            X: inputs, shape (n, d), or (*batch, n, d).

        Returns:
            Pairs of a lengthscale, shape () or (k,) after the leading axes of a batch, and the
            inputs that it scales, shape (n, k), in the same units.
        """
        inputs = self._inputs_of_parts(X)
        return [pair for kernel in self.parts.values() for pair in kernel.scaled_inputs(inputs)]

    def _inputs_of_parts(self, X: Float[Array, "... n d"]) -> Float[Array, "... n k"]:
        """The inputs at which this kernel evaluates its parts."""
        return X

    def categories(self, d: int) -> dict[int, tuple[int, ...]]:
        """The input columns that hold categories, and the integers that each may hold.

        The kernel has no derivative in such a column, so inducing points keep the categories of
        their initial values.

        Args:
            d: number of input dimensions.

        Returns:
            Sorted categories by column.
        """
        by_column: dict[int, tuple[int, ...]] = {}
        for kernel in self.parts.values():
            for column, integers in kernel.categories(d).items():
                common = set(integers).intersection(by_column.get(column, integers))
                by_column[column] = tuple(sorted(common))
        return by_column

    def ranges(self, d: int) -> dict[int, tuple[float, float]]:
        """The input columns, out of d, whose values must lie between two numbers."""
        return {
            column: bounds
            for kernel in self.parts.values()
            for column, bounds in kernel.ranges(d).items()
        }

    def check_values(self, name: str, X: Float[ArrayLike, "... n d"]) -> None:
        """Raise an error, with `name` for X, if a category or a value out of range is not valid."""
        for column, integers in self.categories(jnp.shape(X)[-1]).items():
            checks.categories(name, X, column, integers)
        for column, bounds in self.ranges(jnp.shape(X)[-1]).items():
            checks.within_range(name, X, column, bounds)

    def rough_columns(self, d: int) -> frozenset[int]:
        """The columns, out of d, in which functions with this kernel are not differentiable."""
        return frozenset().union(*(kernel.rough_columns(d) for kernel in self.parts.values()))

    @property
    def is_component(self) -> bool:
        """Whether a sum in this kernel is reduced to one term; see `component`."""
        return any(kernel.is_component for kernel in self.parts.values())

    def component(self, part: "AbstractKernel") -> "AbstractKernel":
        """The kernel of one term of a sum: this kernel with all other terms set to zero.

        Every sum that contains the term is reduced to it, and factors and wrappers remain: the
        component of a in 2 (a + b) c is 2 a c. A function with this kernel is the sum of
        independent functions, one for each component. With the same key, the random features of a
        component have the same columns as this kernel's, with zeros for the other terms. So with
        the same weights, the functions of the components add up to the function with this kernel.

        Args:
            part: an object within this kernel, such as `kernel.left` or `kernel.kernel.right`. The
                component of the kernel itself is the kernel.

        Returns:
            A kernel of the same structure.

        Raises:
            TypeError: if `part` is not a kernel.
            ValueError: if `part` does not occur in this kernel, or more than once.
        """
        checks.instance("part", part, AbstractKernel)
        components = self._components(part)
        if len(components) != 1:
            raise ValueError(
                f"`part` must occur once in this `{type(self).__name__}`, got a "
                f"`{type(part).__name__}` that occurs {len(components)} times: take it from this "
                "kernel, such as `kernel.left`, and make each term a separate object."
            )
        return components[0]

    def restrict(self, change: Callable[["AbstractKernel"], "AbstractKernel"]) -> "AbstractKernel":
        """The kernel of a component of f: `change(self)`.

        A kernel that is defined by the features of another kernel applies `change` to that kernel.
        """
        return change(self)

    def _components(self, term: "AbstractKernel") -> list["AbstractKernel"]:
        """This kernel reduced to the term, once for each of its occurrences."""
        if self is term:
            return [self]
        return [
            eqx.tree_at(operator.attrgetter(name), self, component)
            for name, kernel in self.parts.items()
            for component in kernel._components(term)
        ]

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """This kernel of one input, time, as a linear stochastic differential equation.

        `sgp.estimators.StateSpace` uses it for densities and posteriors in linear time.

        Args:
            num_harmonics: the number of Fourier terms of each `Periodic` kernel in it, besides the
                constant.

        Returns:
            The form of a single kernel.

        Raises:
            ValueError: if the kernel has no such form.
        """
        raise ValueError(
            f"`{type(self).__name__}` has no state-space form: take `Matern52`, a rougher Matern "
            "kernel, `Harmonic`, `Cosine`, `Periodic`, `Linear`, `Constant`, `Wiener` or "
            "`IntegratedWiener`, sums and products of them, or another estimator."
        )

    def on(self, dims: Sequence[int]) -> "ActiveDims":
        """This kernel applied to the input dimensions `dims` only, without repeats."""
        return ActiveDims(self, _as_dims(dims))

    def __add__(self, kernel: "AbstractKernel") -> "Sum":
        return Sum(self, kernel) if isinstance(kernel, AbstractKernel) else NotImplemented

    def __radd__(self, start: Any) -> "AbstractKernel":
        # `sum(kernels)` starts with the number 0.
        return self if isinstance(start, int) and start == 0 else NotImplemented

    def __mul__(self, factor: "AbstractKernel | ArrayLike") -> "AbstractKernel":
        if isinstance(factor, AbstractKernel):
            return Product(self, factor)
        return Scaled(self, checks.as_float(factor, "scale"))

    def __rmul__(self, scale: ArrayLike) -> "Scaled":
        return Scaled(self, checks.as_float(scale, "scale"))

    # NumPy arrays must leave `array * kernel` to `__rmul__` instead of looping over their entries.
    __array_ufunc__ = None


class AbstractMapped(AbstractKernel):
    """A kernel of mapped inputs, k(x, z) = k_1(g(x), g(z)), with the map `_inputs_of_parts`."""

    if TYPE_CHECKING:  # type checkers make an `AbstractVar` the first argument of all subclasses

        @property
        def kernel(self) -> AbstractKernel: ...  # noqa: D102
    else:
        kernel: eqx.AbstractVar[AbstractKernel]

    @property
    def has_smooth_features(self) -> bool:
        """Whether `kernel` has smooth features; see `AbstractKernel.has_smooth_features`."""
        return self.kernel.has_smooth_features

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The features of the mapped inputs."""
        origin = None if origin is None else self._inputs_of_parts(origin[None])[0]
        inputs = self._inputs_of_parts(X)
        return self.kernel.evaluate_features(key, inputs, num_features, origin)

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        return self.kernel.evaluate(self._inputs_of_parts(X), self._inputs_of_parts(Z))

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        return self.kernel.evaluate_diag(self._inputs_of_parts(X))


class AbstractComposite(AbstractKernel):
    """A kernel composed of others, with the properties that all of them have."""

    def __check_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type is AbstractKernel:
                checks.instance(field.name, getattr(self, field.name), AbstractKernel)
        _ = self.batch_shape  # raises unless the parts' batch shapes fit together

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
                "`sample_waves`, or build the kernel of this term by itself."
            )
        return self.sample_waves(key, num, d).frequencies

    @abc.abstractmethod
    def sample_waves(self, key: Key[Array, ""], num: int, d: int) -> Waves:
        """Combine random waves of the parts."""


class Sum(AbstractComposite):
    """The sum of two kernels, k(x, z) = k_1(x, z) + k_2(x, z).

    `active` selects the terms that are included: both, except in a `component` of another sum.
    """

    left: AbstractKernel
    right: AbstractKernel
    active: tuple[bool, bool] = eqx.field(static=True, default=(True, True))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self._terms))

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """Add up the active terms' matrices."""
        return functools.reduce(operator.add, [kernel.evaluate(X, Z) for kernel in self._terms])

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Add up the active terms' variances."""
        return functools.reduce(operator.add, [kernel.evaluate_diag(X) for kernel in self._terms])

    @property
    def is_component(self) -> bool:
        """Whether this sum, or one within it, is reduced to one of its terms."""
        return not all(self.active) or super().is_component

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """Stack the states of both; see `AbstractKernel.state_space`."""
        left, right = (
            kernel.state_space(num_harmonics=num_harmonics) for kernel in (self.left, self.right)
        )
        return Stacked(left, right, self.active)

    @property
    def _terms(self) -> list[AbstractKernel]:
        terms = zip((self.left, self.right), self.active, strict=True)
        return [kernel for kernel, is_active in terms if is_active]

    def _components(self, term: AbstractKernel) -> list[AbstractKernel]:
        if self is term:
            return [self]
        lefts = self.left._components(term) if self.active[0] else []
        rights = self.right._components(term) if self.active[1] else []
        return [
            *(Sum(left, self.right, (True, False)) for left in lefts),
            *(Sum(self.left, right, (False, True)) for right in rights),
        ]

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """Concatenate half as many features of each term; zeros for a term that is not active."""

        def evaluate(kernel: AbstractKernel, is_active: bool, key: Array) -> Array:
            def features() -> Array:
                return kernel.evaluate_features(key, X, max(2, num_features // 2), origin)

            return features() if is_active else jnp.zeros_like(jax.eval_shape(features))

        terms = zip((self.left, self.right), self.active, jax.random.split(key), strict=True)
        return jnp.concatenate([evaluate(*term) for term in terms], axis=1)

    def spectral_density(self, frequencies: Float[Array, "num d"]) -> Float[Array, " num"]:
        """Add up the active terms' densities."""
        return functools.reduce(
            operator.add, [kernel.spectral_density(frequencies) for kernel in self._terms]
        )

    @property
    def has_smooth_frequencies(self) -> bool:
        """False: the variances decide from which term each wave is drawn."""
        return False

    def sample_waves(self, key: Key[Array, ""], num: int, d: int) -> Waves:
        """Draw from the mixture of both spectral densities, weighted by the variances."""
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

    def __repr__(self) -> str:
        return " * ".join(map(_as_factor, (self.left, self.right)))

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """Multiply both kernels' matrices entry by entry."""
        return self.left.evaluate(X, Z) * self.right.evaluate(X, Z)

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Multiply both kernels' variances."""
        return self.left.evaluate_diag(X) * self.right.evaluate_diag(X)

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """All products of state variables; see `AbstractKernel.state_space`."""
        left, right = (
            kernel.state_space(num_harmonics=num_harmonics) for kernel in (self.left, self.right)
        )
        return Kronecker(left, right)

    @property
    def has_smooth_features(self) -> bool:
        """Whether the frequencies (if stationary) or both factors' features are smooth."""
        return self.has_smooth_frequencies if self.is_stationary else super().has_smooth_features

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """Fourier features of a stationary product; else products of both factors' features.

        With standard normal G and H, the columns of (Phi_1 G) * (Phi_2 H) / sqrt(p) have the
        expected inner product k_1 k_2.
        """
        if self.is_stationary:
            return super().evaluate_features(key, X, num_features, origin)
        keys = jax.random.split(key, 4)
        left = self.left.evaluate_features(keys[0], X, num_features, origin)
        right = self.right.evaluate_features(keys[1], X, num_features, origin)
        # As frequencies, in the hyperparameters' dtype, so that the inputs' dtype has no effect.
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

    def __repr__(self) -> str:
        return f"{summary.shown(self.scale)} * {_as_factor(self.kernel)}"

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """Scale the kernel's matrix."""
        return self.scale * self.kernel.evaluate(X, Z)

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Scale the kernel's variances."""
        return self.scale * self.kernel.evaluate_diag(X)

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """The kernel's form, scaled; see `AbstractKernel.state_space`."""
        form = self.kernel.state_space(num_harmonics=num_harmonics)
        return ScaledObservation(form, self.scale)

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The kernel's features times the square root of the scale."""
        features = self.kernel.evaluate_features(key, X, num_features, origin)
        return jnp.sqrt(self.scale) * features

    def spectral_density(self, frequencies: Float[Array, "num d"]) -> Float[Array, " num"]:
        """The kernel's density, scaled."""
        return self.scale * self.kernel.spectral_density(frequencies)

    def sample_waves(self, key: Key[Array, ""], num: int, d: int) -> Waves:
        """Draw the kernel's waves, with the variance scaled."""
        waves = self.kernel.sample_waves(key, num, d)
        return waves._replace(variance=self.scale * waves.variance)


class ActiveDims(AbstractMapped, AbstractComposite):
    """A kernel applied to the input dimensions `dims` only, k(x, z) = k_1(x[dims], z[dims]).

    Raises:
        TypeError: if `dims` is not a sequence of integers.
        ValueError: if `dims` is empty, negative or names a column twice, or, on evaluation, names a
            column that the inputs do not have.
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

    def __repr__(self) -> str:
        is_composed = isinstance(self.kernel, Sum | Product | Scaled)
        kernel = f"({self.kernel!r})" if is_composed else repr(self.kernel)
        return f"{kernel}.on({self.dims})"

    def _inputs_of_parts(self, X: Float[Array, "... n d"]) -> Float[Array, "... n k"]:
        if max(self.dims) >= X.shape[-1]:
            raise ValueError(
                f"`dims` must lie in 0..{X.shape[-1] - 1} for inputs of shape {X.shape}, "
                f"got {self.dims}."
            )
        return X[..., jnp.array(self.dims)]

    def categories(self, d: int) -> dict[int, tuple[int, ...]]:
        """The kernel's categories, for the active columns below d."""
        categories = self.kernel.categories(len(self.dims))
        by_column = {self.dims[active]: integers for active, integers in categories.items()}
        return {column: integers for column, integers in by_column.items() if column < d}

    def ranges(self, d: int) -> dict[int, tuple[float, float]]:
        """The kernel's ranges, for the active columns."""
        of_kernel = self.kernel.ranges(len(self.dims))
        return {self.dims[active]: bounds for active, bounds in of_kernel.items()}

    def rough_columns(self, d: int) -> frozenset[int]:
        """The active columns in which the kernel's functions are not differentiable."""
        active_columns = self.kernel.rough_columns(len(self.dims))
        return frozenset(self.dims[active] for active in active_columns)

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """The kernel's form for the active columns; see `AbstractKernel.state_space`."""
        return OnColumns(self.kernel.state_space(num_harmonics=num_harmonics), self.dims)

    def sample_waves(self, key: Key[Array, ""], num: int, d: int) -> Waves:
        """Draw waves along the active columns; the frequencies of the others are zero."""
        if max(self.dims) >= d:
            raise ValueError(f"`dims` must lie in 0..{d - 1} for d = {d}, got {self.dims}.")
        waves = self.kernel.sample_waves(key, num, len(self.dims))
        zeros = jnp.zeros((num, d), waves.frequencies.dtype)
        frequencies = zeros.at[:, jnp.array(self.dims)].set(waves.frequencies)
        return waves._replace(frequencies=frequencies)


def as_single(name: str, kernel: Any) -> AbstractKernel:
    """Return `kernel`, or raise unless it is a single kernel and not a batch."""
    checks.instance(name, kernel, AbstractKernel)
    if kernel.batch_shape:
        raise ValueError(
            f"`{name}` must be one kernel, got a batch of shape {kernel.batch_shape}: "
            "hyperparameters with leading axes are for `GaussianProcess`, `LatentGP` and "
            "`SparseGP`."
        )
    return kernel


def _is_user_defined(kernel: AbstractKernel) -> bool:
    """Whether a kernel's class is not this package's, so that what it returns must be checked."""
    return type(kernel).__module__.partition(".")[0] != __name__.partition(".")[0]


def _as_dims(dims: Any) -> tuple[int, ...]:
    try:
        entries = tuple(dims)
        if any(np.asarray(entry).dtype == bool for entry in entries):
            raise TypeError  # a mask: its entries, as integers, would name columns 0 and 1
        return tuple(operator.index(entry) for entry in entries)
    except TypeError:
        raise TypeError(
            f"`dims` must be a sequence of integers such as (0, 3), got {dims!r}: column indices, "
            "not a mask (for which write `np.flatnonzero(mask)`)."
        ) from None


def _as_factor(kernel: AbstractKernel) -> str:
    """A kernel as a factor of a product: sums in parentheses."""
    return f"({kernel!r})" if isinstance(kernel, Sum) else repr(kernel)
