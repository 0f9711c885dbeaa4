"""`GridGP`: a distribution over an array of observations, on the product of several axes."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, ArrayLike, Bool, Float, Int
from numpyro.distributions import constraints

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.cholesky import Cholesky
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.integrated.frozen import is_key_frozen
from numpyro_scalegp.integrated.gaussian_process import GaussianProcess
from numpyro_scalegp.integrated.grid import kronecker
from numpyro_scalegp.integrated.grid.axes import (
    Axes,
    as_axes,
    as_terms,
    kernel_of,
    rows_of,
    shape_of,
    terms_of,
    widths_of,
)
from numpyro_scalegp.integrated.grid.iterative import IterativeGridPosterior, grid_operator
from numpyro_scalegp.integrated.grid.posterior import (
    AbstractGridPosterior,
    GridPosterior,
    GridRowsPosterior,
    SpaceTimePosterior,
)
from numpyro_scalegp.integrated.grid.space_time import SpaceTime, time_axis
from numpyro_scalegp.integrated.iterative.iterative import AbstractIterative
from numpyro_scalegp.integrated.members import MISSING, Member, as_boolean, as_mean_function
from numpyro_scalegp.integrated.state_space.state_space import StateSpace
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics import linalg, rounding
from numpyro_scalegp.numerics.axes import along_all
from numpyro_scalegp.programs import functions
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.collapsed import GaussianNoise
from numpyro_scalegp.sites.mini_batches import mini_batch_of
from numpyro_scalegp.sites.rows import RowsDistribution


class GridGP(GaussianNoise, RowsDistribution):
    """Noisy observations of a function at all combinations of the inputs of several axes.

    For an array Y whose axes are, say, times and places, or cells of longitude and latitude. The
    covariance of two cells is a product of a kernel for each axis, k_1 k_2 ... k_d, or a sum of
    such products, plus the noise.

    `log_prob(Y)` is the log marginal likelihood, exactly, by one of these:

    - for a complete grid, one product and noise that varies along at most one axis, by the
      eigenvectors of each axis, in O(n sum_j n_j + sum_j n_j^3) for n cells;
    - with `estimator=sgp.estimators.StateSpace()`, for an axis of times whose kernel has a
      state-space form, by a Kalman filter over the times: with cells missing, any noise and sums of
      products, in O(n_t (s p)^3) for p places and s state variables;
    - otherwise by the estimator, for the observed cells as rows of a `GaussianProcess`: the default
      is the exact one, in O(n^3).

    `estimator=sgp.estimators.Pathwise()`, or `Hutchinson`, estimates it with its gradient for
    millions of cells, missing ones included: a product with the covariance matrix costs
    O(n sum_j n_j).

    Args:
        kernels: a kernel for each axis, such as `[Matern32(5.0), RBF(0.3)]`, or a sequence of such
            sequences, whose products are added up.
        inputs: the inputs of each axis, shapes (n_j, d_j).
        noise_variance: variance of the observation noise, positive, in squared units of Y; of any
            shape that broadcasts with Y, such as (), (n_1, 1) or (n_1, n_2).
        mean: the mean function: None for zero, a constant, or a callable that maps rows, the
            columns of all axes side by side, shape (m, d), to (m,) values. Or an array of its
            values on the grid; the posterior then has moments only on the complete grid.
        observed: boolean mask of the observed cells, of the shape of Y; None if all are observed.
            The density and the posterior ignore the values of Y in the other cells, which may be
            NaN. `sample` draws all cells.
        estimator: one of `sgp.estimators`; see above.
        key: a typed JAX key for an estimator that draws at random; see `GaussianProcess`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has the wrong shape or sign, or holds NaN or infinity; if a
            kernel is a batch; if no cell is observed; with `StateSpace`, if no axis has kernels
            with state-space forms.

    References:
        Saatci (2011), Scalable Inference for Structured Gaussian Process Models, chapter 5; Sarkka,
        Solin and Hartikainen (2013), Spatiotemporal Learning via Infinite-Dimensional Bayesian
        Filtering and Smoothing.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> times, places = jnp.arange(6.0)[:, None], jnp.array([[0.0, 0.0], [0.3, 0.1]])
        >>> kernels = [sgp.kernels.Matern32(2.0), sgp.kernels.RBF(0.5)]
        >>> gp = sgp.GridGP(kernels, [times, places], noise_variance=0.1)
        >>> posterior = gp.condition(jnp.ones((6, 2)))
        >>> posterior.mean([jnp.array([[6.5]]), places]).shape  # a grid of one time
        (1, 2)
        >>> posterior.mean(jnp.array([[6.5, 0.3, 0.1]])).shape  # rows: time, then place
        (1,)
    """

    kernel: AbstractKernel  # of rows, the columns of all axes side by side
    inputs: Axes
    X: Float[Array, "n d"]  # of all cells
    arg_constraints = {"noise_variance": constraints.positive}
    reparametrized_params = ["noise_variance"]
    pytree_data_fields = (
        "kernel", "inputs", "X", "noise_variance", "mean_function", "observed", "estimator", "key",
    )  # fmt: skip

    def __init__(
        self,
        kernels: Sequence[AbstractKernel] | Sequence[Sequence[AbstractKernel]],
        inputs: Sequence[ArrayLike],
        noise_variance: Float[ArrayLike, "..."],
        *,
        mean: Callable[[Array], Array] | ArrayLike | None = None,
        observed: Bool[ArrayLike, "..."] | None = None,
        estimator: AbstractEstimator | None = None,
        key: Array | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.inputs = as_axes("inputs", inputs)
        with checks.known_values(self.inputs):
            self.X = rows_of(self.inputs)
        shape, widths = shape_of(self.inputs), widths_of(self.inputs)
        self.kernel = kernel_of(as_terms(kernels, self.inputs), widths)
        self.noise_variance = _as_noise(noise_variance, shape)
        self.mean_function = self._as_mean_function(mean)
        self.observed = None if observed is None else _as_observed(observed, shape)
        self.estimator = Cholesky() if estimator is None else estimator
        checks.instance("estimator", self.estimator, AbstractEstimator)
        if self.estimator.is_of_batch:
            raise ValueError("a grid has no mini-batches of rows: take another estimator.")
        if isinstance(self.estimator, StateSpace):
            self._time_axis  # noqa: B018  raises
        if is_key_frozen():
            self.estimator.check_frozen_key()
        if key is None and self.estimator.is_stochastic:
            key = numpyro.prng_key() if numpyro.primitives._PYRO_STACK else None
        self.key = key if key is None else checks.as_key(key)
        super().__init__((), shape, validate_args=validate_args)
        of_axes = map(mini_batch_of, self.inputs)
        self.mini_batch = next((batch for batch in of_axes if batch is not None), None)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """All real arrays."""
        return constraints.independent(constraints.real, len(self.inputs))

    def _as_mean_function(self, mean: Any) -> Any:
        if mean is not None and not callable(mean):
            values, shape = checks.as_float(mean, "mean"), shape_of(self.inputs)
            if values.ndim:
                checks.shape(
                    "mean", values, shape, why="a number, one for each cell, or a callable"
                )
                mean = values.ravel()
        return as_mean_function(mean, (), self.X)

    @property
    def condition_options(self) -> frozenset[str]:
        """The options of `condition` that the estimator uses, besides `progress_bar`."""
        options = {"num_samples", "max_epochs"} if self._is_iterative else set()
        return frozenset(options | {"key"} if self.estimator.is_stochastic else options)

    @property
    def _is_iterative(self) -> bool:
        return isinstance(self.estimator, AbstractIterative)

    @property
    def posterior_inputs(self) -> Axes:
        """The inputs of each axis."""
        return self.inputs

    @property
    def mean(self) -> Float[Array, "*shape"]:
        """The mean of the observations."""
        mean = self.mean_function(self.X)
        if jnp.shape(mean) != (self.X.shape[0],):
            raise ValueError(
                f"`mean` must map inputs of shape {self.X.shape} to shape ({self.X.shape[0]},), "
                f"got {jnp.shape(mean)}."
            )
        return mean.reshape(self.event_shape)

    @property
    def variance(self) -> Float[Array, "*shape"]:
        """The marginal variance of the observations, with the noise."""
        return self.kernel.evaluate_diag(self.X).reshape(self.event_shape) + self.noise_variance

    @property
    def _time_axis(self) -> int:
        estimator: Any = self.estimator
        return time_axis(self.kernel, self.inputs, estimator.num_harmonics)

    @property
    def _noise_axis(self) -> int | None:
        """The axis along which the noise varies, the first if none; None if several."""
        if not self.noise_variance.ndim:
            return 0
        varying = [j for j, size in enumerate(self.noise_variance.shape) if size > 1]
        return varying[0] if len(varying) == 1 else None

    @property
    def _has_eigenvectors(self) -> bool:
        """Whether the density is computed from the eigenvectors of each axis."""
        estimator: Any = self.estimator
        is_exact = isinstance(estimator, Cholesky) and estimator.jitter is None
        is_complete = self.observed is None
        if self.observed is not None and checks.is_concrete(self.observed):
            is_complete = bool(np.asarray(self.observed).all())
        has_one_product = len(terms_of(self.kernel, len(self.inputs))) == 1
        return is_exact and is_complete and has_one_product and self._noise_axis is not None

    def _noise_along_axis(self) -> Float[Array, " n_a"]:
        axis = self._noise_axis
        assert axis is not None
        return jnp.broadcast_to(self.noise_variance.ravel(), (self.event_shape[axis],))

    def _space_time(self) -> SpaceTime:
        estimator: Any = self.estimator
        observed = None if self.observed is None else jnp.asarray(self.observed)
        first_cell = [X[:1] for X in self.inputs]
        variance = jax.eval_shape(lambda: self.kernel.evaluate_diag(rows_of(tuple(first_cell))))
        options = self._time_axis, estimator.num_harmonics
        dtype = jnp.result_type(variance, self.noise_variance).name
        return SpaceTime(self.kernel, self.inputs, self.noise_variance, observed, *options, dtype)

    def _as_rows(self) -> GaussianProcess:
        noise = self.noise_variance
        if noise.ndim:
            noise = jnp.broadcast_to(noise, self.event_shape).ravel()
        observed = None if self.observed is None else self.observed.ravel()
        return GaussianProcess(
            self.kernel,
            self.X,
            noise,
            estimator=self.estimator,
            key=self.key,
            observed=observed,
        )

    def log_prob(
        self, value: Float[ArrayLike, "..."], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """The log marginal likelihood of observations.

        Args:
            value: observations, shape (..., n_1, ..., n_d).
            intermediates: unused, part of NumPyro's interface.

        Returns:
            Log densities, shape (...), with first and second derivatives; with `StateSpace`
            derivatives of every order.

        Raises:
            ValueError: if `value` has the wrong shape, or holds NaN or infinity in an observed
                cell, or an axis is a mini-batch that a plate draws.
        """
        self.check_all_rows()
        Y = self._observations(value)
        batch = Y.shape[: Y.ndim - len(self.event_shape)]
        if self._has_eigenvectors:
            residual, noise = Y - self.mean, self._noise_along_axis()
            (factors,) = terms_of(self.kernel, len(self.inputs))
            return _by_eigenvectors(factors, self.inputs, noise, residual, self._noise_axis)
        if isinstance(self.estimator, StateSpace):
            residual = self._residual(Y).reshape(-1, *self.event_shape)
            return _by_filter(self._space_time(), residual).reshape(batch)
        residual = self._residual(Y).reshape(*batch, -1)
        if self._is_iterative:
            member, cells = self._solved_rows()
            values = residual if cells is None else residual[..., cells]
            density = self.estimator.log_prob(member.operator, values, key=self.key)
            return density - member.log_density_of_hidden()
        return self._as_rows().log_prob(residual)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape_and_shape"]:
        """Draw observations from the prior, noise included.

        Args:
            key: a JAX key.
            sample_shape: shape of the draws.

        Returns:
            Draws, shape (*sample_shape, n_1, ..., n_d), in O(n sum_j n_j) for each draw and term.
        """
        key, noise_key = jax.random.split(checks.as_key(key))
        f, shape = _draw(self.kernel, self.inputs, key, sample_shape), self.event_shape
        noise = jax.random.normal(noise_key, (*sample_shape, *shape), f.dtype)
        return self.mean + f + jnp.sqrt(self.noise_variance) * noise

    def condition(
        self,
        Y: Float[ArrayLike, "..."],
        *,
        key: Array | None = None,
        num_samples: int | None = None,
        max_epochs: int | float | None = None,
        progress_bar: bool = True,
    ) -> AbstractGridPosterior:
        """The posterior of the function given observations.

        Args:
            Y: observations, shape (n_1, ..., n_d).
            key: for an estimator that draws at random; by default the distribution's.
            num_samples: number of samples that an iterative estimator stores.
            max_epochs: budget of its solve, in products with the covariance matrix.
            progress_bar: whether the solve may show its progress.

        Returns:
            A `GridPosterior`; with `StateSpace` a `SpaceTimePosterior`, with `Pathwise` or
            `Hutchinson` an `IterativeGridPosterior`, and otherwise a `GridRowsPosterior`.

        Raises:
            ValueError: if `Y` has the wrong shape, or holds NaN or infinity in an observed cell; if
                the estimator does not use an option.
        """
        Y = self._observations(Y)
        checks.shape("Y", Y, self.event_shape, why="a value for each cell")
        checks.count_or_none("num_samples", num_samples)
        if max_epochs is not None:
            checks.number("max_epochs", max_epochs, "(0, inf]")
        options: dict[str, Any] = {"num_samples": num_samples, "max_epochs": max_epochs}
        names = [name for name, value in options.items() if value is not None]
        checks.used(names, self.condition_options, f"`{type(self.estimator).__name__}`")
        key = self.key if key is None else checks.as_key(key)
        fields: dict[str, Any] = {
            "kernel": self.kernel,
            "inputs": self.inputs,
            "y": Y,
            "noise_variance": self.noise_variance,
            "mean_function": self.mean_function,
        }
        if self._has_eigenvectors:
            (factors,) = terms_of(self.kernel, len(self.inputs))
            noise, axis, residual = self._noise_along_axis(), self._noise_axis, Y - self.mean
            rotation, weights = _solution(factors, self.inputs, noise, residual, axis)
            return GridPosterior(**fields, residual=residual, weights=weights, rotation=rotation)
        if isinstance(self.estimator, StateSpace):
            space_time = self._space_time()
            _check(space_time)
            return SpaceTimePosterior(**fields, residual=self._residual(Y), process=space_time)
        observed = None if self.observed is None else jnp.asarray(self.observed)
        if self._is_iterative:
            member, cells = self._solved_rows()
            residual = self._residual(Y).ravel()
            zero = functions.constant_function(jnp.zeros((), residual.dtype))
            values = residual if cells is None else residual[cells]
            solved = self.estimator.condition(
                member.operator, values, zero, key=key, progress_bar=progress_bar, **options
            )
            fields.update(process=solved, observed=observed, cells=cells)
            return IterativeGridPosterior(**fields)
        gp = self._as_rows()
        rows: Any = gp.shown_rows
        fields.update(observed=observed, cells=None if rows is None else jnp.asarray(rows))
        process = gp.condition(self._residual(Y).ravel(), key=key, progress_bar=progress_bar)
        return GridRowsPosterior(**fields, process=process)

    def _solved_rows(self) -> tuple[Member, Int[Array, " n"] | None]:
        """The process at the cells that an iterative estimator solves for, and these cells."""
        noise, observed = self.noise_variance, self.observed
        if noise.ndim:
            noise = jnp.broadcast_to(noise, self.event_shape).ravel()
        X, cells = self.X, None
        if observed is not None and checks.is_concrete(observed):
            index = np.flatnonzero(np.asarray(observed))
            noise = noise[index] if noise.ndim else noise
            X, cells, observed = X[index], jnp.asarray(index), None
        mask = None if observed is None else jnp.asarray(observed).ravel()
        member = Member.of(self.kernel, X, noise, self.estimator, mask)
        of_rows = member.operator.X, member.operator.noise_variance
        operator = grid_operator(self.kernel, self.inputs, *of_rows, cells, mask)
        return member._replace(operator=operator), cells

    def _residual(self, Y: Float[Array, "..."]) -> Float[Array, "..."]:
        """Observations less the mean, zero in cells without a target."""
        residual = Y - self.mean
        return residual if self.observed is None else jnp.where(self.observed, residual, 0.0)

    def _observations(self, value: ArrayLike) -> Float[Array, "..."]:
        """Checked observations, zero in cells without a target."""
        Y, shape = checks.as_float(value, "Y"), self.event_shape
        if Y.ndim < len(shape) or Y.shape[Y.ndim - len(shape) :] != shape:
            raise ValueError(
                f"`Y` must have shape {shape}, got {Y.shape}: an axis for each array of `inputs`."
            )
        if self.observed is not None:
            Y = jnp.where(self.observed, Y, jnp.zeros((), Y.dtype))
        checks.finite("Y", Y, "" if self.observed is not None else _MISSING)
        return Y


_MISSING = MISSING.replace("rows", "cells").replace("(y)", "(Y)")


# NUTS searches for its initial values outside of compiled code: this makes it one program.
@compiled
def _by_eigenvectors(
    factors: Any, inputs: Axes, noise: Array, residual: Array, axis: Any
) -> Float[Array, "*batch"]:
    covariances = [k.evaluate_covariance(X) for k, X in zip(factors, inputs, strict=True)]
    dtype = jnp.result_type(*covariances, noise, residual)
    covariances = [K.astype(dtype) for K in covariances]
    noise, residual = noise.astype(dtype), residual.astype(dtype)
    rotation = _rotation(factors, inputs, noise, axis)
    return kronecker.log_density(covariances, noise, residual, axis, rotation)


@compiled
def _by_filter(process: SpaceTime, residual: Array) -> Float[Array, " k"]:
    return process.log_density(residual)


@compiled
def _check(process: SpaceTime) -> None:
    process.check()


@compiled
def _solution(
    factors: Any, inputs: Axes, noise: Array, residual: Array, axis: Any
) -> tuple[kronecker.Rotation, Float[Array, "*shape"]]:
    variances = (k.evaluate_diag(X[:1]) for k, X in zip(factors, inputs, strict=True))
    dtype = jnp.result_type(*variances, noise, residual)
    rotation = _rotation(factors, inputs, noise.astype(dtype), axis)
    few = rotation.rounding > rounding.FEW_DIGITS
    linalg.warn_of_steps(~jnp.isnan(rotation.rounding), jnp.zeros((), jnp.int32), few=few)
    return rotation, kronecker.solve(rotation, residual.astype(dtype))


def _rotation(factors: Any, inputs: Axes, noise: Array, axis: int) -> kronecker.Rotation:
    rotation = kronecker.rotation(factors, inputs, noise, axis)
    return jax.tree.map(lambda leaf: leaf.astype(noise.dtype), rotation)


@compiled
def _draw(
    kernel: AbstractKernel, inputs: Axes, key: Array, sample_shape: tuple[int, ...]
) -> Float[Array, "*sample_shape_and_shape"]:
    """Draws of the function less its mean, a term at a time."""
    count = math.prod(sample_shape)

    def of_term(factors: Any, key: Array) -> Array:
        covariances = [k.evaluate_covariance(X) for k, X in zip(factors, inputs, strict=True)]
        trils = [linalg.cholesky(K, warn=False) for K in covariances]
        white = jax.random.normal(key, (count, *map(len, trils)), jnp.result_type(*trils))
        return jax.vmap(lambda white: along_all(trils, white))(white)

    terms = terms_of(kernel, len(inputs))
    draws = functools.reduce(operator.add, map(of_term, terms, jax.random.split(key, len(terms))))
    return draws.reshape(*sample_shape, *shape_of(inputs))


def _as_noise(value: ArrayLike, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Noise variances, of shape () or with as many axes as the grid."""
    noise = checks.as_positive(value, "noise_variance")
    fits = noise.ndim in (0, len(shape)) and all(
        size in (1, n) for size, n in zip(noise.shape, shape, strict=False)
    )
    if not fits:
        axes = ", ".join(f"1 or {n}" for n in shape)
        raise ValueError(
            f"`noise_variance` must have shape () or ({axes}), got {noise.shape}: one value, or "
            "values along the axes of the grid."
        )
    checks.positive("noise_variance", noise)
    return noise.reshape(()) if noise.size == 1 else noise


def _as_observed(
    value: ArrayLike, shape: tuple[int, ...]
) -> Bool[Array, "*shape"] | Bool[np.ndarray, "*shape"]:
    observed = as_boolean(value, "a cell")
    checks.shape("observed", observed, shape, why="one entry for each cell of the grid")
    if checks.is_concrete(observed) and not np.asarray(observed).any():
        raise ValueError("`observed` must be True for at least one cell.")
    return observed
