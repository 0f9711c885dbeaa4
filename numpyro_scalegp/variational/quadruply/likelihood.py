"""How a likelihood depends on the function, and its expectation under sets of features."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import erf
from jaxtyping import Array, Float
from numpyro.distributions import (
    BernoulliLogits,
    BinomialLogits,
    Distribution,
    Laplace,
    Normal,
    Poisson,
)

from numpyro_scalegp.likelihoods.dependence import Degree, Dependence, DependenceTable
from numpyro_scalegp.likelihoods.quadrature import normal_expectation, product_nodes
from numpyro_scalegp.numerics.rounding import at_least
from numpyro_scalegp.variational.quadruply.chevron_features import SetProjections
from numpyro_scalegp.variational.quadruply.problem import Observed, Problem

# Likelihoods whose logarithm is concave in f if this parameter is affine in f, or for `Poisson` if
# the logarithm of the rate is.
_LOG_CONCAVE = {
    BernoulliLogits: "logits",
    BinomialLogits: "logits",
    Laplace: "loc",
    Normal: "loc",
    Poisson: "rate",
}


class ObservedLikelihood(NamedTuple):
    """How the likelihood of an observed site depends on f."""

    affine: str | None  # the only parameter that depends on f, if it is affine in f
    log_concave: bool


def analyzed(problem: Problem) -> dict[str, ObservedLikelihood]:
    """The likelihoods of the observed sites that depend on f, by name.

    The analysis runs on the host, once when a step is compiled.

    Raises:
        ValueError: if anything but the distributions of observed sites depends on f, or one of
            these combines several function values.
    """
    variables = problem.model_at.variables()
    terms = {name: variables.observed[name].terms for name in problem.kinds}
    table = DependenceTable(problem.model_at, terms, [problem.site])
    for name, leaves in variables.latent.items():
        if table.of(leaves).degree:
            raise ValueError(
                f"the distribution of the latent site `{name}` depends on the function "
                f"`{problem.site}`: use `QuadratureELBO`."
            )
    likelihoods = {}
    for name, kind in problem.kinds.items():
        site = variables.observed[name]
        if table.of((site.value, site.scale)).degree:
            raise ValueError(
                f"the value or the scale of the observed site `{name}` depends on the function "
                f"`{problem.site}`: let its distribution alone depend on it, or use "
                "`QuadratureELBO`."
            )
        leaves = {**site.parameters, "its mask": site.mask}
        dependences = {key: table.of(leaf) for key, leaf in leaves.items()}
        depends = {key: value for key, value in dependences.items() if value.degree}
        if depends:
            likelihoods[name] = _of_site(kind.distribution, depends)
    table.check_additive()
    return likelihoods


def _of_site(
    distribution: type[Distribution], depends: dict[str, Dependence]
) -> ObservedLikelihood:
    parameter = _LOG_CONCAVE.get(distribution)
    if parameter is None or depends.keys() != {parameter}:
        return ObservedLikelihood(None, False)
    of_logarithm = distribution is Poisson
    dependence = depends[parameter]
    degree = dependence.log_degree if of_logarithm else dependence.degree
    log_concave = degree <= Degree.AFFINE
    return ObservedLikelihood(None if of_logarithm or not log_concave else parameter, log_concave)


def _linearized(
    problem: Problem, name: str, parameter: str, f: Float[Array, " n"]
) -> tuple[Array, Callable[[Array], Array]]:
    """The value at f of a parameter that is affine in f, and its linear map."""

    def value(f: Array) -> Array:
        return jnp.asarray(problem.model_at(f).observed[name].parameters[parameter])

    return jax.linearize(value, f)


def gaussian(
    problem: Problem, likelihood: dict[str, ObservedLikelihood], of_sets: SetProjections
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """An unbiased estimate of E[log p(y | f)], and the sum of the observations' precisions.

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
                f"the observed site `{name}` is not a Gaussian with a mean affine in f "
                "and a scale that does not depend on it, so there is no unbiased estimate: "
                'give `bound="strict"` for a log-concave likelihood, or use `QuadratureELBO`.'
            )
        at_zero, linear = _linearized(problem, name, affine, f)
        projected = [jax.vmap(linear)(of_set.T) for of_set in of_sets.projected]
        i, j = projected[0], projected[-1]  # the same for one set of all features
        # Masked values may be NaN, and would make the gradient NaN.
        residual = jnp.where(site.mask, site.value, at_zero) - at_zero
        product = (residual - i[0]) * (residual - j[0]) + jnp.sum(i[1:] * j[1:], axis=0)
        variance = at_least(jnp.mean(of_sets.diagonal, axis=0), jnp.finfo(f.dtype).tiny)
        product += jnp.square(linear(jnp.sqrt(variance)))
        scale = site.parameters["scale"]
        terms = product / jnp.square(scale) + 2.0 * jnp.log(scale)
        total += site.sum(-0.5 * (terms + math.log(2.0 * math.pi)), kind.shape)
        precision += site.sum(jnp.square(linear(jnp.ones_like(f)) / scale), kind.shape)
    return total, precision


def targets(problem: Problem, likelihood: dict[str, ObservedLikelihood]) -> Float[Array, " n"]:
    """Observations of f at each input by the first Gaussian site, or zeros."""
    f = problem.zero
    for name, kind in problem.kinds.items():
        affine = likelihood[name].affine if name in likelihood else None
        if kind.distribution is Normal and affine is not None:
            at_zero, linear = _linearized(problem, name, affine, f)
            values = (problem.at_zero.observed[name].value - at_zero) / linear(jnp.ones_like(f))
            if values.shape == f.shape:
                return jnp.where(jnp.isfinite(values), values, 0.0)
    return f


def bound(
    problem: Problem,
    likelihood: dict[str, ObservedLikelihood],
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
            scales = jnp.sqrt(at_least(variances, jnp.finfo(variances.dtype).tiny))
            of_sets = jax.vmap(linear)(means), jax.vmap(linear)(scales)
            total += site.sum(_laplace(site, at_zero, *of_sets), kind.shape)
        else:
            by_quadrature.append(name)
    if not by_quadrature:
        return total

    nodes = product_nodes(num_nodes)

    def log_likelihood(f: Array) -> Array:
        observed = problem.model_at(f).observed
        return sum((jnp.sum(observed[name].terms) for name in by_quadrature), jnp.zeros(()))

    def of_set(mean: Array, variance: Array) -> Array:
        return normal_expectation(log_likelihood, [(mean, variance)], nodes)

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
    # The ratio below stays finite even for observations that do not depend on f.
    scale = jnp.maximum(jnp.abs(deviations), 1e-6 * b)
    ratio = center / scale
    distance = scale * math.sqrt(2.0 / math.pi) * jnp.exp(-0.5 * jnp.square(ratio))
    distance += center * erf(ratio / math.sqrt(2.0))
    return jnp.mean(-jnp.log(2.0 * b) - distance / b, axis=0)
