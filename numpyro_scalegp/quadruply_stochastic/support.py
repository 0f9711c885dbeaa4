"""The support of control variates in a run of `RowSVI`, and their fits."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.rows import Rows
from numpyro_scalegp.features import kmeans_points
from numpyro_scalegp.features.chevron import Chevron
from numpyro_scalegp.quadruply_stochastic import likelihood
from numpyro_scalegp.quadruply_stochastic.control_variate import ControlVariate
from numpyro_scalegp.quadruply_stochastic.elbo import QuadruplyStochasticELBO
from numpyro_scalegp.quadruply_stochastic.problem import Problem, find_family, trace_problem

# Rows to which a control variate is fitted, for each support point.
_DATA_ROWS = 5


class ControlVariates(NamedTuple):
    """Fits control variates for a model and a guide with their arguments."""

    model: Callable
    guide: Callable
    loss: QuadruplyStochasticELBO
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def problem(self, given: dict[str, Any], key: Key[Array, ""]) -> Problem:
        """The prior, the family and the likelihood at given parameters."""
        keys = jax.random.split(key)
        return trace_problem(given, self.model, self.guide, keys, self.args, self.kwargs)

    def have_effect(self, problem: Problem) -> bool:
        """Whether a control variate is wanted, and any estimate would use it."""
        return (
            self.loss.control_variate_rank > 0
            and self.loss.num_features < problem.q.loc.shape[0]
            and (self.loss.bound is None or problem.p.has_dense_precision)
        )

    def initial(
        self,
        given: dict[str, Any],
        problem: Problem,
        key: Key[Array, ""],
    ) -> ControlVariate:
        """A control variate on a support chosen from the data.

        Raises:
            ValueError: if there are too few rows of data.
        """
        rows = self._support(given, problem, key)
        return self._fit(given, rows, key, dense_precision=problem.p.has_dense_precision)

    def refit(
        self,
        given: dict[str, Any],
        old: ControlVariate,
        key: Key[Array, ""],
        *,
        dense_precision: bool,
    ) -> ControlVariate:
        """A control variate on the support of another, with the present parameters."""
        rows = old.X, old.data, old.targets
        return self._fit(given, rows, key, dense_precision=dense_precision)

    def weight_names(
        self, given: dict[str, Any], row_names: tuple[str, ...], key: Key[Array, ""]
    ) -> tuple[str, ...]:
        """The parameters that are the family's `loc`, `scale_diag` and `scale_columns`.

        Raises:
            ValueError: unless all three come by rows.
        """
        index = jnp.zeros((1, 1), jnp.int32)
        rows = {name: Rows.of(given[name], index) for name in row_names}
        q = find_family({**given, **rows}, self.guide, key, self.args, self.kwargs)[1]
        parts = q.loc, q.scale_diag, q.scale_columns
        if not all(isinstance(part, Rows) for part in parts):
            raise ValueError(
                "a control variate follows `loc`, `scale_diag` and `scale_columns` by their rows: "
                "declare all three with numpyro.param(..., rows=True), or set "
                "`control_variate_rank` to 0."
            )
        names = {id(value.values): name for name, value in rows.items()}
        return tuple(names[id(part.values)] for part in parts)

    def _support(
        self, given: dict[str, Any], problem: Problem, key: Key[Array, ""]
    ) -> tuple[Float[Array, "r d"], Float[Array, "s d"], Float[Array, " s"]]:
        """Support points, rows of mini-batches that the model draws, and the targets of f there.

        Centers of the rows' clusters vary with more of the data than as many rows.
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
            found = self.problem(given, key)
            targets = jnp.zeros(num, found.q.X.dtype)
            if self.loss.bound is None:
                known = self.loss.likelihood
                known = likelihood.analyzed(found) if known is None else known
                targets = likelihood.targets(found, known)
            return found.q.X, targets

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
        given: dict[str, Any],
        rows: tuple[Float[Array, "r d"], Float[Array, "s d"], Float[Array, " s"]],
        key: Key[Array, ""],
        *,
        dense_precision: bool,
    ) -> ControlVariate:
        _, q, _ = find_family(given, self.guide, key, self.args, self.kwargs)
        weights = Chevron(q.loc, q.scale_diag, q.scale_columns)
        return ControlVariate.fit(q.features, *rows, weights, dense_precision=dense_precision)
