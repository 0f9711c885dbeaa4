"""The tighter bound of sparse GPs, with a variational conditional variance.

In the bound of Titsias (2009), f given its inducing values has the prior's conditional variance u_i
at row i. With the variance v_i u_i instead, the divergence grows by sum_i (v_i - 1 - log v_i) / 2.
For a Gaussian likelihood with precision p_i, the optimal v_i is 1 / (1 + p_i u_i), and the cost
p_i u_i / 2 in the bound becomes log(1 + p_i u_i) / 2. For other likelihoods all rows share a v,
which is a parameter, and the likelihood is integrated over the reduced variances.

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

from numpyro_scalegp.likelihoods.dependence import Axes, Degree, DependenceTable
from numpyro_scalegp.likelihoods.likelihood import summed
from numpyro_scalegp.sites.mini_batches import is_subsampled
from numpyro_scalegp.tracing.runs import Trace, is_observed

Terms = Callable[..., dict[str, Array]]


def row_scales(trace: Trace) -> dict[str, Float[Array, "2"]]:
    """The weight of each row of an observed site: by its subsampled plates, and by its scale."""
    plates = {name: site["args"] for name, site in trace.items() if is_subsampled(site)}

    def scale(site: dict[str, Any]) -> Array:
        sizes = [plates[frame.name] for frame in site["cond_indep_stack"] if frame.name in plates]
        by_plates = math.prod(size / subsample_size for size, subsample_size in sizes)
        by_scale = 1.0 if site["scale"] is None else site["scale"]
        return jnp.stack([jnp.asarray(by_plates, float), jnp.max(jnp.asarray(by_scale, float))])

    return {name: scale(site) for name, site in trace.items() if is_observed(site)}


def tightened(
    terms: Terms,
    means: dict[str, Array],
    name: str,
    table: DependenceTable,
    axes: Axes,
    variances: list[Array],
    scales: dict[str, Float[Array, "2"]],
    site_scale: Any = None,
    shared: Float[Array, "*batch"] | None = None,
) -> tuple[list[Array], Float[Array, ""]]:
    """The variances of f over which the likelihood is integrated, and the cost in the bound.

    Args:
        terms: scaled log densities of the observed sites, given all functions.
        means: means of all functions, by name, each of shape (*batch, n).
        name: the name of the function.
        table: how the terms depend on the functions.
        axes: the axis of each function of its plate, see `DependenceTable.axes`.
        variances: at each row, the variance through the inducing values, and the conditional
            variance given them.
        scales: scales of the observed sites, from `row_scales`. The cost grows with the larger of
            the two, up to the cost in the bound of 2009: so a scale that is too large is valid.
        site_scale: scale of the function's site, which multiplies its divergence; None for 1.
        shared: the factor v of the conditional variance, the same for all rows; None for 1.

    Returns:
        If the likelihood is Gaussian in f, with a precision independent of other functions: the
        first variance alone, and the cost of the second. Otherwise both variances, the second
        multiplied by `shared`, and the cost of this factor.
    """

    def gradient(functions: dict[str, Array]) -> Array:
        def total(f: Array) -> Array:
            return summed(terms(*({**functions, name: f}[key] for key in means)))

        return jax.grad(total)(functions[name])

    sites = [site for site in scales if name in table.functions_of(site)]
    if not sites:
        return variances, jnp.zeros(())

    explained, conditional = variances
    factors = jnp.stack([jnp.asarray(1.0 if site_scale is None else site_scale), jnp.ones(())])
    weight = jnp.max(jnp.stack([scales[site] for site in sites]) * factors).astype(explained.dtype)
    # By the degree, not by the gradient, which is zero for a step function.
    if table.of([table.terms[site] for site in sites]).degree > Degree.QUADRATIC:
        scale = jnp.ones_like(explained) if shared is None else shared[..., None]
        cost = jnp.broadcast_to(scale - 1.0 - jnp.log(scale), explained.shape)
        return [explained, scale * conditional], 0.5 * weight * jnp.sum(cost)
    # Terms depend on single rows and do not combine functions on the same axis: so the sum of a
    # Hessian's row over the entries on an axis is its diagonal entry.
    number = jnp.array(axes).reshape(*explained.shape[:-1], 1)
    zeros = {key: jnp.zeros_like(f) for key, f in means.items() if key != name}

    def on_axis(axis: Array) -> Array:
        mask = jnp.broadcast_to(number == axis, explained.shape).astype(means[name].dtype)
        tangent = {key: mask if key == name else zeros[key] for key in means}
        return mask * jax.jvp(gradient, (means,), (tangent,))[1]

    curvature = jnp.sum(jax.vmap(on_axis)(jnp.arange(max(axes) + 1)), axis=0)
    precision = jnp.maximum(-curvature, 0.0) / weight
    return [explained], 0.5 * jnp.sum(weight * jnp.log1p(precision * conditional))
