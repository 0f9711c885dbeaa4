"""The interface of a finite feature map."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.kernel import Product, Sum


class AbstractFeatures(eqx.Module):
    """A finite feature map x -> phi(x), of which f(x) = phi(x)'w makes a Gaussian process.

    `phi(X)` has all features and `phi.columns(X, index)` some of them, at a cost that does not grow
    with their number. Hyperparameters enter as arrays, so that a model may give them priors.

    Two of them add up, and multiply: `phi + psi` has the features of both, for the sum of two
    independent functions, and `phi * psi` all products, for a kernel that is the product of theirs.

    A feature map of one's own implements `size` and `evaluate`.
    """

    @abc.abstractmethod
    def size(self, X: Float[Array, "n d"]) -> int:
        """The number m of features of inputs with the columns of X."""

    @abc.abstractmethod
    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index` of inputs that were checked, shape (n, num)."""

    def columns(
        self, X: Float[ArrayLike, "n d"], index: Int[ArrayLike, " num"]
    ) -> Float[Array, "n num"]:
        """Evaluate some of the features.

        Args:
            X: inputs, shape (n, d).
            index: which features, shape (num,), from 0 to m - 1.

        Returns:
            Features, shape (n, num), in O(n num d) for random Fourier features and inducing points,
            whatever their number m.

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
        """All features as a basis, multiplied by amplitudes, shape (m,) or ().

        Where hyperparameters enter by amplitudes alone, products with weights multiply these first,
        and no matrix changes with hyperparameters.
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

        By default the features' inner products. For a dense S, Phi(X)'K(X, X)^-1 Phi(X) with this
        K is an approximation of S.
        """
        return matmul(self(X), self(Z).T)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "AbstractFeatures":
        """The features of a part of f, of which `change` gives the kernel.

        Raises:
            ValueError: if the features have no kernel.
        """
        raise ValueError(f"`{type(self).__name__}` features have no kernel to take a part of.")

    def hyperparameters(self) -> list[Array]:
        """The arrays that may change from step to step; see `with_hyperparameters`."""
        return jax.tree.leaves(self)

    def with_hyperparameters(self, hyperparameters: list[Array]) -> "AbstractFeatures":
        """The same features with what `hyperparameters` gave at another time."""
        # Arrays alone, since functions within the features may be other objects in each trace.
        return jax.tree.unflatten(jax.tree.structure(self), hyperparameters)

    def __add__(self, other: "AbstractFeatures") -> "SumOfFeatures":
        return SumOfFeatures(self, other) if isinstance(other, AbstractFeatures) else NotImplemented

    def __radd__(self, other: Any) -> "AbstractFeatures":
        # `sum(features)` starts with the number 0.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __mul__(self, other: "AbstractFeatures") -> "ProductOfFeatures":
        if isinstance(other, AbstractFeatures):
            return ProductOfFeatures(self, other)
        return NotImplemented


class AbstractKernelFeatures(AbstractFeatures):
    """A feature map that stands for a kernel."""

    if TYPE_CHECKING:  # checkers take an `AbstractVar` for the first argument of all subclasses

        @property
        def kernel(self) -> AbstractKernel: ...  # noqa: D102
    else:
        kernel: eqx.AbstractVar[AbstractKernel]

    @abc.abstractmethod
    def with_kernel(self, kernel: AbstractKernel) -> "AbstractKernelFeatures":
        """The same features of another kernel of the same kind."""

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> AbstractFeatures:
        """The features of a part of f; see `AbstractFeatures.restrict`."""
        return self.with_kernel(change(self.kernel))


class AbstractCompositeFeatures(AbstractKernelFeatures):
    """A feature map made of two others, whose weights are independent."""

    left: AbstractFeatures
    right: AbstractFeatures

    def __check_init__(self) -> None:
        for name in ("left", "right"):
            part = checks.instance(name, getattr(self, name), AbstractFeatures)
            if part.has_dense_precision:
                raise ValueError(
                    "sums and products are of features with independent weights, and those of "
                    f"`{type(part).__name__}` depend on each other a priori: write a site for each."
                )

    @property
    def kernel(self) -> AbstractKernel:
        """The kernel that the features stand for.

        Raises:
            ValueError: if one of the maps has none.
        """
        return self._combined(*(_with_kernel(part).kernel for part in (self.left, self.right)))

    @abc.abstractmethod
    def _combined(self, left: AbstractKernel, right: AbstractKernel) -> AbstractKernel:
        """The kernel made of those of the parts."""


class SumOfFeatures(AbstractCompositeFeatures):
    """The features of both maps side by side: f is the sum of two independent functions.

    `active` selects the terms that count: both, unless it is a component of another sum.
    """

    active: tuple[bool, bool] = eqx.field(static=True, default=(True, True))

    def size(self, X: Float[Array, "n d"]) -> int:
        """The number of features of both."""
        return self.left.size(X) + self.right.size(X)

    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index`, shape (n, num), at the cost of as many of each map."""
        num = self.left.size(X)
        found = [
            part.evaluate(X, jnp.clip(index - first, 0, part.size(X) - 1))
            for part, first in ((self.left, 0), (self.right, num))
        ]
        is_left = index < num
        left, right = (jnp.where(on, one, 0.0) for on, one in zip(self.active, found, strict=True))
        return jnp.where(is_left, left, right)

    def __call__(self, X: Float[ArrayLike, "n d"]) -> Float[Array, "n m"]:
        """All features, shape (n, m)."""
        basis, amplitudes = self.basis_and_amplitudes(X)
        return amplitudes * basis

    def basis_and_amplitudes(
        self, X: Float[ArrayLike, "n d"]
    ) -> tuple[Float[Array, "n m"], Float[Array, " m"]]:
        """Those of both maps side by side; a basis of zeros where one is not active."""
        X, parts, amplitudes = checks.inputs("X", X), [], []
        for part, on in zip((self.left, self.right), self.active, strict=True):
            basis, own = part.basis_and_amplitudes(X)
            parts.append(basis if on else jnp.zeros_like(basis))
            amplitudes.append(jnp.broadcast_to(own, basis.shape[1:]))
        with checks.known_values(*parts):
            whole = jnp.concatenate(parts, axis=1)
        return whole, jnp.concatenate(amplitudes)

    def covariance(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The sum of the active terms' covariances."""
        parts = zip((self.left, self.right), self.active, strict=True)
        found = [part.covariance(X, Z) for part, on in parts if on]
        return sum(found[1:], start=found[0])

    def _combined(self, left: AbstractKernel, right: AbstractKernel) -> AbstractKernel:
        return Sum(left, right, self.active)

    def with_kernel(self, kernel: AbstractKernel) -> "SumOfFeatures":
        """The same features of another sum of kernels."""
        terms: Any = checks.instance("kernel", kernel, Sum)
        left, right = _with_kernel(self.left), _with_kernel(self.right)
        parts = left.with_kernel(terms.left), right.with_kernel(terms.right)
        return SumOfFeatures(*parts, terms.active)


class ProductOfFeatures(AbstractCompositeFeatures):
    """The products of all pairs of features: their inner products are those of the maps."""

    def size(self, X: Float[Array, "n d"]) -> int:
        """The product of both numbers."""
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
        """The same features of another product of kernels."""
        factors: Any = checks.instance("kernel", kernel, Product)
        left, right = _with_kernel(self.left), _with_kernel(self.right)
        return ProductOfFeatures(left.with_kernel(factors.left), right.with_kernel(factors.right))


def _with_kernel(features: AbstractFeatures) -> AbstractKernelFeatures:
    """The features as such that have a kernel.

    Raises:
        ValueError: if they have none.
    """
    if not isinstance(features, AbstractKernelFeatures):
        raise ValueError(f"`{type(features).__name__}` features have no kernel to take a part of.")
    return features
