"""Sums of many terms that all but cancel."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

_TERMS = 4


def pairwise_product(A: Float[Array, "m n"], b: Float[Array, " n"]) -> Float[Array, " m"]:
    """A b, with terms added four at a time, then their sums four at a time, and so on.

    Rounding grows as sqrt(log n) in place of sqrt(n) of the terms'. It counts for the weights of a
    posterior mean, which are as large as residuals divided by the noise variance, while the mean is
    as small as the observations. In the time of a plain product, and no slower where A is computed
    on the way, since it need not be stored.
    """
    terms = A * b
    while (n := terms.shape[1]) > 1:
        num = min(_TERMS, n)
        terms = jnp.pad(terms, ((0, 0), (0, -n % num)))
        terms = functools.reduce(jnp.add, jnp.split(terms, num, axis=1))
    return terms[:, 0]
