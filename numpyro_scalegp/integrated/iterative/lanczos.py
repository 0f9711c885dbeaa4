"""Stochastic Lanczos quadrature: log-determinants from the coefficients of conjugate gradients."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from numpyro_scalegp.linear.solver import Coefficients
from numpyro_scalegp.numerics import lapack
from numpyro_scalegp.numerics.linalg import matmul


class LogDeterminant(NamedTuple):
    """An estimate of log|H|."""

    value: Float[Array, ""]
    standard_error: Float[Array, ""]  # over probes; excludes the bias of the quadrature
    stopping_error: Float[Array, ""]  # from a random number of steps; zero if that is fixed


def log_determinant(coefficients: Coefficients, n: int, num_probes: int) -> LogDeterminant:
    """Estimate log|H| = log|P| + tr log(P^-1/2 H P^-1/2) from probes of conjugate gradients.

    The steps of a group of probes define a block tridiagonal matrix T. Let C hold the probes in
    coordinates of the first basis. Then tr log ~ n c_j'F c_j / c_j'c_j for each column c_j of C,
    where F is the first block of log(T): n times Gauss quadrature in the direction of the probe.
    (Directions of normal vectors are uniform, so that a factor of n in place of their squared norms
    leaves the mean unchanged and reduces the variance.)

    Args:
        coefficients: of probes drawn from N(0, P) and started at zero.
        n: size of H.
        num_probes: number of columns of the groups that are probes; further columns are padding.

    Returns:
        Mean and standard error over probes; NaN without probes. The quadrature of a group has
        iterations times probes nodes; with few nodes it overestimates. Time O(steps^3 s^3) for a
        group of s.

    References:
        Ubaru, Chen and Saad (2017), Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature;
        Golub and Meurant (2010), chapter 8, for block quadrature.
    """
    # `coefficients.weights` multiply differences of successive stages: these multiply the stages.
    weights = coefficients.weights - jnp.append(coefficients.weights[1:], 0.0)
    # The eigendecomposition is cubic in the number of steps: compile smaller sizes as well if the
    # largest is expensive.
    num_steps, _, g, _ = coefficients.curvature.shape
    divisors = [divisor for divisor in (1, 2, 4, 8) if num_steps * g >= 100 * divisor]
    sizes = sorted({-(-num_steps // divisor) for divisor in divisors or (1,)})

    def first_steps(size: int, stop: Array) -> Array:
        curvature, triangle = (
            jnp.moveaxis(blocks[:size], 1, 0)
            for blocks in (coefficients.curvature, coefficients.triangle)
        )
        quadrature = functools.partial(_group_quadrature, stop)
        return jax.lax.map(
            lambda group: quadrature(*group), (curvature, triangle, coefficients.start)
        )

    def evaluate(stage: Array, stage_estimates: Array) -> Array:
        stop = coefficients.stops[stage]
        branches = [functools.partial(first_steps, size) for size in sizes]
        smallest = jnp.searchsorted(jnp.array(sizes), stop)
        estimates = jax.lax.switch(smallest, branches, stop)
        return stage_estimates.at[stage].set(estimates.reshape(-1)[:num_probes])

    num_stages = jnp.sum(coefficients.weights > 0)
    zeros = jnp.zeros((weights.size, num_probes), weights.dtype)
    stage_estimates = jax.lax.fori_loop(0, num_stages, evaluate, zeros)
    estimates = matmul(weights, stage_estimates)
    deviation = (
        jnp.std(estimates, ddof=1) if num_probes > 1 else jnp.full((), jnp.nan, estimates.dtype)
    )
    stopping = jnp.sqrt(stopping_variance(weights, jnp.mean(stage_estimates, axis=1)))
    return LogDeterminant(
        coefficients.log_determinant + n * jnp.mean(estimates),
        # Without a step all probes agree, though the error may be anything.
        jnp.where(coefficients.stops[0] > 0, n * deviation / math.sqrt(num_probes), jnp.inf),
        jnp.where(coefficients.is_cut, jnp.inf, n * stopping),
    )


def stopping_variance(
    weights: Float[Array, " r"], terms: Float[Array, "r *m"]
) -> Float[Array, "*m"]:
    """Estimate the variance of sum_r w_r terms_r over the random index that sets the weights.

    The weights sum to one, and E[sum_r w_r g(terms_r)] is g(terms) at the last term. So the mean
    of (sum_r w_r terms_r)^2 - sum_r w_r terms_r^2 is the variance; the difference is zero for most
    draws, and large for the rare draws that stop late. Negative values are set to zero, so that the
    mean is not below the variance.
    """
    # Centered at the first term, so that rounding does not dominate the difference of squares.
    terms = terms - terms[0]
    square = jnp.square(jnp.tensordot(weights, terms, 1, precision="highest"))
    squares = jnp.tensordot(weights, jnp.square(terms), 1, precision="highest")
    return jnp.maximum(square - squares, 0.0)


def _group_quadrature(
    stop: Int[Array, ""],
    curvature: Float[Array, "steps g g"],
    triangle: Float[Array, "steps g g"],
    start: Float[Array, "g g"],
) -> Float[Array, " g"]:
    """C'F c / c'c for each column c of `start`, from the first `stop` steps."""
    steps, g, _ = curvature.shape
    # Decoupled unit blocks leave the first block of the logarithm unchanged.
    step = jnp.arange(steps)[:, None, None]
    curvature = jnp.where(step < stop, curvature, jnp.eye(g, dtype=curvature.dtype))
    triangle = jnp.where(step < stop - 1, triangle, 0.0)
    # T = L D L' with -triangle below the unit diagonal of L, block by block.
    fill_in = jnp.einsum("sij,sjk,slk->sil", triangle, curvature, triangle, precision="highest")
    # (Compiled as an update of a slice, this sum is wrong for g = 1, by an error of XLA.)
    diagonal = curvature + jnp.concatenate([jnp.zeros((1, g, g), fill_in.dtype), fill_in[:-1]])
    below = -matmul(triangle, curvature)[:-1]
    T = jnp.zeros((steps, g, steps, g), curvature.dtype)
    i = jnp.arange(steps)
    T = T.at[i, :, i, :].set(diagonal)
    T = T.at[i[1:], :, i[:-1], :].set(below)
    T = T.at[i[:-1], :, i[1:], :].set(jnp.swapaxes(below, 1, 2))
    nodes, vectors = lapack.eigh(T.reshape(steps * g, steps * g))
    # Rounding can make the smallest node of an ill-conditioned system slightly negative.
    rounding = jnp.finfo(nodes.dtype).eps * nodes[-1]
    is_plausible = nodes >= -steps * g * rounding
    nodes = jnp.where(is_plausible, jnp.maximum(nodes, rounding), jnp.nan)
    weights = jnp.square(matmul(start.T, vectors[:g]))
    return matmul(weights, jnp.log(nodes)) / jnp.sum(jnp.square(start), axis=0)
