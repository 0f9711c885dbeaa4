"""The nearest-neighbor prior of function values as a product with white values."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core.chunks import map_rows
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.neighbors import conditionals
from numpyro_scalegp.neighbors.graph import NeighborGraph
from numpyro_scalegp.neighbors.posterior import Neighbors, rows_at_a_time
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.numerics.rounding import at_least


class PriorFactor(eqx.Module):
    """L with f = m + L v for standard normal v, where each value depends on its nearest before it.

    f_i - m_i = b_i'(f - m)_N(i) + s_i v_i. Rows are stored in steps, so that the rows of a step
    depend on earlier steps alone; a vector has a slot for each row and for padding, whose s is
    zero. Products cost O(n m) for each vector.
    """

    weights: Float[Array, "steps w m"]  # b
    scale: Float[Array, "steps w"]  # s, zero for padding
    near: Int[Array, "steps w m"]  # slots of the neighbors; the number of slots for padding
    slots: Int[Array, " n"]  # of each row
    jitter: Float[Array, ""]  # the mean of the values' variances besides the kernel
    coarse: Int[Array, " c"]  # slots of the rows in the coarse-to-fine order of the graph

    @classmethod
    def of(
        cls, operator: KernelOperator, num_neighbors: int, graph: NeighborGraph
    ) -> "PriorFactor":
        """The factor of K(X, X) plus the variances of `operator`, in O(n m^3)."""
        n, steps = operator.size, graph.steps
        num_slots = steps.size
        places = jnp.arange(num_slots, dtype=steps.dtype)
        slots = jnp.full(n + 1, num_slots, steps.dtype).at[steps.reshape(-1)].set(places)
        slots = slots.at[n].set(num_slots)
        data = Neighbors(operator.kernel, operator.X, operator.noise(), num_neighbors)

        # A gradient computes the systems again, in place of storing O(n m^2) numbers.
        @jax.checkpoint
        def of_chunk(rows: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            near, x, noise = rows
            b, variance = conditionals.weights(data.systems(near, x))
            return b, jnp.sqrt(at_least(variance, 0.0) + noise)

        rows = graph.nearest, operator.X, operator.noise()
        b, scale = map_rows(of_chunk, rows, rows_at_a_time(num_neighbors))
        index = jnp.minimum(steps, n - 1)
        is_row = steps < n
        return cls(
            jnp.where(is_row[..., None], b[index], 0.0),
            jnp.where(is_row, scale[index], 0.0),
            jnp.where(is_row[..., None], slots[graph.nearest[index]], num_slots),
            slots[:n],
            jnp.mean(operator.noise()),
            slots[graph.order],
        )

    @property
    def num_slots(self) -> int:
        """The number of rows and padding."""
        return self.scale.size

    @property
    def _width(self) -> int:
        return self.scale.shape[1]

    def at_rows(self, values: Float[Array, "slots *k"]) -> Float[Array, "n *k"]:
        """Values in the order of the rows."""
        return values[self.slots]

    def at_slots(self, values: Float[Array, "n *k"]) -> Float[Array, "slots *k"]:
        """Values in slots, zero for padding."""
        zeros = jnp.zeros((self.num_slots, *values.shape[1:]), values.dtype)
        return zeros.at[self.slots].set(values)

    def times(self, V: Float[Array, "slots k"]) -> Float[Array, "slots k"]:
        """L V."""
        k = V.shape[1]

        def step(F: Array, row: tuple[Array, ...]) -> tuple[Array, None]:
            i, b, near, terms = row
            # Not `sum` of a product, which jaxlib 0.10 miscompiles under `vmap` on CPUs.
            explained = jnp.einsum("wm,wmk->wk", b, F[near], precision="highest")
            return jax.lax.dynamic_update_slice(F, explained + terms, (i * self._width, 0)), None

        start = jnp.zeros((self.num_slots + 1, k), V.dtype)
        terms = self.scale[..., None] * V.reshape(*self.scale.shape, k)
        rows = jnp.arange(len(self.scale)), self.weights, self.near, terms
        return jax.lax.scan(step, start, rows)[0][:-1]

    def transposed_times(self, U: Float[Array, "slots k"]) -> Float[Array, "slots k"]:
        """L'U."""
        k = U.shape[1]

        def step(Z: Array, row: tuple[Array, ...]) -> tuple[Array, None]:
            i, b, near = row
            z = jax.lax.dynamic_slice(Z, (i * self._width, 0), (self._width, k))
            return Z.at[near].add(b[..., None] * z[:, None, :]), None

        start = jnp.concatenate([U, jnp.zeros((1, k), U.dtype)])
        rows = jnp.arange(len(self.scale)), self.weights, self.near
        Z = jax.lax.scan(step, start, rows, reverse=True)[0][:-1]
        return self.scale.reshape(-1, 1) * Z

    def weight_products(
        self, left: Float[Array, "slots k"], right: Float[Array, "slots k"]
    ) -> Float[Array, "steps w m"]:
        """sum_k left_i right_N(i): the derivative of left'(B right) in the weights b_i."""
        padded = jnp.concatenate([right, jnp.zeros((1, right.shape[1]), right.dtype)])

        def of_step(row: tuple[Array, Array]) -> Array:
            left, near = row
            return jnp.einsum("wk,wmk->wm", left, padded[near], precision="highest")

        return jax.lax.map(of_step, (left.reshape(*self.scale.shape, -1), self.near))

    def dense(self) -> Float[Array, "n slots"]:
        """The rows of L as a dense matrix, in O(n^3)."""
        size, m = self.num_slots, self.weights.shape[2]
        B = jnp.zeros((size, size + 1), self.weights.dtype)
        rows, near = jnp.arange(size)[:, None], self.near.reshape(size, m)
        B = B.at[rows, near].add(self.weights.reshape(size, m))[:, :-1]
        scale = jnp.diag(self.scale.reshape(-1))
        L = solve_triangular(jnp.eye(size, dtype=B.dtype) - B, scale, lower=True)
        return self.at_rows(L)

    def covariance(self) -> Float[Array, "n n"]:
        """L L' as a dense matrix, in O(n^3)."""
        L = self.dense()
        return matmul(L, L.T)
