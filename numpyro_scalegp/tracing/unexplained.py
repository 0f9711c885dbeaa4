"""The bound of sparse GPs, tightened by what inducing points leave unexplained.

Given its inducing values, f keeps the prior's variance u_i at each row in Titsias's bound of 2009.
With variances v_i u_i instead the divergence grows by sum (v_i - 1 - log v_i) / 2. For a Gaussian
likelihood of precision p_i the best v_i is 1 / (1 + p_i u_i), for each row by itself, and in place
of p_i u_i / 2 the bound loses log(1 + p_i u_i) / 2. For other likelihoods all rows have the same v,
a parameter, and the likelihood is integrated over the smaller variances.

References:
    Titsias (2025), New Bounds for Sparse Variational Gaussian Processes; Bui, Ashman and Turner
    (2025), Tighter Sparse Variational Gaussian Processes.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.ops.provenance import eval_provenance

from numpyro_scalegp.distributions.mini_batches import takes_part
from numpyro_scalegp.tracing.affine import Degree, degree
from numpyro_scalegp.tracing.likelihood import summed
from numpyro_scalegp.tracing.runs import Trace, flat_provenance, is_observed

Terms = Callable[..., dict[str, Array]]


def row_scales(trace: Trace) -> dict[str, Float[Array, "2"]]:
    """How many rows each row of an observed site may stand for: by its plates, and by its scale."""
    parts = {name: site["args"] for name, site in trace.items() if takes_part(site)}

    def scale(site: dict[str, Any]) -> Array:
        sizes = [parts[frame.name] for frame in site["cond_indep_stack"] if frame.name in parts]
        by_plates = math.prod(size / taken for size, taken in sizes)
        own = 1.0 if site["scale"] is None else site["scale"]
        return jnp.stack([jnp.asarray(by_plates, float), jnp.max(jnp.asarray(own, float))])

    return {name: scale(site) for name, site in trace.items() if is_observed(site)}


def tightened(
    terms: Terms,
    means: dict[str, Array],
    name: str,
    axes: tuple[int, ...],
    variances: list[Array],
    scales: dict[str, Float[Array, "2"]],
    own_scale: Any = None,
    shared: Float[Array, "*batch"] | None = None,
) -> tuple[list[Array], Float[Array, ""]]:
    """The variances that the likelihood sees, and what the rest of them costs.

    Args:
        terms: scaled log densities of the observed sites, given all functions.
        means: of all functions, by name, each of shape (*batch, n).
        name: of the function.
        axes: for each function of its plate, as of `additivity.function_axes`.
        variances: of what its inducing values decide, and what they leave unexplained, at each row.
        scales: of the observed sites, as `row_scales` gives them. The cost grows with the larger of
            the two, up to that of the untightened bound: one that is too large is safe.
        own_scale: of the function's site, whose divergence has it; None for 1.
        shared: by what the second variance of all rows is multiplied; None for 1.

    Returns:
        The first variance alone, and the whole cost of the second, where the likelihood is Gaussian
        in f and its precision independent of other functions; otherwise both, the second smaller,
        and what that costs.
    """

    def slope(functions: dict[str, Array]) -> Array:
        def total(f: Array) -> Array:
            return summed(terms(*({**functions, name: f}[one] for one in means)))

        return jax.grad(total)(functions[name])

    depends = eval_provenance(lambda **given: terms(*map(given.__getitem__, means)), **means)
    own = [site for site, origin in depends.items() if name in _names(origin)]
    if not own:
        return variances, jnp.zeros(())

    def of_function(functions: dict[str, Array]) -> list[Array]:
        found = terms(*map(functions.__getitem__, means))
        return [found[site] for site in own]

    inside, unexplained = variances
    factors = jnp.stack([jnp.asarray(1.0 if own_scale is None else own_scale), jnp.ones(())])
    weight = jnp.max(jnp.stack([scales[site] for site in own]) * factors).astype(inside.dtype)
    # Not by the slope, which of a step is zero.
    if degree(of_function, means) > Degree.QUADRATIC:
        scale = jnp.ones_like(inside) if shared is None else shared[..., None]
        cost = jnp.broadcast_to(scale - 1.0 - jnp.log(scale), inside.shape)
        return [inside, scale * unexplained], 0.5 * weight * jnp.sum(cost)
    # Terms of single rows, and functions of one axis are not combined: the sum of a row of the
    # Hessian over these is its diagonal.
    number = jnp.array(axes).reshape(*inside.shape[:-1], 1)
    others = {one: jnp.zeros_like(f) for one, f in means.items() if one != name}

    def on_axis(axis: Array) -> Array:
        own = jnp.broadcast_to(number == axis, inside.shape).astype(means[name].dtype)
        along = {one: own if one == name else others[one] for one in means}
        return own * jax.jvp(slope, (means,), (along,))[1]

    curvature = jnp.sum(jax.vmap(on_axis)(jnp.arange(max(axes) + 1)), axis=0)
    precision = jnp.maximum(-curvature, 0.0) / weight
    return [inside], 0.5 * jnp.sum(weight * jnp.log1p(precision * unexplained))


def _names(provenance: Any) -> frozenset[str]:
    return frozenset().union(*flat_provenance([provenance]))
