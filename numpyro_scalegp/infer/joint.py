"""The evidence lower bound at joint draws of the function."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from numpyro_scalegp.tracing.elbo import AbstractParticleELBO, Pair, elbo_terms
from numpyro_scalegp.tracing.likelihood import summed
from numpyro_scalegp.tracing.runs import mutable_values, traced
from numpyro_scalegp.tracing.sites import StandIn, joint_draw


class JointELBO(AbstractParticleELBO):
    """An ELBO at draws of the function, jointly at all of its rows.

    For likelihoods that combine rows, such as a cumulative sum, an integral or a difference from
    the mean, and for functions of functions. Draw from the fit by `Predictive(..., joint=True)`.
    `QuadratureELBO` has no noise from f, at a cost linear in the rows: take it wherever each entry
    of the likelihood depends on one row. (NumPyro's `TraceMeanField_ELBO` draws each row by itself:
    it is right for such likelihoods only.) All sites' divergences are as in `QuadratureELBO`.

    The bound is that of the rows which the model gets. A likelihood that combines the rows of a
    mini-batch is another one than that of all rows: give the model all of them.

    Args:
        num_particles: draws.
        vectorize_particles: as in NumPyro's ELBOs.

    Raises:
        ValueError: in a step, if the guide has no GP site.

    References:
        Kingma and Welling (2014), Auto-Encoding Variational Bayes, for the gradient through draws.
        A step takes O(n^3) for n rows, and O(n^2) memory; with an `AutoChevronGP` O(n m).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> loss = sgp.infer.JointELBO(num_particles=4)
    """

    def __init__(
        self, *, num_particles: int = 1, vectorize_particles: bool | Callable = True
    ) -> None:
        super().__init__(num_particles, vectorize_particles)

    def particle(self, key: Array, pair: Pair) -> tuple[Float[Array, ""], dict[str, Any]]:
        """The bound at one draw of all sites, functions included."""
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
        given = {**params, **mutable}
        model_trace = traced(model, model_key, given, args, kwargs, replayed=guide_trace)
        mutable.update(mutable_values(model_trace))
        return summed(elbo_terms(model_trace, guide_trace)), mutable
