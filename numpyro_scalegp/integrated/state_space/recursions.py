"""The log density of a series, its smoothed states and its moments, with their derivatives."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.integrated.state_space.passes import (
    AtRows,
    Derivatives,
    Passes,
    Smoothed,
    rows_at,
)
from numpyro_scalegp.integrated.state_space.rows import Series
from numpyro_scalegp.numerics.derivatives import custom_jvp_all_orders


def log_density(
    series: Series, y: Float[Array, " n"], noise: Float[Array, " n"]
) -> Float[Array, ""]:
    """The log density of y, in O(n s^3) time and O(n s) memory.

    Its derivatives are of every order, in both modes; the first ones cost about as much as three
    values.

    Args:
        series: the process and the times.
        y: observations in the order of time, shape (n,).
        noise: noise variances in the order of time, shape (n,).
    """
    arrays, static = eqx.partition(series, eqx.is_inexact_array)

    @custom_jvp_all_orders
    def density(arrays: Any, y: Array, noise: Array) -> Array:
        passes = passes_of(eqx.combine(arrays, static), y, noise)
        return passes.filter(passes.starts())

    def rule(primals: Any, tangents: Any) -> tuple[Array, Array]:
        arrays, y, noise = primals
        passes = passes_of(eqx.combine(arrays, static), y, noise)
        value, derivatives, _ = passes.with_derivatives()
        return value, along(derivatives, *tangents)

    density.defjvp(rule)
    return density(arrays, y, noise)


def smooth(series: Series, y: Float[Array, " n"], noise: Float[Array, " n"]) -> Smoothed:
    """Filter and smooth the rows; for the arguments see `log_density`."""
    return passes_of(series, y, noise).smoothed()


def at_rows(
    series: Series, y: Float[Array, " n"], noise: Float[Array, " n"], *, variances: bool = True
) -> AtRows:
    """Moments of the function at the rows; for the arguments see `log_density`."""
    return passes_of(series, y, noise).at_rows(variances=variances)


def passes_of(series: Series, y: Float[Array, " n"], noise: Float[Array, " n"]) -> Passes:
    """The passes over the rows of a series."""
    return Passes(series.form, rows_at(series.times, y, noise, series.h))


def along(
    derivatives: Derivatives, series: Any, y: Float[Array, " n"], noise: Float[Array, " n"]
) -> Float[Array, ""]:
    """The derivative along tangents of the floating-point arrays of a series, y and noise."""
    rows = rows_at(series.times, y, noise, series.varying_h)._replace(weight=None)
    tangents = Derivatives(series.form, series.times[0], rows)
    pairs = zip(jax.tree.leaves(derivatives), jax.tree.leaves(tangents), strict=True)
    return sum((jnp.sum(a * b) for a, b in pairs), jnp.zeros((), y.dtype))
