"""How a likelihood depends on the function, and its expectation under sets of features."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import erf
from jaxtyping import Array, Float
from numpyro.distributions import BernoulliLogits, BinomialLogits, Laplace, Normal, Poisson
from numpyro.ops.provenance import eval_provenance

from numpyro_scalegp.core.additivity import affine_names, check_additive
from numpyro_scalegp.core.quadrature import normal_expectation, product_nodes
from numpyro_scalegp.features.chevron import Views
from numpyro_scalegp.quadruply_stochastic.problem import Observed, Problem
from numpyro_scalegp.tracing.runs import flat_provenance

# Likelihoods whose logarithm is concave in f where this parameter is affine in it, or, of
# `Poisson`, the logarithm of its rate.
_LOG_CONCAVE = {
    BernoulliLogits: "logits",
    BinomialLogits: "logits",
    Laplace: "loc",
    Normal: "loc",
    Poisson: "rate",
}


class Dependence(NamedTuple):
    """How an observed site depends on f."""

    affine: str | None  # the one parameter that depends on it, if it does so affinely
    log_concave: bool


def analyzed(problem: Problem) -> dict[str, Dependence]:
    """How the observed sites that depend on f do so, by name.

    It runs on the host, once where a step is compiled.

    Raises:
        ValueError: if more than the distributions of observed sites depends on f, or one of these
            combines rows of it.
    """
    found = {}
    for name, depends in _dependences(problem).items():
        kind = problem.kinds[name].distribution
        parameter = _LOG_CONCAVE.get(kind)
        affine = parameter is not None and depends == {parameter}
        if affine:

            def value(f: Array, name: str = name, parameter: Any = parameter) -> dict[str, Array]:
                value = jnp.asarray(problem.around(f).observed[name].parameters[parameter])
                return {name: jnp.log(value) if parameter == "rate" else value}

            # A rate is the exponential of what should be affine, which large f would overflow.
            scales = (1.0, -3.0) if kind is Poisson else None
            affine = bool(affine_names(value, problem.zero, scales))
        found[name] = Dependence(parameter if affine and kind is not Poisson else None, affine)

    def terms(f: Array) -> dict[str, Array]:
        observed = problem.around(f).observed
        return {name: observed[name].terms for name in found}

    check_additive(terms, problem.zero, problem.site)
    return found


def _dependences(problem: Problem) -> dict[str, set[str]]:
    """Of each observed site that depends on f, the parameters that do.

    Raises:
        ValueError: if more than the distributions of observed sites does.
    """

    def parts(f: Array) -> tuple[dict[str, Observed], dict[str, Any]]:
        around = problem.around(f)
        return around.observed, around.latent

    observed, latent = eval_provenance(parts, f=problem.zero)
    for name, leaves in latent.items():
        if _depends(leaves):
            raise ValueError(
                f"the distribution of the latent site `{name}` depends on the function "
                f"`{problem.site}`: use `QuadratureELBO`."
            )
    found = {}
    for name in problem.kinds:
        site = observed[name]
        if _depends((site.value, site.scale)):
            raise ValueError(
                f"the value or the scale of the observed site `{name}` depends on the function "
                f"`{problem.site}`: let its distribution alone depend on it, or use "
                "`QuadratureELBO`."
            )
        parts_of_it = {**site.parameters, "its mask": site.mask}
        if depends := {key for key, leaves in parts_of_it.items() if _depends(leaves)}:
            found[name] = depends
    return found


def _depends(leaves: object) -> bool:
    return any("f" in names for names in flat_provenance(leaves))


def _linearized(
    problem: Problem, name: str, parameter: str, f: Float[Array, " n"]
) -> tuple[Array, Callable[[Array], Array]]:
    """A parameter that is affine in f: its value at zero, and the linear part."""

    def value(f: Array) -> Array:
        return jnp.asarray(problem.around(f).observed[name].parameters[parameter])

    return jax.linearize(value, f)


def gaussian(
    problem: Problem, likelihood: dict[str, Dependence], seen: Views
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """An unbiased estimate of E[log p(y | f)], and the sum of the rows' precisions.

    Raises:
        ValueError: if the likelihood is not Gaussian with a mean that is affine in f.
    """
    total, precision = jnp.zeros(()), jnp.zeros(())
    f = problem.zero
    for name, kind in problem.kinds.items():
        site = problem.at_zero.observed[name]
        if name not in likelihood:
            total += jnp.sum(site.terms)
            continue
        affine = likelihood[name].affine
        if kind.distribution is not Normal or affine is None:
            raise ValueError(
                f"the observed site `{name}` is no Gaussian with a mean affine in f "
                "and a scale that does not depend on it, so there is no unbiased estimate: "
                'give `bound="strict"` for a log-concave likelihood, or use `QuadratureELBO`.'
            )
        at_zero, linear = _linearized(problem, name, affine, f)
        parts = [jax.vmap(linear)(view.T) for view in seen.projected]
        i, j = parts[0], parts[-1]  # the same where the set has all features
        # What is masked may be NaN, which not even a derivative of zero would forgive.
        residual = jnp.where(site.mask, site.value, at_zero) - at_zero
        product = (residual - i[0]) * (residual - j[0]) + jnp.sum(i[1:] * j[1:], axis=0)
        variance = jnp.maximum(jnp.mean(seen.diagonal, axis=0), jnp.finfo(f.dtype).tiny)
        product += jnp.square(linear(jnp.sqrt(variance)))
        scale = site.parameters["scale"]
        terms = product / jnp.square(scale) + 2.0 * jnp.log(scale)
        total += site.sum(-0.5 * (terms + math.log(2.0 * math.pi)), kind.shape)
        precision += site.sum(jnp.square(linear(jnp.ones_like(f)) / scale), kind.shape)
    return total, precision


def targets(problem: Problem, likelihood: dict[str, Dependence]) -> Float[Array, " n"]:
    """What the first Gaussian site observes f as at each row, or zeros."""
    f = problem.zero
    for name, kind in problem.kinds.items():
        affine = likelihood[name].affine if name in likelihood else None
        if kind.distribution is Normal and affine is not None:
            at_zero, linear = _linearized(problem, name, affine, f)
            found = (problem.at_zero.observed[name].value - at_zero) / linear(jnp.ones_like(f))
            if found.shape == f.shape:
                return jnp.where(jnp.isfinite(found), found, 0.0)
    return f


def bound(
    problem: Problem,
    likelihood: dict[str, Dependence],
    means: Float[Array, "sets n"],
    variances: Float[Array, "sets n"],
    num_nodes: int,
    declared: tuple[str, ...],
) -> Float[Array, ""]:
    """The mean over sets of E[log p(y | f)] for f ~ N(means, variances).

    Raises:
        ValueError: if a likelihood is not known to be log-concave.
    """
    total = jnp.zeros(())
    by_quadrature = []
    for name, kind in problem.kinds.items():
        site = problem.at_zero.observed[name]
        if name not in likelihood:
            total += jnp.sum(site.terms)
            continue
        affine, log_concave = likelihood[name]
        if name not in declared and not log_concave:
            raise ValueError(
                f"the observed site `{name}`, a `{kind.distribution.__name__}`, is not known to be "
                "log-concave in f: name it in `log_concave` if it is, or use `QuadratureELBO`."
            )
        if kind.distribution is Laplace and affine is not None:
            at_zero, linear = _linearized(problem, name, affine, problem.zero)
            scales = jnp.sqrt(jnp.maximum(variances, jnp.finfo(variances.dtype).tiny))
            of_sets = jax.vmap(linear)(means), jax.vmap(linear)(scales)
            total += site.sum(_laplace(site, at_zero, *of_sets), kind.shape)
        else:
            by_quadrature.append(name)
    if not by_quadrature:
        return total

    nodes = product_nodes(num_nodes)

    def at(f: Array) -> Array:
        observed = problem.around(f).observed
        return sum((jnp.sum(observed[name].terms) for name in by_quadrature), jnp.zeros(()))

    def of_set(mean: Array, variance: Array) -> Array:
        return normal_expectation(at, [(mean, variance)], nodes)

    return total + jnp.mean(jax.vmap(of_set)(means, variances))


def _laplace(
    site: Observed,
    at_zero: Array,
    means: Float[Array, "sets *shape"],
    deviations: Float[Array, "sets *shape"],
) -> Array:
    """E[-log 2b - |y - f| / b] in closed form, averaged over sets."""
    b = site.parameters["scale"]
    center = jnp.where(site.mask, site.value, at_zero) - at_zero - means
    # Where f does not enter at all, the ratio below stays finite.
    scale = jnp.maximum(jnp.abs(deviations), 1e-6 * b)
    ratio = center / scale
    distance = scale * math.sqrt(2.0 / math.pi) * jnp.exp(-0.5 * jnp.square(ratio))
    distance += center * erf(ratio / math.sqrt(2.0))
    return jnp.mean(-jnp.log(2.0 * b) - distance / b, axis=0)
