"""The base class of this package's objectives."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key
from numpyro.distributions.kl import kl_divergence
from numpyro.infer.elbo import ELBO

from numpyro_scalegp.core import checks
from numpyro_scalegp.likelihoods.likelihood import log_density, log_terms
from numpyro_scalegp.tracing.runs import Trace


class ModelAndGuide(NamedTuple):
    """A model and a guide, with their parameters and arguments."""

    params: dict[str, Any]  # constrained parameters and mutable state, by name
    model: Callable
    guide: Callable
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class AbstractParticleELBO(ELBO, abc.ABC):
    """An ELBO that averages over particles, draws of the guide; each may update mutable state."""

    def __init__(self, num_particles: int, vectorize_particles: bool | Callable) -> None:
        checks.count("num_particles", num_particles)
        super().__init__(num_particles, vectorize_particles)

    def loss_with_mutable_state(
        self,
        rng_key: Key[Array, ""],
        param_map: dict[str, Any],
        model: Callable,
        guide: Callable,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The negative ELBO and the new mutable state; NumPyro's SVI calls it.

        Args:
            rng_key: a JAX key.
            param_map: constrained parameters, by name.
            model: the model.
            guide: the guide.
            *args: positional arguments of both.
            **kwargs: keyword arguments of both.

        Returns:
            `loss`, a scalar, and `mutable_state`, a dict or None.
        """
        pair = ModelAndGuide(param_map, model, guide, args, kwargs)
        if self.num_particles == 1:
            elbo, mutable = self.particle(rng_key, pair)
            return {"loss": -elbo, "mutable_state": mutable or None}
        elbos, mutable = self.vectorize_particles_fn(
            lambda key: self.particle(key, pair), jax.random.split(rng_key, self.num_particles)
        )
        if mutable:
            raise ValueError(
                f"mutable state ({', '.join(mutable)}) needs num_particles=1, got "
                f"{self.num_particles}: each particle would write its own."
            )
        return {"loss": -jnp.mean(elbos), "mutable_state": None}

    @abc.abstractmethod
    def particle(self, key: Array, pair: ModelAndGuide) -> tuple[Float[Array, ""], dict[str, Any]]:
        """The ELBO from one draw of the guide's other sites, and the new mutable state.

        Args:
            key: a JAX key.
            pair: the model and the guide.
        """


def divergence(guide_site: dict[str, Any], model_site: dict[str, Any]) -> Float[Array, ""]:
    """The divergence at a latent site: analytic if NumPyro has a rule, else at the drawn value."""
    try:
        kl = kl_divergence(guide_site["fn"], model_site["fn"])
    except NotImplementedError:
        return log_density(guide_site) - log_density(model_site)
    scale = common_scale(guide_site, model_site)
    return jnp.sum(kl if scale is None else scale * kl)


def common_scale(guide_site: dict[str, Any], model_site: dict[str, Any]) -> Any:
    """The scale of a site with an analytic divergence; NaN if it differs in model and guide.

    Raises:
        ValueError: if the scales are concrete and differ.
    """
    scales = [site["scale"] for site in (guide_site, model_site)]
    if all(scale is None for scale in scales):
        return None
    in_guide, in_model = (1.0 if scale is None else scale for scale in scales)
    if not checks.is_concrete((in_guide, in_model)):
        return jnp.where(jnp.isclose(in_guide, in_model), in_guide, jnp.nan)
    if not np.isclose(in_guide, in_model):
        raise ValueError(
            f"the site `{model_site['name']}` has the scale {in_model} in the model and {in_guide} "
            "in the guide: put `numpyro.handlers.scale` and plates around it in both."
        )
    return in_guide


def elbo_terms(model_trace: Trace, guide_trace: Trace) -> dict[str, Float[Array, "..."]]:
    """The terms of the bound by site: log densities of each entry, and negative divergences.

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
