"""A guide's chevron site, and how the model around it depends on its function."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf
from jaxtyping import Array, Float, Key
from numpyro import handlers
from numpyro.distributions import (
    BernoulliLogits,
    BinomialLogits,
    Distribution,
    ExpandedDistribution,
    Independent,
    Laplace,
    MaskedDistribution,
    Normal,
    Poisson,
)
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from numpyro_scalegp.core.quadrature import normal_nodes
from numpyro_scalegp.families import AbstractVariationalGP, ChevronGP, WeightSpaceGP
from numpyro_scalegp.families.same import one_if_same
from numpyro_scalegp.features.chevron import Views
from numpyro_scalegp.tracing.additivity import check_additive, standing_in
from numpyro_scalegp.tracing.elbo import Trace, common_scale, elbo_terms, mutable_values, summed
from numpyro_scalegp.tracing.likelihood import log_density, log_terms
from numpyro_scalegp.tracing.substitution import substituted

# Likelihoods whose logarithm is concave in f where this parameter is affine in it, or, of
# `Poisson`, the logarithm of its rate.
_LOG_CONCAVE = {
    BernoulliLogits: "logits",
    BinomialLogits: "logits",
    Laplace: "loc",
    Normal: "loc",
}


class Problem(NamedTuple):
    """A guide's chevron site and a model that has been run around it."""

    site: str
    q: ChevronGP
    p: WeightSpaceGP
    scale: Any  # of the site's divergence
    guide_trace: Trace
    model_trace: Trace  # at f = 0
    mutable: dict[str, Any]
    run: Callable[[Float[Array, " n"]], Trace]  # the model at other values of f

    def other_terms(self) -> Float[Array, ""]:
        """Minus the divergences of all other latent sites."""
        model_trace, guide_trace = (
            {
                name: site
                for name, site in trace.items()
                if name != self.site and not site.get("is_observed")
            }
            for trace in (self.model_trace, self.guide_trace)
        )
        return summed(elbo_terms(model_trace, guide_trace))

    def check_rows(self) -> None:
        """Raise where an observed site combines rows of f."""

        def terms(f: Array) -> dict[str, Array]:
            return {
                name: log_terms(site)
                for name, site in self.run(f).items()
                if site["type"] == "sample" and site["is_observed"]
            }

        check_additive(terms, self._at_zero(), self.site)

    def _at_zero(self) -> Float[Array, " n"]:
        dtype = jnp.result_type(self.q.X, *jax.tree.leaves(self.q.features.hyperparameters()))
        return jnp.zeros(self.q.X.shape[0], dtype)

    def _observed(self) -> list["_Observed"]:
        """Each observed site, with what of it depends on f.

        Raises:
            ValueError: if more than the laws of observed sites does.
        """

        def parts(f: Array) -> dict[str, Any]:
            return {
                name: {
                    **_parameters(site["fn"]),
                    _VALUE: site["value"] if site["is_observed"] else 0.0,
                    _SCALE: 1.0 if site["scale"] is None else site["scale"],
                }
                for name, site in self.run(f).items()
                if site["type"] == "sample" and name != self.site
            }

        provenance = eval_provenance(
            lambda f: jax.tree.map(jnp.asarray, parts(f)), f=self._at_zero()
        )
        found = []
        for name in self.model_trace:  # in the model's order, latent sites before what they explain
            if name not in provenance:
                continue
            depends = frozenset(
                key
                for key, leaves in provenance[name].items()
                if any("f" in one for one in flat_provenance(leaves))
            )
            site = self.model_trace[name]
            if depends and not site["is_observed"]:
                raise ValueError(
                    f"the law of the latent site `{name}` depends on the function `{self.site}`: "
                    "use `QuadratureELBO`."
                )
            if depends & {_VALUE, _SCALE}:
                raise ValueError(
                    f"the value or the scale of the observed site `{name}` depends on the function "
                    f"`{self.site}`: let its law alone depend on it, or use `QuadratureELBO`."
                )
            if site["is_observed"]:
                found.append(_Observed(name, site, *unwrapped(site["fn"]), depends))
        return found

    def _parameter(self, name: str, parameter: str) -> Callable[[Array], Array]:
        """A parameter of an observed site's law as a function of f."""
        return lambda f: jnp.asarray(getattr(unwrapped(self.run(f)[name]["fn"])[0], parameter))

    def _affine(self, observed: "_Observed", parameter: str) -> Callable[[Array], Array] | None:
        """That function, if it is affine and all else in the law does not depend on f."""
        if observed.depends != {parameter}:
            return None
        value, f = self._parameter(observed.name, parameter), self._at_zero()
        try:
            shape = jax.eval_shape(value, f)
            jax.linear_transpose(value, f)(jnp.zeros(shape.shape, shape.dtype))
        except Exception:  # whatever a non-linear operation raises when it is transposed
            return None
        return value

    def _is_log_affine(self, observed: "_Observed", parameter: str) -> bool:
        """Whether the logarithm of a parameter is affine in f, at a few places along two lines."""
        value = self._parameter(observed.name, parameter)
        evaluate = standing_in(lambda f: [jnp.log(value(f))], self._at_zero())
        ends = np.random.default_rng(0).uniform(-3.0, 3.0, (2, 2, *self.q.X.shape[:1]))
        for one, other in ends:
            (first,), (last,), (half,) = map(evaluate, (one, other, 0.5 * (one + other)))
            if not np.allclose(half, 0.5 * (first + last), rtol=1e-3, atol=1e-3):
                return False
        return True

    def gaussian(self, seen: Views) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """An unbiased estimate of E[log p(y | f)], and the sum of the rows' precisions.

        Raises:
            ValueError: if the likelihood is not Gaussian with a mean that is affine in f, or
                combines rows of it.
        """
        total, precision = jnp.zeros(()), jnp.zeros(())
        f = jnp.zeros(self.q.X.shape[0], seen.projected.dtype)
        for observed in self._observed():
            if not observed.depends:
                total += log_density(observed.site)
                continue
            fn = observed.fn
            mean = self._affine(observed, "loc") if isinstance(fn, Normal) else None
            if mean is None:
                raise ValueError(
                    f"the observed site `{observed.name}` is no Gaussian with a mean affine in f "
                    "and a scale that does not depend on it, so there is no unbiased estimate: "
                    'give `bound="strict"` for a log-concave likelihood, or use `QuadratureELBO`.'
                )
            at_zero, linear = jax.linearize(mean, f)
            parts = [jax.vmap(linear)(view.T) for view in seen.projected]
            i, j = parts[0], parts[-1]  # the same where the set has all features
            # What is masked may be NaN, which not even a derivative of zero would forgive.
            residual = jnp.where(observed.mask, observed.site["value"], at_zero) - at_zero
            product = (residual - i[0]) * (residual - j[0]) + jnp.sum(i[1:] * j[1:], axis=0)
            variance = jnp.maximum(jnp.mean(seen.diagonal, axis=0), jnp.finfo(f.dtype).tiny)
            product += jnp.square(linear(jnp.sqrt(variance)))
            terms = product / jnp.square(fn.scale) + 2.0 * jnp.log(fn.scale)
            total += observed.sum(-0.5 * (terms + math.log(2.0 * math.pi)))
            slope = linear(jnp.ones_like(f))
            precision += observed.sum(jnp.square(slope / fn.scale))
        self.check_rows()
        return total, precision

    def targets(self) -> Float[Array, " n"]:
        """What the first Gaussian site observes f as at each row, or zeros."""
        f = self._at_zero()
        for observed in self._observed():
            is_normal = isinstance(observed.fn, Normal)
            mean = self._affine(observed, "loc") if is_normal else None
            if mean is not None:
                at_zero, linear = jax.linearize(mean, f)
                targets = (observed.site["value"] - at_zero) / linear(jnp.ones_like(f))
                if targets.shape == f.shape:
                    return jnp.where(jnp.isfinite(targets), targets, 0.0)
        return f

    def bound(
        self,
        means: Float[Array, "sets n"],
        variances: Float[Array, "sets n"],
        num_nodes: int,
        declared: tuple[str, ...],
    ) -> Float[Array, ""]:
        """The mean over sets of E[log p(y | f)] for f ~ N(means, variances).

        Raises:
            ValueError: if a likelihood is not known to be log-concave, or combines rows of f.
        """
        nodes, masses = normal_nodes(num_nodes)
        weights = jnp.asarray(masses, means.dtype)
        scales = jnp.sqrt(jnp.maximum(variances, jnp.finfo(variances.dtype).tiny))
        total = jnp.zeros(())
        by_quadrature = []
        for observed in self._observed():
            if not observed.depends:
                total += log_density(observed.site)
                continue
            parameter = _LOG_CONCAVE.get(type(observed.fn))
            affine = None if parameter is None else self._affine(observed, parameter)
            concave = affine is not None
            if isinstance(observed.fn, Poisson):
                concave = observed.depends == {"rate"} and self._is_log_affine(observed, "rate")
            if observed.name not in declared and not concave:
                raise ValueError(
                    f"the observed site `{observed.name}`, a `{type(observed.fn).__name__}`, is "
                    "not known to be log-concave in f: name it in `log_concave` if it is, or use "
                    "`QuadratureELBO`."
                )
            if isinstance(observed.fn, Laplace) and affine is not None:
                total += observed.sum(_laplace(observed, affine, means, scales))
            else:
                by_quadrature.append(observed.name)
        self.check_rows()
        if not by_quadrature:
            return total

        def at(f: Array) -> Array:
            trace = self.run(f)
            return sum((log_density(trace[name]) for name in by_quadrature), jnp.zeros(()))

        places = jnp.asarray(nodes, means.dtype)
        points = means[:, None] + places[:, None] * scales[:, None]
        values = jax.vmap(jax.vmap(at))(points)
        return total + jnp.mean(values @ weights)


