"""The variational family that predicts a function from its nearest inducing values."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.core.chunks import rows_per_chunk
from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.neighbors import search
from numpyro_scalegp.neighbors.posterior import NeighborFunctionSamples, Neighbors, scaled
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.numerics.rounding import at_least
from numpyro_scalegp.processes.function_samples import (
    AbstractFunctionSamples,
    BatchFunctionSamples,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.processes.variational import AbstractVariationalPosterior
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.family import AbstractVariationalGP
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.same import same_prior
from numpyro_scalegp.variational.sparse.sparse import unexplained_part

# The ratio of the numbers of points in two successive levels: small, so that a point excludes few
# of the points around it as neighbors, but large enough for few levels.
_GROWTH = 1.2


class NeighborLevels(eqx.Module):
    """Values at M points in levels, u = B v with standard normal v.

    Each value depends on its nearest neighbors in the levels before. The first level has its exact
    covariance; the values of a later level are independent given all levels before. So a draw takes
    one sequential step for each level, not for each point.
    """

    points: Neighbors
    tril: Float[Array, "k k"]  # Cholesky factor of the first level's covariance
    near: Int[Array, "r m"]  # neighbors of the points in later levels
    weights: Float[Array, "r m"]  # of the neighbors in the conditional means
    scale: Float[Array, " r"]  # conditional standard deviations

    @classmethod
    def build(cls, points: Neighbors) -> "NeighborLevels":
        """The levels of points in coarse-to-fine order, in O(M^2 + M m^3).

        Neighbors are the nearest in lengthscales of the kernel.
        """
        ends = level_ends(len(points.X), points.num)
        first, m, dtype = ends[0], points.num, points.noise.dtype
        K = points.kernel.evaluate_covariance(points.X[:first]).astype(dtype)
        tril = linalg.cholesky(K + jnp.diag(points.noise[:first]))
        if len(ends) == 1:
            none = jnp.zeros((0, m), dtype)
            return cls(points, tril, none.astype(jnp.int32), none, none[:, 0])
        units = scaled(points.kernel, points.X)
        limits = np.repeat(ends[:-1], np.diff(ends))
        near = search.nearest(units, units[first:], m, limits)
        weights, variance = points.weights(near, points.X[first:])
        scale = jnp.sqrt(at_least(variance, 0.0) + points.noise[first:])
        return cls(points, tril, near, weights, scale)

    def _levels(self) -> list[slice]:
        """The slices of the later levels, among the points after the first level."""
        ends = level_ends(len(self.points.X), self.points.num)
        return [slice(start - ends[0], end - ends[0]) for start, end in itertools.pairwise(ends)]

    def values(self, white: Float[Array, "M s"]) -> Float[Array, "M s"]:
        """B v for s vectors v, in O(M m) each."""
        first = len(self.tril)
        drawn = self.scale[:, None] * white[first:]
        u = matmul(self.tril, white[:first])
        for level in self._levels():
            # Not `sum` of a product, which jaxlib 0.10 miscompiles under `vmap` on CPUs.
            explained = jnp.einsum(
                "rm,rms->rs", self.weights[level], u[self.near[level]], precision="highest"
            )
            u = jnp.concatenate([u, explained + drawn[level]])
        return u

    def whitened(
        self, near: Int[Array, "r k"], weights: Float[Array, "r k"]
    ) -> Float[Array, "r M"]:
        """The rows B'a for sparse linear combinations a'u of the values, in O(r M^2).

        Args:
            near: indices of the values in each combination.
            weights: their coefficients.
        """
        first, r = len(self.tril), near.shape[0]
        coefficients = jnp.zeros((r, len(self.points.X)), weights.dtype)
        coefficients = coefficients.at[jnp.arange(r)[:, None], near].add(weights)
        blocks = []
        for level in reversed(self._levels()):
            before = first + level.start
            of_before, of_level = coefficients[:, :before], coefficients[:, before:]
            blocks.append(of_level * self.scale[level])
            # Dense products of a few points at a time are faster than scattered sums.
            size = rows_per_chunk(before)
            for start in range(level.start, level.stop, size):
                chunk = slice(start, min(start + size, level.stop))
                W = jnp.zeros((chunk.stop - start, before), weights.dtype)
                W = W.at[jnp.arange(len(W))[:, None], self.near[chunk]].add(self.weights[chunk])
                columns = slice(start - level.start, chunk.stop - level.start)
                of_before = of_before + matmul(of_level[:, columns], W)
            coefficients = of_before
        return jnp.concatenate([matmul(coefficients, self.tril), *reversed(blocks)], axis=1)


def level_ends(num_points: int, num_neighbors: int) -> list[int]:
    """The cumulative number of points at the end of each level."""
    ends = [min(num_points, 2 * num_neighbors)]
    while ends[-1] < num_points:
        ends.append(min(num_points, math.ceil(_GROWTH * ends[-1])))
    return ends


class NearestNeighborPosterior(AbstractVariationalPosterior):
    """The posterior of f at each input given the nearest inducing values.

    Let q(v) = N(loc, diag(scale^2)), u = B v the inducing values, and a(x) the weights of the m
    nearest inducing values in the conditional mean of f(x). Then f(x) has the mean a'B loc and the
    variance r(x) + ||diag(scale) B'a||^2, where r(x) is the conditional prior variance.

    The fields are the arguments of `VariationalNearestNeighborGP`. The constructor computes the
    conditional distributions of the inducing values, in O(M^2 + M m^3). Moments at n inputs cost
    O(n (M^2 + m^3)). Joint samples are drawn sequentially, each value given the nearest among the
    inducing values and the inputs before, in O(M m + n m) for each draw after O(n (M + m^3)).

    References:
        Wu, Pleiss and Cunningham (2022), Variational Nearest Neighbor Gaussian Process.
    """

    kernel: AbstractKernel
    inducing_points: Float[Array, "M d"]
    loc: Float[Array, "*batch M"]
    scale: Float[Array, "*batch M"]
    num_neighbors: int = eqx.field(static=True)
    jitter: float | None = eqx.field(static=True, default=None)
    noise_variance: Float[Array, "..."] | None = None
    component_kernel: AbstractKernel | None = None  # for the posterior of a component of f
    levels: NeighborLevels = None  # type: ignore[assignment]  # derived from the other fields

    def __post_init__(self) -> None:
        if self.levels is None:
            points = self.kernel, self.inducing_points
            self.levels = _levels(*points, self.num_neighbors, self.jitter)

    def restrict(
        self, change: Callable[[AbstractKernel], AbstractKernel]
    ) -> "NearestNeighborPosterior":
        """The posterior of a component of f given the m nearest inducing values.

        With few neighbors, joint draws use more information about the component than the moments
        at single inputs; see `AbstractPosterior.restrict`.
        """
        kernel = self.kernel if self.component_kernel is None else self.component_kernel
        return dataclasses.replace(self, component_kernel=change(kernel))

    @property
    def _num_columns(self) -> int:
        return self.inducing_points.shape[-1]

    @property
    def _row_width(self) -> int:
        return len(self.inducing_points)

    def _weights(self) -> tuple[Any, ...]:
        return self.loc, self.scale

    def _moments(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        near, a, unexplained = self._conditionals(X)
        means = self.levels.values(self.loc[:, None])[:, 0]
        explained = jnp.square(self.levels.whitened(near, a) * self.scale)
        return jnp.sum(a * means[near], axis=1), jnp.sum(explained, axis=1), unexplained

    def _conditionals(self, X: Float[Array, "n d"]) -> tuple[Array, ...]:
        """For each input, the nearest inducing points, their weights, and the variance of f."""
        points = self.levels.points
        near = points.nearest(X)
        a, variance = points.weights(near, X, self.component_kernel)
        return near, a, at_least(variance, 0.0)

    def _drawn_values(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "M num_samples"]:
        """Draws of the inducing values."""
        normal = jax.random.normal(key, (len(self.loc), num_samples), self.loc.dtype)
        return self.levels.values(self.loc[:, None] + self.scale[:, None] * normal)

    @property
    def _takes_batches(self) -> bool:
        return False

    @compiled
    def _given_draw(
        self, key: Key[Array, ""], X: Float[Array, "n d"]
    ) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """Mean and variance of f at each input given one draw of the inducing values.

        In O(M (M + m^3) + n (M + m^3)).
        """

        def moments(member: NearestNeighborPosterior, key: Array) -> tuple[Array, Array]:
            near, a, unexplained = member._conditionals(X)
            values = member._drawn_values(key, 1)[:, 0]
            return jnp.sum(a * values[near], axis=1), unexplained

        return self._each(moments, batches.keys(key, self.batch_shape))

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        order, near = self.levels.points.coarse_to_fine(Xs)
        drawn = self._draw(key, Xs[order], near, num_samples)
        return jnp.moveaxis(drawn, -2, 0)[..., np.argsort(order)]

    @compiled
    def _draw(self, key: Array, Xs: Array, near: Array, num_samples: int) -> Array:
        def draw(member: NearestNeighborPosterior, key: Array) -> Array:
            keys = jax.random.split(key)
            values = member._drawn_values(keys[0], num_samples)
            return member.levels.points.draw(
                keys[1], Xs, near, values, num_samples, member.component_kernel
            )

        return self._each(draw, batches.keys(key, self.batch_shape))

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        def draw(member: NearestNeighborPosterior, key: Array) -> AbstractFunctionSamples:
            keys = jax.random.split(key)
            points, dtype = member.levels.points, member.loc.dtype
            Z = points.X.astype(dtype)
            draws = prior_draws(keys[0], member.kernel, num_samples, num_features, Z)
            values = member._drawn_values(keys[1], num_samples)
            residuals = values - draws.observations(member.kernel, Z, points.noise)
            return NeighborFunctionSamples(
                points, member.component_kernel, zero_function(dtype), draws, residuals
            )

        functions = self._each(draw, batches.keys(key, self.batch_shape))
        if not self.batch_shape:
            return functions
        return BatchFunctionSamples(functions, len(self.batch_shape))


@compiled
def _levels(
    kernel: AbstractKernel, points: Float[Array, "M d"], num_neighbors: int, jitter: float | None
) -> NeighborLevels:
    prior = kernel.evaluate_diag(points)
    noise = jnp.broadcast_to(linalg.added_variance(prior, jitter), prior.shape)
    return NeighborLevels.build(Neighbors(kernel, points, noise, num_neighbors))


class VariationalNearestNeighborGP(AbstractVariationalGP):
    """A variational GP that conditions each function value on the nearest of many inducing values.

    Each of the M inducing values u, in coarse-to-fine order, depends on the m nearest before it,
    and f(x) depends on the m nearest of all. The precision of this prior has a sparse factor, which
    allows thousands of inducing points where `SparseGP` allows hundreds. With u = B v and
    v ~ N(0, I) a priori, q(v) = N(loc, diag(scale^2)).

    The KL divergence from this prior is (sum scale^2 + loc^2 - 1 - 2 log scale) / 2. So the ELBO
    bounds the marginal likelihood of the nearest-neighbor GP, which approaches the exact one as m
    grows. `AbstractVariationalGP` describes its use in a model.

    Args:
        kernel: covariance function of the prior.
        X: inputs, shape (n, d).
        inducing_points: Z, shape (M, d), in coarse-to-fine order.
        loc: mean of v, shape (M,), or (*batch, M) for independent functions.
        scale: standard deviations of v, positive, of the same shape.
        num_neighbors: m, positive. If M <= m, this is a `SparseGP` with a diagonal `scale_tril`.
        jitter: variance added to each inducing value, relative to the mean of k(z, z); None for 100
            times machine epsilon.
        unexplained_scale: see `SparseGP`.
        key: None, or a typed JAX key: moments are then given one draw of the inducing values, which
            leaves the ELBO unbiased. The cost is O(M^2 + M m^3 + n (M + m^3)), without a term O(n
            M^2).

    Raises:
        ValueError: if a shape does not match, inputs hold NaN or infinity, or a scale or
            `num_neighbors` is not positive.

    References:
        Wu, Pleiss and Cunningham (2022), Variational Nearest Neighbor Gaussian Process. Here q is
        independent over v, not over u.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 20)[:, None]
        >>> kernel = sgp.kernels.RBF(0.3)
        >>> guide = sgp.VariationalNearestNeighborGP(kernel, X, X, jnp.zeros(20), jnp.ones(20))
        >>> guide.mean.shape, guide.variance.shape
        ((20,), (20,))
    """

    arg_constraints = {
        "inducing_points": constraints.real_matrix,
        "loc": constraints.real_vector,
        "scale": constraints.independent(constraints.positive, 1),
        "unexplained_scale": constraints.positive,
    }
    reparametrized_params = list(arg_constraints)
    pytree_data_fields = ("kernel", "X", *arg_constraints, "key")
    pytree_aux_fields = ("num_neighbors", "jitter")

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "n d"],
        inducing_points: Float[ArrayLike, "M d"],
        loc: Float[ArrayLike, "*batch M"],
        scale: Float[ArrayLike, "*batch M"],
        *,
        num_neighbors: int = 15,
        jitter: float | None = None,
        unexplained_scale: Float[ArrayLike, "*batch"] | None = None,
        key: Key[Array, ""] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = as_single("kernel", kernel)
        self.X = checks.inputs("X", X)
        self.kernel.check_hooks(self.X)
        self.inducing_points = checks.inputs("inducing_points", inducing_points, self.X.shape[1])
        self.loc, M = checks.as_float(loc, "loc"), len(self.inducing_points)
        batch = self.loc.shape[:-1]
        checks.shape("loc", self.loc, (*batch, M), why="one value for each inducing point")
        checks.finite("loc", self.loc)
        self.scale = checks.as_positive(scale, "scale")
        checks.shape("scale", self.scale, self.loc.shape, why="one for each of `loc`")
        checks.positive("scale", self.scale)
        self.num_neighbors = checks.count("num_neighbors", num_neighbors)
        self.jitter = checks.jitter(jitter)
        self.unexplained_scale = unexplained_part(unexplained_scale, batch)
        self.key = key if key is None else checks.as_key(key)
        super().__init__(batch, (self.X.shape[0],), validate_args=validate_args)

    def marginals(self) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """The mean and variance of f at each input; with a key, given drawn inducing values."""
        if self.key is None:
            return super().marginals()
        return self.posterior()._given_draw(self.key, self.X)

    def split_marginals(self) -> tuple[Float[Array, "*batch n"], ...]:
        """The mean, the variance of inducing values (zero with a key), the unexplained variance."""
        if self.key is None:
            return self.posterior().split_marginals(self.X)
        mean, unexplained = self.marginals()
        return mean, jnp.zeros_like(mean), unexplained

    def posterior(self) -> NearestNeighborPosterior:
        """The approximate posterior, with moments and joint samples at any inputs."""
        return NearestNeighborPosterior(
            self.kernel, self.inducing_points, self.loc, self.scale, self.num_neighbors, self.jitter
        )


@kl_divergence.register(VariationalNearestNeighborGP, LatentGP)
def _kl_neighbors_latent(q: VariationalNearestNeighborGP, p: LatentGP) -> Float[Array, "*batch"]:
    """KL(q(v) || N(0, I)), for any inputs of the two sites."""
    terms = 0.5 * (jnp.square(q.loc) + jnp.square(q.scale) - 1.0) - jnp.log(q.scale)
    return same_prior(q, p) * jnp.sum(terms, axis=-1)
