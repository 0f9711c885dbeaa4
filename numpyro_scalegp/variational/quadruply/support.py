"""Support points of control variates in a run of `RowSVI`, and their fits."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.features.selection import kmeans_points
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.variational.quadruply import likelihood
from numpyro_scalegp.variational.quadruply.chevron_features import Chevron
from numpyro_scalegp.variational.quadruply.control_variate import ControlVariate
from numpyro_scalegp.variational.quadruply.elbo import QuadruplyStochasticELBO
from numpyro_scalegp.variational.quadruply.problem import Problem, find_family, trace_problem
from numpyro_scalegp.variational.quadruply.rows import Rows

# Number of data points for the fit of a control variate, for each support point.
_DATA_ROWS = 5


class ControlVariates(NamedTuple):
    """Fits control variates for a model and a guide with their arguments."""

    model: Callable
    guide: Callable
    loss: QuadruplyStochasticELBO
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def problem(self, params: dict[str, Any], key: Key[Array, ""]) -> Problem:
        """The prior, the family and the likelihood at these parameters."""
        keys = jax.random.split(key)
        return trace_problem(params, self.model, self.guide, keys, self.args, self.kwargs)

    def are_used(self, problem: Problem) -> bool:
        """Whether a control variate is requested, and the estimates use it."""
        return (
            self.loss.control_variate_rank > 0
            and self.loss.num_features < problem.q.loc.shape[0]
            and (self.loss.bound is None or problem.p.has_dense_precision)
        )

    def initial(
        self,
        params: dict[str, Any],
        problem: Problem,
        key: Key[Array, ""],
    ) -> ControlVariate:
        """A control variate with support points chosen from the data.

        Raises:
            ValueError: if there are too few data points.
        """
        rows = self._support_and_data(params, problem, key)
        return self._fit(params, rows, key, dense_precision=problem.p.has_dense_precision)

    def refit(
        self,
        params: dict[str, Any],
        old: ControlVariate,
        key: Key[Array, ""],
        *,
        dense_precision: bool,
    ) -> ControlVariate:
        """A control variate with the support points of `old`, at these parameters."""
        rows = old.X, old.data, old.targets
        return self._fit(params, rows, key, dense_precision=dense_precision)

    def weight_names(
        self, params: dict[str, Any], row_names: tuple[str, ...], key: Key[Array, ""]
    ) -> tuple[str, ...]:
        """The names of the parameters `loc`, `scale_diag` and `scale_columns` of the family.

        Raises:
            ValueError: unless all three are declared with `rows=True`.
        """
        index = jnp.zeros((1, 1), jnp.int32)
        rows = {name: Rows.of(params[name], index) for name in row_names}
        q = find_family({**params, **rows}, self.guide, key, self.args, self.kwargs)[1]
        weights = q.loc, q.scale_diag, q.scale_columns
        if not all(isinstance(value, Rows) for value in weights):
            raise ValueError(
                "a control variate needs `loc`, `scale_diag` and `scale_columns` by rows: declare "
                "all three with numpyro.param(..., rows=True), or set `control_variate_rank` to 0."
            )
        names = {id(value.values): name for name, value in rows.items()}
        return tuple(names[id(value.values)] for value in weights)

    def _support_and_data(
        self, params: dict[str, Any], problem: Problem, key: Key[Array, ""]
    ) -> tuple[Float[Array, "r d"], Float[Array, "s d"], Float[Array, " s"]]:
        """Support points, inputs of mini-batches that the model draws, and observations of f there.

        Cluster centers represent more of the data than as many inputs.
        """
        rank, points = self.loss.control_variate_rank, self.loss.support_points
        num, width = problem.q.X.shape
        batches = math.ceil(_DATA_ROWS * rank / num) if problem.is_mini_batch else 1
        if points is None and batches * num < rank:
            raise ValueError(
                f"`control_variate_rank` is {rank}, and the model has {num} rows: take at most as "
                "many, draw mini-batches within the model (`sgp.plate`), or give `support_points`."
            )

        def batch(key: Array) -> tuple[Array, Array]:
            problem = self.problem(params, key)
            targets = jnp.zeros(num, problem.q.X.dtype)
            if self.loss.bound is None:
                observed = self.loss.likelihood
                observed = likelihood.analyzed(problem) if observed is None else observed
                targets = likelihood.targets(problem, observed)
            return problem.q.X, targets

        batch_key, choice_key, points_key = jax.random.split(key, 3)
        of_batches = compiled(lambda keys: jax.lax.map(batch, keys))
        X, targets = of_batches(jax.random.split(batch_key, batches))
        X, targets = X.reshape(-1, X.shape[-1]), targets.reshape(-1)
        chosen = jax.random.permutation(choice_key, len(X))[: _DATA_ROWS * rank]
        X, targets = X[chosen], targets[chosen]
        if points is None:
            return kmeans_points(points_key, X, rank), X, targets
        return checks.inputs("support_points", points, width).astype(X.dtype), X, targets

    def _fit(
        self,
        params: dict[str, Any],
        rows: tuple[Float[Array, "r d"], Float[Array, "s d"], Float[Array, " s"]],
        key: Key[Array, ""],
        *,
        dense_precision: bool,
    ) -> ControlVariate:
        _, q, _ = find_family(params, self.guide, key, self.args, self.kwargs)
        weights = Chevron(q.loc, q.scale_diag, q.scale_columns)
        return ControlVariate.fit(q.features, *rows, weights, dense_precision=dense_precision)
