"""Kernels that depend on where the inputs lie: linear, and kernels of mapped inputs."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks, functions
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.spectrum import Origin


class Linear(AbstractKernel):
    """The covariance of a linear function with random coefficients and intercept.

    k(x, z) = variance * x'z + bias.

    Args:
        variance: prior variance of the coefficients, in squared units of the function over the
            inputs', positive; shape () or (*batch,).
        bias: prior variance of the intercept, in squared units of the function, not negative;
            shape () or (*batch,).

    Raises:
        ValueError: if a hyperparameter has the wrong sign, or shapes do not fit together.

    References:
        Rasmussen and Williams (2006), section 4.2.2.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> trend = sgp.kernels.Linear(variance=0.1, bias=1.0)
    """

    hyperparameter_ndims = {"variance": 0, "bias": 0}

    variance: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variance"), default=1.0)
    bias: Float[Array, "..."] = eqx.field(
        converter=checks.to_positive("bias", or_zero=True), default=0.0
    )

    def __check_init__(self) -> None:
        checks.positive("variance", self.variance)
        checks.positive("bias", self.bias, or_zero=True)
        _ = self.batch_shape  # of shapes that fit together

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The d + 1 exact features, sqrt(variance) x and sqrt(bias)."""
        linear = jnp.sqrt(self.variance) * X
        constant = jnp.broadcast_to(jnp.sqrt(self.bias).astype(linear.dtype), (X.shape[0], 1))
        return jnp.concatenate([linear, constant], axis=1)

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        return self.variance * matmul(X, Z.T) + self.bias

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        return self.variance * jnp.sum(jnp.square(X), axis=1) + self.bias


class FeatureMapped(AbstractKernel):
    """A kernel of mapped inputs, k(x, z) = k_1(g(x), g(z)): a deep kernel where g is a network.

    Args:
        kernel: the kernel k_1 on the outputs of the map.
        feature_map: the map g. An Equinox module is applied row by row, as Equinox networks are
            written; anything else (a plain function, a Flax NNX module, what
            `numpyro.contrib.module` returns) is applied to the whole (n, d) array and returns
            (n, p).

    Raises:
        ValueError: if `feature_map` is not callable or does not return one row for each input row.

    References:
        Wilson, Hu, Salakhutdinov and Xing (2016), Deep Kernel Learning, eq. 5.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.FeatureMapped(sgp.kernels.RBF(1.0), jnp.tanh)
    """

    kernel: AbstractKernel
    feature_map: functions.RowsFunction

    def __init__(self, kernel: AbstractKernel, feature_map: Callable[[Array], Array]) -> None:
        checks.instance("kernel", kernel, AbstractKernel)
        refuse_kernel("feature_map", feature_map)
        self.kernel = kernel
        self.feature_map = functions.as_pytree(feature_map, "feature_map")

    def _seen(self, X: Float[Array, "... n d"]) -> Float[Array, "... n p"]:
        if X.ndim > 2:
            return jax.vmap(self._seen)(X)
        mapped = self.feature_map(X)
        if jnp.ndim(mapped) != 2 or mapped.shape[0] != X.shape[0]:
            raise ValueError(
                f"`feature_map` must return shape ({X.shape[0]}, p) for inputs of shape "
                f"{X.shape}, got {jnp.shape(mapped)}."
            )
        return mapped

    def categories(self, d: int) -> dict[int, tuple[int, ...]]:
        """None: those of the kernel are outputs of the map."""
        return {}

    def rough_columns(self, d: int) -> frozenset[int]:
        """All, if the kernel has any among the outputs of the map."""
        width = jax.eval_shape(self._seen, jax.ShapeDtypeStruct((1, d), float)).shape[1]
        return frozenset(range(d) if self.kernel.rough_columns(width) else ())

    @property
    def has_smooth_features(self) -> bool:
        """Whether the kernel's own features are smooth."""
        return self.kernel.has_smooth_features

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The features of the mapped inputs."""
        origin = None if origin is None else self._seen(origin[None])[0]
        return self.kernel.evaluate_features(key, self._seen(X), num_features, origin)

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        return self.kernel.evaluate(self._seen(X), self._seen(Z))

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        return self.kernel.evaluate_diag(self._seen(X))


def refuse_kernel(name: str, function: object) -> None:
    """Raise for a kernel where the argument `name` is a map of inputs: both are callable."""
    if isinstance(function, AbstractKernel):
        raise TypeError(
            f"`{name}` must be a function of inputs, got the kernel `{type(function).__name__}`: "
            "a kernel is an argument of its own."
        )
