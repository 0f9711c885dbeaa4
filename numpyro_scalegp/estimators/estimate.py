"""An estimate of the log marginal likelihood from solves, and its gradient."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core.derivatives import refuse_derivatives, with_pullback
from numpyro_scalegp.estimators import lanczos
from numpyro_scalegp.solvers import KernelOperator, Solution

_REFUSAL = (
    "`Hutchinson` and `Pathwise` have first derivatives in reverse mode alone (`jax.grad`): the "
    "solutions that these rest on are held fixed in them, and second derivatives would be wrong. "
    "For `jax.hessian`, `jax.jvp` or a Laplace approximation take `sgp.estimators.Cholesky()`, "
    "or `RandomFourier` where the data are too many."
)


class Estimate(NamedTuple):
    """A log marginal likelihood for each of m data vectors, and what it rests on."""

    value: Float[Array, " m"]
    standard_error: Float[Array, ""]  # of the value, the largest where there are several
    solution: Solution  # m columns for the data, then those of the probes
    left: Float[Array, "n s"]  # tr(H^-1 dH) ~ sum_j left_j'dH right_j / s
    right: Float[Array, "n s"] | None = None  # None where it is the left one


def differentiable(
    found: Estimate, operator: KernelOperator, rows: Float[Array, "m n"]
) -> Float[Array, " m"]:
    """The value of an estimate with its gradient in the operator and the data, in reverse mode."""
    inputs, rest = eqx.partition(operator, eqx.is_inexact_array)
    return with_pullback(_pull_back, _REFUSAL, found.value, (inputs, rows), (rest, found))


def stopping_variance(solution: Solution, residual: Float[Array, "n m"]) -> Float[Array, " m"]:
    """The variance that a random stopping index gives y'v, without bias in the mean, or zero.

    With s_r = y'v_r for the iterates v_r, both y'v = sum_r w_r s_r and its square's mean,
    E[sum_r w_r s_r^2] = (y'H^-1 y)^2, are at hand.
    """
    if solution.weights is None or solution.vectors is None:
        return jnp.zeros(residual.shape[1], residual.dtype)
    terms = jnp.einsum("nm,rnm->rm", residual, solution.vectors[..., : residual.shape[1]])
    return lanczos.stopping_variance(solution.weights, terms)


def _pull_back(
    inputs: tuple[KernelOperator, Array], fixed: tuple[KernelOperator, Estimate], cotangent: Array
) -> tuple[KernelOperator, Array]:
    """The estimator's gradient with respect to the operator and the data, shape (m, n)."""
    (operator, _), (rest, found) = inputs, fixed
    operator = refuse_derivatives(_REFUSAL, eqx.combine(operator, rest))
    m, s = cotangent.size, found.left.shape[1]
    square_weights, vectors = found.solution.outer_products(m)
    data = jnp.outer(0.5 * square_weights, cotangent).reshape(-1)
    probes = jnp.full(s, -0.5 / s * jnp.sum(cotangent), data.dtype)
    weights = jnp.concatenate([data, probes])
    left = _side_by_side(vectors, found.left)
    if found.right is None:
        gradient = operator.quadratic_gradient(weights, left)
    else:
        gradient = operator.bilinear_gradient(weights * left, _side_by_side(vectors, found.right))
    gradient = eqx.filter(gradient, eqx.is_inexact_array)
    return gradient, -(cotangent * found.solution.value[:, :m]).T


def _side_by_side(squares: Float[Array, "r n m"], probes: Float[Array, "n s"]) -> Array:
    columns = jnp.moveaxis(squares, 0, 1).reshape(len(probes), -1)
    return jnp.concatenate([columns, probes], axis=1)
