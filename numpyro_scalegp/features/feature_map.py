"""The interface of a finite feature map."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.summary import OneLine
from numpyro_scalegp.kernels.kernel import AbstractKernel, Product, Sum
from numpyro_scalegp.numerics.linalg import matmul


class AbstractFeatures(OneLine):
    """A finite feature map x -> phi(x), for Gaussian processes f(x) = phi(x)'w.

    `phi(X)` computes all features and `phi.columns(X, index)` a few of them, at a cost that does
    not grow with their total number. Hyperparameters are arrays, so that a model may give them
    priors.

    Feature maps can be added and multiplied: `phi + psi` has the features of both, for the sum of
    two independent functions, and `phi * psi` all products of features, for the product of kernels.

    A custom feature map implements `size` and `evaluate`.
    """

    @abc.abstractmethod
    def size(self, X: Float[Array, "n d"]) -> int:
        """The number m of features for inputs like X."""

    @abc.abstractmethod
    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index` at checked inputs, shape (n, num)."""

    def columns(
        self, X: Float[ArrayLike, "n d"], index: Int[ArrayLike, " num"]
    ) -> Float[Array, "n num"]:
        """Evaluate a few of the features.

        Args:
            X: inputs, shape (n, d).
            index: indices of the features, shape (num,), from 0 to m - 1.

        Returns:
            Features, shape (n, num), in O(n num d) for random Fourier features and inducing points,
            regardless of the number m of all features.

        Raises:
            ValueError: if `X` is not of rank 2, or holds NaN or infinity.
        """
        X, index = checks.inputs("X", X), checks.as_index(index)
        return checks.call_hook(self, "evaluate", (X.shape[0], index.shape[0]), X, index)

    def __call__(self, X: Float[ArrayLike, "n d"]) -> Float[Array, "n m"]:
        """Evaluate all features, shape (n, m)."""
        X = checks.inputs("X", X)
        return self.columns(X, jnp.arange(self.size(X)))

    def basis_and_amplitudes(
        self, X: Float[ArrayLike, "n d"]
    ) -> tuple[Float[Array, "n m"], Float[Array, "*m"]]:
        """All features, as a basis and its amplitudes, shape (m,) or ().

        If the hyperparameters determine the amplitudes alone, the weights are multiplied by the
        amplitudes first, and the basis does not change with the hyperparameters.
        """
        basis = self(X)
        return basis, jnp.ones((), basis.dtype)

    @property
    def has_dense_precision(self) -> bool:
        """Whether the weights' prior precision S is a matrix, not the identity."""
        return False

    def precision(self, rows: Int[Array, " r"], columns: Int[Array, " c"]) -> Float[Array, "r c"]:
        """A block of the weights' prior precision S.

        Args:
            rows: indices of features, shape (r,).
            columns: indices of features, shape (c,).

        Returns:
            S[rows, columns], shape (r, c).
        """
        return (rows[:, None] == columns[None, :]).astype(float)

    def precision_diagonal(self, index: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Entries of the diagonal of S, at indices of any shape."""
        return jnp.ones(index.shape)

    def covariance(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The prior covariance of f(X) and f(Z) under the precision S, exact or nearly so.

        By default, these are the inner products of the features. For a dense S, Phi(X)'K(X, X)^-1
        Phi(X) with this K approximates S.
        """
        return matmul(self(X), self(Z).T)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "AbstractFeatures":
        """The features of the component of f whose kernel is `change(kernel)`.

        Raises:
            ValueError: if the features have no kernel.
        """
        raise ValueError(f"`{type(self).__name__}` features have no kernel with components.")

    def hyperparameters(self) -> list[Array]:
        """The arrays that may change from step to step; see `with_hyperparameters`."""
        return jax.tree.leaves(self)

    def with_hyperparameters(self, hyperparameters: list[Array]) -> "AbstractFeatures":
        """The same features with other values of `hyperparameters()`."""
        # Arrays alone, since functions in the features may be different objects in each trace.
        return jax.tree.unflatten(jax.tree.structure(self), hyperparameters)

    def __add__(self, right: "AbstractFeatures") -> "SumOfFeatures":
        return SumOfFeatures(self, right) if isinstance(right, AbstractFeatures) else NotImplemented

    def __radd__(self, left: Any) -> "AbstractFeatures":
        # `sum(features)` starts with the number 0.
        return self if isinstance(left, int) and left == 0 else NotImplemented

    def __mul__(self, right: "AbstractFeatures") -> "ProductOfFeatures":
        if isinstance(right, AbstractFeatures):
            return ProductOfFeatures(self, right)
        return NotImplemented


class AbstractKernelFeatures(AbstractFeatures):
    """A feature map with a kernel."""

    if TYPE_CHECKING:  # type checkers take an `AbstractVar` for the first argument of subclasses

        @property
        def kernel(self) -> AbstractKernel: ...  # noqa: D102
    else:
        kernel: eqx.AbstractVar[AbstractKernel]

    @abc.abstractmethod
    def with_kernel(self, kernel: AbstractKernel) -> "AbstractKernelFeatures":
        """The same features for another kernel of the same kind."""

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> AbstractFeatures:
        """The features of one component of f; see `AbstractFeatures.restrict`."""
        return self.with_kernel(change(self.kernel))


class AbstractCompositeFeatures(AbstractKernelFeatures):
    """A feature map made of two maps with independent weights."""

    left: AbstractFeatures
    right: AbstractFeatures

    def __check_init__(self) -> None:
        for name in ("left", "right"):
            features = checks.instance(name, getattr(self, name), AbstractFeatures)
            if features.has_dense_precision:
                raise ValueError(
                    "sums and products need features with independent weights, but the weights of "
                    f"`{type(features).__name__}` are correlated a priori: write a site for each."
                )

    @property
    def kernel(self) -> AbstractKernel:
        """The sum or the product of the kernels of both maps.

        Raises:
            ValueError: if one of the maps has no kernel.
        """
        return self._combined(_with_kernel(self.left).kernel, _with_kernel(self.right).kernel)

    @abc.abstractmethod
    def _combined(self, left: AbstractKernel, right: AbstractKernel) -> AbstractKernel:
        """Combine the kernels of the two maps."""


class SumOfFeatures(AbstractCompositeFeatures):
    """The features of both maps side by side: f is the sum of two independent functions.

    `active` selects the maps that count: both, unless this is a component of another sum.
    """

    active: tuple[bool, bool] = eqx.field(static=True, default=(True, True))

    def size(self, X: Float[Array, "n d"]) -> int:
        """The number of features of both maps."""
        return self.left.size(X) + self.right.size(X)

    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index`, shape (n, num), at the cost of `num` features of each map."""
        num = self.left.size(X)
        columns = []
        for features, first, is_active in zip(
            (self.left, self.right), (0, num), self.active, strict=True
        ):
            values = features.evaluate(X, jnp.clip(index - first, 0, features.size(X) - 1))
            columns.append(jnp.where(is_active, values, 0.0))
        left, right = columns
        return jnp.where(index < num, left, right)

    def __call__(self, X: Float[ArrayLike, "n d"]) -> Float[Array, "n m"]:
        """All features, shape (n, m)."""
        basis, amplitudes = self.basis_and_amplitudes(X)
        return amplitudes * basis

    def basis_and_amplitudes(
        self, X: Float[ArrayLike, "n d"]
    ) -> tuple[Float[Array, "n m"], Float[Array, " m"]]:
        """The bases of both maps side by side; zeros for a map that is not active."""
        X, bases, amplitudes = checks.inputs("X", X), [], []
        for features, is_active in zip((self.left, self.right), self.active, strict=True):
            basis, amplitude = features.basis_and_amplitudes(X)
            bases.append(basis if is_active else jnp.zeros_like(basis))
            amplitudes.append(jnp.broadcast_to(amplitude, basis.shape[1:]))
        with checks.known_values(*bases):
            joint_basis = jnp.concatenate(bases, axis=1)
        return joint_basis, jnp.concatenate(amplitudes)

    def covariance(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The sum of the covariances of the active maps."""
        maps = zip((self.left, self.right), self.active, strict=True)
        covariances = [features.covariance(X, Z) for features, is_active in maps if is_active]
        return sum(covariances[1:], start=covariances[0])

    def _combined(self, left: AbstractKernel, right: AbstractKernel) -> AbstractKernel:
        return Sum(left, right, self.active)

    def with_kernel(self, kernel: AbstractKernel) -> "SumOfFeatures":
        """The same features for another sum of kernels."""
        terms: Any = checks.instance("kernel", kernel, Sum)
        left, right = _with_kernel(self.left), _with_kernel(self.right)
        features = left.with_kernel(terms.left), right.with_kernel(terms.right)
        return SumOfFeatures(*features, terms.active)


class ProductOfFeatures(AbstractCompositeFeatures):
    """The products of all pairs of features, whose kernel is the product of the kernels."""

    def size(self, X: Float[Array, "n d"]) -> int:
        """The product of the numbers of features."""
        return self.left.size(X) * self.right.size(X)

    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index`, shape (n, num)."""
        num = self.right.size(X)
        return self.left.evaluate(X, index // num) * self.right.evaluate(X, index % num)

    def covariance(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The product of the covariances."""
        return self.left.covariance(X, Z) * self.right.covariance(X, Z)

    def _combined(self, left: AbstractKernel, right: AbstractKernel) -> AbstractKernel:
        return Product(left, right)

    def with_kernel(self, kernel: AbstractKernel) -> "ProductOfFeatures":
        """The same features for another product of kernels."""
        factors: Any = checks.instance("kernel", kernel, Product)
        left, right = _with_kernel(self.left), _with_kernel(self.right)
        return ProductOfFeatures(left.with_kernel(factors.left), right.with_kernel(factors.right))


def _with_kernel(features: AbstractFeatures) -> AbstractKernelFeatures:
    """The features, if they have a kernel.

    Raises:
        ValueError: if they have none.
    """
    if not isinstance(features, AbstractKernelFeatures):
        raise ValueError(f"`{type(features).__name__}` features have no kernel with components.")
    return features
