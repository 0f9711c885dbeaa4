"""The posterior at each input given its nearest observations."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core import checks, linalg, neighbors, rounding
from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.row_values import in_chunks_and_whole
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors import conditionals
from numpyro_scalegp.posteriors.function_samples import (
    AbstractFunctionSamples,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.posteriors.posterior import AbstractConditioned

# Entries of the neighbors' covariances in a chunk on CPUs, whose caches hold them.
_MAX_CACHED = 2**14


def scaled(kernel: AbstractKernel, X: Float[Array, "n d"]) -> Float[Array, "n k"]:
    """The inputs in units of a kernel's lengthscales, those of all its parts side by side.

    As they are for a kernel that has none.
    """
    pairs = kernel.scaled_inputs(X)
    found = [seen / jnp.asarray(lengthscale) for lengthscale, seen in pairs]
    return jnp.concatenate(found, axis=1) if found else X


def rows_at_a_time(num_neighbors: int, width: int = 0, most: int | None = None) -> int:
    """Rows of a chunk, with a few matrices of the neighbors' covariance for each.

    Args:
        num_neighbors: of each row.
        width: further entries for each row.
        most: how many rows at most.
    """
    size = num_neighbors + 1
    found = rows_per_chunk(8 * size**2 + width)
    if jax.default_backend() == "cpu":
        found = min(found, max(1, _MAX_CACHED // size**2))
    return found if most is None else min(found, most)


class Neighbors(eqx.Module):
    """Observations, of which each input takes the nearest."""

    kernel: AbstractKernel
    X: Float[Array, "n d"]
    noise: Float[Array, " n"]
    num: int = eqx.field(static=True)

    def nearest(self, Xs: Float[Array, "m d"], num: int | None = None) -> Int[Array, "m k"]:
        """The nearest rows of X to each of Xs, in lengthscales of the kernel."""
        num = min(self.num if num is None else num, len(self.X))
        points, queries = (scaled(self.kernel, rows) for rows in (self.X, Xs))
        return neighbors.nearest(points, queries, num)

    def systems(
        self,
        near: Int[Array, "r k"],
        rows: Float[Array, "r d"],
        part: AbstractKernel | None = None,
        is_part: Bool[Array, "r k"] | None = None,
    ) -> conditionals.Systems:
        """The systems of f, or a part of it, at some rows given their neighbors."""
        is_given = near < len(self.X)
        safe = jnp.where(is_given, near, 0)
        given = self.X[safe], self.noise[safe], is_given
        return conditionals.systems(self.kernel, *given, rows, part, is_part)

    def weights(
        self,
        near: Int[Array, "r k"],
        rows: Float[Array, "r d"],
        part: AbstractKernel | None = None,
        is_part: Bool[Array, "r k"] | None = None,
    ) -> tuple[Float[Array, "r k"], Float[Array, " r"]]:
        """What multiplies the neighbors in each row's mean, and the variances; in chunks.

        Args:
            near: the neighbors of each row.
            rows: where f, or a part of it, is in question.
            part: of f.
            is_part: which neighbors are values of the part, too.
        """

        def of_chunk(chunk: tuple[Array, Array, Array | None]) -> tuple[Array, Array]:
            near, rows, is_part = chunk
            return conditionals.weights(self.systems(near, rows, part, is_part))

        return map_rows(of_chunk, (near, rows, is_part), rows_at_a_time(self.num))

    def groups(self, rows: Int[Array, "r k"], places: Int[Array, "r o"]) -> conditionals.Groups:
        """Observations in groups, those at the places each given those before it."""
        is_given = rows < len(self.X)
        safe = jnp.where(is_given, rows, 0)
        return conditionals.groups(self.kernel, self.X[safe], self.noise[safe], is_given, places)

    def in_turn(self, Xs: Float[Array, "m d"]) -> tuple[Int[np.ndarray, " m"], Int[Array, "m k"]]:
        """An ordering of inputs from coarse to fine, and the nearest rows of X and inputs before.

        Neighbors are of the inputs in this order, which come after the n rows of X: n + m is none.
        Inputs that are traced stay in their own.
        """
        n, m = len(self.X), len(Xs)
        # In the wider dtype: rounded, they were other inputs.
        rows = jnp.concatenate([self.X, jnp.asarray(Xs)])
        points = scaled(self.kernel, rows)
        order = np.arange(m)
        if checks.is_concrete(points):
            order = neighbors.maxmin_order(as_numpy(points[n:]).astype(np.float64))
        points = jnp.concatenate([points[:n], points[n:][order]])
        num = min(self.num, n + m - 1)
        return order, neighbors.nearest(points, points[n:], num, n + np.arange(m))

    def with_rows(self, Xs: Float[Array, "m d"], part: AbstractKernel | None = None) -> "Neighbors":
        """These and values of f, or a part of it, without noise but what keeps equal ones apart."""
        own = self.kernel if part is None else part
        nugget = linalg.default_jitter(self.noise.dtype) * own.diag(Xs)
        noise = jnp.concatenate([self.noise, nugget.astype(self.noise.dtype)])
        return Neighbors(self.kernel, jnp.concatenate([self.X, Xs]), noise, self.num)

    def draw(
        self,
        key: Key[Array, ""],
        Xs: Float[Array, "m d"],
        near: Int[Array, "m k"],
        values: Float[Array, "n s"],
        num_samples: int,
        part: AbstractKernel | None = None,
    ) -> Float[Array, "num_samples m"]:
        """Draws of f, or a part of it, at inputs in their order, as `in_turn` gives both.

        Args:
            key: a typed JAX key.
            Xs: inputs.
            near: their neighbors.
            values: the observations, one for all draws or one for each.
            num_samples: number of draws.
            part: of f.
        """
        b, variance = self.with_rows(Xs, part).weights(near, Xs, part, near >= len(self.X))
        return draw_in_turn(key, b, variance, near, values, num_samples)


def draw_in_turn(
    key: Key[Array, ""],
    weights: Float[Array, "m k"],
    variance: Float[Array, " m"],
    near: Int[Array, "m k"],
    values: Float[Array, "n s"],
    num_samples: int,
) -> Float[Array, "num_samples m"]:
    """Draw one value after the other, each given its neighbors.

    Args:
        key: a typed JAX key.
        weights: of the neighbors in each value's mean.
        variance: what these leave.
        near: the neighbors: of n known values, of the values before, as n, n + 1 and so on, and
            n + m in place of those that a value lacks, whose weights are zero.
        values: the known ones, one for all draws or one for each.
        num_samples: number of draws.
    """
    n, m, dtype = len(values), len(near), values.dtype
    is_new = near >= n
    old = jnp.where(is_new, 0.0, weights)
    known = jnp.einsum("mk,mks->ms", old, values[jnp.where(is_new, 0, near)], precision="highest")
    scale = jnp.sqrt(jnp.maximum(variance, 0.0))[:, None]
    known = known + scale * jax.random.normal(key, (m, num_samples), dtype)
    new, among_new = jnp.where(is_new, near - n, m), jnp.where(is_new, weights, 0.0)

    def step(f: Array, row: tuple[Array, ...]) -> tuple[Array, None]:
        i, weights, new, known = row
        return f.at[i].set(known + linalg.matmul(weights, f[new])), None

    start = jnp.zeros((m + 1, num_samples), dtype)
    return jax.lax.scan(step, start, (jnp.arange(m), among_new, new, known))[0][:-1].T


class VecchiaPosterior(AbstractConditioned):
    """The posterior of f at each input given the nearest of its noisy observations.

    With H the covariance of the k nearest observations r (minus the mean), and c theirs with f(x):
    mean m(x) + c'H^-1 r and variance k(x, x) - c'H^-1 c. Joint samples are drawn one input after
    the other, from coarse to fine, each given the nearest among the observations and the inputs
    that were drawn before.

    Made by `GaussianProcess.condition` with `Vecchia`; immutable. Moments at m inputs cost
    O(m (k^3 + log n)); a joint sample costs O(m k) after as much. Neighbors are found on the host,
    or, where X, Xs or the kernel are traced, from all n m distances.

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
    noise: Float[Array, " n"]  # with which these were observed
    num_neighbors: int = eqx.field(static=True)
    part: AbstractKernel | None = None  # of f; part(x, z) is its covariance at x with f at z
    of_values: bool = eqx.field(static=True, default=False)  # whether y are values of f

    @property
    def _is_of_values(self) -> bool:
        return self.of_values

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "VecchiaPosterior":
        """The posterior of a part of f; see `AbstractPosterior.restrict`."""
        own = self.kernel if self.part is None else self.part
        zero = zero_function(self.residual.dtype)
        return dataclasses.replace(self, part=change(own), mean_function=zero)

    @property
    def _known(self) -> Neighbors:
        return Neighbors(self.kernel, self.X, self.noise, self.num_neighbors)

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[0]

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[1]

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        return self._moments(Xs, self._known.nearest(Xs), chunk_size)

    @compiled
    def _moments(self, Xs: Array, near: Array, chunk_size: int | None) -> tuple[Array, Array]:
        known, (in_chunks, whole) = self._known, in_chunks_and_whole(self.mean_function)
        limit = rounding.NO_DIGITS if self.noise_variance is None else rounding.FEW_DIGITS

        def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            rows, near = chunk
            found = known.systems(near, rows, self.part)
            values = jnp.where(near < len(self.X), self.residual[near], 0.0)
            mean, variance = conditionals.moments(found, values[..., None], limit)
            left = rounding.remaining_variance(found.variance, found.variance - variance)
            return in_chunks(rows) + mean[:, 0], left

        size = rows_at_a_time(self.num_neighbors, most=chunk_size)
        mean, variance = map_rows(of_chunk, (Xs, near), size)
        return whole(Xs) + mean, variance

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given its nearest others.

        Raises:
            ValueError: if the function's own values were given, and the observations are others.
        """
        self._refuse_unknown_observations()
        near = self._known.nearest(self.X, self.num_neighbors + 1)
        # Each row but itself; of rows that are all the same, it may not be among the nearest.
        own = near == jnp.arange(len(near), dtype=near.dtype)[:, None]
        own = own.at[:, -1].set(own[:, -1] | ~jnp.any(own, axis=1))
        ranks = jnp.argsort(own, axis=1, stable=True)[:, :-1]
        mean, variance = self._moments(self.X, jnp.take_along_axis(near, ranks, axis=1), None)
        return dist.Normal(mean, jnp.sqrt(variance + self.noise))

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        order, near = self._known.in_turn(Xs)
        return self._drawn(key, Xs[order], near, num_samples)[:, np.argsort(order)]

    @compiled
    def _drawn(self, key: Array, Xs: Array, near: Array, num_samples: int) -> Array:
        """Draws at rows of which each has neighbors among those of X and those before it."""
        f = self._known.draw(key, Xs, near, self.residual[:, None], num_samples, self.part)
        return f + self.mean_function(Xs)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> "NeighborFunctionSamples":
        known, dtype = self._known, self.residual.dtype
        X = self.X.astype(dtype)
        draws = prior_draws(key, self.kernel, num_samples, num_features, X)
        rest = self.residual[:, None] - draws.observations(self.kernel, X, known.noise)
        return NeighborFunctionSamples(known, self.part, self.mean_function, draws, rest)


class NeighborFunctionSamples(AbstractFunctionSamples):
    """Prior draws, each updated at an input by what its nearest observations say.

    f_j(x) = m(x) + p_j(x) + c'H^-1 (r - p_j(X) - e_j), of the neighbors of x: where these change,
    the function may jump.
    """

    known: Neighbors
    part: AbstractKernel | None
    mean_function: RowsFunction
    draws: PriorDraws
    rest: Float[Array, "n num_samples"]

    @property
    def _num_columns(self) -> int:
        return self.known.X.shape[-1]

    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._at(Xs, self.known.nearest(Xs), chunk_size)

    @compiled
    def _at(self, Xs: Array, near: Array, chunk_size: int | None) -> Array:
        own = self.known.kernel if self.part is None else self.part

        def of_chunk(chunk: tuple[Array, Array]) -> Array:
            rows, near = chunk
            found = self.known.systems(near, rows, self.part)
            values = jnp.where((near < len(self.rest))[..., None], self.rest[near], 0.0)
            drawn = self.draws(own, rows.astype(self.rest.dtype))
            b = conditionals.weights(found)[0]
            update = jnp.einsum("bk,bks->bs", b, values, precision="highest")
            return self.mean_function(rows)[:, None] + drawn + update

        size = rows_at_a_time(self.known.num, most=chunk_size)
        return map_rows(of_chunk, (Xs, near), size).T
