"""An estimate of the log marginal likelihood from linear solves, and its gradient."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.integrated.iterative import lanczos
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.solver import Solution
from numpyro_scalegp.numerics.derivatives import refuse_derivatives, with_pullback

_REFUSAL = (
    "`Hutchinson` and `Pathwise` have only first derivatives in reverse mode (`jax.grad`): they "
    "hold the solutions fixed, so that second derivatives would be wrong. For `jax.hessian`, "
    "`jax.jvp` or a Laplace approximation use `sgp.estimators.Cholesky()`, or `RandomFourier` for "
    "many observations."
)


class Estimate(NamedTuple):
    """A log marginal likelihood for each of m data vectors, and the solutions for its gradient."""

    value: Float[Array, " m"]
    standard_error: Float[Array, ""]  # of the value, the largest of the m
    solution: Solution  # m columns for the data, then those for the probes
    left: Float[Array, "n s"]  # tr(H^-1 dH) ~ sum_j left_j'dH right_j / s
    right: Float[Array, "n s"] | None = None  # None if equal to `left`


def differentiable(
    estimate: Estimate, operator: KernelOperator, rows: Float[Array, "m n"]
) -> Float[Array, " m"]:
    """The value of an estimate with its gradient in the operator and the data, in reverse mode."""
    inputs, static = eqx.partition(operator, eqx.is_inexact_array)
    return with_pullback(_pull_back, _REFUSAL, estimate.value, (inputs, rows), (static, estimate))


def stopping_variance(solution: Solution, residual: Float[Array, "n m"]) -> Float[Array, " m"]:
    """Estimate the variance of y'v from a random stopping index; zero if the index is fixed.

    The estimate is unbiased before negative values are set to zero: with s_r = y'v_r for the
    iterates v_r, y'v = sum_r w_r s_r, and E[sum_r w_r s_r^2] = (y'H^-1 y)^2 is its squared mean.
    """
    if solution.weights is None or solution.vectors is None:
        return jnp.zeros(residual.shape[1], residual.dtype)
    terms = jnp.einsum("nm,rnm->rm", residual, solution.vectors[..., : residual.shape[1]])
    return lanczos.stopping_variance(solution.weights, terms)


def _pull_back(
    inputs: tuple[KernelOperator, Array], fixed: tuple[KernelOperator, Estimate], cotangent: Array
) -> tuple[KernelOperator, Array]:
    """The cotangents of the operator and of the data, shape (m, n)."""
    (operator, _), (static, estimate) = inputs, fixed
    operator = refuse_derivatives(_REFUSAL, eqx.combine(operator, static))
    m, s = cotangent.size, estimate.left.shape[1]
    product_weights, vectors = estimate.solution.outer_products(m)
    data = jnp.outer(0.5 * product_weights, cotangent).reshape(-1)
    probes = jnp.full(s, -0.5 / s * jnp.sum(cotangent), data.dtype)
    weights = jnp.concatenate([data, probes])
    left = _as_columns(vectors, estimate.left)
    if estimate.right is None:
        gradient = operator.quadratic_gradient(weights, left)
    else:
        gradient = operator.bilinear_gradient(weights * left, _as_columns(vectors, estimate.right))
    gradient = eqx.filter(gradient, eqx.is_inexact_array)
    return gradient, -(cotangent * estimate.solution.value[:, :m]).T


def _as_columns(vectors: Float[Array, "r n m"], probes: Float[Array, "n s"]) -> Array:
    columns = jnp.moveaxis(vectors, 0, 1).reshape(len(probes), -1)
    return jnp.concatenate([columns, probes], axis=1)
