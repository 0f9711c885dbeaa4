"""The collapsed family: a distribution over observations with the function integrated out."""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, ArrayLike, Bool, Float
from numpyro.distributions import constraints
from numpyro.primitives import mutable

from numpyro_scalegp.core import batches, checks, functions
from numpyro_scalegp.core.row_values import is_of_rows
from numpyro_scalegp.distributions.collapsed import GaussianNoise
from numpyro_scalegp.distributions.frozen import is_key_frozen
from numpyro_scalegp.distributions.members import (
    MISSING,
    Alike,
    Member,
    as_mean_function,
    as_observed,
    batch_shape_of,
    check_noise,
    mean_at,
)
from numpyro_scalegp.distributions.rows import RowsDistribution
from numpyro_scalegp.estimators import AbstractEstimator, Cholesky, SolverState
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.batch import BatchPosterior
from numpyro_scalegp.posteriors.posterior import AbstractConditioned
from numpyro_scalegp.solvers import KernelOperator


class GaussianProcess(GaussianNoise, RowsDistribution):
    """Noisy observations of a Gaussian process, y ~ N(m(X), K(X, X) + noise).

    `log_prob(y)` is the log marginal likelihood. The default estimator is exact; others estimate it
    and its gradient, for data too large to factorize.

    A batch of kernels, of matrices of inputs or of masks of what is observed makes it a batch of
    independent Gaussian processes: one for each group of a plate, with data and hyperparameters of
    its own.

    Args:
        kernel: covariance function, or a batch of them.
        X: inputs, shape (n, d), or (*batch, n, d) where each member has its own.
        noise_variance: variance of the observation noise, positive, in squared units of y; shape ()
            or, one a row, (n,); of a batch also (*batch, 1) or (*batch, n).
        mean: the mean function: None for zero, a number for a constant, or numbers of shape
            (*batch,), or a callable that maps (n, d) inputs to (n,) values, and X of a batch to
            (*batch, n). Or its values at the rows of X, shape (n,) or (*batch, n), such as
            `Z @ beta`: then the posterior has moments at these rows alone, all at once.
        estimator: how the log marginal likelihood is computed; one of `sgp.estimators`.
        key: a typed JAX key for an estimator that draws at random; by default the next key of the
            model's seed handler, so that each step of SVI has fresh probes. A constant key fixes
            them, as a line search needs.
        state: for an iterative estimator, the name of a NumPyro mutable site that the distribution
            makes, a `SolverState`. Each step's solves start from the last solutions (a warm start)
            and leave theirs there, with the residuals and epochs of each step for `sgp.to_arviz`;
            the probe vectors stay the same, unless the estimator has `fresh_probes=True`.
            `SVI.run`, `update` and `stable_update` keep it in `SVIState.mutable_state`, with arrays
            as its leaves, so that a saved state resumes; `handlers.substitute` puts it into a model
            or a call. Outside of a model without one, the distribution has a new state of its own,
            as its attribute `state`. It serves one computation: no `num_particles > 1`, and another
            name for each further site. Not for a batch.
        observed: which rows have a target, boolean, shape (n,) or (*batch, n); None for all. The
            others drop out of the density and the posterior, whatever y holds there, NaN included:
            gaps, or groups of unequal size, padded to that of the largest. `sample` draws all rows.
            A mask that is known while the model is traced spares their cost, or most of it.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has the wrong shape or sign, or holds NaN or infinity; if no row
            is observed; if the
            estimator has no use for a state, or a new state gets no key; under NUTS and the like,
            if the estimator's value leaves something out. There an estimator that draws at random
            warns: it is one frozen draw.

    References:
        Rasmussen and Williams (2006), section 2.2. Cost with `Cholesky`: O(n^3) time and O(n^2)
        memory for each member, nothing before `log_prob` or `sample` is called. Iterative
        estimators take the members in turn, in the memory of one.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> gp = sgp.GaussianProcess(sgp.kernels.RBF(0.3), X, noise_variance=0.1)
        >>> gp.log_prob(jnp.zeros(5)).shape, gp.condition(jnp.ones(5)).mean(X).shape
        ((), (5,))
        >>> def groups(X, y, observed):  # (G, n, d), (G, n), (G, n): hyperparameters for each group
        ...     with numpyro.plate("groups", len(X)):
        ...         variance = numpyro.sample("variance", numpyro.distributions.LogNormal())
        ...         kernel = sgp.kernels.RBF(0.3, variance)
        ...         gp = sgp.GaussianProcess(kernel, X, 0.1, observed=observed)
        ...         return numpyro.sample("y", gp, obs=y)
        >>> estimator = sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients())
        >>> def model(X, y, kernel):  # many data points: each step of SVI goes on from the last
        ...     gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator, state="solver")
        ...     return numpyro.sample("y", gp, obs=y)
    """

    arg_constraints = {"noise_variance": constraints.positive}
    reparametrized_params = ["noise_variance"]
    pytree_data_fields = (
        "kernel", "X", "noise_variance", "mean_function", "estimator", "key", "state", "observed",
    )  # fmt: skip

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "... n d"],
        noise_variance: Float[ArrayLike, "..."],
        *,
        mean: Callable[[Array], Array] | ArrayLike | None = None,
        estimator: AbstractEstimator | None = None,
        key: Array | None = None,
        state: str | None = None,
        observed: Bool[ArrayLike, "... n"] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = checks.instance("kernel", kernel, AbstractKernel)
        self.X = checks.inputs("X", X, may_be_batch=True)
        self.kernel.check_categories("X", self.X)
        n = self.X.shape[-2]
        self.noise_variance = checks.as_positive(noise_variance, "noise_variance")
        self.observed = None if observed is None else as_observed(observed, n)
        batch_shape = batch_shape_of(self.kernel, self.X, self.observed)
        check_noise(self.noise_variance, n, batch_shape)
        checks.positive("noise_variance", self.noise_variance)
        self.mean_function = as_mean_function(mean, batch_shape, self.X)
        self.estimator = Cholesky() if estimator is None else estimator
        checks.instance("estimator", self.estimator, AbstractEstimator)
        if is_key_frozen():
            self.estimator.check_frozen_key()
        if key is None and self.estimator.is_stochastic:
            # Outside of a model there is none, and NumPyro would warn.
            key = numpyro.prng_key() if numpyro.primitives._PYRO_STACK else None
        self.key = key if key is None else checks.as_key(key)
        super().__init__(batch_shape, (n,), validate_args=validate_args)
        self.state: SolverState | None = None
        if state is not None:
            self.state = self._state(state)

    def _state(self, name: str) -> SolverState:
        checks.instance("state", name, str, "the name of a mutable site, such as 'solver'")
        if self.batch_shape:
            raise ValueError(
                f"`state` is for one Gaussian process, got a batch of shape {self.batch_shape}: "
                "leave it out, or write a site with a state of its own for each member."
            )
        self.state = state = mutable(name, SolverState())
        # NumPyro collects the state before it first calls `log_prob`.
        self._shown()._each(lambda one: one.estimator.prepare(state, one.operator, self.key))
        return state

    def expand(self, batch_shape: Sequence[int]) -> Any:
        """Independent copies, as a plate makes them; see `RowsDistribution.expand`.

        Raises:
            ValueError: for any shape of a plate if the density is that of a mini-batch.
        """
        if tuple(batch_shape) != self.batch_shape and self.estimator.is_of_batch:
            raise ValueError(
                "the site of a `GaussianProcess` with a mini-batch of rows stands outside of the "
                "plate that drew them: its density is scaled to all rows by itself, and the plate "
                "would count it once for each row."
            )
        return super().expand(batch_shape)

    @property
    def mean(self) -> Float[Array, "... n"]:
        """The mean of the observations, m(X)."""
        return mean_at(self.mean_function, self.X, self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Float[Array, "... n"]:
        """The marginal variance of the observations, k(x, x) + noise."""
        variance = self.kernel.diag(self.X) + self.noise_variance
        return jnp.broadcast_to(variance, self.batch_shape + self.event_shape)

    @property
    def is_of_batch(self) -> bool:
        """See `CollapsedDistribution.is_of_batch`."""
        return self.estimator.is_of_batch

    @property
    def condition_options(self) -> frozenset[str]:
        """See `CollapsedDistribution.condition_options`."""
        return self.estimator.condition_options

    def log_prob(
        self, value: Float[ArrayLike, "... n"], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """The log marginal likelihood of observations.

        Args:
            value: observations, shape (..., n), of a batch (..., *batch, n); one factorization
                serves all of a member's.
            intermediates: unused, part of NumPyro's interface.

        Returns:
            Log densities, shape (...).

        Raises:
            ValueError: if `value` has the wrong length, or holds NaN or infinity where a row is
                observed, or the rows are those of a mini-batch that a plate takes.
        """
        self.check_all_rows()
        residual = self._residual(self._observations(value))
        shape = residual.shape[:-1]
        if self.batch_shape:
            residual = batches.samples_last(residual, self.batch_shape)

        def of_one(one: Member, residual: Array, key: Array | None) -> Array:
            arguments, options = (one.operator, residual), {"key": key, "state": self.state}
            found = checks.call_hook(
                one.estimator, "log_prob", residual.shape[:-1], *arguments, **options
            )
            return found - one.log_density_of_hidden()

        keys = batches.keys(self.key, self.batch_shape)
        if (observed := self._own_rows) is None:
            residuals = batches.Batch(residual, len(self.batch_shape))
            found = self._shown()._each(of_one, residuals, keys)
            return jnp.moveaxis(found, -1, 0).reshape(shape) if self.batch_shape else found
        groups = Alike.groups(observed)
        parts = []
        for group in groups:
            # Indices apart from each other come first.
            own = jnp.moveaxis(residual[group.members[:, None], :, group.rows], -1, 1)
            some = batches.Batch(own, 1), batches.take(keys, group.members)
            parts.append(self._members(group)._each(of_one, *some))
        order = np.argsort(np.concatenate([group.members for group in groups]))
        return jnp.concatenate(parts)[order].T.reshape(shape)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape n"]:
        """Draw observations from the prior, noise included.

        Args:
            key: a JAX key.
            sample_shape: shape of the draws.

        Returns:
            Draws, shape (*sample_shape, n), as the estimator makes them: exact ones in O(n^3) with
            `Cholesky`; with one that has `num_features`, by that many random features, in
            O(n num_features) a draw.
        """
        count, key = math.prod(sample_shape), checks.as_key(key)

        def of_one(one: Member, key: Array) -> Array:
            shape, arguments = (count, *self.event_shape), (one.operator, key, count)
            return checks.call_hook(one.estimator, "sample_prior", shape, *arguments)

        everything = self._with(self.X, self.noise_variance)
        draws = jnp.moveaxis(everything._each(of_one, batches.keys(key, self.batch_shape)), -2, 0)
        return self.mean + draws.reshape(*sample_shape, *self.batch_shape, *self.event_shape)

    def condition(
        self,
        y: Float[ArrayLike, "... n"],
        *,
        key: Array | None = None,
        num_samples: int | None = None,
        max_epochs: int | float | None = None,
        start: AbstractConditioned | None = None,
        progress_bar: bool = True,
    ) -> AbstractConditioned:
        """The posterior of f given observations.

        With an iterative estimator it is solved for, which may take minutes and can be gone on
        with: `start` is a posterior before, such as one that the budget ended or that
        `sgp.load` has read, for other observations or hyperparameters, or for the first rows of
        these data. With a `state`, the last posterior conditioned with it is the default.

        The posterior calls the mean function again at new inputs, and raises a ValueError if what
        that reads has changed. Only a kernel's class is not compared: let what it reads stay as it
        is, or condition again.

        Args:
            y: observations, shape (n,), or (*batch, n).
            key: a typed JAX key for an estimator that draws at random, by default the
                distribution's own. A `state` of an estimator without `fresh_probes` keeps its own.
            num_samples: posterior samples to store with an iterative estimator, by default its
                `num_probes`.
            max_epochs: budget of the solve with an iterative estimator, by default the solver's: a
                budget that suits a step of training may be too small for the final result.
            start: a `PathwisePosterior` at whose solution the solve with an iterative estimator
                starts, and whose samples are kept, unless `num_samples` is another number. Its
                inputs are the first rows of X, and new rows start at zero.
            progress_bar: whether a solve that takes longer than a few seconds shows its epochs,
                residual and time on the standard error; it never does where something is traced.

        Returns:
            With `Cholesky` and `SingleSampleRFF` an `ExactPosterior`, from one factorization in
            O(n^3); with `RandomFourier` a `FeaturePosterior`; of a batch a `BatchPosterior` of
            these. With an iterative estimator a
            `PathwisePosterior`: from the solution of `start` or the state, with no further solve,
            if that is the one for these hyperparameters, inputs, observations and samples, and
            within the solver's tolerance; otherwise from one batched solve, which starts there.

        Raises:
            ValueError: if `y` has the wrong length, or holds NaN or infinity, or an estimator that
                draws at random has neither a key nor a state nor a start; if X does not begin with
                the rows of `start`, or, where it has more rows, with those of the state.
            TypeError: if `start` is no `PathwisePosterior`, with an iterative estimator.
        """
        y = self._observations(y)
        shape = self.batch_shape + self.event_shape
        if (y - self.mean).shape != shape:
            raise ValueError(f"`y` must have shape {shape}, got {y.shape}.")
        checks.count_or_none("num_samples", num_samples)
        if max_epochs is not None:
            checks.number("max_epochs", max_epochs, "(0, inf]")
        checks.instance("progress_bar", progress_bar, bool, "True or False")
        given = {"num_samples": num_samples, "max_epochs": max_epochs, "start": start}
        names = [name for name, value in given.items() if value is not None]
        checks.used(names, self.condition_options, f"`{type(self.estimator).__name__}`")
        shown, key = self._shown(), self.key if key is None else checks.as_key(key)
        options: dict[str, Any] = {"num_samples": num_samples, "max_epochs": max_epochs}
        if not self.batch_shape and shown.observed is None:
            values, mean_function = self._of_shown(y), self.mean_function
            if is_of_rows(mean_function):  # also those of rows that are left out
                values = self._residual(y)
                mean_function = functions.constant_function(jnp.zeros((), values.dtype))
            found = self.estimator.condition(
                KernelOperator(shown.kernel, shown.X, shown.noise_variance),
                values,
                mean_function,
                key=key,
                state=self.state,
                start=start,
                progress_bar=progress_bar,
                **options,
            )
            if mean_function is self.mean_function:
                return found
            # Fields of all posteriors given observations.
            fields: dict[str, Any] = {"y": self._of_shown(y), "mean_function": self.mean_function}
            return dataclasses.replace(found, **fields)
        if start is not None:
            raise ValueError(
                "`start` is for one Gaussian process, and is left out for a batch, or where "
                "`observed` is traced."
            )

        def of_one(one: Member, residual: Array, key: Array | None) -> AbstractConditioned:
            zero = functions.constant_function(jnp.zeros((), residual.dtype))
            options.update(key=key, state=self.state, progress_bar=False)
            found = one.estimator.condition(one.operator, residual, zero, **options)
            return eqx.tree_at(lambda given: given.noise_variance, found, one.noise_variance)

        residual = batches.Batch(self._residual(y), len(self.batch_shape))
        return BatchPosterior(
            members=shown._each(of_one, residual, batches.keys(key, self.batch_shape)),
            X=shown.X,
            y=self._of_shown(y),
            noise_variance=shown.noise_variance,
            mean_function=self.mean_function,
            observed=None if shown.observed is None else jnp.asarray(shown.observed),
            batch_shape=self.batch_shape,
        )

    def _observations(self, value: ArrayLike) -> Float[Array, "... n"]:
        """Observations that were checked, zero where there is no target."""
        y = checks.as_float(value, "y")
        if self.observed is not None and y.shape[-1:] == self.event_shape:
            y = jnp.where(self.observed, y, jnp.zeros((), y.dtype))
        remedy = "" if self.observed is not None else MISSING
        return checks.observations(y, self.event_shape, "X", remedy)

    @property
    def shown_rows(self) -> Any:
        """The rows that have a target, where these, or their number, are known; None for all.

        Their number is known from a state that has them alone. Of a batch they must be the same.
        """
        if self.observed is None or self.observed.ndim > 1:
            return None
        if checks.is_concrete(self.observed):
            return np.flatnonzero(np.asarray(self.observed))
        num_rows = None if self.state is None else self.state.num_rows
        if num_rows in (None, self.X.shape[-2]):
            return None
        return jnp.flatnonzero(self.observed, size=num_rows)

    def _residual(self, y: Float[Array, "... n"]) -> Float[Array, "... shown"]:
        """Observations minus the mean, zero for hidden rows that stay."""
        residual = y - self.mean
        if self.observed is not None:
            residual = jnp.where(self.observed, residual, 0.0)
        return self._of_shown(residual)

    def _of_shown(self, values: Float[Array, "... n"]) -> Float[Array, "... shown"]:
        if (rows := self.shown_rows) is None:
            return values
        if self.observed is None or isinstance(rows, np.ndarray):
            return values[..., rows]
        # As many as a state has: others would be left out, or come twice.
        is_right = jnp.sum(self.observed) == rows.size
        return jnp.where(is_right, values[..., rows], jnp.nan)

    def _shown(self) -> "GaussianProcess":
        """This without the rows that have no target, as far as these are known."""
        if self.observed is not None and self.estimator.is_of_batch:
            raise ValueError(
                "`observed` and a mini-batch of rows do not go together: leave the rows without a "
                "target out of `X` and `y`."
            )
        if (rows := self.shown_rows) is None:
            return self
        noise = self.noise_variance
        noise = noise[..., rows] if noise.shape[-1:] == self.event_shape else noise
        with checks.known_values(self.X, rows):
            X = self.X[..., rows, :]
        return self._with(X, noise)

    @property
    def _own_rows(self) -> Bool[np.ndarray, "G n"] | None:
        """Which rows of each member are observed, where these are known and its own."""
        if self.observed is None or self.observed.ndim < 2 or len(self.batch_shape) > 1:
            return None
        if not checks.is_concrete(self.observed):
            return None
        return np.broadcast_to(np.asarray(self.observed), self.batch_shape + self.event_shape)

    def _members(self, group: Alike) -> "GaussianProcess":
        """Some members of a batch, with some of their rows."""
        (size,), n = self.batch_shape, self.X.shape[-2]
        pick = group.members[:, None], group.rows
        shown = np.broadcast_to(np.asarray(self.observed), (size, n))[pick]
        other = copy.copy(self)
        other.kernel = batches.take(self.kernel.as_batch(), group.members).tree
        other.X = jnp.broadcast_to(self.X, (size, *self.X.shape[-2:]))[pick]
        other.noise_variance = jnp.broadcast_to(self.noise_variance, (size, n))[pick]
        other.observed = None if shown.all() else shown
        other._batch_shape, other._event_shape = group.rows.shape[:1], group.rows.shape[1:]
        return other

    def _with(
        self, X: Float[Array, "... m d"], noise_variance: Float[Array, "..."]
    ) -> "GaussianProcess":
        """This at other rows, all of which have a target."""
        other = copy.copy(self)
        other.X, other.noise_variance, other.observed = X, noise_variance, None
        other._event_shape = X.shape[-2:-1]
        return other

    def _each(self, function: Callable[..., Any], *others: batches.Batch) -> Any:
        """What a function gives for each member, and a part of the others."""
        observed = None if self.observed is None else jnp.asarray(self.observed)
        parts = (
            self.kernel.as_batch(),
            batches.Batch(self.X, self.X.ndim - 2),
            batches.Batch(self.noise_variance, max(0, self.noise_variance.ndim - 1)),
            batches.Batch(observed, 0 if observed is None else observed.ndim - 1),
        )

        def of_one(kernel: Any, X: Array, noise: Array, observed: Any, *others: Any) -> Any:
            noise = noise.reshape(()) if noise.shape == (1,) else noise
            return function(Member.of(kernel, X, noise, self.estimator, observed), *others)

        return batches.each(of_one, *parts, *others, in_turn=self.estimator.takes_turns)
