"""Features that a function computes, such as a neural network."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.features.feature_map import AbstractFeatures
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.nonstationary import refuse_kernel
from numpyro_scalegp.programs import functions


class Learned(AbstractFeatures):
    """The outputs of a function as features, with standard normal weights a priori.

    Args:
        feature_map: maps inputs (n, d) to features (n, m); an Equinox module maps a single row. Its
            parameters are the arrays in it, such as the weights of a network in
            `numpyro.contrib.module`.
        columns_map: maps inputs (n, d) and indices (num,) to these features only, (n, num). Without
            it, `columns` computes all features and selects from them.

    Raises:
        ValueError: if `feature_map` is not callable, or, when called, if it does not return a
            matrix with one row for each input.

    References:
        Snoek et al. (2015), Scalable Bayesian Optimization Using Deep Neural Networks.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> phi = sgp.features.Learned(lambda X: jnp.concatenate([X, jnp.square(X)], axis=1))
        >>> phi(jnp.ones((3, 2))).shape
        (3, 4)
    """

    feature_map: Callable[[Array], Array] = eqx.field(converter=lambda function: _as_map(function))
    columns_map: Callable[[Array, Array], Array] | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        if self.columns_map is not None:
            checks.function("columns_map", self.columns_map)

    def size(self, X: Float[Array, "n d"]) -> int:
        """The number of outputs, from tracing the function alone."""
        # Not the map itself, whose arrays may be traced and are not hashable.
        return jax.eval_shape(lambda X: self._outputs(X), X).shape[1]

    def __call__(self, X: Float[ArrayLike, "n d"]) -> Float[Array, "n m"]:
        """All outputs, shape (n, m), in one evaluation of the function."""
        return self._outputs(checks.inputs("X", X))

    def _outputs(self, X: Float[Array, "n d"]) -> Float[Array, "n m"]:
        outputs = self.feature_map(X)
        if outputs.ndim != 2 or outputs.shape[0] != X.shape[0]:
            raise ValueError(
                f"`feature_map` must map inputs of shape {X.shape} to features of shape "
                f"({X.shape[0]}, m), got {outputs.shape}."
            )
        return outputs

    def evaluate(self, X: Float[Array, "n d"], index: Int[Array, " num"]) -> Float[Array, "n num"]:
        """The features `index`, shape (n, num)."""
        if self.columns_map is not None:
            return self.columns_map(X, index)
        return self.feature_map(X)[:, index]


def as_features(value: Any, name: str = "features") -> AbstractFeatures:
    """A feature map itself, or any other function of inputs as `Learned`.

    Raises:
        TypeError: if it is not a function, or is a kernel; the message calls it `name`.
    """
    if isinstance(value, AbstractKernel):
        raise TypeError(
            f"`{name}` must be features or a function of inputs, got the kernel "
            f"`{type(value).__name__}`: a kernel is an argument of `sgp.LatentGP` and "
            "`sgp.GaussianProcess`, and `sgp.features.RandomFourier` makes features of it."
        )
    if callable(value) and not isinstance(value, AbstractFeatures | type):
        return Learned(functions.as_pytree(value, name))
    expected = "features of `sgp.features`, or a function such as `lambda X: X`"
    return checks.instance(name, value, AbstractFeatures, expected)


def _as_map(function: Callable[[Array], Array]) -> functions.RowsFunction:
    refuse_kernel("feature_map", function)
    return functions.as_pytree(function, "feature_map")
