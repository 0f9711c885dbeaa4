"""The posterior at each input given its nearest observations."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.neighbors import conditionals, search
from numpyro_scalegp.numerics import linalg, rounding
from numpyro_scalegp.processes.function_samples import (
    AbstractFunctionSamples,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.processes.posterior import AbstractConditioned
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction, in_chunks_and_whole

# On CPUs, the number of entries of neighbor covariances in a chunk that fits into the caches.
_MAX_CACHED = 2**14


def scaled(kernel: AbstractKernel, X: Float[Array, "n d"]) -> Float[Array, "n k"]:
    """The inputs in units of the kernel's lengthscales, concatenated over its components.

    A kernel without lengthscales leaves the inputs unchanged.
    """
    pairs = kernel.scaled_inputs(X)
    scaled_inputs = [inputs / jnp.asarray(lengthscale) for lengthscale, inputs in pairs]
    return jnp.concatenate(scaled_inputs, axis=1) if scaled_inputs else X


def rows_at_a_time(num_neighbors: int, width: int = 0, most: int | None = None) -> int:
    """The number of rows in a chunk that needs a few neighbor covariances for each row.

    Args:
        num_neighbors: neighbors of each row.
        width: further entries for each row.
        most: an upper limit.
    """
    size = num_neighbors + 1
    num_rows = rows_per_chunk(8 * size**2 + width)
    if jax.default_backend() == "cpu":
        num_rows = min(num_rows, max(1, _MAX_CACHED // size**2))
    return num_rows if most is None else min(num_rows, most)


class Neighbors(eqx.Module):
    """Observations, and the conditional distributions of f at inputs given their neighbors."""

    kernel: AbstractKernel
    X: Float[Array, "n d"]
    noise: Float[Array, " n"]
    num: int = eqx.field(static=True)

    def nearest(self, Xs: Float[Array, "m d"], num: int | None = None) -> Int[Array, "m k"]:
        """For each row of Xs, the nearest rows of X, in lengthscales of the kernel."""
        num = min(self.num if num is None else num, len(self.X))
        points, queries = (scaled(self.kernel, rows) for rows in (self.X, Xs))
        return search.nearest(points, queries, num)

    def systems(
        self,
        near: Int[Array, "r k"],
        rows: Float[Array, "r d"],
        component: AbstractKernel | None = None,
        is_component: Bool[Array, "r k"] | None = None,
    ) -> conditionals.Systems:
        """The systems of f, or of a component of f, at inputs given their neighbors."""
        is_neighbor = near < len(self.X)
        index = jnp.where(is_neighbor, near, 0)
        neighbors = self.X[index], self.noise[index], is_neighbor
        return conditionals.systems(self.kernel, *neighbors, rows, component, is_component)

    def weights(
        self,
        near: Int[Array, "r k"],
        rows: Float[Array, "r d"],
        component: AbstractKernel | None = None,
        is_component: Bool[Array, "r k"] | None = None,
    ) -> tuple[Float[Array, "r k"], Float[Array, " r"]]:
        """The weights of the neighbors in conditional means, and the variances, in chunks.

        Args:
            near: neighbors of each input.
            rows: the inputs.
            component: the kernel of a component of f, if it is predicted in place of f.
            is_component: which neighbors are values of the component, too.
        """

        def of_chunk(chunk: tuple[Array, Array, Array | None]) -> tuple[Array, Array]:
            near, rows, is_component = chunk
            return conditionals.weights(self.systems(near, rows, component, is_component))

        return map_rows(of_chunk, (near, rows, is_component), rows_at_a_time(self.num))

    def groups(self, rows: Int[Array, "r k"], places: Int[Array, "r o"]) -> conditionals.Groups:
        """Groups of observations; those at `places` are each given the ones before."""
        is_value = rows < len(self.X)
        index = jnp.where(is_value, rows, 0)
        return conditionals.groups(self.kernel, self.X[index], self.noise[index], is_value, places)

    def coarse_to_fine(
        self, Xs: Float[Array, "m d"]
    ) -> tuple[Int[np.ndarray, " m"], Int[Array, "m k"]]:
        """A coarse-to-fine ordering of inputs, and the neighbors of each ordered input.

        Neighbors are among the n rows of X and the inputs before, which are numbered from n on in
        this order; n + m is padding. Traced inputs keep their order.
        """
        n, m = len(self.X), len(Xs)
        # In the wider dtype, since rounding would change the inputs.
        rows = jnp.concatenate([self.X, jnp.asarray(Xs)])
        points = scaled(self.kernel, rows)
        order = np.arange(m)
        if checks.is_concrete(points):
            order = search.maxmin_order(as_numpy(points[n:]).astype(np.float64))
        points = jnp.concatenate([points[:n], points[n:][order]])
        num = min(self.num, n + m - 1)
        return order, search.nearest(points, points[n:], num, n + np.arange(m))

    def with_rows(
        self, Xs: Float[Array, "m d"], component: AbstractKernel | None = None
    ) -> "Neighbors":
        """Append values of f, or of a component of f, with jitter in place of noise."""
        kernel = self.kernel if component is None else component
        nugget = linalg.default_jitter(self.noise.dtype) * kernel.evaluate_diag(Xs)
        noise = jnp.concatenate([self.noise, nugget.astype(self.noise.dtype)])
        return Neighbors(self.kernel, jnp.concatenate([self.X, Xs]), noise, self.num)

    def draw(
        self,
        key: Key[Array, ""],
        Xs: Float[Array, "m d"],
        near: Int[Array, "m k"],
        values: Float[Array, "n s"],
        num_samples: int,
        component: AbstractKernel | None = None,
    ) -> Float[Array, "num_samples m"]:
        """Joint draws of f, or of a component of f.

        Args:
            key: a typed JAX key.
            Xs: inputs, in the order of `coarse_to_fine`.
            near: their neighbors, from `coarse_to_fine`.
            values: observations, s = 1 for all draws, or s = `num_samples`.
            num_samples: number of draws.
            component: the kernel of the component.
        """
        is_new = near >= len(self.X)
        b, variance = self.with_rows(Xs, component).weights(near, Xs, component, is_new)
        return draw_sequentially(key, b, variance, near, values, num_samples)


def draw_sequentially(
    key: Key[Array, ""],
    weights: Float[Array, "m k"],
    variance: Float[Array, " m"],
    near: Int[Array, "m k"],
    values: Float[Array, "n s"],
    num_samples: int,
) -> Float[Array, "num_samples m"]:
    """Draw m values in sequence, each given its neighbors.

    Args:
        key: a typed JAX key.
        weights: weights of the neighbors in the conditional means.
        variance: conditional variances.
        near: neighbors: 0 to n - 1 are the n observations, n, n + 1 and so on are the values
            already drawn, and n + m is padding, with weight zero.
        values: observations, s = 1 for all draws, or s = `num_samples`.
        num_samples: number of draws.
    """
    n, m, dtype = len(values), len(near), values.dtype
    is_new = near >= n
    old_weights, new_weights = jnp.where(is_new, 0.0, weights), jnp.where(is_new, weights, 0.0)
    old_values = values[jnp.where(is_new, 0, near)]
    mean = jnp.einsum("mk,mks->ms", old_weights, old_values, precision="highest")
    scale = jnp.sqrt(jnp.maximum(variance, 0.0))[:, None]
    terms = mean + scale * jax.random.normal(key, (m, num_samples), dtype)
    new_near = jnp.where(is_new, near - n, m)

    def step(f: Array, row: tuple[Array, ...]) -> tuple[Array, None]:
        i, weights, near, term = row
        return f.at[i].set(term + linalg.matmul(weights, f[near])), None

    start = jnp.zeros((m + 1, num_samples), dtype)
    return jax.lax.scan(step, start, (jnp.arange(m), new_weights, new_near, terms))[0][:-1].T


class VecchiaPosterior(AbstractConditioned):
    """The posterior of f at each input given the nearest noisy observations.

    Let r be the k nearest observations minus their means, H their covariance, and c their
    covariance with f(x). Then f(x) has the mean m(x) + c'H^-1 r and the variance
    k(x, x) - c'H^-1 c. Joint samples are drawn sequentially, in coarse-to-fine order, each value
    given the nearest among the observations and the values already drawn.

    `GaussianProcess.condition` returns it for `Vecchia`; it is immutable. Moments at m inputs cost
    O(m (k^3 + log n)); a joint sample costs O(m k) after as much. The neighbor search runs on the
    host; if X, Xs or the kernel is traced, it uses all n m distances.

    References:
        Vecchia (1988), Estimation and Model Identification for Continuous Spatial Processes;
        Katzfuss et al. (2020), Vecchia Approximations of Gaussian-Process Predictions.
    """

    kernel: AbstractKernel
    X: Float[Array, "n d"]
    y: Float[Array, " n"]
    noise_variance: Float[Array, "..."] | None
    mean_function: RowsFunction
    residual: Float[Array, " n"]  # y - m(X)
    noise: Float[Array, " n"]  # noise variances of y
    num_neighbors: int = eqx.field(static=True)
    component_kernel: AbstractKernel | None = None  # for the posterior of a component of f
    of_values: bool = eqx.field(static=True, default=False)  # whether y are values of f

    @property
    def _is_of_values(self) -> bool:
        return self.of_values

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "VecchiaPosterior":
        """The posterior of a component of f; see `AbstractPosterior.restrict`."""
        kernel = self.kernel if self.component_kernel is None else self.component_kernel
        zero = zero_function(self.residual.dtype)
        return dataclasses.replace(self, component_kernel=change(kernel), mean_function=zero)

    @property
    def _data(self) -> Neighbors:
        return Neighbors(self.kernel, self.X, self.noise, self.num_neighbors)

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[0]

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[1]

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        return self._moments(Xs, self._data.nearest(Xs), chunk_size)

    @compiled
    def _moments(self, Xs: Array, near: Array, chunk_size: int | None) -> tuple[Array, Array]:
        data, (in_chunks, at_once) = self._data, in_chunks_and_whole(self.mean_function)
        limit = rounding.NO_DIGITS if self.noise_variance is None else rounding.FEW_DIGITS

        def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            rows, near = chunk
            system = data.systems(near, rows, self.component_kernel)
            values = jnp.where(near < len(self.X), self.residual[near], 0.0)
            mean, variance = conditionals.moments(system, values[..., None], limit)
            remaining = rounding.remaining_variance(system.variance, system.variance - variance)
            return in_chunks(rows) + mean[:, 0], remaining

        size = rows_at_a_time(self.num_neighbors, most=chunk_size)
        mean, variance = map_rows(of_chunk, (Xs, near), size)
        return at_once(Xs) + mean, variance

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given the nearest other observations.

        Raises:
            ValueError: if the posterior is conditioned on values of f, not on observations.
        """
        self._refuse_unknown_observations()
        near = self._data.nearest(self.X, self.num_neighbors + 1)
        # Exclude each row itself, or the last neighbor: among many equal rows, a row may not be one
        # of the nearest to itself.
        is_excluded = near == jnp.arange(len(near), dtype=near.dtype)[:, None]
        is_excluded = is_excluded.at[:, -1].set(is_excluded[:, -1] | ~jnp.any(is_excluded, axis=1))
        ranks = jnp.argsort(is_excluded, axis=1, stable=True)[:, :-1]
        mean, variance = self._moments(self.X, jnp.take_along_axis(near, ranks, axis=1), None)
        return dist.Normal(mean, jnp.sqrt(variance + self.noise))

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        order, near = self._data.coarse_to_fine(Xs)
        return self._draw(key, Xs[order], near, num_samples)[:, np.argsort(order)]

    @compiled
    def _draw(self, key: Array, Xs: Array, near: Array, num_samples: int) -> Array:
        values, component = self.residual[:, None], self.component_kernel
        f = self._data.draw(key, Xs, near, values, num_samples, component)
        return f + self.mean_function(Xs)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> "NeighborFunctionSamples":
        data, dtype = self._data, self.residual.dtype
        X = self.X.astype(dtype)
        draws = prior_draws(key, self.kernel, num_samples, num_features, X)
        residuals = self.residual[:, None] - draws.observations(self.kernel, X, data.noise)
        return NeighborFunctionSamples(
            data, self.component_kernel, self.mean_function, draws, residuals
        )


