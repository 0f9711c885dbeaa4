"""The interface of a finite feature map."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.kernels import AbstractKernel


class AbstractFeatures(eqx.Module):
    """A finite feature map x -> phi(x), of which f(x) = phi(x)'w makes a Gaussian process.

    `phi(X)` has all features and `phi.columns(X, index)` some of them, at a cost that does not grow
    with their number. Hyperparameters enter as arrays, so that a model may give them priors.

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
