"""Nonstationary kernels: linear, and kernels of mapped inputs."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS, AbstractKernel, AbstractMapped
from numpyro_scalegp.kernels.spectrum import Origin
from numpyro_scalegp.kernels.state_space import AbstractStateSpace, Trend
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs import functions


class Linear(AbstractKernel):
    """The covariance of a linear function with random coefficients and intercept.

    k(x, z) = variance * x'z + bias.

    Args:
        variance: prior variance of the coefficients, in squared units of the function over squared
            units of the inputs, positive; shape () or (*batch,).
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
        _ = self.batch_shape  # raises unless batch shapes fit together

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

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """The value and the slope; see `AbstractKernel.state_space`."""
        return Trend(self.variance, self.bias)


class FeatureMapped(AbstractMapped):
    """A kernel of mapped inputs, k(x, z) = k_1(g(x), g(z)): a deep kernel if g is a network.

    Args:
        kernel: the kernel k_1 on the outputs of the map.
        feature_map: the map g. An Equinox module maps a single row; any other callable (a plain
            function, a Flax NNX module, the return value of a function of `numpyro.contrib.module`)
            maps the (n, d) array to (n, p).

    Raises:
        ValueError: if `feature_map` is not callable, or does not return a row for each input.

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

    def _inputs_of_parts(self, X: Float[Array, "... n d"]) -> Float[Array, "... n p"]:
        if X.ndim > 2:
            return batches.mapped(self._inputs_of_parts, 2)(X)
        mapped = self.feature_map(X)
        if jnp.ndim(mapped) != 2 or mapped.shape[0] != X.shape[0]:
            raise ValueError(
                f"`feature_map` must return shape ({X.shape[0]}, p) for inputs of shape "
                f"{X.shape}, got {jnp.shape(mapped)}."
            )
        return mapped

    def categories(self, d: int) -> dict[int, tuple[int, ...]]:
        """No categories: the kernel's categories are outputs of the map, not inputs."""
        return {}

    def ranges(self, d: int) -> dict[int, tuple[float, float]]:
        """No ranges: the kernel's are of outputs of the map, not of inputs."""
        return {}

    def rough_columns(self, d: int) -> frozenset[int]:
        """All columns, if the kernel is rough in any output of the map."""
        inputs = jax.ShapeDtypeStruct((1, d), float)
        width = jax.eval_shape(self._inputs_of_parts, inputs).shape[1]
        return frozenset(range(d) if self.kernel.rough_columns(width) else ())


def refuse_kernel(name: str, function: object) -> None:
    """Raise if the argument `name`, a function of inputs, is a kernel, which is callable, too."""
    if isinstance(function, AbstractKernel):
        raise TypeError(
            f"`{name}` must be a function of inputs, got the kernel `{type(function).__name__}`: "
            "pass a kernel as `kernel`."
        )
