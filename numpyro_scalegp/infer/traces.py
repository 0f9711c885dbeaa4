"""What objectives read off the traces of model and guide."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import checks
from numpyro_scalegp.guides.likelihood import log_density, log_terms

Trace = dict[str, Any]


def mutable_values(trace: Trace) -> dict[str, Any]:
    """The values of the mutable sites."""
    return {name: site["value"] for name, site in trace.items() if site["type"] == "mutable"}


def divergence(guide_site: dict[str, Any], model_site: dict[str, Any]) -> Float[Array, ""]:
    """The divergence at a latent site, by a rule or at the value drawn."""
    try:
        found = kl_divergence(guide_site["fn"], model_site["fn"])
    except NotImplementedError:
        return log_density(guide_site) - log_density(model_site)
    scale = common_scale(guide_site, model_site)
    return jnp.sum(found if scale is None else scale * found)


def common_scale(guide_site: dict[str, Any], model_site: dict[str, Any]) -> Any:
    """The scale of a site whose divergence is taken by a rule: NaN where only one side has it.

    Raises:
        ValueError: if that is known already.
    """
    scales = [site["scale"] for site in (guide_site, model_site)]
    if all(scale is None for scale in scales):
        return None
    own, prior = (1.0 if scale is None else scale for scale in scales)
    if not checks.is_concrete((own, prior)):
        return jnp.where(jnp.isclose(own, prior), own, jnp.nan)
    if not np.isclose(own, prior):
        raise ValueError(
            f"the site `{model_site['name']}` has the scale {prior} in the model and {own} in the "
            "guide: put `numpyro.handlers.scale` and plates around it in both."
        )
    return own


def elbo_terms(model_trace: Trace, guide_trace: Trace) -> dict[str, Float[Array, "..."]]:
    """What each site adds to the bound: log densities, one for each entry, and minus divergences.

    Raises:
        ValueError: if the guide lacks a latent site of the model.
    """
    terms = {}
    for name, site in model_trace.items():
        if site["type"] != "sample":
            continue
        if site["is_observed"]:
            terms[name] = log_terms(site)
            continue
        if name not in guide_trace:
            raise ValueError(f"the guide has no site `{name}`, which the model samples.")
        terms[name] = -divergence(guide_trace[name], site)
    for name, site in guide_trace.items():
        if site["type"] == "sample" and name not in model_trace:
            terms[name] = -log_density(site)
    return terms


def summed(terms: dict[str, Float[Array, "..."]]) -> Float[Array, ""]:
    """The sum of all terms."""
    return sum(map(jnp.sum, terms.values()), jnp.zeros(()))
