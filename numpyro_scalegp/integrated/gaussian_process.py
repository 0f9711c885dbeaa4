"""`GaussianProcess`: a distribution over observations, with the function integrated out."""

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, ArrayLike, Bool, Float
from numpyro.distributions import constraints

from numpyro_scalegp.core import batches, checks, summary
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.integrated.cholesky import Cholesky
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.integrated.frozen import is_key_frozen
from numpyro_scalegp.integrated.iterative.solver_state import SolverState
from numpyro_scalegp.integrated.members import (
    MISSING,
    Member,
    SimilarSizeGroup,
    as_mean_function,
    as_observed,
    batch_shape_of,
    check_noise,
    mean_at,
)
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.processes.batch import BatchPosterior
from numpyro_scalegp.processes.posterior import AbstractConditioned
from numpyro_scalegp.programs import functions
from numpyro_scalegp.programs.functions import is_of_rows
from numpyro_scalegp.sites.collapsed import GaussianNoise
from numpyro_scalegp.sites.mutable_state import state_site
from numpyro_scalegp.sites.rows import RowsDistribution


class GaussianProcess(GaussianNoise, RowsDistribution):
    """Noisy observations of a Gaussian process, y ~ N(m(X), K(X, X) + noise).

    `log_prob(y)` is the log marginal likelihood. The default estimator computes it exactly; others
    estimate it and its gradient, for data too large for a Cholesky factorization.

    A batch of kernels, of input matrices or of masks makes it a batch of independent Gaussian
    processes: one for each group of a plate, with separate data and hyperparameters.

    Args:
        kernel: covariance function, or a batch of them.
        X: inputs, shape (n, d), or (*batch, n, d) if each member of the batch has different inputs.
        noise_variance: variance of the observation noise, positive, in squared units of y; shape ()
            or, one per observation, (n,); for a batch also (*batch, 1) or (*batch, n).
        mean: the mean function: None for zero, a constant of shape () or (*batch,), or a callable
            that maps (n, d) inputs to (n,) values, and the X of a batch to (*batch, n). Or an array
            of its values at X, shape (n,) or (*batch, n), such as `Z @ beta`; the posterior then
            has moments only at the complete X.
        estimator: how the log marginal likelihood is computed; one of `sgp.estimators`.
        key: a typed JAX key for an estimator that draws at random; by default the next key of the
            model's seed handler, so that each step of SVI has fresh probe vectors. A constant key
            fixes the probe vectors, as a line search requires.
        state: for an iterative estimator, the name of a NumPyro mutable site, which the
            distribution creates and which holds a `SolverState`. Each step's solves start from the
            previous step's solutions (a warm start). The state also records the residuals and
            epochs of each step, for `sgp.to_arviz`. The probe vectors stay the same unless the
            estimator has `fresh_probes=True`. `SVI.run`, `update` and `stable_update` keep the
            state in `SVIState.mutable_state`; its leaves are arrays, so training resumes from a
            saved state. Elsewhere, pass the state in by `handlers.substitute`; outside of a model,
            a distribution without a substituted state creates one, in its attribute `state`. Give
            each site a state with a different name, and use `num_particles=1`. Not available for a
            batch.
        observed: boolean mask of the observed rows, shape (n,) or (*batch, n); None if all are
            observed. The density and the posterior ignore the values of y in the other rows, which
            may be NaN. Use it for gaps, or for groups of unequal size, padded to the size of the
            largest. `sample` draws all rows. If the mask is concrete while the model is traced,
            unobserved rows cost little or nothing.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has the wrong shape or sign, or holds NaN or infinity; if no row
            is observed; if `state` is given for an estimator that is not iterative, or a new state
            without a key; if the estimator omits terms of the log density (`num_logdet_probes=0`)
            and the model runs under NUTS, another sampler that uses a potential energy, or a line
            search. There, an estimator that draws at random warns, since all evaluations use the
            same draw.

    References:
        Rasmussen and Williams (2006), section 2.2. Cost with `Cholesky`: O(n^3) time and O(n^2)
        memory for each member, at each call of `log_prob`, `sample` or `condition`. Iterative
        estimators process the members one after the other, in the memory of one.

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
        >>> def model(X, y, kernel):  # many observations: each step of SVI starts from the last
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
        self.kernel.check_inputs("X", self.X)
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
            # Outside of a model there is no key, and NumPyro would warn.
            key = numpyro.prng_key() if numpyro.primitives._PYRO_STACK else None
        self.key = key if key is None else checks.as_key(key)
        super().__init__(batch_shape, (n,), validate_args=validate_args)
        self.state: SolverState | None = None
        if state is not None:
            self.state = self._initialized_state(state)

    def _initialized_state(self, name: str) -> SolverState:
        checks.instance("state", name, str, "the name of a mutable site, such as 'solver'")
        if self.batch_shape:
            raise ValueError(
                f"`state` is for one Gaussian process, got a batch of shape {self.batch_shape}: "
                "leave it out, or write a separate site, with its own state, for each member."
            )
        self.state = state = state_site(name, SolverState())
        # NumPyro collects the state before it first calls `log_prob`.
        self._shown()._each(
            lambda member: member.estimator.prepare(state, member.operator, self.key)
        )
        return state

    def expand(self, batch_shape: Sequence[int]) -> Any:
        """Independent copies, one for each index of a plate.

        Raises:
            ValueError: if the density is estimated from a mini-batch and the shape is not
                `batch_shape`.
        """
        if tuple(batch_shape) != self.batch_shape and self.estimator.is_of_batch:
            raise ValueError(
                "the site of a `GaussianProcess` with a mini-batch of rows must stand outside of "
                "the plate that drew them: its density is already scaled to all rows, and the "
                "plate would count it once for each row."
            )
        return super().expand(batch_shape)

    @property
    def mean(self) -> Float[Array, "... n"]:
        """The mean of the observations, m(X)."""
        return mean_at(self.mean_function, self.X, self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Float[Array, "... n"]:
        """The marginal variance of the observations, k(x, x) + noise."""
        variance = self.kernel.each(lambda kernel, X: kernel.evaluate_diag(X), self.X)
        return jnp.broadcast_to(variance + self.noise_variance, self.batch_shape + self.event_shape)

    @property
    def is_of_batch(self) -> bool:
        """Whether the density is estimated from a mini-batch and scaled to all observations."""
        return self.estimator.is_of_batch

    @property
    def condition_options(self) -> frozenset[str]:
        """The options of `condition` that the estimator uses, besides `progress_bar`."""
        return self.estimator.condition_options

    def _summary(self) -> list[str]:
        parts = [f"noise_variance={summary.shown(self.noise_variance)}", repr(self.estimator)]
        return [*super()._summary(), *parts]

    def log_prob(
        self, value: Float[ArrayLike, "... n"], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """The log marginal likelihood of observations.

        Args:
            value: observations, shape (..., n), or (..., *batch, n) for a batch; all observation
                vectors of a member share one factorization.
            intermediates: unused, part of NumPyro's interface.

        Returns:
            Log densities, shape (...).

        Raises:
            ValueError: if `value` has the wrong length, or holds NaN or infinity in an observed
                row, or X is a mini-batch that a plate draws.
        """
        self.check_all_rows()
        residual = self._residual(self._observations(value))
        shape = residual.shape[:-1]
        if self.batch_shape:
            residual = batches.samples_last(residual, self.batch_shape)

        def member_log_prob(member: Member, residual: Array, key: Array | None) -> Array:
            arguments, options = (member.operator, residual), {"key": key, "state": self.state}
            density = checks.call_hook(
                member.estimator, "log_prob", residual.shape[:-1], *arguments, **options
            )
            return density - member.log_density_of_hidden()

        keys = batches.keys(self.key, self.batch_shape)
        if (observed := self._concrete_masks) is None:
            residuals = batches.Batch(residual, len(self.batch_shape))
            densities = self._shown()._each(member_log_prob, residuals, keys)
            if not self.batch_shape:
                return densities
            return jnp.moveaxis(densities, -1, 0).reshape(shape)
        groups = SimilarSizeGroup.of_masks(observed)
        group_densities = []
        for group in groups:
            # A slice between two index arrays puts their axes first.
            group_residual = jnp.moveaxis(residual[group.members[:, None], :, group.rows], -1, 1)
            arguments = batches.Batch(group_residual, 1), batches.take(keys, group.members)
            group_densities.append(self._members(group)._each(member_log_prob, *arguments))
        order = np.argsort(np.concatenate([group.members for group in groups]))
        return jnp.concatenate(group_densities)[order].T.reshape(shape)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape n"]:
        """Draw observations from the prior, noise included.

        Args:
            key: a JAX key.
            sample_shape: shape of the draws.

        Returns:
            Draws, shape (*sample_shape, n). `Cholesky` draws exactly, in O(n^3); an estimator with
            `num_features` approximates draws with that many random features, in O(n num_features)
            per draw.
        """
        count, key = math.prod(sample_shape), checks.as_key(key)

        def member_draws(member: Member, key: Array) -> Array:
            shape, arguments = (count, *self.event_shape), (member.operator, key, count)
            return checks.call_hook(member.estimator, "sample_prior", shape, *arguments)

        all_rows = self._with(self.X, self.noise_variance)
        draws = all_rows._each(member_draws, batches.keys(key, self.batch_shape))
        draws = jnp.moveaxis(draws, -2, 0)
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

        An iterative estimator solves for the posterior, which may take minutes. It can resume from
        an earlier posterior `start`: one whose solve reached its budget, one read by `sgp.load`, or
        one for other observations or hyperparameters, or for only the first rows of X. With a
        `state`, the default is the last posterior computed with that state.

        The posterior calls the mean function again at new inputs, and raises a ValueError if a
        variable that the mean function closes over has changed. Variables that a custom kernel
        class closes over are not checked: leave them unchanged, or condition again.

        Args:
            y: observations, shape (n,), or (*batch, n).
            key: a typed JAX key for an estimator that draws at random, by default the key of this
                distribution. A `state` uses its own key, unless the estimator has `fresh_probes`.
            num_samples: posterior samples to store with an iterative estimator, by default its
                `num_probes`.
            max_epochs: budget of the solve with an iterative estimator, by default the solver's
                budget, which may be enough for a training step but too small for the final result.
            start: a `PathwisePosterior`. The solve of an iterative estimator starts from its
                solution, and uses its samples again unless `num_samples` differs. Its inputs must
                be the first rows of X; new rows start at zero.
            progress_bar: whether a solve that takes longer than a few seconds shows its epochs,
                residual and time on stderr; never while a program is traced.

        Returns:
            With `Cholesky` and `SingleSampleRFF` an `ExactPosterior`, from one factorization in
            O(n^3); with `RandomFourier` a `FeaturePosterior`; with an iterative estimator a
            `PathwisePosterior`; for a batch a `BatchPosterior` of these. A `PathwisePosterior`
            needs no further solve if the solution of `start` or the state is for the same
            hyperparameters, inputs, observations and samples, and within the solver's tolerance;
            otherwise one batched solve starts from that solution.

        Raises:
            ValueError: if `y` has the wrong length, or holds NaN or infinity; if an estimator that
                draws at random has no key, state or start; if the first rows of X are not the rows
                of `start`, or, if X has more rows than the state, the rows of the state.
            TypeError: with an iterative estimator, if `start` is not a `PathwisePosterior`.
        """
        y = self._observations(y)
        shape = self.batch_shape + self.event_shape
        if (y - self.mean).shape != shape:
            raise ValueError(f"`y` must have shape {shape}, got {y.shape}.")
        checks.count_or_none("num_samples", num_samples)
        if max_epochs is not None:
            checks.number("max_epochs", max_epochs, "(0, inf]")
        checks.instance("progress_bar", progress_bar, bool, "True or False")
        options: dict[str, Any] = {"num_samples": num_samples, "max_epochs": max_epochs}
        names = [name for name, value in {**options, "start": start}.items() if value is not None]
        checks.used(names, self.condition_options, f"`{type(self.estimator).__name__}`")
        shown, key = self._shown(), self.key if key is None else checks.as_key(key)
        if not self.batch_shape and shown.observed is None:
            values, mean_function = self._of_shown(y), self.mean_function
            if is_of_rows(mean_function):  # has values of the rows without a target, too
                values = self._residual(y)
                mean_function = functions.constant_function(jnp.zeros((), values.dtype))
            posterior = self.estimator.condition(
                KernelOperator.from_checked(shown.kernel, shown.X, shown.noise_variance),
                values,
                mean_function,
                key=key,
                state=self.state,
                start=start,
                progress_bar=progress_bar,
                **options,
            )
            if mean_function is self.mean_function:
                return posterior
            fields: dict[str, Any] = {"y": self._of_shown(y), "mean_function": self.mean_function}
            return dataclasses.replace(posterior, **fields)
        if start is not None:
            raise ValueError(
                "`start` is for a single Gaussian process whose `observed` is not traced: leave "
                "it out here."
            )

        def condition_member(member: Member, residual: Array, key: Array | None) -> Any:
            zero = functions.constant_function(jnp.zeros((), residual.dtype))
            options.update(key=key, state=self.state, progress_bar=False)
            posterior = member.estimator.condition(member.operator, residual, zero, **options)
            return eqx.tree_at(lambda tree: tree.noise_variance, posterior, member.noise_variance)

        residual = batches.Batch(self._residual(y), len(self.batch_shape))
        return BatchPosterior(
            members=shown._each(condition_member, residual, batches.keys(key, self.batch_shape)),
            X=shown.X,
            y=self._of_shown(y),
            noise_variance=shown.noise_variance,
            mean_function=self.mean_function,
            observed=None if shown.observed is None else jnp.asarray(shown.observed),
            batch_shape=self.batch_shape,
        )

    def _observations(self, value: ArrayLike) -> Float[Array, "... n"]:
        """Checked observations, zero in rows without a target."""
        y = checks.as_float(value, "y")
        if self.observed is not None and y.shape[-1:] == self.event_shape:
            y = jnp.where(self.observed, y, jnp.zeros((), y.dtype))
        remedy = "" if self.observed is not None else MISSING
        return checks.observations(y, self.event_shape, "X", remedy)

    @property
    def shown_rows(self) -> Any:
        """Indices of the observed rows; None if all are observed, or if the indices are unknown.

        They are known if the mask is concrete or a state stores the number of observed rows, and,
        for a batch, if its members share one mask.
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
        """Observations minus the mean at `shown_rows`, zero in rows without a target."""
        residual = y - self.mean
        if self.observed is not None:
            residual = jnp.where(self.observed, residual, 0.0)
        return self._of_shown(residual)

    def _of_shown(self, values: Float[Array, "... n"]) -> Float[Array, "... shown"]:
        if (rows := self.shown_rows) is None:
            return values
        if self.observed is None or isinstance(rows, np.ndarray):
            return values[..., rows]
        # With another number than the state's, rows would be missing or repeated.
        is_number_of_state = jnp.sum(self.observed) == rows.size
        call_where(~is_number_of_state, _warn_of_other_rows)
        return jnp.where(is_number_of_state, values[..., rows], jnp.nan)

    def _shown(self) -> "GaussianProcess":
        """This distribution at `shown_rows` only, where possible without the other rows."""
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
    def _concrete_masks(self) -> Bool[np.ndarray, "G n"] | None:
        """The mask of each member of a batch with one axis; None if shared or traced."""
        if self.observed is None or self.observed.ndim < 2 or len(self.batch_shape) > 1:
            return None
        if not checks.is_concrete(self.observed):
            return None
        return np.broadcast_to(np.asarray(self.observed), self.batch_shape + self.event_shape)

    def _members(self, group: SimilarSizeGroup) -> "GaussianProcess":
        """The members of a group, at the rows of that group."""
        (size,), n = self.batch_shape, self.X.shape[-2]
        index = group.members[:, None], group.rows
        observed = np.broadcast_to(np.asarray(self.observed), (size, n))[index]
        gp = copy.copy(self)
        gp.kernel = batches.take(self.kernel.as_batch(), group.members).tree
        gp.X = jnp.broadcast_to(self.X, (size, *self.X.shape[-2:]))[index]
        gp.noise_variance = jnp.broadcast_to(self.noise_variance, (size, n))[index]
        gp.observed = None if observed.all() else observed
        gp._batch_shape, gp._event_shape = group.rows.shape[:1], group.rows.shape[1:]
        return gp

    def _with(
        self, X: Float[Array, "... m d"], noise_variance: Float[Array, "..."]
    ) -> "GaussianProcess":
        """This distribution at other inputs, all of which have a target."""
        gp = copy.copy(self)
        gp.X, gp.noise_variance, gp.observed = X, noise_variance, None
        gp._event_shape = X.shape[-2:-1]
        return gp

    def _each(self, function: Callable[..., Any], *arguments: batches.Batch) -> Any:
        """Apply `function` to each `Member` and its entry of each further batch."""
        observed = None if self.observed is None else jnp.asarray(self.observed)
        fields = (
            self.kernel.as_batch(),
            batches.Batch(self.X, self.X.ndim - 2),
            batches.Batch(self.noise_variance, max(0, self.noise_variance.ndim - 1)),
            batches.Batch(observed, 0 if observed is None else observed.ndim - 1),
        )

        def apply(kernel: Any, X: Array, noise: Array, observed: Any, *arguments: Any) -> Any:
            noise = noise.reshape(()) if noise.shape == (1,) else noise
            return function(Member.of(kernel, X, noise, self.estimator, observed), *arguments)

        return batches.each(apply, *fields, *arguments, sequential=self.estimator.takes_turns)


def _warn_of_other_rows() -> None:
    warnings.warn(
        "a `state` is for another number of observed rows than `observed` has, so the density is "
        "NaN. If observations are added to padded data, initialize within `jax.jit`: "
        "jax.jit(svi.init)(key, X, y, observed).",
        RuntimeWarning,
        stacklevel=1,
    )
