"""The log marginal likelihood of each observation given its nearest ones before it."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Key

from numpyro_scalegp.core import checks, rounding
from numpyro_scalegp.core.chunks import map_rows, sum_rows
from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.mesh import divided
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.estimators.estimator import AbstractEstimator
from numpyro_scalegp.estimators.neighbor_graph import ORDERINGS, NeighborGraph, Ordering, RowGroups
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.kernel import as_single
from numpyro_scalegp.posteriors import conditionals
from numpyro_scalegp.posteriors.vecchia import (
    Neighbors,
    VecchiaPosterior,
    rows_at_a_time,
    scaled,
)
from numpyro_scalegp.solvers import KernelOperator

Found = TypeVar("Found", bound="AbstractNeighbors")


class AbstractNeighbors(AbstractEstimator):
    """An estimator that looks at the nearest rows before each."""

    if TYPE_CHECKING:  # checkers take an `AbstractVar` for the first argument of all subclasses

        @property
        def num_neighbors(self) -> int: ...  # noqa: D102
        @property
        def ordering(self) -> Ordering: ...  # noqa: D102
        @property
        def graph(self) -> NeighborGraph | None: ...  # noqa: D102
    else:
        num_neighbors: eqx.AbstractVar[int]
        ordering: eqx.AbstractVar[Ordering]
        graph: eqx.AbstractVar[NeighborGraph | None]

    def __check_init__(self) -> None:
        checks.count("num_neighbors", self.num_neighbors)
        if self.ordering not in ORDERINGS:
            raise ValueError(f"`ordering` must be one of {ORDERINGS}, got {self.ordering!r}.")

    def find_neighbors(
        self: Found, X: Float[ArrayLike, "n d"], kernel: AbstractKernel | None = None
    ) -> Found:
        """This estimator with the neighbors of the rows of X.

        Args:
            X: inputs, shape (n, d).
            kernel: whose lengthscales are the units of distances; None for those of the columns.

        Returns:
            The estimator for these rows alone, in O(n log n) for few columns, O(n^2) for many.

        Raises:
            ValueError: if `X` or the kernel is traced, or the kernel is a batch.
        """
        X = checks.inputs("X", X)
        if kernel is not None:
            as_single("kernel", kernel)
        if not checks.is_concrete((X, kernel)):
            raise ValueError(_TRACED)
        with checks.known_values(X):
            units = X if kernel is None else scaled(kernel, X)
        given = self.num_neighbors, self.ordering, self._most
        with checks.known_values(X):
            graph = NeighborGraph.found(X, as_numpy(units), *given)
        return eqx.tree_at(lambda one: one.graph, self, graph, is_leaf=lambda leaf: leaf is None)

    def with_inputs(self: Found, change: Callable[[Array], Array]) -> Found:
        """Refuse: which rows count decides who the neighbors are.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"`{type(self).__name__}` must know `observed` while the model is traced, and is for "
            "one Gaussian process: give `observed` as an array of NumPy, and write a site for each "
            "group."
        )

    @property
    def _most(self) -> int:
        """How many rows may share their neighbors."""
        return 1

    def _known(self, operator: KernelOperator) -> Neighbors:
        noise = operator.noise()
        return Neighbors(operator.kernel, operator.X, noise, self.num_neighbors)

    def _graph_of(self, operator: KernelOperator) -> NeighborGraph:
        if self.graph is not None:
            return self.graph
        kernel = operator.kernel if checks.is_concrete(operator.kernel) else None
        graph = self.find_neighbors(operator.X, kernel).graph
        assert graph is not None
        return graph


