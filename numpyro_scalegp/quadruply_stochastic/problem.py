"""A guide's chevron site, and the model around it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key
from numpyro.distributions import Distribution

from numpyro_scalegp.distributions.mini_batches import takes_part
from numpyro_scalegp.distributions.rows import unwrapped
from numpyro_scalegp.families import ChevronGP, WeightSpaceGP
from numpyro_scalegp.families.same import one_if_same
from numpyro_scalegp.tracing.elbo import common_scale, elbo_terms
from numpyro_scalegp.tracing.likelihood import log_terms, summed
from numpyro_scalegp.tracing.runs import (
    Staged,
    Trace,
    is_latent,
    is_observed,
    mutable_values,
    traced,
)
from numpyro_scalegp.tracing.sites import StandIn


class Observed(NamedTuple):
    """An observed site at some f; a tree of arrays."""

    parameters: dict[str, Any]  # of its distribution, without wrappers
    mask: Any
    value: Any
    scale: Any
    terms: Array  # its log density, scaled

    def sum(self, terms: Array, shape: tuple[int, ...]) -> Float[Array, ""]:
        """The sum over all entries of the site, whose shape is given, scaled and masked."""
        whole = jnp.broadcast_to(terms, shape)
        return jnp.sum(jnp.where(self.mask, self.scale * whole, 0.0))


class Kind(NamedTuple):
    """What is known of an observed site without its values."""

    distribution: type[Distribution]  # without wrappers
    shape: tuple[int, ...]


class Around(NamedTuple):
    """A model around some f; a tree of arrays."""

    observed: dict[str, Observed]
    latent: dict[str, Any]  # what the other latent sites are drawn from
    other_terms: Float[Array, ""]  # minus the divergences of these
    prior: WeightSpaceGP
    scale: Float[Array, ""]  # of the site's divergence
    mutable: dict[str, Any]


class Problem(NamedTuple):
    """A guide's chevron site and a model that has been run around it, once."""

    site: str
    q: ChevronGP
    around: Callable[[Float[Array, " n"]], Around]  # at values of f, without another run
    zero: Float[Array, " n"]
    at_zero: Around
    kinds: dict[str, "Kind"]  # of the observed sites, in the model's order
    is_mini_batch: bool  # whether a plate of the model takes a part of its elements

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
    """The parameters of a site's distribution by name, as far as they have one; mask and scale."""
    fn, _, mask = unwrapped(site["fn"])
    named = {name: getattr(fn, name) for name in fn.arg_constraints if name in vars(fn)}
    known = {id(leaf) for leaf in jax.tree.leaves(named)}
    rest = [leaf for leaf in jax.tree.leaves(fn) if id(leaf) not in known]
    scale = 1.0 if site["scale"] is None else site["scale"]
    return {**named, "its other parameters": rest}, mask, scale


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
    """Run the guide, and the model at what it draws, around a chevron site.

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
    given = {**params, **mutable_values(guide_trace)}
    kinds: dict[str, Kind] = {}
    partial: list[str] = []

    def around(f: Array) -> Around:
        at_f = {**guide_trace, name: {**guide_trace[name], "value": f}}
        trace = traced(model, keys[1], given, args, kwargs, replayed=at_f)
        partial.extend(name for name, site in trace.items() if takes_part(site))
        kinds.update({key: _kind(site) for key, site in trace.items() if is_observed(site)})
        others, of_guide = (
            {key: site for key, site in one.items() if key != name and not is_observed(site)}
            for one in (trace, guide_trace)
        )
        scale = common_scale(guide_trace[name], trace[name])
        p = trace[name]["fn"]
        same = one_if_same("features", q.features, p.features)
        return Around(
            {key: _observed(trace[key]) for key in kinds},
            {key: _drawn_from(site) for key, site in others.items() if is_latent(site)},
            summed(elbo_terms(others, of_guide)),
            p,
            same if scale is None else same * scale,
            {**mutable_values(guide_trace), **mutable_values(trace)},
        )

    of_f = q.X, q.features.hyperparameters(), q.loc, q.scale_diag, q.scale_columns
    zero = jnp.zeros(q.X.shape[0], jnp.result_type(*jax.tree.leaves(of_f)))
    run = Staged(around, zero)
    return Problem(name, q, run, zero, run(zero), kinds, bool(partial))