class NeighborFunctionSamples(AbstractFunctionSamples):
    """Prior draws, each updated at an input by the nearest observations.

    f_j(x) = m(x) + p_j(x) + c'H^-1 (r - p_j(X) - e_j), for the neighbors of x. The function may
    jump where the neighbors of x change.
    """

    data: Neighbors
    component_kernel: AbstractKernel | None
    mean_function: RowsFunction
    draws: PriorDraws
    residuals: Float[Array, "n num_samples"]

    @property
    def _num_columns(self) -> int:
        return self.data.X.shape[-1]

    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._at(Xs, self.data.nearest(Xs), chunk_size)

    @compiled
    def _at(self, Xs: Array, near: Array, chunk_size: int | None) -> Array:
        data, component, residuals = self.data, self.component_kernel, self.residuals
        kernel = data.kernel if component is None else component

        def of_chunk(chunk: tuple[Array, Array]) -> Array:
            rows, near = chunk
            system = data.systems(near, rows, component)
            values = jnp.where((near < len(residuals))[..., None], residuals[near], 0.0)
            drawn = self.draws(kernel, rows.astype(residuals.dtype))
            b = conditionals.weights(system)[0]
            update = jnp.einsum("bk,bks->bs", b, values, precision="highest")
            return self.mean_function(rows)[:, None] + drawn + update

        size = rows_at_a_time(data.num, most=chunk_size)
        return map_rows(of_chunk, (Xs, near), size).T
