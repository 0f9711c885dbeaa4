"""Diagonal blocks of H, inverted as far as the precision can tell."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import linalg


def whitener(H: Float[Array, "b b"], noise: Float[Array, " b"]) -> Float[Array, "b b"]:
    """W lower triangular with W'W close to the inverse of a block, in O(b^3).

    Where the noise is beyond rounding there is more on the diagonal: of eigenvalues that are wrong
    altogether, the inverse would send a solver off. With more, it takes smaller steps along these,
    and its fixed point stays the solution.

    Args:
        H: rows and the same columns of the matrix, shape (b, b).
        noise: noise variances that are part of its diagonal, shape (b,).
    """
    damped = H + jnp.diag(jnp.maximum(linalg.least_diagonal(jnp.trace(H)) - noise, 0.0))
    return linalg.triangular_inverse(linalg.factorize(damped, warn=False).tril)
