"""Members of a batch of collapsed Gaussian processes, in the form that estimators take."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.kernels.indicated import Indicated
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.nonstationary import refuse_kernel
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.programs import functions
from numpyro_scalegp.programs.functions import row_values

# Fewest observed rows of a member, relative to the largest member of its group.
_MIN_RELATIVE_SIZE = 2.0 / 3.0
# Smallest cost of the smaller members, relative to the groups so far, that justifies a new group.
_MIN_RELATIVE_COST = 0.1

# Remedy for observations that are not finite.
MISSING = " If these are rows without a target, give `observed=~jnp.isnan(y)`."


class Member(NamedTuple):
    """One Gaussian process and its estimator; rows without a target are called hidden."""

    operator: KernelOperator
    estimator: AbstractEstimator
    noise_variance: Float[Array, "..."]  # as in the model; `operator` differs in hidden rows
    observed: Bool[Array, " n"] | None  # None if `operator` has no hidden rows

    @classmethod
    def of(
        cls,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        noise_variance: Float[Array, "..."],
        estimator: AbstractEstimator,
        observed: Bool[Array, " n"] | None,
    ) -> "Member":
        """The member with this kernel and these inputs; hidden rows are independent noise."""
        operator_noise = noise_variance
        if observed is not None:
            # The noise variance of hidden rows is the mean marginal variance of the observed rows,
            # so that jitter is small beside it and the mean diagonal of H does not change.
            variance = jax.lax.stop_gradient(kernel.evaluate_diag(X) + noise_variance)
            num = jnp.sum(observed.astype(variance.dtype))
            mean = jnp.sum(jnp.where(observed, variance, 0.0)) / jnp.maximum(num, 1.0)
            mean = jnp.where(num > 0, mean, jnp.mean(variance))
            operator_noise = jnp.where(observed, noise_variance, mean)
            kernel, X = Indicated(kernel), Indicated.with_indicator(X, observed)
            estimator = estimator.with_inputs(Indicated.with_indicator)
        operator = KernelOperator.from_checked(kernel, X, operator_noise)
        return cls(operator, estimator, noise_variance, observed)

    def log_density_of_hidden(self) -> Float[Array, ""] | float:
        """The log density of the hidden rows, which are zeros with independent noise."""
        if self.observed is None:
            return 0.0
        entries = -0.5 * jnp.log(2.0 * math.pi * self.operator.noise())
        return jnp.sum(jnp.where(self.observed, 0.0, entries))


def fits(axes: tuple[int, ...], batch_shape: tuple[int, ...]) -> bool:
    """Whether leading axes broadcast to `batch_shape` without enlarging it."""
    pairs = zip(reversed(axes), reversed(batch_shape), strict=False)
    return len(axes) <= len(batch_shape) and all(axis in (1, size) for axis, size in pairs)


def as_boolean(value: Any, entry: str) -> Bool[Array, "..."] | Bool[np.ndarray, "..."]:
    """The mask of the entries that have a target: a NumPy array unless it is a JAX array.

    A NumPy array stays concrete under a trace. It is a copy, so that later changes of the user's
    array have no effect.
    """
    if not isinstance(value, jax.Array):
        value = np.array(value)
    if value.dtype != bool:
        raise TypeError(
            f"`observed` must be boolean, True where {entry} has a target, got {value.dtype}."
        )
    return value


def as_observed(value: Any, n: int) -> Bool[Array, "... n"] | Bool[np.ndarray, "... n"]:
    """The mask of the rows that have a target."""
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
    """The common batch shape of kernels, input matrices and masks."""
    return batches.common_shape(
        "the leading axes of a batch must fit together",
        kernel=kernel.batch_shape,
        X=X.shape[:-2],
        observed=() if observed is None else observed.shape[:-1],
    )


class SimilarSizeGroup(NamedTuple):
    """Members of a batch with similar numbers of observed rows."""

    members: Int[np.ndarray, " g"]
    rows: Int[np.ndarray, "g w"]  # of each member, the observed rows first

    @classmethod
    def of_masks(cls, observed: Bool[np.ndarray, "G n"]) -> "list[SimilarSizeGroup]":
        """Partition a batch into groups, so that members are padded to members of similar size."""
        counts = observed.sum(axis=1)
        order, groups = np.argsort(-counts, kind="stable"), []
        cost = 0.0
        while len(order):
            width = counts[order[0]]
            is_smaller = counts[order] < _MIN_RELATIVE_SIZE * width
            # Each group compiles a program, which does not pay for a few small members.
            if np.sum(is_smaller) * float(width) ** 3 <= _MIN_RELATIVE_COST * cost:
                is_smaller[:] = False
            members, order = order[~is_smaller], order[is_smaller]
            cost += len(members) * float(width) ** 3
            rows = np.argsort(~observed[members], axis=1, kind="stable")[:, :width]
            groups.append(cls(members, rows))
        return groups


def check_noise(noise: Float[Array, "..."], n: int, batch_shape: tuple[int, ...]) -> None:
    """Raise unless the shape of the noise variances fits the batch and its rows."""
    if not batch_shape:
        checks.shape("noise_variance", noise, (), (n,), why="one value, or one for each row")
        return
    is_of_members = noise.ndim == 1 and noise.shape == batch_shape[-1:] and noise.size > 1
    has_axes = noise.shape[-1:] in ((), (1,), (n,)) and fits(noise.shape[:-1], batch_shape)
    if is_of_members or not has_axes:
        remedy = ""
        if is_of_members:
            remedy = " For one value per member write noise_variance[:, None]."
        if noise.shape == (n,):
            remedy += " For one value per row write noise_variance[None, :]."
        raise ValueError(
            f"`noise_variance` of a batch of shape {batch_shape} must have shape (), (*batch, 1) "
            f"or (*batch, {n}), got {noise.shape}.{remedy}"
        )


def as_mean_function(
    mean: Callable[[Array], Array] | ArrayLike | None,
    batch_shape: tuple[int, ...],
    X: Float[Array, "... n d"],
) -> functions.RowsFunction:
    """The mean function of a constant, values at the rows of X, a callable or None."""
    refuse_kernel("mean", mean)
    if callable(mean):
        return functions.as_pytree(mean, "mean")
    constant, n = checks.as_float(0.0 if mean is None else mean, "mean"), X.shape[-2]
    checks.finite("mean", constant)
    if fits(constant.shape, batch_shape):
        return functions.constant_function(constant)
    if constant.shape[-1:] == (n,) and fits(constant.shape[:-1], batch_shape):
        return row_values(constant, X)
    shapes = (batch_shape, (*batch_shape, n)) if batch_shape else ((n,),)
    meaning = "a number, one for each row of `X`, a callable or None"
    checks.shape("mean", constant, (), *shapes, why=meaning)
    raise AssertionError


def mean_at(
    mean_function: functions.RowsFunction, X: Float[Array, "... n d"], shape: tuple[int, ...]
) -> Float[Array, "... n"]:
    """The values of a mean function at X, for each member of a batch."""
    mean = mean_function(X)
    if jnp.shape(mean)[-1:] != shape[-1:] or not fits(jnp.shape(mean)[:-1], shape[:-1]):
        raise ValueError(
            f"`mean` must map inputs of shape {X.shape} to shape {shape}, got {jnp.shape(mean)}."
        )
    if X.ndim > 2 and X.shape[-1] == X.shape[-2] and _depends_on_columns(mean_function, X):
        raise ValueError(
            f"`mean` maps inputs of shape {X.shape} to one value for each column: in a batch "
            "the columns are the last axis, as in `lambda X: X[..., 0]`."
        )
    return jnp.broadcast_to(mean, shape)


def _depends_on_columns(mean_function: functions.RowsFunction, X: Float[Array, "... n d"]) -> bool:
    """Whether a mean function returns one value for each column of a square X, not for each row."""
    *batch, n, d = X.shape
    try:
        values = jax.eval_shape(mean_function, jax.ShapeDtypeStruct((*batch, n + 1, d), X.dtype))
    except (TypeError, ValueError):
        return False  # a mean function that holds values for these rows only
    return values.ndim > 0 and values.shape[-1] == n
