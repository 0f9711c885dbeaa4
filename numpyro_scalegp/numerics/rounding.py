"""The effect of rounding errors on results."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

# Relative rounding above which to warn. Up to this value the error of a posterior mean is a few
# percent of its standard deviation, and variances and log densities have smaller errors.
FEW_DIGITS = 0.02
# The same for a covariance without noise, whose jitter is of the size of rounding errors:
# above this value a log density is off by one.
NO_DIGITS = 0.5
_POWER_STEPS = 3


def unit(dtype: jnp.dtype) -> float:
    """The unit roundoff: the largest relative error of a rounded number."""
    return 0.5 * float(jnp.finfo(dtype).eps)


def relative_rounding(tril: Float[Array, "n n"]) -> Float[Array, ""]:
    """The rounding errors of H = L L' relative to its least pivot, u ||H|| / min_i L_ii^2.

    H is first scaled to a unit diagonal, since a row with a large variance, such as noise, costs
    other rows no digits. The least pivot approximates the least eigenvalue, so that this is about
    the condition number times the unit roundoff u: the relative error of solutions with H. It is
    NaN if the factor is NaN. Without a derivative, in O(n^2).

    References:
        Higham (2002), Accuracy and Stability of Numerical Algorithms, theorem 10.6: the error of a
        Cholesky factorization, by Demmel's scaling.
    """
    L = jax.lax.stop_gradient(tril)
    L = L / jnp.linalg.norm(L, axis=1, keepdims=True)
    # An initial vector that is not orthogonal to smooth vectors.
    vector = 1.0 + jnp.cos(jnp.arange(L.shape[0], dtype=L.dtype))
    for _ in range(_POWER_STEPS):
        vector = vector / jnp.linalg.norm(vector)
        vector = jnp.matmul(L, jnp.matmul(L.T, vector, precision="highest"), precision="highest")
    return unit(L.dtype) * jnp.linalg.norm(vector) / jnp.min(jnp.square(jnp.diagonal(L)))


def digits_left(rounding: Float[Array, "..."]) -> Float[Array, "..."]:
    """The number of decimal digits that a relative rounding error leaves, at least zero."""
    return jnp.maximum(-jnp.log10(rounding), 0.0)


def at_least(x: Float[Array, "..."], least: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
    """The maximum of both, with a derivative that rounding does not change.

    The derivative of `jnp.maximum` compares its result with x. If XLA computes x twice, with other
    rounding errors, they differ, and the derivative is zero.
    """
    return jnp.where(x < least, least, x)


def at_most(x: Float[Array, "..."], most: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
    """The minimum of both; see `at_least`."""
    return jnp.where(x > most, most, x)


def remaining_variance(
    prior: Float[Array, "*n"], explained: Float[Array, "*n"]
) -> Float[Array, "*n"]:
    """The prior minus the explained variance, at least `eps` times the prior variance.

    It is not negative, even if rounding made the prior variance negative.
    """
    return at_least(prior - explained, jnp.finfo(prior.dtype).eps * jnp.abs(prior))
