"""The precision of white values given observations, and its two-level preconditioner."""

import math

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, Float, Key

from numpyro_scalegp.linear.operator import AbstractOperator
from numpyro_scalegp.linear.preconditioners import AbstractFactor
from numpyro_scalegp.neighbors.prior_factor import PriorFactor
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul

# The number of coarse values in multiples of sqrt(n), and the bytes that their columns may take.
_COARSE = 1.0
_MAX_BYTES = 2**28
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
    """The columns of L for the first values of the coarse-to-fine order, about sqrt(n) of them."""
    n, size = len(factor.slots), factor.num_slots
    limit = _MAX_BYTES // (size * factor.scale.dtype.itemsize)
    count = max(1, min(math.ceil(_COARSE * math.sqrt(n)), limit, n))
    width = min(count, _COLUMNS_AT_A_TIME)
    num_blocks = -(-count // width)

    def block(i: Array) -> Array:
        columns = i * width + jnp.arange(width)
        slots = jnp.where(columns < count, factor.coarse[jnp.minimum(columns, count - 1)], size)
        unit = jnp.zeros((size + 1, width), factor.scale.dtype)
        unit = unit.at[slots, jnp.arange(width)].set(1.0)
        return factor.times(unit[:-1])

    blocks = jax.lax.map(block, jnp.arange(num_blocks))
    return jnp.moveaxis(blocks, 0, 1).reshape(size, -1)[:, :count]


class TwoLevelFactor(AbstractFactor):
    """P close to A: exact for coarse values; given them, other values count as independent.

    With coarse values c and the others r, P has the blocks A_cc, A_cr and
    A_rc A_cc^-1 A_cr + D, where D = 1 + s^2 W. The diagonal alone fails for smooth functions,
    whose coarse values share many observations; coarse values alone fail for informative
    observations.
    """

    operator: LatentPrecision
    columns: Float[Array, "slots c"]  # of L, for the coarse values
    tril: Float[Array, "c c"]  # of A_cc
    diagonal: Float[Array, " slots"]  # D

    @classmethod
    def of(cls, operator: LatentPrecision, columns: Float[Array, "slots c"]) -> "TwoLevelFactor":
        """Factorize A_cc, in O(n c^2)."""
        scaled = jnp.sqrt(operator.precision)[:, None] * columns
        eye = jnp.eye(columns.shape[1], dtype=columns.dtype)
        tril = linalg.factorize(eye + matmul(scaled.T, scaled), warn=False).tril
        return cls(operator, columns, tril, operator.diagonal())

    @property
    def _coarse(self) -> Array:
        return self.operator.factor.coarse[: self.columns.shape[1]]

    def _of_coarse(self, C: Float[Array, "c k"]) -> Float[Array, "slots k"]:
        """A_rc C, with arbitrary coarse values."""
        return self.operator.informed(matmul(self.columns, C))

    def _without_coarse(self, R: Float[Array, "slots k"]) -> Float[Array, "slots k"]:
        return R.at[self._coarse].set(0.0)

    def solve(self, R: Float[Array, "slots k"]) -> Float[Array, "slots k"]:
        """P^-1 R, at the cost of a product with A."""
        of_coarse = R[self._coarse]
        remaining = R - self._of_coarse(cho_solve((self.tril, True), of_coarse))
        others = self._without_coarse(remaining / self.diagonal[:, None])
        W = self.operator.precision[:, None]
        shared = matmul(self.columns.T, W * self.operator.factor.times(others))
        return others.at[self._coarse].set(cho_solve((self.tril, True), of_coarse - shared))

    def log_determinant(self) -> Float[Array, ""]:
        """log|P|."""
        others = jnp.log(self.diagonal).at[self._coarse].set(0.0)
        return jnp.sum(others) + 2.0 * jnp.sum(jnp.log(jnp.diagonal(self.tril)))

    def sample(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "slots num_samples"]:
        """Draw columns from N(0, P)."""
        shape = len(self.diagonal), num_samples
        normal = jax.random.normal(key, shape, self.diagonal.dtype)
        white = normal[self._coarse]
        inner = solve_triangular(self.tril, white, lower=True, trans=1)
        drawn = self._of_coarse(inner) + jnp.sqrt(self.diagonal)[:, None] * normal
        return drawn.at[self._coarse].set(matmul(self.tril, white))
