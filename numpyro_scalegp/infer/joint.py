"""The evidence lower bound, estimated from joint draws of the function."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from numpyro_scalegp.likelihoods.elbo import AbstractParticleELBO, ModelAndGuide, elbo_terms
from numpyro_scalegp.likelihoods.likelihood import summed
from numpyro_scalegp.tracing.runs import mutable_values, traced
from numpyro_scalegp.tracing.sites import StandIn, joint_draw


class JointELBO(AbstractParticleELBO):
    """An ELBO from joint draws of the function at all inputs.

    Use it for likelihoods that combine values of the function at several inputs, such as a
    cumulative sum, an integral or a difference from the mean, and for compositions of functions.
    Draw from the fit with `Predictive(..., joint=True)`. If each entry of the likelihood depends on
    one input, use `QuadratureELBO`, which has no Monte Carlo noise from f and costs time linear in
    n. (NumPyro's `TraceMeanField_ELBO` draws the values of f independently, which is valid only if
    each entry depends on one input.) The KL divergences of all sites are as in `QuadratureELBO`.

    Give the model all observations: a likelihood that combines them is different for a mini-batch.

    Args:
        num_particles: number of draws.
        vectorize_particles: as in NumPyro's ELBOs.

    Raises:
        ValueError: in a step, if the guide has no GP site.

    References:
        Kingma and Welling (2014), Auto-Encoding Variational Bayes, for the gradient through draws.
        A step takes O(n^3) time and O(n^2) memory; with an `AutoChevronGP` O(n m).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> loss = sgp.infer.JointELBO(num_particles=4)
    """

    def __init__(
        self, *, num_particles: int = 1, vectorize_particles: bool | Callable = True
    ) -> None:
        super().__init__(num_particles, vectorize_particles)

    def particle(self, key: Array, pair: ModelAndGuide) -> tuple[Float[Array, ""], dict[str, Any]]:
        """An estimate of the bound from one draw of all sites, functions included."""
        params, model, guide, args, kwargs = pair
        model_key, guide_key = jax.random.split(key)
        with StandIn(joint_draw) as sites:
            guide_trace = traced(guide, guide_key, params, args, kwargs)
        if not sites.families:
            raise ValueError(
                "`JointELBO` found no GP site in the guide: use one of sgp.guides, or NumPyro's "
                "own ELBOs for a guide without GP sites."
            )
        mutable = mutable_values(guide_trace)
        params = {**params, **mutable}
        model_trace = traced(model, model_key, params, args, kwargs, replayed=guide_trace)
        mutable.update(mutable_values(model_trace))
        return summed(elbo_terms(model_trace, guide_trace)), mutable
