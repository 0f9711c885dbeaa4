"""Functions drawn from a Gaussian process prior, by random features."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, UInt

from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.compiled import compiled_unless_traced

# The number of draws that share frequencies; given these, their covariance is approximate.
_GROUP = 16


def rows_stay() -> bool:
    """Whether an array of random numbers keeps its rows if more rows are drawn after them.

    JAX's random bits do not depend on the shape if this setting is on, which is the default.
    """
    return getattr(jax.config, "jax_threefry_partitionable", True)


def center(X: Float[Array, "n d"]) -> Float[Array, " d"]:
    """The mean of the rows over their finite entries."""
    X = jax.lax.stop_gradient(X)
    first = jnp.where(jnp.isfinite(X[0]), X[0], 0.0)
    # The mean of differences, so that all programs round a large mean alike.
    return first + jnp.mean(jnp.where(jnp.isfinite(X), X - first, 0.0), axis=0)


class PriorDraws(eqx.Module):
    """Functions f_j = phi(.)'w_j with random features phi and standard normal weights w_j.

    With the same seed, the frequencies, the weights and the noise are fixed while the draws follow
    the hyperparameters. The phases of the random features are measured from `origin`: as
    lengthscales change, a draw changes more at rows further away from it, and warm starts save
    less. Over seeds, Cov(f_j) = k exactly; each 16 draws have separate frequencies, so that the
    error of the features averages out over many draws.

    References:
        Wilson et al. (2020), Efficiently Sampling Functions from Gaussian Process Posteriors.
    """

    seed: UInt[Array, " 2"]
    num_draws: int = eqx.field(static=True)
    num_features: int = eqx.field(static=True)
    origin: Float[Array, " d"]

    @classmethod
    def from_key(
        cls, key: Key[Array, ""], num_draws: int, num_features: int, X: Float[Array, "n d"]
    ) -> "PriorDraws":
        """Take the seed from a key, and the center of X as the origin."""
        return cls(jax.random.bits(key, (2,), jnp.uint32), num_draws, num_features, center(X))

    def is_same(self, draws: "PriorDraws") -> Bool[Array, ""]:
        """Whether the draws are the same except for the origin, given the same kernel and noise."""
        counts = self.num_draws == draws.num_draws and self.num_features == draws.num_features
        return counts & jnp.all(self.seed == draws.seed)

    @property
    def key(self) -> Key[Array, ""]:
        """The key of all random numbers."""
        return jax.random.wrap_key_data(self.seed, impl="threefry2x32")

    def _keys(self) -> Key[Array, " 2"]:
        """Keys for the functions and the noise."""
        return jax.random.split(self.key)

    @compiled_unless_traced
    def __call__(
        self, kernel: AbstractKernel, X: Float[Array, "n d"]
    ) -> Float[Array, "n num_draws"]:
        """The draws at X, shape (n, num_draws), in chunks of rows: O(n num_features num_draws).

        The weights are drawn in the dtype of X: in another dtype the functions are different.
        """
        origin = self.origin.astype(X.dtype)
        num_groups = -(-self.num_draws // _GROUP)
        width = min(_GROUP, self.num_draws)

        def group(key: Array) -> Array:
            feature_key, weight_key = jax.random.split(key)

            def features(rows: Array) -> Array:
                return kernel.evaluate_features(feature_key, rows, self.num_features, origin)

            size = jax.eval_shape(features, X[:1]).shape[1]
            weights = jax.random.normal(weight_key, (size, width), X.dtype)
            return map_rows(lambda rows: matmul(features(rows), weights), X, rows_per_chunk(size))

        draws = jax.lax.map(group, jax.random.split(self._keys()[0], num_groups))
        return jnp.moveaxis(draws, 0, 1).reshape(X.shape[0], -1)[:, : self.num_draws]

    def observations(
        self,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        noise: Float[Array, " n"],
    ) -> Float[Array, "n num_draws"]:
        """Noisy values of the draws at X, xi_j = f_j(X) + sqrt(noise) w_j ~ N(0, H).

        The draws have the dtype of the noise.
        """
        return self(kernel, X.astype(noise.dtype)) + self.errors(noise)

    def errors(self, noise: Float[Array, " n"]) -> Float[Array, "n num_draws"]:
        """The errors of the observations, sqrt(noise) w_j, shape (n, num_draws)."""
        shape = (noise.size, self.num_draws)
        normal = divided(jax.random.normal(self._keys()[1], shape, noise.dtype), mesh_of(noise))
        return jnp.sqrt(noise)[:, None] * normal