# Beside the parameters of a site's law, what else of it may depend on f.
_VALUE, _SCALE = "the value", "the scale of the site"


class _Observed(NamedTuple):
    """An observed site."""

    name: str
    site: dict[str, Any]
    fn: Distribution  # without wrappers
    mask: Any
    depends: frozenset[str]  # parameters of the law that depend on f

    def sum(self, terms: Array) -> Float[Array, ""]:
        """The sum over all entries of the law, scaled and masked."""
        weight = 1.0 if self.site["scale"] is None else self.site["scale"]
        whole = jnp.broadcast_to(terms, self.site["fn"].shape())
        return jnp.sum(jnp.where(self.mask, weight * whole, 0.0))


def _laplace(
    observed: _Observed,
    location: Callable[[Array], Array],
    means: Float[Array, "sets n"],
    scales: Float[Array, "sets n"],
) -> Array:
    """E[-log 2b - |y - f| / b] in closed form, averaged over sets."""
    at_zero, linear = jax.linearize(location, jnp.zeros_like(means[0]))
    b = observed.fn.scale
    value = jnp.where(observed.mask, observed.site["value"], at_zero)
    centre = value - at_zero - jax.vmap(linear)(means)
    # Where f does not enter at all, the ratio below stays finite.
    scale = jnp.maximum(jnp.abs(jax.vmap(linear)(scales)), 1e-6 * b)
    ratio = centre / scale
    distance = scale * math.sqrt(2.0 / math.pi) * jnp.exp(-0.5 * jnp.square(ratio))
    distance += centre * erf(ratio / math.sqrt(2.0))
    return jnp.mean(-jnp.log(2.0 * b) - distance / b, axis=0)


