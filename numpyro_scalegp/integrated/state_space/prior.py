"""The prior of a batch of functions of time, and their moments given normal observations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import batches
from numpyro_scalegp.integrated.state_space import recursions
from numpyro_scalegp.integrated.state_space.passes import AtRows, Derivatives
from numpyro_scalegp.integrated.state_space.rows import Series
from numpyro_scalegp.kernels.kernel import AbstractKernel


class Prior(NamedTuple):
    """The function at the rows of each member of a batch, less its mean."""

    series: Series
    variance: Float[Array, "*batch n"]

    @classmethod
    def of(
        cls,
        kernel: AbstractKernel,
        X: Float[Array, "... n d"],
        num_harmonics: int,
        like: Float[Array, "*batch n"],
    ) -> "Prior":
        """The prior of the functions with a kernel, in the shape and the dtype of `like`."""

        def of_member(kernel: AbstractKernel, X: Array) -> Prior:
            series = Series.of(kernel, X, num_harmonics, like.dtype)
            return cls(series, kernel.evaluate_diag(X).astype(like.dtype))

        prior = kernel.each(of_member, X)
        return prior._replace(variance=jnp.broadcast_to(prior.variance, like.shape))


def at_rows(prior: Prior, y: Array, noise: Array, *, variances: bool) -> AtRows:
    """Moments of f - m in the order of the rows, for each member of a batch."""

    def of_member(series: Series, y: Array, noise: Array) -> AtRows:
        noise = series.in_order(noise)
        moments = recursions.at_rows(series, series.in_order(y), noise, variances=variances)
        weights, means, of_f = jax.tree.map(series.by_row, moments[:3])
        return AtRows(weights, means, of_f, *moments[3:])

    return _each(of_member, prior.series, y, noise)


def log_density_derivatives(
    prior: Prior, y: Array, noise: Array
) -> tuple[Derivatives, Array, Array]:
    """The derivatives of log N(y; 0, K + noise), (K + noise)^-1 y, and K times it."""

    def of_member(series: Series, y: Array, noise: Array) -> tuple[Derivatives, Array, Array]:
        passes = recursions.passes_of(series, series.in_order(y), series.in_order(noise))
        _, derivatives, means = passes.with_derivatives()
        return derivatives, series.by_row(-derivatives.rows.y), series.by_row(means)

    return _each(of_member, prior.series, y, noise)


def along(derivatives: Derivatives, prior: Prior, tangents: Prior) -> Float[Array, "*batch"]:
    """The derivative along tangents of the kernel and the inputs."""
    num_axes = prior.series.times.ndim - 1

    def of_member(derivatives: Derivatives, tangents: Any) -> Array:
        zeros = jnp.zeros_like(tangents.times)
        return recursions.along(derivatives, tangents, zeros, zeros)

    batch_axes = derivatives.first_time.ndim
    members = batches.Batch(derivatives, batch_axes), batches.Batch(tangents.series, num_axes)
    return batches.each(of_member, *members)


def _each(function: Callable[..., Any], series: Series, *vectors: Float[Array, "*batch n"]) -> Any:
    """Apply a function of a member's series and vectors to each member of a batch."""
    members = (batches.Batch(vector, vector.ndim - 1) for vector in vectors)
    return batches.each(function, batches.Batch(series, series.times.ndim - 1), *members)
