"""The normal posterior of a function with a nearest-neighbor prior, from its values at the data."""

import dataclasses
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.neighbors import conditionals, laplace
from numpyro_scalegp.neighbors.posterior import (
    NeighborFunctionSamples,
    Neighbors,
    rows_at_a_time,
)
from numpyro_scalegp.neighbors.prior_factor import PriorFactor
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.numerics.rounding import at_least
from numpyro_scalegp.processes.function_samples import prior_draws, zero_function
from numpyro_scalegp.processes.posterior import NEEDS_OBSERVATIONS, AbstractConditioned
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction, in_chunks_and_whole


class NeighborValuesPosterior(AbstractConditioned):
    """The posterior of f at each input given its nearest values at the data, which are uncertain.

    The values at X are normal with mean `y` and covariance R R'. With the weights b of the k
    nearest values and the conditional variance s^2, f(x) has the mean m(x) + b'(y - m)_N and the
    variance s^2 + ||R_N'b||^2. Up to 2,000 rows R is a factor; beyond, its columns are draws of a
    solve for each, and variances have a relative standard error of sqrt(2 / r) for r of them.

    `LaplaceGP.condition` returns it for `Vecchia`, within a `LaplacePosterior`; immutable. Moments
    at m inputs cost O(m (k^3 + k r + log n)).
    """

    kernel: AbstractKernel
    X: Float[Array, "n d"]
    y: Float[Array, " n"]  # the mean of f at X
    noise_variance: None
    mean_function: RowsFunction
    residual: Float[Array, " n"]  # y - m(X)
    root: Float[Array, "n r"]  # R
    precision: Float[Array, " n"]  # the diagonal of (K + W^-1)^-1
    jitter: Float[Array, " n"]  # the variances of the values besides the kernel
    curvature: Float[Array, " n"]  # W
    factor: PriorFactor
    num_neighbors: int = eqx.field(static=True)
    is_exact: bool = eqx.field(static=True)  # whether R is a factor of the covariance
    component_kernel: AbstractKernel | None = None

    @classmethod
    def of(
        cls,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        f: Float[Array, " n"],
        residual: Float[Array, " n"],
        jitter: Float[Array, " n"],
        curvature: Float[Array, " n"],
        mean_function: RowsFunction,
        factor: PriorFactor,
        num_neighbors: int,
        key: Key[Array, ""],
        num_samples: int,
    ) -> "NeighborValuesPosterior":
        """Compute R and the precisions; see the fields."""
        is_exact = len(X) <= laplace.MAX_DENSE
        if is_exact:
            root, precision = _exact_root(factor, curvature)
        else:
            draws = laplace.draw(factor, curvature, key, num_samples)
            root, precision = draws.values / math.sqrt(num_samples), draws.precision
        return cls(
            kernel=kernel,
            X=X,
            y=f,
            noise_variance=None,
            mean_function=mean_function,
            residual=residual,
            root=root,
            precision=precision,
            jitter=jitter,
            curvature=curvature,
            factor=factor,
            num_neighbors=num_neighbors,
            is_exact=is_exact,
        )

    def restrict(
        self, change: Callable[[AbstractKernel], AbstractKernel]
    ) -> "NeighborValuesPosterior":
        """The posterior of a component of f; see `AbstractPosterior.restrict`."""
        kernel = self.kernel if self.component_kernel is None else self.component_kernel
        zero = zero_function(self.residual.dtype)
        return dataclasses.replace(self, component_kernel=change(kernel), mean_function=zero)

    @property
    def _data(self) -> Neighbors:
        return Neighbors(self.kernel, self.X, self.jitter, self.num_neighbors)

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[0]

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._mean_and_variance(Xs, chunk_size)[1]

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        return self._moments(Xs, self._data.nearest(Xs), chunk_size)

    @compiled
    def _moments(self, Xs: Array, near: Array, chunk_size: int | None) -> tuple[Array, Array]:
        data, (in_chunks, at_once) = self._data, in_chunks_and_whole(self.mean_function)

        def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            rows, near = chunk
            b, variance = conditionals.weights(data.systems(near, rows, self.component_kernel))
            index = jnp.where(near < len(self.X), near, 0)
            mean = jnp.sum(b * self.residual[index], axis=1)
            explained = jnp.einsum("rk,rks->rs", b, self.root[index], precision="highest")
            return in_chunks(rows) + mean, at_least(variance, 0.0) + jnp.sum(
                jnp.square(explained), axis=1
            )

        size = rows_at_a_time(self.num_neighbors, most=chunk_size)
        size = min(size, rows_per_chunk(near.shape[1] * self.root.shape[1]))
        mean, variance = map_rows(of_chunk, (Xs, near), size)
        return at_once(Xs) + mean, variance

    def _precision(self) -> Float[Array, " n"]:
        return self.precision

    def leave_one_out(self) -> dist.Normal:
        """Not available: use `LaplaceGP.leave_one_out`.

        Raises:
            ValueError: always.
        """
        raise ValueError(NEEDS_OBSERVATIONS)

    def _drawn_values(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "n s"]:
        """Draws of f - m at the data."""
        num_stored = self.root.shape[1]
        if self.is_exact:
            normal = jax.random.normal(key, (num_stored, num_samples), self.root.dtype)
            deviations = matmul(self.root, normal)
        elif num_samples <= num_stored:
            columns = jax.random.permutation(key, num_stored)[:num_samples]
            deviations = math.sqrt(num_stored) * self.root[:, columns]
        else:
            deviations = laplace.draw(self.factor, self.curvature, key, num_samples).values
        return self.residual[:, None] + deviations

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        order, near = self._data.coarse_to_fine(Xs)
        return self._draw(key, Xs[order], near, num_samples)[:, np.argsort(order)]

    @compiled
    def _draw(self, key: Array, Xs: Array, near: Array, num_samples: int) -> Array:
        keys = jax.random.split(key)
        values = self._drawn_values(keys[0], num_samples)
        f = self._data.draw(keys[1], Xs, near, values, num_samples, self.component_kernel)
        return f + self.mean_function(Xs)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> NeighborFunctionSamples:
        keys, data, dtype = jax.random.split(key), self._data, self.residual.dtype
        X = self.X.astype(dtype)
        draws = prior_draws(keys[0], self.kernel, num_samples, num_features, X)
        values = self._drawn_values(keys[1], num_samples)
        residuals = values - draws.observations(self.kernel, X, data.noise)
        return NeighborFunctionSamples(
            data, self.component_kernel, self.mean_function, draws, residuals
        )


def _exact_root(
    factor: PriorFactor, W: Float[Array, " n"]
) -> tuple[Float[Array, "n r"], Float[Array, " n"]]:
    """R with R R' = (K^-1 + W)^-1, and the diagonal of (K + W^-1)^-1, in O(n^3)."""
    L = factor.dense()
    root = jnp.sqrt(jnp.maximum(W, 0.0))[:, None]
    scaled = root * L
    eye = jnp.eye(L.shape[1], dtype=L.dtype)
    tril = linalg.factorize(eye + matmul(scaled.T, scaled), warn=False).tril
    of_data = linalg.factorize(
        jnp.eye(len(L), dtype=L.dtype) + matmul(scaled, scaled.T), warn=False
    ).tril
    weights = solve_triangular(of_data, jnp.diag(root[:, 0]), lower=True)
    R = solve_triangular(tril, L.T, lower=True).T
    return R, jnp.sum(jnp.square(weights), axis=0)
