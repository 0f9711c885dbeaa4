"""What objectives read off the traces of model and guide."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.distributions import Independent
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


def check_factorises(site: dict[str, Any], rows: set[int]) -> None:
    """Raise if an observed site is one law over all rows."""
    couples_rows = (
        len(site["fn"].event_shape) == 1
        and site["fn"].event_shape[0] in rows
        and site["fn"].batch_shape == ()
        and not isinstance(site["fn"], Independent)
    )
    if couples_rows:
        raise ValueError(
            f"the observed site `{site['name']}` is one {type(site['fn']).__name__} over all rows: "
            "the objective needs a likelihood that factorises over rows."
        )
