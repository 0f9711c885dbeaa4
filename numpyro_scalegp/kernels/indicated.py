"""A kernel that is zero for some rows."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from numpyro_scalegp.kernels.kernel import NUM_HARMONICS, AbstractKernel
from numpyro_scalegp.kernels.spectrum import Origin
from numpyro_scalegp.kernels.state_space import AbstractStateSpace, WithIndicator


class Indicated(AbstractKernel):
    """k((x, a), (z, b)) = a b k_1(x, z), with an indicator of 0 or 1 as the last column.

    Rows whose indicator is zero have no variance and no covariance, so they do not affect what is
    computed from the kernel of all rows.

    Args:
        kernel: the kernel k_1 of the columns before the last.
    """

    kernel: AbstractKernel

    @staticmethod
    def with_indicator(
        X: Float[Array, "... n d"], is_active: Bool[Array, "... n"] | bool = True
    ) -> Float[Array, "... n d_and_one"]:
        """Add the indicator as the last column."""
        column = jnp.broadcast_to(jnp.asarray(is_active, X.dtype), X.shape[:-1])
        return jnp.concatenate([X, column[..., None]], axis=-1)

    def _inputs_of_parts(self, X: Float[Array, "... n d_and_one"]) -> Float[Array, "... n d"]:
        return X[..., :-1]

    def categories(self, d: int) -> dict[int, tuple[int, ...]]:
        """The kernel's categories, in the columns before the last."""
        return self.kernel.categories(d - 1)

    def ranges(self, d: int) -> dict[int, tuple[float, float]]:
        """The kernel's ranges, in the columns before the last."""
        return self.kernel.ranges(d - 1)

    def rough_columns(self, d: int) -> frozenset[int]:
        """The kernel's rough columns, among the columns before the last."""
        return self.kernel.rough_columns(d - 1)

    @property
    def has_smooth_features(self) -> bool:
        """Whether the kernel's features are smooth."""
        return self.kernel.has_smooth_features

    def evaluate(
        self, X: Float[Array, "n d_and_one"], Z: Float[Array, "m d_and_one"]
    ) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        K = self.kernel.evaluate(self._inputs_of_parts(X), self._inputs_of_parts(Z))
        return X[:, -1:] * Z[:, -1] * K

    def evaluate_diag(self, X: Float[Array, "n d_and_one"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        return X[:, -1] * self.kernel.evaluate_diag(self._inputs_of_parts(X))

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """The kernel's form, not observed in rows whose indicator is zero."""
        return WithIndicator(self.kernel.state_space(num_harmonics=num_harmonics))

    def evaluate_features(
        self,
        key: Key[Array, ""],
        X: Float[Array, "n d_and_one"],
        num_features: int,
        origin: Origin,
    ) -> Float[Array, "n p"]:
        """The kernel's features, zero for rows whose indicator is zero."""
        origin = None if origin is None else origin[:-1]
        inputs = self._inputs_of_parts(X)
        return X[:, -1:] * self.kernel.evaluate_features(key, inputs, num_features, origin)
