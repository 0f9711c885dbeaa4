"""The Vecchia approximation: each observation given its nearest neighbors before it."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.chunks import map_rows, sum_rows
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.core.mesh import divided
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.integrated.laplace.estimator import AbstractLaplaceEstimator, LaplaceProblem
from numpyro_scalegp.integrated.laplace.search import Sites
from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.neighbors import conditionals, laplace
from numpyro_scalegp.neighbors.graph import ORDERINGS, NeighborGraph, Ordering, RowGroups
from numpyro_scalegp.neighbors.latent_posterior import NeighborValuesPosterior
from numpyro_scalegp.neighbors.posterior import Neighbors, VecchiaPosterior, rows_at_a_time, scaled
from numpyro_scalegp.neighbors.prior_factor import PriorFactor
from numpyro_scalegp.numerics import linalg, rounding
from numpyro_scalegp.numerics.derivatives import refuse_derivatives
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction

Estimator = TypeVar("Estimator", bound="AbstractNeighbors")


class AbstractNeighbors(AbstractEstimator):
    """An estimator that conditions each row on its nearest neighbors before it."""

    if TYPE_CHECKING:  # type checkers make an `AbstractVar` the first argument of all subclasses

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
        self: Estimator, X: Float[ArrayLike, "n d"], kernel: AbstractKernel | None = None
    ) -> Estimator:
        """This estimator with the neighbors of the inputs X.

        Args:
            X: inputs, shape (n, d).
            kernel: measure distances in lengthscales of this kernel; None for the units of X.

        Returns:
            An estimator for these inputs only, in O(n log n) for up to 16 input dimensions and
            O(n^2) for more.

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
        options = self.num_neighbors, self.ordering, self._group_size
        with checks.known_values(X):
            graph = NeighborGraph.build(X, as_numpy(units), *options)
        return eqx.tree_at(lambda tree: tree.graph, self, graph, is_leaf=lambda leaf: leaf is None)

    def with_inputs(self: Estimator, change: Callable[[Array], Array]) -> Estimator:
        """Refuse, since the neighbors depend on which rows are observed.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"`{type(self).__name__}` must know `observed` while the model is traced, and is for "
            "one Gaussian process: give `observed` as a NumPy array, and write a site for each "
            "group."
        )

    @property
    def _group_size(self) -> int:
        """The largest number of rows that share their neighbors."""
        return 1

    def _data(self, operator: KernelOperator) -> Neighbors:
        noise = operator.noise()
        return Neighbors(operator.kernel, operator.X, noise, self.num_neighbors)

    def _graph_of(self, operator: KernelOperator) -> NeighborGraph:
        if self.graph is not None:
            return self.graph
        kernel = operator.kernel if checks.is_concrete(operator.kernel) else None
        graph = self.find_neighbors(operator.X, kernel).graph
        assert graph is not None
        return graph


class Vecchia(AbstractNeighbors, AbstractLaplaceEstimator):
    """The Vecchia approximation: the density of each observation given its nearest neighbors.

    log p(y) ~ sum_i log p(y_i | y_N(i)), where N(i) are the m nearest rows among those before i in
    a coarse-to-fine ordering. This is the exact log density of an approximate model, whose
    covariance has a sparse inverse factor. It equals the exact density of the GP for m = n - 1, and
    is close to it for a few dozen neighbors in two or three input dimensions. The bias decreases
    with m, fastest in few input dimensions and for lengthscales long relative to the distances
    between neighbors; `audit` measures it.

    The estimator is deterministic, with derivatives of every order, and works with NUTS, Laplace
    approximations and line searches. Time and memory are linear in n.

    The neighbors are found once, on the host, when the density is first evaluated: in units of the
    kernel's lengthscales if these are concrete, as outside compiled code, and in the units of X
    otherwise. Call `find_neighbors` to find them beforehand for chosen lengthscales, to update them
    after the lengthscales have changed, or if X is traced, as in a jitted function of X.

    Rows with many neighbors in common form a group. Each row of a group is conditioned on all
    earlier rows among the group and the neighbors of its members. This is closer to the exact
    density for the same m, at about the same cost, since a group needs only one factorization.

    `LaplaceGP` takes it for counts and other observations. There the nearest-neighbor prior is of
    the function's values, without groups. Up to 2,000 rows the approximation is computed densely,
    with derivatives of every order. Beyond, conjugate gradients with a two-level preconditioner
    find the mode, and probes estimate the log-determinant and the gradient without bias, besides
    the tolerance of the solves. The probes are fixed under NUTS, so that it samples from one
    density, whose gradient differs from the computed one by the error of the probes.

    The sum over rows can be estimated from mini-batches without bias: `estimator.on(index)` takes
    rows of an `sgp.plate`, and scales their sum to all rows. The site stands outside the plate and
    observes all of y.

    Args:
        num_neighbors: m, positive.
        ordering: "maxmin", each row far from the rows before it; "random"; or "given", the order of
            X, such as time.
        group_size: the largest number of rows that share their neighbors; 1 for no groups.
        num_probes: number of probes for the log-determinant and the gradient of `LaplaceGP`.
        graph: the neighbors, set by `find_neighbors`.
        rows: the mini-batch, set by `on`.

    Raises:
        ValueError: if `num_neighbors` or `group_size` is not positive, or `ordering` is not one of
            these; when used, if X is traced, or differs from the X of `graph`.

    References:
        Vecchia (1988), Estimation and Model Identification for Continuous Spatial Processes;
        Guinness (2018), Permutation and Grouping Methods for Sharpening Gaussian Process
        Approximations; Katzfuss and Guinness (2021), A General Framework for Vecchia
        Approximations of Gaussian Processes. Time O(n m^3), memory O(n m) and one chunk of rows.

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
    num_probes: int = eqx.field(static=True, converter=checks.plain, default=32, kw_only=True)

    def __check_init__(self) -> None:
        checks.count("group_size", self.group_size)
        checks.count("num_probes", self.num_probes)

    @property
    def _group_size(self) -> int:
        return self.group_size

    def on(self, index: Int[ArrayLike, " b"]) -> "Vecchia":
        """This estimator on a mini-batch of rows, scaled to all rows: unbiased over batches.

        Each row contributes the mean term of its group. So b rows use the terms of several times as
        many rows, at the cost of b groups.

        Args:
            index: the rows, shape (b,), as entering an `sgp.plate` returns them. It cannot be
                combined with `observed`.

        Raises:
            ValueError: if `index` is empty; when used, if an entry is out of range (if traced, the
                density is NaN instead).
            TypeError: if `index` does not hold integers.
        """
        rows = checks.as_index(index)
        checks.shape("index", rows, (rows.size,), why="one entry for each row of the mini-batch")
        if not rows.size:
            raise ValueError("`index` must name at least one row.")
        return dataclasses.replace(self, rows=rows)

    @property
    def is_of_batch(self) -> bool:
        """Whether this is an estimator on a mini-batch; see `on`."""
        return self.rows is not None

    def log_prob(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"], **options: Any
    ) -> Float[Array, "*batch"]:
        """The sum of log densities; see `AbstractEstimator.log_prob`."""
        return self.log_density(operator, residual, rounding.FEW_DIGITS)

    def log_density(
        self, operator: KernelOperator, residual: Float[Array, "*batch n"], limit: float
    ) -> Float[Array, "*batch"]:
        """The log density, with a warning if relative rounding exceeds `limit`; see `rounding`."""
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
            # The mean term of a row's group: the sum over the group, divided by its size.
            group = groups.slots[index] // places.shape[1]
            rows, places = rows[group], places[group]
            weights = n / len(index) / counts[group].astype(operator.dtype)
        data = self._data(operator)

        def of_chunk(
            chunk: tuple[Array, Array, Array],
        ) -> tuple[Array, conditionals.FactorizationIssues]:
            rows, places, weights = chunk
            # Padding of a chunk has no rows.
            is_real = weights[:, None] > 0
            rows, places = jnp.where(is_real, rows, n), jnp.where(is_real, places, rows.shape[1])
            group = data.groups(rows, places)
            is_member = places < rows.shape[1]
            of_rows = jnp.where((rows < n)[..., None], values[jnp.where(rows < n, rows, 0)], 0.0)
            errors, variance, issues = conditionals.errors(group, of_rows)
            variance = jnp.where(is_member, variance, 1.0)
            terms = jnp.log(variance)[..., None] + errors * errors / variance[..., None]
            terms = jnp.where(is_member[..., None], weights[:, None, None] * terms, 0.0)
            marginal = jnp.where(is_member, conditionals.variances(group), 0.0)
            inaccurate = conditionals.few_digits(marginal, variance, rows.shape[1], limit)
            return jnp.sum(terms, axis=(0, 1)), jax.tree.map(jnp.add, issues, inaccurate)

        chunk = divided((rows, places, weights), operator.mesh)
        size = rows_at_a_time(rows.shape[1] - 1)
        total, issues = sum_rows(of_chunk, chunk, size, saved_names=(conditionals.SOLUTIONS,))
        issues.warn()
        density = -0.5 * (total + n * math.log(2.0 * math.pi))
        return density.reshape(residual.shape[:-1])

    def condition(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        **options: Any,
    ) -> VecchiaPosterior:
        """The posterior at each input given its nearest observations, for any ordering."""
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
        """Draw from the approximation, in O(n m) for each draw after O(n m^3)."""
        normal = jax.random.normal(key, (num_samples, operator.size), operator.dtype)
        return self.of_white(operator, normal)

    def of_white(
        self, operator: KernelOperator, white: Float[Array, "num_samples n"]
    ) -> Float[Array, "num_samples n"]:
        """Transform standard normal values to draws from the approximation."""
        graph = self._graph_of(operator)
        check = graph.check(operator.X)
        return self._of_white(operator, white, graph) + check

    @compiled
    def _of_white(
        self, operator: KernelOperator, white: Float[Array, "num_samples n"], graph: NeighborGraph
    ) -> Float[Array, "num_samples n"]:
        data = self._data(operator)
        rows, places = graph.groups.rows, graph.groups.places
        width, group_size = rows.shape[1], places.shape[1]

        def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            return conditionals.weights_in_groups(data.groups(*chunk))

        b, variance = map_rows(of_chunk, (rows, places), rows_at_a_time(width - 1))
        slots = graph.groups.slots
        b, variance = b.reshape(-1, width)[slots], variance.reshape(-1)[slots]
        return sequential_draws(graph.order, rows[slots // group_size], b, variance, white)

    def draws_probes(self, num_rows: int) -> bool:
        """Whether there are too many rows for a dense matrix."""
        return num_rows > laplace.MAX_DENSE

    def for_inputs(self, kernel: AbstractKernel, X: Float[Array, "... n d"]) -> "Vecchia":
        """This estimator with the neighbors of X.

        Raises:
            ValueError: for a batch, a mini-batch, or a traced X without neighbors.
        """
        if X.ndim > 2 or kernel.batch_shape:
            raise ValueError(_ONE_FUNCTION)
        if self.rows is not None:
            raise ValueError(
                "`LaplaceGP` takes all rows at once: give it `sgp.estimators.Vecchia()` without "
                "`on(index)`, or train a `sgp.LatentGP` on mini-batches."
            )
        if self.graph is not None:
            self.graph.check(X)
            return self
        return self.find_neighbors(X, kernel if checks.is_concrete(kernel) else None)

    def _prior_factor(
        self, kernel: AbstractKernel, X: Float[Array, "n d"], dtype: Any
    ) -> tuple[PriorFactor, Float[Array, ""]]:
        """The factor of the values' prior, and zero, or NaN if X is not the graph's."""
        assert self.graph is not None
        variance = kernel.evaluate_diag(X).astype(dtype)
        jitter = linalg.added_variance(variance)
        operator = KernelOperator.from_checked(kernel, X, jitter)
        factor = PriorFactor.of(operator, self.num_neighbors, self.graph)
        return factor, self.graph.check(X)

    def laplace_log_prob(self, problem: LaplaceProblem) -> Float[Array, "*batch"]:
        """See `AbstractLaplaceEstimator.laplace_log_prob`; time O(n m^3), memory O(n m)."""
        kernel, X, entries, mean, data, key = problem
        self._refuse_batch(mean)
        factor, check = self._prior_factor(kernel, X, mean.dtype)
        return laplace.log_marginal(entries, factor, mean, data, key, self.num_probes) + check

    def laplace_sites(self, problem: LaplaceProblem) -> Sites:
        """See `AbstractLaplaceEstimator.laplace_sites`."""
        kernel, X, entries, mean, data, _ = problem
        self._refuse_batch(mean)
        kernel, mean, data = refuse_derivatives(_NO_DERIVATIVES, (kernel, mean, data))
        factor, check = self._prior_factor(kernel, X, mean.dtype)
        return laplace.normal_sites(entries, factor, mean + check, data)

    def laplace_posterior(
        self,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        sites: Sites,
        mean: Float[Array, " n"],
        mean_function: RowsFunction,
        key: Key[Array, ""],
        num_samples: int | None,
    ) -> NeighborValuesPosterior:
        """See `AbstractLaplaceEstimator.laplace_posterior`; a solve for each draw."""
        kernel = refuse_derivatives(_NO_DERIVATIVES, kernel)
        factor, _ = self._prior_factor(kernel, X, mean.dtype)
        return NeighborValuesPosterior.of(
            kernel,
            X,
            sites.f,
            sites.f - mean,
            jnp.broadcast_to(factor.jitter, mean.shape),
            sites.precision,
            mean_function,
            factor,
            self.num_neighbors,
            key,
            _NUM_DRAWS if num_samples is None else num_samples,
        )

    def _refuse_batch(self, mean: Float[Array, "*batch n"]) -> None:
        if mean.ndim > 1:
            raise ValueError(_ONE_FUNCTION)


def sequential_draws(
    order: Int[Array, " n"],
    near: Int[Array, "n m"],
    weights: Float[Array, "n m"],
    variance: Float[Array, " n"],
    white: Float[Array, "num_samples n"],
) -> Float[Array, "num_samples n"]:
    """Draws in sequence: conditional means given neighbors, plus scaled standard normal values."""
    drawn = jnp.sqrt(variance)[:, None] * white.T.astype(variance.dtype)

    def step(y: Array, row: Array) -> tuple[Array, None]:
        value = matmul(weights[row], y[near[row]]) + drawn[row]
        return y.at[row].set(value), None

    # With a row for padding.
    start = jnp.zeros((len(variance) + 1, len(white)), variance.dtype)
    return jax.lax.scan(step, start, order)[0][:-1].T


# The draws that a posterior of `LaplaceGP` stores by default.
_NUM_DRAWS = 256

_ONE_FUNCTION = (
    "`Vecchia` in a `LaplaceGP` is for one Gaussian process: write a separate site for each member "
    "of the batch."
)

_NO_DERIVATIVES = (
    "the posterior of a `LaplaceGP` with `Vecchia` has no derivatives with respect to "
    "hyperparameters or observations, only with respect to the new inputs: its solutions are held "
    "fixed. Use `sgp.estimators.Cholesky()`, or wrap the arguments of `condition` in "
    "`jax.lax.stop_gradient`."
)

_TRACED = (
    "`X` is traced, and the neighbors of its rows are found on the host: find them beforehand, by "
    "`estimator.find_neighbors(X, kernel)`, and give the `GaussianProcess` that estimator. "
    "In a batch, each X is traced: write a separate site for each."
)