def unwrapped(fn: Distribution) -> tuple[Distribution, Any]:
    """The distribution within expansions, masks and independent dimensions, and the mask."""
    mask: Any = True
    while isinstance(fn, ExpandedDistribution | Independent | MaskedDistribution):
        if isinstance(fn, MaskedDistribution):
            own = jnp.asarray(fn._mask)
            mask = mask & own.reshape(own.shape + (1,) * (fn.event_dim if own.ndim else 0))
        fn = fn.base_dist
    return fn, mask


def _parameters(fn: Distribution) -> dict[str, Any]:
    """The parameters of a law by name, as far as they have one."""
    fn, mask = unwrapped(fn)
    named = {name: getattr(fn, name) for name in fn.arg_constraints if name in vars(fn)}
    known = {id(leaf) for leaf in jax.tree.leaves(named)}
    rest = [leaf for leaf in jax.tree.leaves(fn) if id(leaf) not in known]
    return {**named, "its other parameters": rest, "its mask": mask}


def flat_provenance(leaves: Any) -> list[Any]:
    """The sets of names that `eval_provenance` gives."""
    return jax.tree.leaves(leaves, is_leaf=lambda one: isinstance(one, frozenset))


class Stopped(Messenger):
    """Stands in for the guide's function sites, without their moments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, AbstractVariationalGP] = {}

    def __enter__(self) -> "Stopped":
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        """Note the family and put zeros in the place of a draw."""
        if msg["type"] == "sample" and isinstance(msg["fn"], AbstractVariationalGP):
            self.found[msg["name"]] = msg["fn"]
            msg["value"] = jnp.zeros(msg["fn"].shape(), msg["fn"].X.dtype)


def find_family(
    params: dict[str, Any],
    guide: Callable,
    key: Key[Array, ""],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[str, ChevronGP, Trace]:
    """Run the guide without the moments of its function site; its name, its family, the trace.

    Raises:
        ValueError: if the guide's GP sites are not one `ChevronGP`.
    """
    with Stopped() as stopped:
        seeded = substituted(handlers.seed(guide, key), params)
        guide_trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    kinds = {name: type(fn).__name__ for name, fn in stopped.found.items()}
    if list(kinds.values()) != ["ChevronGP"]:
        raise ValueError(
            "`QuadruplyStochasticELBO` needs a guide with one GP site, a `ChevronGP`, such as "
            f"`AutoChevronGP`; got {kinds or 'none'}."
        )
    ((name, q),) = stopped.found.items()
    return name, q, guide_trace


def trace_problem(
    params: dict[str, Any],
    model: Callable,
    guide: Callable,
    guide_key: Key[Array, ""],
    model_key: Key[Array, ""],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Problem:
    """Run the guide, and the model at what it draws, around a chevron site.

    Raises:
        ValueError: if the guide's GP sites are not one `ChevronGP`.
    """
    name, q, guide_trace = find_family(params, guide, guide_key, args, kwargs)
    given = {**params, **mutable_values(guide_trace)}

    def run(f: Array) -> Trace:
        trace = {**guide_trace, name: {**guide_trace[name], "value": f}}
        replayed = handlers.replay(handlers.seed(model, model_key), trace)
        return handlers.trace(substituted(replayed, given)).get_trace(*args, **kwargs)

    model_trace = run(jnp.zeros_like(q.X[:, 0]))
    p = model_trace[name]["fn"]
    same = one_if_same("features", q.features, p.features)
    scale = common_scale(guide_trace[name], model_trace[name])
    mutable = {**mutable_values(guide_trace), **mutable_values(model_trace)}
    return Problem(
        name, q, p, same if scale is None else same * scale, guide_trace, model_trace, mutable, run
    )
