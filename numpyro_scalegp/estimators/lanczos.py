"""Stochastic Lanczos quadrature: log-determinants from the coefficients of conjugate gradients."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.solvers.solver import Coefficients


class LogDeterminant(NamedTuple):
    """An estimate of log|H|."""

    value: Float[Array, ""]
    standard_error: Float[Array, ""]  # from the spread over probes; the quadrature's bias is not in
    stopping_error: Float[Array, ""]  # from a random number of steps, zero where that is fixed


def log_determinant(coefficients: Coefficients, n: int, num_probes: int) -> LogDeterminant:
    """Estimate log|H| = log|P| + tr log(P^-1/2 H P^-1/2) from probes of conjugate gradients.

    The steps of a group of probes make up a block tridiagonal T. With C the probes in terms of the
    process's first basis, tr log ~ n c_j'F c_j / c_j'c_j for each column c_j of C, where F is the
    first block of log(T): Gauss quadrature in the direction of the probe, times n. (Directions of
    normal vectors are uniform, so that n instead of their squared norms leaves the mean unchanged
    and takes variance away.)

    Args:
        coefficients: of probes drawn from N(0, P) and started at zero.
        n: size of H.
        num_probes: how many columns of the groups are probes; others are padding.

    Returns:
        Mean and standard error over probes; NaN where there are none. Each group's quadrature has
        as many nodes as iterations times probes, and errs on the large side where they are few.
        Time O(steps^3 s^3) for a group of s.

    References:
        Ubaru, Chen and Saad (2017), Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature;
        Golub and Meurant (2010), chapter 8, for block quadrature.
    """
    # The stages' sum, by what each number of steps counts in it.
    weights = coefficients.weights - jnp.append(coefficients.weights[1:], 0.0)
    # Eigenvectors of many steps cost much more than those of few: sizes to choose from, as long as
    # there is something to gain.
    num_steps, _, g, _ = coefficients.curvature.shape
    parts = [part for part in (1, 2, 4, 8) if num_steps * g >= 100 * part]
    sizes = sorted({-(-num_steps // part) for part in parts or (1,)})

    def first_steps(size: int, stop: Array) -> Array:
        curvature, triangle = (
            jnp.moveaxis(blocks[:size], 1, 0)
            for blocks in (coefficients.curvature, coefficients.triangle)
        )
        of_group = functools.partial(_of_group, stop)
        return jax.lax.map(
            lambda group: of_group(*group), (curvature, triangle, coefficients.start)
        )

    def evaluate(stage: Array, found: Array) -> Array:
        stop = coefficients.stops[stage]
        branches = [functools.partial(first_steps, size) for size in sizes]
        smallest = jnp.searchsorted(jnp.array(sizes), stop)
        estimates = jax.lax.switch(smallest, branches, stop)
        return found.at[stage].set(estimates.reshape(-1)[:num_probes])

    num_stages = jnp.sum(coefficients.weights > 0)
    nothing = jnp.zeros((weights.size, num_probes), weights.dtype)
    found = jax.lax.fori_loop(0, num_stages, evaluate, nothing)
    estimates = matmul(weights, found)
    spread = (
        jnp.std(estimates, ddof=1) if num_probes > 1 else jnp.full((), jnp.nan, estimates.dtype)
    )
    stopping = jnp.sqrt(stopping_variance(weights, jnp.mean(found, axis=1)))
    return LogDeterminant(
        coefficients.log_determinant + n * jnp.mean(estimates),
        # Without a step there is no spread, and nothing is known.
        jnp.where(coefficients.stops[0] > 0, n * spread / math.sqrt(num_probes), jnp.inf),
        jnp.where(coefficients.is_cut, jnp.inf, n * stopping),
    )


def stopping_variance(
    weights: Float[Array, " r"], terms: Float[Array, "r *m"]
) -> Float[Array, "*m"]:
    """The variance of sum_r w_r terms_r over the random index that the weights come from.

    The weights, whose sum is one, make E[sum_r w_r g(terms_r)] the last term's g(terms). So
    (sum_r w_r terms_r)^2 - sum_r w_r terms_r^2 has the variance for its mean: zero at
    most draws and large at the rare ones that go far. What is negative is taken for zero, so that
    the mean is not below the variance.
    """
    # Around the first term, lest the difference of two squares be rounding.
    terms = terms - terms[0]
    square = jnp.square(jnp.tensordot(weights, terms, 1, precision="highest"))
    squares = jnp.tensordot(weights, jnp.square(terms), 1, precision="highest")
    return jnp.maximum(square - squares, 0.0)


def _of_group(
    stop: Int[Array, ""],
    curvature: Float[Array, "steps g g"],
    triangle: Float[Array, "steps g g"],
    start: Float[Array, "g g"],
) -> Float[Array, " g"]:
    """C'F c / c'c for each column c of `start`, from the first `stop` steps."""
    steps, g, _ = curvature.shape
    # A unit block that is linked to no other adds nothing to the first block of the logarithm.
    step = jnp.arange(steps)[:, None, None]
    curvature = jnp.where(step < stop, curvature, jnp.eye(g, dtype=curvature.dtype))
    triangle = jnp.where(step < stop - 1, triangle, 0.0)
    # T = L D L' with -triangle below the unit diagonal of L, block by block.
    fill_in = jnp.einsum("sij,sjk,slk->sil", triangle, curvature, triangle, precision="highest")
    # (As an update of a slice, XLA gets this sum wrong for g = 1 once it is compiled.)
    diagonal = curvature + jnp.concatenate([jnp.zeros((1, g, g), fill_in.dtype), fill_in[:-1]])
    below = -matmul(triangle, curvature)[:-1]
    T = jnp.zeros((steps, g, steps, g), curvature.dtype)
    i = jnp.arange(steps)
    T = T.at[i, :, i, :].set(diagonal)
    T = T.at[i[1:], :, i[:-1], :].set(below)
    T = T.at[i[:-1], :, i[1:], :].set(jnp.swapaxes(below, 1, 2))
    nodes, vectors = jnp.linalg.eigh(T.reshape(steps * g, steps * g))
    # Rounding may take the smallest node of a hard system below zero, though not by much.
    rounding = jnp.finfo(nodes.dtype).eps * nodes[-1]
    possible = nodes >= -steps * g * rounding
    nodes = jnp.where(possible, jnp.maximum(nodes, rounding), jnp.nan)
    weights = jnp.square(matmul(start.T, vectors[:g]))
    return matmul(weights, jnp.log(nodes)) / jnp.sum(jnp.square(start), axis=0)
