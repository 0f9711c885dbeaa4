"""Cosines and sines of many angles, several times faster than `jnp.cos` and `jnp.sin` on CPUs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.numerics.linalg import matmul

# cos(2 pi r) and sin(2 pi r) / r as polynomials in r^2 for |r| <= 1/2: Chebyshev fits of degree 6
# with errors of 2e-8, below the rounding of float32.
_COS = (
    0.999999989, -19.7392045, 64.9391175, -85.4501395, 60.167631, -25.9675992, 6.52865816,
)  # fmt: skip
_SIN = (
    6.2831853, -41.3417004, 81.6051314, -76.7030154, 42.025927, -14.8998467, 3.23813751,
)  # fmt: skip


def turns_of(
    X: Float[Array, "n d"],
    frequencies: Float[Array, "p d"],
    origin: Float[Array, " d"] | None = None,
) -> Float[Array, "n p"]:
    """Compute (X - origin) frequencies' up to whole turns.

    Without an origin, inputs may be arbitrarily far from zero: the phase of the first row is
    computed by exact products, from which whole turns are subtracted exactly; the phases of other
    rows differ from it by the product with their differences from the first row. With an origin,
    the error in each row does not depend on other rows.

    Args:
        X: inputs, shape (n, d).
        frequencies: in turns per unit of the inputs, shape (p, d), of the dtype of X.
        origin: the point where phases are zero, shape (d,); None for zero.

    Returns:
        Turns, shape (n, p). The error is `eps` times the spread of the phases over the rows, or
        times their distance from the origin if it is given, instead of times the phases. The cost
        is one product of an (n, d) matrix, as for the plain formula.
    """
    if origin is not None:
        return matmul(X - origin, frequencies.T)
    anchor = jax.lax.stop_gradient(X[:1])
    phase = matmul(anchor, frequencies.T)
    exact = jnp.sum(_exact_fractions(anchor[:, None, :], frequencies), axis=-1)
    # The value of `exact` with the derivative of `phase`.
    phase = jax.lax.stop_gradient(exact) + (phase - jax.lax.stop_gradient(phase))
    return matmul(X - anchor, frequencies.T) + phase


def _exact_fractions(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """The product x y up to whole turns, computed exactly from products of half the digits."""
    x, y = jax.lax.stop_gradient((x, y))
    kind = jnp.finfo(x.dtype)

    def split(value: Array) -> tuple[Array, Array]:
        high = jax.lax.reduce_precision(value, kind.nexp, (kind.nmant - 1) // 2)
        return high, value - high

    products = (_fraction(a * b) for a in split(x) for b in split(y))
    return _fraction(sum(products, jnp.zeros((), x.dtype)))


def cos_sin_of_turns(
    turns: Float[Array, "..."],
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Compute cos(2 pi t) and sin(2 pi t).

    Args:
        turns: t, angles in full turns.

    Returns:
        Cosines and sines, with the shape and dtype of `turns`. In float32 their error is at most
        1e-6, besides the effect of the error of `turns`.
    """
    fraction = _fraction(turns)
    if turns.dtype != jnp.float32:
        angle = 2.0 * jnp.pi * fraction
        return jnp.cos(angle), jnp.sin(angle)
    square = fraction * fraction
    return _polynomial(_COS, square), fraction * _polynomial(_SIN, square)


def cos_of_turns(turns: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute cos(2 pi t) alone; see `cos_sin_of_turns`."""
    fraction = _fraction(turns)
    if turns.dtype != jnp.float32:
        return jnp.cos(2.0 * jnp.pi * fraction)
    return _polynomial(_COS, fraction * fraction)


def _fraction(turns: Float[Array, "..."]) -> Float[Array, "..."]:
    """The signed distance to the nearest whole turn."""
    return turns - jax.lax.stop_gradient(jnp.round(turns))


def _polynomial(coefficients: tuple[float, ...], x: Float[Array, "..."]) -> Float[Array, "..."]:
    total = jnp.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
