"""Values of a function at points that follow each other in levels, from coarse to fine."""

import itertools
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core import linalg, neighbors
from numpyro_scalegp.core.chunks import rows_per_chunk
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.posteriors.vecchia import Neighbors, scaled

# By what the number of points grows from one level to the next: little, so that most of a point's
# neighbors may be as near as the points beside it, and yet enough for few levels.
_GROWTH = 1.2


class NeighborLevels(eqx.Module):
    """Values at M points, each given its nearest ones in the levels before: u = B v of normal v.

    The first level has its exact covariance; values of any other are independent given all before.
    So a draw takes a step for each level, where one point after the other would take one for each.
    """

    points: Neighbors
    tril: Float[Array, "k k"]  # of the first level
    near: Int[Array, "r m"]  # of all other points
    weights: Float[Array, "r m"]
    scale: Float[Array, " r"]  # of what these leave

    @classmethod
    def found(cls, points: Neighbors) -> "NeighborLevels":
        """The levels of points from coarse to fine, in O(M^2 + M m^3).

        Neighbors are the nearest in lengthscales of the kernel.
        """
        ends = level_ends(len(points.X), points.num)
        first, m, dtype = ends[0], points.num, points.noise.dtype
        K = points.kernel.covariance(points.X[:first]).astype(dtype)
        tril = linalg.cholesky(K + jnp.diag(points.noise[:first]))
        if len(ends) == 1:
            none = jnp.zeros((0, m), dtype)
            return cls(points, tril, none.astype(jnp.int32), none, none[:, 0])
        units = scaled(points.kernel, points.X)
        limits = np.repeat(ends[:-1], np.diff(ends))
        near = neighbors.nearest(units, units[first:], m, limits)
        weights, variance = points.weights(near, points.X[first:])
        scale = jnp.sqrt(jnp.maximum(variance, 0.0) + points.noise[first:])
        return cls(points, tril, near, weights, scale)

    def _levels(self) -> list[slice]:
        """Of the points after the first level, in turn."""
        ends = level_ends(len(self.points.X), self.points.num)
        return [slice(start - ends[0], end - ends[0]) for start, end in itertools.pairwise(ends)]

    def values(self, white: Float[Array, "M s"]) -> Float[Array, "M s"]:
        """B v for some v, in O(M m) each."""
        first = len(self.tril)
        drawn = self.scale[:, None] * white[first:]
        u = matmul(self.tril, white[:first])
        for level in self._levels():
            # No sum of products: of these jaxlib 0.10 makes wrong ones under `vmap` on CPUs.
            explained = jnp.einsum(
                "rm,rms->rs", self.weights[level], u[self.near[level]], precision="highest"
            )
            u = jnp.concatenate([u, explained + drawn[level]])
        return u

    def whitened(
        self, near: Int[Array, "r k"], weights: Float[Array, "r k"]
    ) -> Float[Array, "r M"]:
        """B'a for sums a'u over few of the values: what each v adds to them, in O(r M^2).

        Args:
            near: which values each sum has.
            weights: by what these are multiplied.
        """
        first, r = len(self.tril), len(near)
        across = jnp.zeros((r, len(self.points.X)), weights.dtype)
        across = across.at[jnp.arange(r)[:, None], near].add(weights)
        found = []
        for level in reversed(self._levels()):
            before = first + level.start
            left, own = across[:, :before], across[:, before:]
            found.append(own * self.scale[level])
            # Dense, a few points at a time: products are faster than as many scattered sums.
            size = rows_per_chunk(before)
            for start in range(level.start, level.stop, size):
                some = slice(start, min(start + size, level.stop))
                W = jnp.zeros((some.stop - start, before), weights.dtype)
                W = W.at[jnp.arange(len(W))[:, None], self.near[some]].add(self.weights[some])
                at = slice(start - level.start, some.stop - level.start)
                left = left + matmul(own[:, at], W)
            across = left
        return jnp.concatenate([matmul(across, self.tril), *reversed(found)], axis=1)


def level_ends(num_points: int, num_neighbors: int) -> list[int]:
    """How many points each level has with those before it."""
    ends = [min(num_points, 2 * num_neighbors)]
    while ends[-1] < num_points:
        ends.append(min(num_points, math.ceil(_GROWTH * ends[-1])))
    return ends