class Vecchia(AbstractNeighbors):
    """The density of each observation given its nearest ones before it, in a coarse-to-fine order.

    log p(y) ~ sum_i log p(y_i | y_N(i)), with N(i) the m nearest rows among those before i: the log
    density of another model, whose covariance has a sparse inverse factor. It is exact for m = n -
    1, and close for a few dozen in two or three columns. Its bias falls with m, as `audit` shows,
    and most in few columns and where lengthscales are long beside the distance to neighbors.

    It is deterministic and has derivatives of every order, so it serves NUTS, Laplace
    approximations and line searches; time and memory are linear in the number of rows.

    Neighbors are found once, on the host, when the density is first evaluated: in units of the
    kernel's lengthscales where these are known, such as outside of compiled code, and of the
    columns of X otherwise. `find_neighbors` finds them beforehand: for lengthscales, or anew once
    these have moved; and where X itself is traced, as in a jitted function of X.

    Rows with many neighbors in common share them in a group, in which each is given all rows before
    it, its own neighbors and those of others: closer to the exact density for as many neighbors, at
    about the same cost, since one factorization serves a whole group.

    A sum over rows has unbiased mini-batches: `estimator.on(index)` takes rows of an `sgp.plate`,
    and scales them to all. The site, of all of y, stands outside of the plate.

    Args:
        num_neighbors: m, positive.
        ordering: "maxmin", each row far from those before it; "random"; or "given", that of X, such
            as time.
        group_size: how many rows may share their neighbors; 1 for each row's own neighbors alone.
        graph: of `find_neighbors`.
        rows: of `on`.

    Raises:
        ValueError: if `num_neighbors` or `group_size` is not positive, `ordering` another; when
            used, if X is traced, or is not that of the `graph`.

    References:
        Vecchia (1988), Estimation and Model Identification for Continuous Spatial Processes;
        Guinness (2018), Permutation and Grouping Methods for Sharpening Gaussian Process
        Approximations; Katzfuss and Guinness (2021), A General Framework for Vecchia
        Approximations of Gaussian Processes. Time O(n m^3), memory O(n m) beside chunks of rows.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jax.random.uniform(jax.random.key(0), (2_000, 2))
        >>> estimator = sgp.estimators.Vecchia(num_neighbors=20)
        >>> kernel = sgp.kernels.Matern32([0.2, 0.3])
        >>> gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator.find_neighbors(X, kernel))
        >>> gp.condition(jnp.sin(6.0 * X[:, 0])).mean(X[:3]).shape
        (3,)
    """

    num_neighbors: int = eqx.field(static=True, converter=checks.plain, default=30)
    ordering: Ordering = eqx.field(static=True, default="maxmin")
    group_size: int = eqx.field(static=True, converter=checks.plain, default=8)
    graph: NeighborGraph | None = None
    rows: Int[Array, " b"] | None = None

    def __check_init__(self) -> None:
        checks.count("group_size", self.group_size)

    @property
    def _most(self) -> int:
        return self.group_size

    def on(self, index: Int[ArrayLike, " b"]) -> "Vecchia":
        """This estimator on a mini-batch of rows, scaled to all: unbiased over batches.

        Each row stands for its group, whose mean term it counts: b rows have the terms of several
        times as many, at the cost of b groups.

        Args:
            index: the rows, shape (b,), as entering an `sgp.plate` gives them. None may be left out
                of the density by `observed`.

        Raises:
            ValueError: if there are none; when used, if one lies beyond the rows (NaN where it is
                traced).
            TypeError: if they are no integers.
        """
        rows = checks.as_index(index)
        checks.shape("index", rows, (rows.size,), why="one entry for each row of the mini-batch")
        if not rows.size:
            raise ValueError("`index` must name at least one row.")
        return dataclasses.replace(self, rows=rows)

    @property
    def is_of_batch(self) -> bool:
        """Whether `on` has taken some rows."""
        return self.rows is not None

    def log_prob(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"], **options: Any
    ) -> Float[Array, "*batch"]:
        """The sum of log densities; see `AbstractEstimator.log_prob`."""
        return self.log_density(operator, residual, rounding.FEW_DIGITS)

    def log_density(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"], limit: float
    ) -> Float[Array, "*batch"]:
        """The same, with a warning from another relative rounding; see `rounding`."""
        graph, n = self._graph_of(operator), operator.size
        check = graph.check(operator.X)
        if self.rows is not None:
            inside = jnp.all((self.rows >= 0) & (self.rows < n))
            if checks.is_concrete(inside) and not inside:
                raise ValueError(
                    f"`index` must be in 0..{n - 1}, got up to {int(jnp.max(self.rows))} and down "
                    f"to {int(jnp.min(self.rows))}."
                )
            check = jnp.where(inside, check, jnp.nan)
        return self._log_density(operator, residual, graph.groups, limit) + check

    @compiled
    def _log_density(
        self,
        operator: KernelOperator,
        residual: Float[Array, "*batch n"],
        groups: RowGroups,
        limit: float,
    ) -> Float[Array, "*batch"]:
        n = operator.size
        values = residual.reshape(-1, residual.shape[-1]).T.astype(operator.dtype)
        counts = jnp.sum(groups.places < groups.rows.shape[1], axis=1)
        weights = jnp.ones(len(counts), operator.dtype)
        rows, places = groups.rows, groups.places
        if self.rows is not None:
            index = self.rows
            # A row stands for its group, which has as many.
            some = groups.slots[index] // places.shape[1]
            rows, places = rows[some], places[some]
            weights = n / len(index) / counts[some].astype(operator.dtype)
        known = self._known(operator)

        def of_chunk(
            chunk: tuple[Array, Array, Array],
        ) -> tuple[Array, conditionals.Trouble]:
            rows, places, weights = chunk
            # Groups that fill a chunk are empty.
            is_real = weights[:, None] > 0
            rows, places = jnp.where(is_real, rows, n), jnp.where(is_real, places, rows.shape[1])
            found = known.groups(rows, places)
            is_own = places < rows.shape[1]
            seen = jnp.where((rows < n)[..., None], values[jnp.where(rows < n, rows, 0)], 0.0)
            errors, left, trouble = conditionals.errors(found, seen)
            left = jnp.where(is_own, left, 1.0)
            terms = jnp.log(left)[..., None] + errors * errors / left[..., None]
            terms = jnp.where(is_own[..., None], weights[:, None, None] * terms, 0.0)
            whole = jnp.where(is_own, conditionals.variances(found), 0.0)
            few = conditionals.few_digits(whole, left, rows.shape[1], limit)
            return jnp.sum(terms, axis=(0, 1)), jax.tree.map(jnp.add, trouble, few)

        chunk = divided((rows, places, weights), operator.mesh)
        size = rows_at_a_time(rows.shape[1] - 1)
        total, trouble = sum_rows(of_chunk, chunk, size, kept=(conditionals.SOLUTIONS,))
        trouble.warn()
        found = -0.5 * (total + n * math.log(2.0 * math.pi))
        return found.reshape(residual.shape[:-1])

    def condition(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        **options: Any,
    ) -> VecchiaPosterior:
        """The posterior at each input given its nearest observations, whatever the ordering."""
        return VecchiaPosterior(
            kernel=operator.kernel,
            X=operator.X,
            y=y,
            noise_variance=operator.noise_variance,
            mean_function=mean_function,
            residual=(y - mean_function(operator.X)).astype(operator.dtype),
            noise=operator.noise(),
            num_neighbors=self.num_neighbors,
        )

    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from the approximation, row after row, in O(n m) a draw after O(n m^3)."""
        normal = jax.random.normal(key, (num_samples, operator.size), operator.dtype)
        return self.of_white(operator, normal)

    def of_white(
        self, operator: KernelOperator, white: Float[Array, "num_samples n"]
    ) -> Float[Array, "num_samples n"]:
        """Make draws from the approximation of standard normal values, one a row."""
        graph = self._graph_of(operator)
        check = graph.check(operator.X)
        return self._of_white(operator, white, graph) + check

    @compiled
    def _of_white(
        self, operator: KernelOperator, white: Float[Array, "num_samples n"], graph: NeighborGraph
    ) -> Float[Array, "num_samples n"]:
        known = self._known(operator)
        rows, places = graph.groups.rows, graph.groups.places
        width, most = rows.shape[1], places.shape[1]

        def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            return conditionals.weights_in_groups(known.groups(*chunk))

        b, variance = map_rows(of_chunk, (rows, places), rows_at_a_time(width - 1))
        slots = graph.groups.slots
        b, variance = b.reshape(-1, width)[slots], variance.reshape(-1)[slots]
        return in_order(graph.order, rows[slots // most], b, variance, white)


def in_order(
    order: Int[Array, " n"],
    near: Int[Array, "n m"],
    weights: Float[Array, "n m"],
    variance: Float[Array, " n"],
    white: Float[Array, "num_samples n"],
) -> Float[Array, "num_samples n"]:
    """Values of rows in their order: what their neighbors say, and standard normal values."""
    drawn = jnp.sqrt(variance)[:, None] * white.T.astype(variance.dtype)

    def step(y: Array, row: Array) -> tuple[Array, None]:
        value = matmul(weights[row], y[near[row]]) + drawn[row]
        return y.at[row].set(value), None

    # One row more, for the neighbors that a row lacks.
    start = jnp.zeros((len(variance) + 1, len(white)), variance.dtype)
    return jax.lax.scan(step, start, order)[0][:-1].T


_TRACED = (
    "`X` is traced, and the neighbors of its rows are found on the host: find them beforehand, by "
    "`estimator.find_neighbors(X, kernel)`, and give the `GaussianProcess` that estimator. "
    "Each X of a batch is traced: write a site for each."
)
