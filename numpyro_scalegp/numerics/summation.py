"""Accurate sums of many terms that nearly cancel."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

_TERMS = 4


def pairwise_product(A: Float[Array, "m n"], b: Float[Array, " n"]) -> Float[Array, " m"]:
    """A b by pairwise summation: terms are added four at a time, then their sums, and so on.

    The rounding error is sqrt(log n) times the rounding error of a term, instead of sqrt(n) times.
    This matters for the representer weights of a posterior mean, which are as large as residuals
    divided by the noise variance, while the mean is only as large as the observations. It takes the
    time of a plain product, also if A is computed within the same program, since A is not stored.
    """
    terms = A * b
    while (n := terms.shape[1]) > 1:
        num = min(_TERMS, n)
        terms = jnp.pad(terms, ((0, 0), (0, -n % num)))
        terms = functools.reduce(jnp.add, jnp.split(terms, num, axis=1))
    return terms[:, 0]
