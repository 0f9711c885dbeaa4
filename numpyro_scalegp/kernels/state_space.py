"""Kernels of one input, time, as linear stochastic differential equations."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.numerics.linalg import matmul

# A small matrix as rows of scalars, which compiled loops handle better, or as an array.
Block = tuple[tuple[Array, ...], ...] | Array
Blocks = tuple[Block, ...]

# Below this elapsed time, in units of the drift's largest row sum, the noise is an integral.
_SHORT = 1.0
# Up to this size matrices are kept as entries.
MOST_ENTRIES = 4
_NODES = np.polynomial.legendre.leggauss(10)


class Transition(NamedTuple):
    """What happens to a state over a time: x becomes A x + q, with noise q ~ N(0, Q)."""

    matrix: Blocks  # A
    noise: Blocks  # Q


class AbstractStateSpace(eqx.Module):
    """A Gaussian process f(t) = h'x(t), whose state x is a Markov process of s numbers.

    The mean is zero. Covariances and transitions of the state are block-diagonal, with blocks of
    `block_sizes`. All methods take single times, and work under `jax.vmap`.

    References:
        Hartikainen and Sarkka (2010), Kalman Filtering and Smoothing Solutions to Temporal Gaussian
        Process Regression Models; Sarkka and Solin (2019), Applied Stochastic Differential
        Equations, chapter 12.
    """

    @property
    @abc.abstractmethod
    def block_sizes(self) -> tuple[int, ...]:
        """The sizes of the blocks, which add up to s."""

    @abc.abstractmethod
    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """The covariance of x(time)."""

    @abc.abstractmethod
    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """The transition from x(start) to x(start + elapsed), for `elapsed` at least zero.

        The noise must be accurate relative to its size, which for a smooth process is a high power
        of `elapsed`: the difference of covariances is not.
        """

    @abc.abstractmethod
    def observation(self, X: Float[Array, "n d"]) -> Float[Array, "n s"]:
        """The vector h of each row of inputs."""

    @property
    def has_equal_observations(self) -> bool:
        """Whether `observation` is the same vector for all rows."""
        return True

    @property
    def has_costly_transitions(self) -> bool:
        """Whether a transition is worth storing, not computing again in each pass over the rows."""
        return False

    def time_column(self, d: int) -> int | None:
        """The column, out of d, that holds the time; None if the process does not depend on it.

        Raises:
            ValueError: if no column or several may be meant.
        """
        if d != 1:
            raise ValueError(
                f"a state-space form is for inputs of one column, the time, got {d}: name it for "
                "each kernel, as in `kernel.on((0,))`."
            )
        return 0

    @property
    def size(self) -> int:
        """The number of state variables, s."""
        return sum(self.block_sizes)


class LinearSDE(AbstractStateSpace):
    """A stationary process by its stochastic differential equation, dx = F x dt + noise.

    For a custom kernel: the matrices suffice. The transition is exp(F t), and the noise over a time
    is P - A P A', or for short times the integral of exp(F s) D exp(F s)', D = -(F P + P F'), by
    Gauss-Legendre quadrature.

    Args:
        drift: F, shape (s, s), with eigenvalues of negative or zero real part.
        covariance: P, the stationary covariance of the state, shape (s, s); F P + P F' must be
            negative semidefinite.
        observation: h, shape (s,), so that the kernel is k(t) = h' exp(F |t|) P h.

    Raises:
        ValueError: if shapes do not fit, or an entry is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> drift, covariance = jnp.array([[-2.0]]), jnp.array([[1.5]])
        >>> form = sgp.kernels.LinearSDE(drift, covariance, jnp.ones(1))  # 1.5 exp(-2 |t|)
        >>> form.size
        1
    """

    drift: Float[Array, "s s"]
    stationary: Float[Array, "s s"]
    weights: Float[Array, " s"]

    def __init__(
        self,
        drift: Float[ArrayLike, "s s"],
        covariance: Float[ArrayLike, "s s"],
        observation: Float[ArrayLike, " s"],
    ) -> None:
        self.drift = checks.as_float(drift, "drift")
        self.stationary = checks.as_float(covariance, "covariance")
        self.weights = checks.as_float(observation, "observation")
        size = self.weights.shape[-1] if self.weights.ndim else 0
        checks.shape("observation", self.weights, (size,))
        for name, value in {"drift": self.drift, "covariance": self.stationary}.items():
            checks.shape(name, value, (size, size), why="one row for each entry of `observation`")
            checks.finite(name, value)
        checks.finite("observation", self.weights)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """One block."""
        return (self.weights.shape[0],)

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """The stationary covariance."""
        return (self.stationary,)

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """By matrix exponentials."""
        F, P = self.drift, self.stationary
        A = jax.scipy.linalg.expm(F * elapsed)
        diffusion = -(F @ P + P @ F.T)
        is_short = jnp.max(jnp.sum(jnp.abs(F), axis=1)) * elapsed < _SHORT
        short = jnp.where(is_short, elapsed, 0.0)

        def at_node(node: Array) -> Array:
            E = jax.scipy.linalg.expm(F * (short * node))
            return E @ diffusion @ E.T

        nodes, weights = (jnp.asarray(values, F.dtype) for values in _NODES)
        nodes, weights = 0.5 * (1.0 + nodes), 0.5 * weights  # on the interval from 0 to 1
        integral = short * jnp.tensordot(weights, jax.vmap(at_node)(nodes), 1)
        noise = jnp.where(is_short, integral, P - A @ P @ A.T)
        return Transition((A,), (0.5 * (noise + noise.T),))

    def observation(self, X: Float[Array, "n d"]) -> Float[Array, "n s"]:
        """The same vector for all rows."""
        return jnp.broadcast_to(self.weights, (X.shape[0], self.size))


class FirstEntry(AbstractStateSpace):
    """A state in one block whose first entry is the function."""

    def observation(self, X: Float[Array, "n d"]) -> Float[Array, "n s"]:
        """A unit vector."""
        unit = [1.0] + [0.0] * (self.size - 1)
        return jnp.broadcast_to(jnp.array(unit, X.dtype), (X.shape[0], self.size))


class Fixed(FirstEntry):
    """An unknown constant of variance `variance`."""

    variance: Float[Array, ""]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """One number."""
        return (1,)

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """The variance of the constant."""
        return (matrix([[self.variance]]),)

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """None."""
        one = jnp.ones_like(elapsed)
        return Transition((matrix([[one]]),), (matrix([[0.0 * one]]),))


class Constants(AbstractStateSpace):
    """Independent constants z, of which each row observes a linear combination, by its category.

    The process does not depend on time; its product with one that does has different paths for
    different categories.

    Args:
        loadings: the coefficients of the shared constants for each category, shape (p, r).
        variances: of the p constants that belong to one category each, shape (p,).
    """

    loadings: Float[Array, "p r"]
    variances: Float[Array, " p"]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """A block for each constant."""
        return (1,) * sum(self.loadings.shape)

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """Ones for the shared constants, and the variances."""
        ones = jnp.ones(self.loadings.shape[1], self.variances.dtype)
        return tuple(matrix([[v]]) for v in (*ones, *self.variances))

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """None."""
        one = jnp.ones_like(elapsed)
        size = self.size
        return Transition((matrix([[one]]),) * size, (matrix([[0.0 * one]]),) * size)

    def observation(self, X: Float[Array, "n 1"]) -> Float[Array, "n s"]:
        """The loadings of each row's category, and its indicators; NaN for no category."""
        categories = jnp.arange(len(self.variances), dtype=X.dtype)
        indicators = (categories == X).astype(X.dtype)
        shared = matmul(indicators, self.loadings.astype(X.dtype))
        is_category = jnp.any(indicators > 0.0, axis=1, keepdims=True)
        return jnp.where(is_category, jnp.concatenate([shared, indicators], axis=1), jnp.nan)

    @property
    def has_equal_observations(self) -> bool:
        """False: they depend on the category."""
        return False

    def time_column(self, d: int) -> None:
        """None: the column holds the category."""


class Trend(FirstEntry):
    """A linear function of time, the state of which is its value and its slope."""

    variance: Float[Array, ""]  # of the slope
    bias: Float[Array, ""]  # variance of the value at time zero

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The value and the slope."""
        return (2,)

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """The covariance of value and slope."""
        both = self.variance * time
        return (matrix([[self.bias + both * time, both], [both, self.variance]]),)

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """The value grows by the slope."""
        one, zero = jnp.ones_like(elapsed), jnp.zeros_like(elapsed)
        A = matrix([[one, elapsed], [zero, one]])
        return Transition((A,), (matrix([[zero, zero], [zero, zero]]),))


class AbstractPair(AbstractStateSpace):
    """A process made of two processes of the same time."""

    left: eqx.AbstractVar[AbstractStateSpace]
    right: eqx.AbstractVar[AbstractStateSpace]

    @property
    def has_equal_observations(self) -> bool:
        """Whether both have the same vector for all rows."""
        return self.left.has_equal_observations and self.right.has_equal_observations

    @property
    def has_costly_transitions(self) -> bool:
        """Whether one of them has."""
        return self.left.has_costly_transitions or self.right.has_costly_transitions

    def time_column(self, d: int) -> int | None:
        """The column of both; see `AbstractStateSpace.time_column`."""
        column, other = self.left.time_column(d), self.right.time_column(d)
        if column is None or other is None:
            return other if column is None else column
        if column != other:
            raise ValueError(
                f"a state-space form is for one time, got kernels of column {column} and {other}: "
                "take the same column in all terms and factors."
            )
        return column


class Stacked(AbstractPair):
    """The sum of two processes, whose states are stacked; an inactive one is not observed."""

    left: AbstractStateSpace
    right: AbstractStateSpace
    active: tuple[bool, bool] = eqx.field(static=True)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The blocks of both."""
        return self.left.block_sizes + self.right.block_sizes

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """The covariances of both."""
        return self.left.covariance(time) + self.right.covariance(time)

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """The transitions of both."""
        left = self.left.transition(start, elapsed)
        right = self.right.transition(start, elapsed)
        return Transition(left.matrix + right.matrix, left.noise + right.noise)

    def observation(self, X: Float[Array, "n d"]) -> Float[Array, "n s"]:
        """The vectors of both, zero for an inactive one."""
        terms = zip((self.left, self.right), self.active, strict=True)
        vectors = [
            form.observation(X) if active else jnp.zeros((X.shape[0], form.size), X.dtype)
            for form, active in terms
        ]
        return jnp.concatenate(vectors, axis=1)


class Kronecker(AbstractPair):
    """The product of two processes of time: all products of state variables."""

    left: AbstractStateSpace
    right: AbstractStateSpace

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """A block for each pair of blocks."""
        return tuple(a * b for a in self.left.block_sizes for b in self.right.block_sizes)

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """Products of covariances."""
        return _products(self.left.covariance(time), self.right.covariance(time))

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """Products of transitions, with the noise of either factor."""
        left = self.left.transition(start, elapsed)
        right = self.right.transition(start, elapsed)
        of_right = self.right.covariance(start + elapsed)
        kept = tuple(map(_congruence, left.matrix, self.left.covariance(start)))
        noise = map(_add, _products(left.noise, of_right), _products(kept, right.noise))
        return Transition(_products(left.matrix, right.matrix), tuple(noise))

    def observation(self, X: Float[Array, "n d"]) -> Float[Array, "n s"]:
        """Products of the vectors' entries."""
        lefts = _split(self.left.observation(X), self.left.block_sizes)
        rights = _split(self.right.observation(X), self.right.block_sizes)
        return jnp.concatenate(
            [
                (a[:, :, None] * b[:, None, :]).reshape(X.shape[0], -1)
                for a in lefts
                for b in rights
            ],
            axis=1,
        )


class AbstractWrapped(AbstractStateSpace):
    """A process with the states of another one."""

    form: eqx.AbstractVar[AbstractStateSpace]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The blocks of the other."""
        return self.form.block_sizes

    @property
    def has_costly_transitions(self) -> bool:
        """Whether the other has."""
        return self.form.has_costly_transitions

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """The covariance of the other."""
        return self.form.covariance(time)

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """The transition of the other."""
        return self.form.transition(start, elapsed)

    @property
    def has_equal_observations(self) -> bool:
        """Whether the other has the same vector for all rows."""
        return self.form.has_equal_observations


class ScaledObservation(AbstractWrapped):
    """A process times the square root of a number."""

    form: AbstractStateSpace
    scale: Float[Array, ""]

    def observation(self, X: Float[Array, "n d"]) -> Float[Array, "n s"]:
        """The vectors, scaled."""
        return jnp.sqrt(self.scale) * self.form.observation(X)

    def time_column(self, d: int) -> int | None:
        """The column of the other."""
        return self.form.time_column(d)


class OnColumns(AbstractWrapped):
    """A process of the columns `dims`, of which one is the time."""

    form: AbstractStateSpace
    dims: tuple[int, ...] = eqx.field(static=True)

    def observation(self, X: Float[Array, "n d"]) -> Float[Array, "n s"]:
        """The vectors of the other for these columns."""
        return self.form.observation(X[:, jnp.array(self.dims)])

    def time_column(self, d: int) -> int | None:
        """The column among all of them."""
        column = self.form.time_column(len(self.dims))
        return None if column is None else self.dims[column]


class WithIndicator(AbstractWrapped):
    """A process that is zero in rows whose last column is zero."""

    form: AbstractStateSpace

    def observation(self, X: Float[Array, "n d_and_one"]) -> Float[Array, "n s"]:
        """The vectors, zero where the indicator is zero."""
        return X[:, -1:] * self.form.observation(X[:, :-1])

    @property
    def has_equal_observations(self) -> bool:
        """False: they depend on the indicator."""
        return False

    def time_column(self, d: int) -> int | None:
        """The column among the columns before the indicator."""
        return self.form.time_column(d - 1)


class WithSlope(AbstractWrapped):
    """A process, or in rows whose last column is not zero its derivative with respect to time.

    With the transition A(u) over a time u, h'A(u)x is the expected value after u, given the state
    x. If the process is differentiable, its derivative is the derivative of that at zero.
    """

    form: AbstractStateSpace

    def observation(self, X: Float[Array, "n d_and_one"]) -> Float[Array, "n s"]:
        """The vectors of the value, or of the derivative; NaN for another column's derivative."""
        inputs, order = X[:, :-1], X[:, -1]
        column = self.form.time_column(inputs.shape[1])
        h = self.form.observation(inputs)
        if column is None:
            return jnp.where(order[:, None] == 0.0, h, jnp.nan)

        def slope(time: Array, h: Float[Array, " s"]) -> Float[Array, " s"]:
            def expected(elapsed: Array) -> Float[Array, " s"]:
                blocks = self.form.transition(time, elapsed).matrix
                parts = _split(h[None], self.form.block_sizes)
                pairs = zip(parts, blocks, strict=True)
                return jnp.concatenate([matmul(part, array(block))[0] for part, block in pairs])

            return jax.jvp(expected, (jnp.zeros_like(time),), (jnp.ones_like(time),))[1]

        slopes = jax.vmap(slope)(inputs[:, column].astype(h.dtype), h)
        of_order = jnp.where(order[:, None] == column + 1.0, slopes, jnp.nan)
        return jnp.where(order[:, None] == 0.0, h, of_order)

    @property
    def has_equal_observations(self) -> bool:
        """False: they depend on the last column."""
        return False

    def time_column(self, d: int) -> int | None:
        """The column among the columns before the last one."""
        return self.form.time_column(d - 1)


def matrix(rows: Sequence[Sequence[Any]]) -> Block:
    """A small matrix from its entries."""
    dtype = jnp.result_type(*(entry for row in rows for entry in row))
    return tuple(tuple(jnp.asarray(entry, dtype) for entry in row) for row in rows)


def array(block: Block) -> Float[Array, "b b ..."]:
    """A matrix as an array."""
    if isinstance(block, tuple):
        return jnp.stack([jnp.stack(row) for row in block])
    return block


def single_lane(blocks: Blocks) -> Blocks:
    """The blocks with a last axis of one lane."""
    return jax.tree.map(lambda entry: entry[..., None], blocks)


def _products(lefts: Blocks, rights: Blocks) -> Blocks:
    return tuple(_kronecker(left, right) for left in lefts for right in rights)


def _kronecker(left: Block, right: Block) -> Block:
    if len(left) * len(right) > MOST_ENTRIES:
        return jnp.kron(array(left), array(right))
    return tuple(tuple(a * b for a in row for b in other) for row in left for other in right)


def _congruence(A: Block, P: Block) -> Block:
    """A P A'."""
    A, P = array(A), array(P)
    if len(A) <= MOST_ENTRIES:
        AP = jnp.sum(A[:, :, None] * P[None, :, :], axis=1)
        return jnp.sum(AP[:, None, :] * A[None, :, :], axis=2)
    return matmul(matmul(A, P), A.T)


def _add(left: Block, right: Block) -> Block:
    return jax.tree.map(jnp.add, left, right)


def _split(vectors: Float[Array, "n s"], sizes: Sequence[int]) -> list[Float[Array, "n b"]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(vectors[:, start : start + size])
        start += size
    return parts
