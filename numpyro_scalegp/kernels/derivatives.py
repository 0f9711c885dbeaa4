"""A kernel of a function together with its partial derivatives."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS, AbstractKernel
from numpyro_scalegp.kernels.spectrum import Origin
from numpyro_scalegp.kernels.state_space import AbstractStateSpace, WithSlope


class _Rows(NamedTuple):
    inputs: Float[Array, "n d"]
    directions: Float[Array, "n d"]  # of the derivatives, unit vectors; zero for the function
    is_derivative: Bool[Array, " n"]
    is_valid: Bool[Array, " n"]  # whether the function has this derivative


class WithDerivatives(AbstractKernel):
    """A function and its partial derivatives: the last input column selects one of them.

    The last column holds 0 for the function itself and j for the derivative with respect to the
    j-th input column (counted from 1). With D_0 f = f and D_j f = df / dx_j, the covariance of D_i
    f(x) and D_j f(z) is k((x, i), (z, j)) = D_i D_j' k_1(x, z), where D_i acts on x and D_j' on z.
    The derivatives are by automatic differentiation, for any kernel k_1 that can be differentiated
    once in x and once in z. Values and derivatives may be observed at different inputs, and each is
    predicted from all observations. A derivative has units of the function per unit of the input,
    so its noise differs: give `GaussianProcess` a noise variance for each row.

    Args:
        kernel: k_1, the covariance of the function, of all columns but the last.

    Raises:
        TypeError: if `kernel` is not a kernel.
        ValueError: when called, if the inputs have a single column, if the last column holds
            anything but 0 and the numbers j of differentiable columns, or if no column is
            differentiable, as with `Matern12`, or with `Coregion` in its categories. Inside `jit`
            the covariances with such a row are NaN.

    References:
        Rasmussen and Williams (2006), eq. 9.1; Solak et al. (2003), Derivative Observations in
        Gaussian Process Models of Dynamic Systems. A matrix of k costs about as much as five of
        k_1, for any number of columns.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.WithDerivatives(sgp.kernels.RBF(5.0, 25.0))
        >>> X = jnp.array([[0.0, 0.0], [1.0, 1.0], [3.0, 1.0]])  # f(0), and its slope at 1 and 3
        >>> y = jnp.array([0.0, 1.0, 1.0])
        >>> posterior = sgp.GaussianProcess(kernel, X, 1e-4).condition(y)
        >>> posterior.mean(jnp.array([[2.0, 0.0]])).round(1).tolist()
        [2.0]
    """

    kernel: AbstractKernel

    def __check_init__(self) -> None:
        checks.instance("kernel", self.kernel, AbstractKernel)

    def _inputs_of_parts(self, X: Float[Array, "n d"]) -> Float[Array, "n k"]:
        return X[:, :-1]

    def categories(self, d: int) -> dict[int, tuple[int, ...]]:
        """The categories of k_1, and in the last column the derivatives that exist."""
        if d < 2:
            raise ValueError(
                "`WithDerivatives` takes inputs and a last column that says which derivative a row "
                f"holds, got {d} column."
            )
        rough = self.kernel.rough_columns(d - 1)
        if len(rough) == d - 1:
            raise ValueError(
                "functions with the `kernel` of `WithDerivatives` have no derivative in any of the "
                f"{d - 1} column(s), as with `Matern12`: take a smoother one, such as "
                "`Matern52`."
            )
        orders = (0, *(column + 1 for column in range(d - 1) if column not in rough))
        return {**self.kernel.categories(d - 1), d - 1: orders}

    def ranges(self, d: int) -> dict[int, tuple[float, float]]:
        """The ranges of k_1, in the columns before the last."""
        return self.kernel.ranges(d - 1)

    def rough_columns(self, d: int) -> frozenset[int]:
        """All columns, since there are no second derivatives."""
        return frozenset(range(d))

    @property
    def has_smooth_features(self) -> bool:
        """Whether k_1 has smooth features; see `AbstractKernel.has_smooth_features`."""
        return self.kernel.has_smooth_features

    def _rows(self, X: Float[Array, "n d"]) -> _Rows:
        num, which = X.shape[1] - 1, X[:, -1]
        directions = (which[:, None] == jnp.arange(1, num + 1, dtype=X.dtype)).astype(X.dtype)
        valid = jnp.array(self.categories(num + 1)[num], X.dtype)
        return _Rows(self._inputs_of_parts(X), directions, which > 0, jnp.isin(which, valid))

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        left, right = self._rows(X), self._rows(Z)

        # One derivative for all rows, each along its direction: k_1(x, z) depends on no other row.
        def along_right(x: Array) -> tuple[Array, Array]:
            primals, tangents = (right.inputs,), (right.directions,)
            return jax.jvp(lambda z: self.kernel.evaluate(x, z), primals, tangents)

        (value, by_right), (by_left, by_both) = jax.jvp(
            along_right, (left.inputs,), (left.directions,)
        )
        is_valid = left.is_valid[:, None] & right.is_valid
        of_function = jnp.where(right.is_derivative, by_right, value)
        of_derivative = jnp.where(right.is_derivative, by_both, by_left)
        K = jnp.where(left.is_derivative[:, None], of_derivative, of_function)
        return jnp.where(is_valid, K, jnp.nan)

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """The kernel's form, whose state has the derivative; see `AbstractKernel.state_space`."""
        return WithSlope(self.kernel.state_space(num_harmonics=num_harmonics))

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,), in O(n d)."""
        rows = self._rows(X)

        def of_derivative(x: Array, direction: Array) -> Array:
            def along_right(left: Array) -> Array:
                def value(right: Array) -> Array:
                    return self.kernel.evaluate(left[None], right[None])[0, 0]

                return jax.jvp(value, (x,), (direction,))[1]

            return jax.jvp(along_right, (x,), (direction,))[1]

        variances = jax.vmap(of_derivative)(rows.inputs, rows.directions)
        of_function = self.kernel.evaluate_diag(rows.inputs)
        variances = jnp.where(rows.is_derivative, variances, of_function)
        return jnp.where(rows.is_valid, variances, jnp.nan)

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The features of k_1 or, for a derivative, their derivatives."""
        rows = self._rows(X)
        begin = None if origin is None else self._inputs_of_parts(origin[None])[0]

        def features(x: Array) -> Array:
            return self.kernel.evaluate_features(key, x, num_features, begin)

        value, derivative = jax.jvp(features, (rows.inputs,), (rows.directions,))
        values = jnp.where(rows.is_derivative[:, None], derivative, value)
        return jnp.where(rows.is_valid[:, None], values, jnp.nan)
