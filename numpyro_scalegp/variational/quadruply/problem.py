"""A guide's chevron site, and the model as a function of f."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key
from numpyro.distributions import Distribution

from numpyro_scalegp.likelihoods.elbo import common_scale, elbo_terms
from numpyro_scalegp.likelihoods.likelihood import log_terms, summed
from numpyro_scalegp.sites.mini_batches import is_subsampled
from numpyro_scalegp.sites.rows import unwrapped
from numpyro_scalegp.tracing.runs import (
    Trace,
    TracedProgram,
    is_latent,
    is_observed,
    mutable_values,
    traced,
)
from numpyro_scalegp.tracing.sites import StandIn
from numpyro_scalegp.variational.quadruply.chevron import ChevronGP
from numpyro_scalegp.variational.quadruply.weight_space import WeightSpaceGP
from numpyro_scalegp.variational.same import one_if_same


class Observed(NamedTuple):
    """An observed site at a value of f, as a pytree of arrays."""

    parameters: dict[str, Any]  # of its distribution, without wrappers
    mask: Any
    value: Any
    scale: Any
    terms: Array  # its log density, scaled

    def sum(self, terms: Array, shape: tuple[int, ...]) -> Float[Array, ""]:
        """The scaled and masked sum over all entries of the site, which has this shape."""
        scaled = self.scale * jnp.broadcast_to(terms, shape)
        return jnp.sum(jnp.where(self.mask, scaled, 0.0))


class Kind(NamedTuple):
    """The static properties of an observed site."""

    distribution: type[Distribution]  # without wrappers
    shape: tuple[int, ...]


class ModelAt(NamedTuple):
    """A model at a value of f, as a pytree of arrays."""

    observed: dict[str, Observed]
    latent: dict[str, Any]  # parameters of the other latent sites' distributions
    other_terms: Float[Array, ""]  # minus the divergences of the other latent sites
    prior: WeightSpaceGP
    scale: Float[Array, ""]  # of the site's divergence
    mutable: dict[str, Any]


class Problem(NamedTuple):
    """A guide's chevron site and the model, traced once as a function of f."""

    site: str
    q: ChevronGP
    model_at: TracedProgram  # from values of f to a `ModelAt`
    zero: Float[Array, " n"]  # f = 0
    at_zero: ModelAt
    kinds: dict[str, "Kind"]  # of the observed sites, in the model's order
    is_mini_batch: bool  # whether a plate of the model draws a mini-batch

    @property
    def p(self) -> WeightSpaceGP:
        """The model's prior."""
        return self.at_zero.prior


def _kind(site: dict[str, Any]) -> Kind:
    return Kind(type(unwrapped(site["fn"]).distribution), tuple(site["fn"].shape()))


def _observed(site: dict[str, Any]) -> Observed:
    parameters, mask, scale = _drawn_from(site)
    return Observed(parameters, mask, site["value"], scale, log_terms(site))


def _drawn_from(site: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """The parameters of a site's distribution, by name if they have one; mask and scale."""
    fn, _, mask = unwrapped(site["fn"])
    named = {name: getattr(fn, name) for name in fn.arg_constraints if name in vars(fn)}
    named_leaves = {id(leaf) for leaf in jax.tree.leaves(named)}
    unnamed = [leaf for leaf in jax.tree.leaves(fn) if id(leaf) not in named_leaves]
    scale = 1.0 if site["scale"] is None else site["scale"]
    return {**named, "its other parameters": unnamed}, mask, scale


def find_family(
    params: dict[str, Any],
    guide: Callable,
    key: Key[Array, ""],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[str, ChevronGP, Trace]:
    """Run the guide without moments of f; return the site's name, its family and the trace.

    Raises:
        ValueError: if the guide's GP sites are not one `ChevronGP`.
    """
    with StandIn() as sites:
        guide_trace = traced(guide, key, params, args, kwargs)
    kinds = {name: type(family).__name__ for name, family in sites.families.items()}
    if list(kinds.values()) != ["ChevronGP"]:
        raise ValueError(
            "`QuadruplyStochasticELBO` needs a guide with one GP site, a `ChevronGP`, such as "
            f"`AutoChevronGP`; got {kinds or 'none'}."
        )
    ((name, q),) = sites.families.items()
    return name, q, guide_trace


def trace_problem(
    params: dict[str, Any],
    model: Callable,
    guide: Callable,
    keys: Key[Array, "2"],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Problem:
    """Run the guide, and trace the model at the guide's draws as a function of f.

    Args:
        params: values of parameters and mutable sites.
        model: the model.
        guide: the guide.
        keys: one for the guide, one for the model.
        args: positional arguments of both.
        kwargs: keyword arguments of both.

    Raises:
        ValueError: if the guide's GP sites are not one `ChevronGP`.
    """
    name, q, guide_trace = find_family(params, guide, keys[0], args, kwargs)
    values = {**params, **mutable_values(guide_trace)}
    kinds: dict[str, Kind] = {}
    mini_batches: list[str] = []

    def model_at(f: Array) -> ModelAt:
        at_f = {**guide_trace, name: {**guide_trace[name], "value": f}}
        trace = traced(model, keys[1], values, args, kwargs, replayed=at_f)
        mini_batches.extend(name for name, site in trace.items() if is_subsampled(site))
        kinds.update({key: _kind(site) for key, site in trace.items() if is_observed(site)})
        of_model, of_guide = (
            {key: site for key, site in sites.items() if key != name and not is_observed(site)}
            for sites in (trace, guide_trace)
        )
        scale = common_scale(guide_trace[name], trace[name])
        p = trace[name]["fn"]
        same = one_if_same("features", q.features, p.features)
        return ModelAt(
            {key: _observed(trace[key]) for key in kinds},
            {key: _drawn_from(site) for key, site in of_model.items() if is_latent(site)},
            summed(elbo_terms(of_model, of_guide)),
            p,
            same if scale is None else same * scale,
            {**mutable_values(guide_trace), **mutable_values(trace)},
        )

    of_f = q.X, q.features.hyperparameters(), q.loc, q.scale_diag, q.scale_columns
    zero = jnp.zeros(q.X.shape[0], jnp.result_type(*jax.tree.leaves(of_f)))
    run = TracedProgram(model_at, zero)
    return Problem(name, q, run, zero, run(zero), kinds, bool(mini_batches))
