"""How much of a result rounding leaves."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Relative rounding, as below, from which results are warned of. Up to there a posterior mean is off
# by a few percent of its standard deviation, variances and log densities by less.
FEW_DIGITS = 0.02
# The same where a covariance has no noise on its diagonal but jitter, which is of the size of
# rounding itself: from there on a log density is off by one.
NO_DIGITS = 0.5
_POWER_STEPS = 3


def unit(dtype: jnp.dtype) -> float:
    """The largest relative error of a rounded number."""
    return 0.5 * float(jnp.finfo(dtype).eps)


def relative_rounding(tril: Float[Array, "n n"]) -> Float[Array, ""]:
    """The rounding errors of H = L L' in units of its least pivot, u ||H|| / min_i L_ii^2.

    Of H scaled to a diagonal of ones, since a row with a large variance of its own, such as noise,
    costs the others no digits. The least pivot stands for the least eigenvalue, so that this is
    about the condition number times the unit u of rounding: the part that solutions with H may be
    off by. NaN for a factor that is NaN. Without a derivative, in O(n^2).

    References:
        Higham (2002), Accuracy and Stability of Numerical Algorithms, theorem 10.6: the error of a
        Cholesky factorization, by Demmel's scaling.
    """
    L = jax.lax.stop_gradient(tril)
    L = L / jnp.linalg.norm(L, axis=1, keepdims=True)
    # A vector that is orthogonal to no smooth one.
    vector = 1.0 + jnp.cos(jnp.arange(L.shape[0], dtype=L.dtype))
    for _ in range(_POWER_STEPS):
        vector = vector / jnp.linalg.norm(vector)
        vector = jnp.matmul(L, jnp.matmul(L.T, vector, precision="highest"), precision="highest")
    return unit(L.dtype) * jnp.linalg.norm(vector) / jnp.min(jnp.square(jnp.diagonal(L)))


def digits_left(rounding: Float[Array, "..."]) -> Float[Array, "..."]:
    """Decimal digits that such relative rounding leaves, at least zero."""
    return jnp.maximum(-jnp.log10(rounding), 0.0)


def remaining_variance(
    prior: Float[Array, "*n"], explained: Float[Array, "*n"]
) -> Float[Array, "*n"]:
    """A prior variance minus what is explained of it, at least what rounding can tell from zero."""
    return jnp.maximum(prior - explained, jnp.finfo(prior.dtype).eps * prior)
