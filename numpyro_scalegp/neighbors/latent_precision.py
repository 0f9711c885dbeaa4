"""The precision of white values given observations, and its two-level preconditioner."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core.device import memory_share
from numpyro_scalegp.linear.operator import AbstractOperator
from numpyro_scalegp.linear.preconditioners import AbstractFactor
from numpyro_scalegp.neighbors.prior_factor import PriorFactor
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul, triangular_inverse

# The number of coarse values in multiples of sqrt(n), and the bytes that their columns may take on
# a CPU, or the share of an accelerator's memory.
_COARSE = 0.5
_MAX_BYTES = 2**28
_SHARE = 1 / 16
_COLUMNS_AT_A_TIME = 32


class LatentPrecision(AbstractOperator):
    """A = I + L'W L: the precision of v, where f = m + L v is observed with precisions W."""

    factor: PriorFactor
    precision: Float[Array, " slots"]  # W, zero for padding

    @property
    def size(self) -> int:
        """The number of slots."""
        return self.factor.num_slots

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the factor."""
        return self.factor.scale.dtype

    def diagonal(self) -> Float[Array, " slots"]:
        """The diagonal without the effect of a value on later ones."""
        return 1.0 + jnp.square(self.factor.scale.reshape(-1)) * self.precision

    def matmul(self, V: Float[Array, "slots k"]) -> Float[Array, "slots k"]:
        """A V, in O(n m k)."""
        return V + self.informed(self.factor.times(V))

    def informed(self, F: Float[Array, "slots k"]) -> Float[Array, "slots k"]:
        """L'W F."""
        return self.factor.transposed_times(self.precision[:, None] * F)


def coarse_columns(factor: PriorFactor) -> Float[Array, "slots c"]:
    """The columns of L for the first values of the coarse-to-fine order, sqrt(n) / 2 of them."""
    n, size = len(factor.slots), factor.num_slots
    limit = memory_share(_SHARE, _MAX_BYTES) // (size * factor.scale.dtype.itemsize)
    count = max(1, min(math.ceil(_COARSE * math.sqrt(n)), limit, n))

    def of_columns(columns: Array) -> Array:
        slots = jnp.where(columns < count, factor.coarse[jnp.minimum(columns, count - 1)], size)
        unit = jnp.zeros((size, len(columns)), factor.scale.dtype)
        return factor.times(unit.at[slots, jnp.arange(len(columns))].set(1.0, mode="drop"))

    return _in_blocks(of_columns, count)


def _in_blocks(of_columns: Callable[[Array], Array], count: int) -> Float[Array, "slots c"]:
    """All columns of a matrix, of which few are computed at a time, in the processor's cache."""
    width = min(count, _COLUMNS_AT_A_TIME)
    columns = jnp.arange(-(-count // width) * width).reshape(-1, width)
    blocks = jnp.moveaxis(jax.lax.map(of_columns, columns), 0, 1)
    return blocks.reshape(len(blocks), -1)[:, :count]


class TwoLevelFactor(AbstractFactor):
    """P close to A: exact for coarse values; given them, other values count as independent.

    With coarse values c and the others r, P has the blocks A_cc, A_cr and
    A_rc A_cc^-1 A_cr + D, where D = 1 + s^2 W. The diagonal alone fails for smooth functions,
    whose coarse values share many observations; coarse values alone fail for informative
    observations.
    """

    operator: LatentPrecision
    coupling: Float[Array, "slots c"]  # A_rc, zero for the coarse values
    tril: Float[Array, "c c"]  # of A_cc
    inverse: Float[Array, "c c"]  # of `tril`: products with it are faster than solves
    diagonal: Float[Array, " slots"]  # D

    @classmethod
    def of(cls, operator: LatentPrecision, columns: Float[Array, "slots c"]) -> "TwoLevelFactor":
        """Compute the blocks, given the columns of L for the coarse values, in O(n m c)."""
        count = columns.shape[1]
        coarse = operator.factor.coarse[:count]
        coupling = _in_blocks(
            lambda index: operator.informed(columns[:, jnp.minimum(index, count - 1)]), count
        )
        of_coarse = jnp.eye(count, dtype=columns.dtype) + coupling[coarse]
        tril = linalg.factorize(0.5 * (of_coarse + of_coarse.T), warn=False).tril
        coupling = coupling.at[coarse].set(0.0)
        return cls(operator, coupling, tril, triangular_inverse(tril), operator.diagonal())

    @property
    def _coarse(self) -> Array:
        return self.operator.factor.coarse[: self.coupling.shape[1]]

    def solve(self, R: Float[Array, "slots k"]) -> Float[Array, "slots k"]:
        """P^-1 R, in O(n c k)."""
        of_coarse = R[self._coarse]
        remaining = R - matmul(self.coupling, self._coarse_solve(of_coarse))
        fine = remaining / self.diagonal[:, None]
        # For one column, ten times as fast as a product with the transposed matrix.
        shared = matmul(fine.T, self.coupling).T
        return fine.at[self._coarse].set(self._coarse_solve(of_coarse - shared))

    def _coarse_solve(self, C: Float[Array, "c k"]) -> Float[Array, "c k"]:
        return matmul(self.inverse.T, matmul(self.inverse, C))

    def log_determinant(self) -> Float[Array, ""]:
        """log|P|."""
        fine = jnp.log(self.diagonal).at[self._coarse].set(0.0)
        return jnp.sum(fine) + 2.0 * jnp.sum(jnp.log(jnp.diagonal(self.tril)))

    def sample(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "slots num_samples"]:
        """Draw columns from N(0, P)."""
        shape = len(self.diagonal), num_samples
        normal = jax.random.normal(key, shape, self.diagonal.dtype)
        white = normal[self._coarse]
        inner = matmul(self.coupling, matmul(self.inverse.T, white))
        drawn = inner + jnp.sqrt(self.diagonal)[:, None] * normal
        return drawn.at[self._coarse].set(matmul(self.tril, white))
