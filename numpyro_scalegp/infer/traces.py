"""What objectives read off the traces of model and guide."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.guides.likelihood import log_density

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
    scale = guide_site["scale"]
    return jnp.sum(found if scale is None else scale * found)
