"""Stochastic Lanczos quadrature: log-determinants from the coefficients of conjugate gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.solvers import Coefficients


class LogDeterminant(NamedTuple):
    """An estimate of log|H|."""

    value: Float[Array, ""]
    standard_error: Float[Array, ""]  # from the spread over probes; the quadrature's bias is not in


def log_determinant(coefficients: Coefficients, n: int) -> LogDeterminant:
    """Estimate log|H| = log|P| + tr log(P^-1/2 H P^-1/2) from probes of conjugate gradients.

    A probe's coefficients make up a tridiagonal T, and tr log ~ n e_1' log(T) e_1: Gauss quadrature
    for the probe's direction, times n. (Directions of normal vectors are uniform, so that n instead
    of their squared norms leaves the mean unchanged and takes variance away.)

    Args:
        coefficients: of s probes, drawn from N(0, P) and started at zero.
        n: size of H.

    Returns:
        Mean and standard error over probes; NaN where there are none. The quadrature has one node
        for each iteration made, and errs on the large side where they are few. Time O(s steps^3).

    References:
        Ubaru, Chen and Saad (2017), Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature;
        Golub and Meurant (2010), section 4.1, for T from conjugate gradients.
    """
    estimates = jax.vmap(_first_entry_of_log, in_axes=1)(coefficients.alpha, coefficients.beta)
    s = estimates.size
    spread = jnp.std(estimates, ddof=1) if s > 1 else jnp.full((), jnp.nan, estimates.dtype)
    return LogDeterminant(
        coefficients.log_determinant + n * jnp.mean(estimates), n * spread / jnp.sqrt(s)
    )


def _first_entry_of_log(alpha: Float[Array, " steps"], beta: Float[Array, " steps"]) -> Array:
    """e_1' log(T) e_1; steps that were not made stay apart as ones on the diagonal."""
    made = alpha > 0
    alpha = jnp.where(made, alpha, 1.0)
    carried = jnp.concatenate([jnp.zeros(1, alpha.dtype), beta[:-1] / alpha[:-1]])
    diagonal = jnp.where(made, 1.0 / alpha + carried, 1.0)
    linked = made[:-1] & made[1:]
    off = jnp.where(linked, jnp.sqrt(jnp.maximum(beta[:-1], 0.0)) / alpha[:-1], 0.0)
    T = jnp.diag(diagonal) + jnp.diag(off, 1) + jnp.diag(off, -1)
    nodes, vectors = jnp.linalg.eigh(T)
    # Rounding may take the smallest node of a hard system below zero.
    nodes = jnp.maximum(nodes, jnp.finfo(nodes.dtype).tiny)
    return jnp.sum(jnp.square(vectors[0]) * jnp.log(nodes))
