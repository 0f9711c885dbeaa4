"""Mixtures of normal distributions, with quantiles."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import ndtr, ndtri
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core.derivatives import lasting_jvp


class NormalMixture(dist.MixtureSameFamily):
    """A mixture of normal distributions, one for each of a batch of entries.

    As NumPyro's `MixtureSameFamily`, with `icdf` besides.

    Args:
        weights: of the components, a `Categorical` of batch shape (*batch,).
        components: the normal distributions, of batch shape (*batch, S).
    """

    def icdf(self, q: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The quantiles, at which the distribution function is q.

        By bisection between the smallest and the largest quantile of a component, in the tail that
        is nearer, so that small probabilities of both ends count; to rounding, in about 30 steps in
        float32 and 60 in float64, each O(S) an entry. With derivatives in q and the components.

        Args:
            q: probabilities, of a shape that broadcasts with (*batch,).

        Returns:
            Quantiles; infinite for 0 and 1, and NaN where q is no probability.
        """
        normal = self.component_distribution
        q = jnp.asarray(q, jnp.result_type(q, normal.loc))
        return _program(q, self.mixing_distribution.probs, normal.loc, normal.scale)


@jax.jit
def _program(*arguments: Array) -> Array:
    """Outside of compiled code one compilation, in place of one for the loop of each call."""
    return _quantiles(*arguments)


def _distances(
    x: Float[Array, "..."], loc: Float[Array, "... S"], scale: Float[Array, "... S"]
) -> Float[Array, "... S"]:
    """How far values are above the means of the components, in their deviations."""
    gap = x[..., None] - loc
    is_spread = scale > 0
    return jnp.where(
        is_spread, gap / jnp.where(is_spread, scale, 1.0), jnp.where(gap < 0, -jnp.inf, jnp.inf)
    )


@lasting_jvp
def _quantiles(
    q: Float[Array, "..."],
    weights: Float[Array, "... S"],
    loc: Float[Array, "... S"],
    scale: Float[Array, "... S"],
) -> Float[Array, "..."]:
    # The upper tail is the lower one of the mirrored mixture, and 1 - q is exact there.
    sign = jnp.where(q > 0.5, -1.0, 1.0).astype(loc.dtype)
    p = jnp.where(q > 0.5, 1.0 - q, q)
    loc = sign[..., None] * loc
    ends = loc + jnp.where(scale > 0, scale * ndtri(p)[..., None], 0.0)
    least = jnp.min(scale, axis=-1)
    eps = jnp.finfo(ends.dtype).eps

    def is_open(bracket: tuple[Array, Array]) -> Array:
        low, high = bracket
        size = jnp.maximum(jnp.maximum(jnp.abs(low), jnp.abs(high)), least)
        middle = 0.5 * (low + high)
        return jnp.any((high - low > eps * size) & (low < middle) & (middle < high))

    def halve(bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        is_above = jnp.sum(weights * ndtr(_distances(middle, loc, scale)), axis=-1) >= p
        return jnp.where(is_above, low, middle), jnp.where(is_above, middle, high)

    bracket = jnp.min(ends, axis=-1), jnp.max(ends, axis=-1)
    return sign * jax.lax.while_loop(is_open, halve, bracket)[1]


@_quantiles.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    """From F(x) = q: dx = (dq - dF) / F', with dF at a fixed x."""
    (q, weights, loc, scale), (dq, *others) = primals, tangents
    x = _quantiles(q, weights, loc, scale)

    def lower_tail(weights: Array, loc: Array, scale: Array) -> Array:
        return jnp.sum(weights * ndtr(_distances(x, loc, scale)), axis=-1)

    change = jax.jvp(lower_tail, (weights, loc, scale), tuple(others))[1]
    densities = jnp.exp(-0.5 * jnp.square(_distances(x, loc, scale))) / (2.0 * jnp.pi) ** 0.5
    return x, (dq - change) / jnp.sum(weights * densities / scale, axis=-1)
