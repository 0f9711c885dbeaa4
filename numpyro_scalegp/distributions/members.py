"""The members of a batch of collapsed Gaussian processes, as an estimator takes them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from numpyro_scalegp.core import batches, checks, functions
from numpyro_scalegp.core.row_values import row_values
from numpyro_scalegp.estimators import AbstractEstimator
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.indicated import Indicated
from numpyro_scalegp.kernels.nonstationary import refuse_kernel
from numpyro_scalegp.solvers import KernelOperator

# Least share of the rows of the largest member of a group, and of the work done, that is split off.
_LEAST_SHARE = 2.0 / 3.0
_SMALL_PART = 0.1

# Remedy for what is not finite.
MISSING = " Where these are rows without a target, give `observed=~jnp.isnan(y)`."


class Member(NamedTuple):
    """What an estimator takes of one Gaussian process."""

    operator: KernelOperator
    estimator: AbstractEstimator
    noise_variance: Float[Array, "..."]  # of all rows
    observed: Bool[Array, " n"] | None  # where hidden rows stay, without covariance

    @classmethod
    def of(
        cls,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        noise_variance: Float[Array, "..."],
        estimator: AbstractEstimator,
        observed: Bool[Array, " n"] | None,
    ) -> "Member":
        """Of a kernel at the rows of X."""
        own = noise_variance
        if observed is not None:
            # Hidden rows get the mean variance of the others as noise: beside that, what jitter
            # adds to all rows is little, and what is relative to the mean stays as it is.
            variance = jax.lax.stop_gradient(kernel.diag(X) + noise_variance)
            num = jnp.sum(observed.astype(variance.dtype))
            mean = jnp.sum(jnp.where(observed, variance, 0.0)) / jnp.maximum(num, 1.0)
            mean = jnp.where(num > 0, mean, jnp.mean(variance))
            noise_variance = jnp.where(observed, noise_variance, mean)
            kernel, X = Indicated(kernel), Indicated.with_indicator(X, observed)
            estimator = estimator.with_inputs(Indicated.with_indicator)
        return cls(KernelOperator(kernel, X, noise_variance), estimator, own, observed)

    def log_density_of_hidden(self) -> Float[Array, ""] | float:
        """The part of the log density that is that of zeros under the noise of hidden rows."""
        if self.observed is None:
            return 0.0
        entries = -0.5 * jnp.log(2.0 * math.pi * self.operator.noise())
        return jnp.sum(jnp.where(self.observed, 0.0, entries))


def fits(axes: tuple[int, ...], batch_shape: tuple[int, ...]) -> bool:
    """Whether leading axes broadcast to those of a batch, and make it no larger."""
    pairs = zip(reversed(axes), reversed(batch_shape), strict=False)
    return len(axes) <= len(batch_shape) and all(own in (1, whole) for own, whole in pairs)


def as_boolean(value: Any, entry: str) -> Bool[Array, "..."] | Bool[np.ndarray, "..."]:
    """What says which entries have a target, in NumPy unless it is an array of JAX's.

    There it stays known under a trace. It is a copy, which changes of the user's array leave as is.
    """
    if not isinstance(value, jax.Array):
        value = np.array(value)
    if value.dtype != bool:
        raise TypeError(
            f"`observed` must be boolean, True where {entry} has a target, got {value.dtype}."
        )
    return value


def as_observed(value: Any, n: int) -> Bool[Array, "... n"] | Bool[np.ndarray, "... n"]:
    """Which rows have a target."""
    value = as_boolean(value, "a row")
    if value.shape[-1:] != (n,):
        raise ValueError(
            f"`observed` must have shape ({n},) or (*batch, {n}), got {value.shape}: one entry for "
            "each row of `X`."
        )
    if checks.is_concrete(value) and not np.asarray(value).any(axis=-1).all():
        raise ValueError("`observed` must be True for at least one row of each member.")
    return value


def batch_shape_of(
    kernel: AbstractKernel, X: Float[Array, "... n d"], observed: Any
) -> tuple[int, ...]:
    """The shape of the batch that kernels, matrices of inputs and masks make."""
    return batches.common_shape(
        "the leading axes of a batch must fit together",
        kernel=kernel.batch_shape,
        X=X.shape[:-2],
        observed=() if observed is None else observed.shape[:-1],
    )


class Alike(NamedTuple):
    """Members of a batch with about as many rows."""

    members: Int[np.ndarray, " g"]
    rows: Int[np.ndarray, "g w"]  # of each, those with a target first

    @classmethod
    def groups(cls, observed: Bool[np.ndarray, "G n"]) -> "list[Alike]":
        """All members of a batch, so that each is padded to the rows of members like it."""
        counts = observed.sum(axis=1)
        order, groups = np.argsort(-counts, kind="stable"), []
        work = 0.0
        while len(order):
            width = counts[order[0]]
            others = counts[order] < _LEAST_SHARE * width
            # Few small ones are no reason for another program.
            if np.sum(others) * float(width) ** 3 <= _SMALL_PART * work:
                others[:] = False
            members, order = order[~others], order[others]
            work += len(members) * float(width) ** 3
            rows = np.argsort(~observed[members], axis=1, kind="stable")[:, :width]
            groups.append(cls(members, rows))
        return groups


def check_noise(noise: Float[Array, "..."], n: int, batch_shape: tuple[int, ...]) -> None:
    """Raise unless the noise variances have a shape that says to which rows they belong."""
    if not batch_shape:
        checks.shape("noise_variance", noise, (), (n,), why="one value, or one for each row")
        return
    is_of_members = noise.ndim == 1 and noise.shape == batch_shape[-1:] and noise.size > 1
    has_axes = noise.shape[-1:] in ((), (1,), (n,)) and fits(noise.shape[:-1], batch_shape)
    if is_of_members or not has_axes:
        remedy = " For one value a member write noise_variance[:, None]." if is_of_members else ""
        rows = " For one value a row write noise_variance[None, :]." if noise.shape == (n,) else ""
        raise ValueError(
            f"`noise_variance` of a batch of shape {batch_shape} must have shape (), (*batch, 1) "
            f"or (*batch, {n}), got {noise.shape}.{remedy}{rows}"
        )


def as_mean_function(
    mean: Callable[[Array], Array] | ArrayLike | None,
    batch_shape: tuple[int, ...],
    X: Float[Array, "... n d"],
) -> functions.RowsFunction:
    """The mean function that a number, values at the rows of X, a callable or None stands for."""
    refuse_kernel("mean", mean)
    if callable(mean):
        return functions.as_pytree(mean, "mean")
    constant, n = checks.as_float(0.0 if mean is None else mean, "mean"), X.shape[-2]
    checks.finite("mean", constant)
    if fits(constant.shape, batch_shape):
        return functions.constant_function(constant)
    if constant.shape[-1:] == (n,) and fits(constant.shape[:-1], batch_shape):
        return row_values(constant, X)
    own = (batch_shape, (*batch_shape, n)) if batch_shape else ((n,),)
    whose = "a number, one for each row of `X`, a callable or None"
    checks.shape("mean", constant, (), *own, why=whose)
    raise AssertionError


def mean_at(
    mean_function: functions.RowsFunction, X: Float[Array, "... n d"], shape: tuple[int, ...]
) -> Float[Array, "... n"]:
    """The values of a mean function at the rows of X, for each member of a batch."""
    mean = mean_function(X)
    if jnp.shape(mean)[-1:] != shape[-1:] or not fits(jnp.shape(mean)[:-1], shape[:-1]):
        raise ValueError(
            f"`mean` must map inputs of shape {X.shape} to shape {shape}, got {jnp.shape(mean)}."
        )
    if X.ndim > 2 and X.shape[-1] == X.shape[-2] and _depends_on_columns(mean_function, X):
        raise ValueError(
            f"`mean` maps inputs of shape {X.shape} to one value for each column: in a batch "
            "columns are the last axis, as in `lambda X: X[..., 0]`."
        )
    return jnp.broadcast_to(mean, shape)


def _depends_on_columns(mean_function: functions.RowsFunction, X: Float[Array, "... n d"]) -> bool:
    """Whether the values of a mean function are as many as X has columns, not rows."""
    *batch, n, d = X.shape
    try:
        found = jax.eval_shape(mean_function, jax.ShapeDtypeStruct((*batch, n + 1, d), X.dtype))
    except (TypeError, ValueError):
        return False  # one that holds values for these rows
    return found.ndim > 0 and found.shape[-1] == n
