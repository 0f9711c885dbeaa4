"""The members of a batch of collapsed Gaussian processes, as an estimator takes them."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.estimators import AbstractEstimator
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.indicated import Indicated
from numpyro_scalegp.solvers import KernelOperator


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
            num = jnp.sum(observed)
            mean = jnp.sum(jnp.where(observed, variance, 0.0)) / jnp.maximum(num, 1)
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


def as_observed(value: Any, n: int) -> Bool[Array, "... n"] | Bool[np.ndarray, "... n"]:
    """Which rows have a target."""
    if not (hasattr(value, "dtype") and value.dtype == bool):
        value = np.asarray(value)
    if value.dtype != bool:
        raise TypeError(
            f"`observed` must be boolean, True where a row has a target, got {value.dtype}."
        )
    if value.shape[-1:] != (n,):
        raise ValueError(
            f"`observed` must have shape ({n},) or (*batch, {n}), got {value.shape}: one entry for "
            "each row of `X`."
        )
    if checks.is_concrete(value) and not np.asarray(value).any(axis=-1).all():
        raise ValueError("`observed` must be True for at least one row of each member.")
    return value  # an array of NumPy stays known under a trace


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
