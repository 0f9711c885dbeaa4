"""The evidence lower bound at joint draws of the function."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_scalegp.families import AbstractVariationalGP
from numpyro_scalegp.tracing.elbo import AbstractParticleELBO, elbo_terms, mutable_values, summed
from numpyro_scalegp.tracing.substitution import substituted


class JointELBO(AbstractParticleELBO):
    """An ELBO at draws of the function, jointly at all of its rows.

    For likelihoods that combine rows, such as a cumulative sum, an integral or a difference from
    the mean, and for functions of functions. Draw from the fit by `Predictive(..., joint=True)`.
    `QuadratureELBO` has no noise from f, at a cost linear in the rows: take it wherever each entry
    of the likelihood depends on one row. (NumPyro's `TraceMeanField_ELBO` draws each row by itself:
    it is right for such likelihoods only.) All sites' divergences are as in `QuadratureELBO`.

    The bound is that of the rows which the model sees. A likelihood that combines the rows of a
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

    def _particle(
        self,
        key: Array,
        params: dict[str, Any],
        model: Callable,
        guide: Callable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Float[Array, ""], dict[str, Any]]:
        model_key, guide_key = jax.random.split(key)
        seeded_guide = substituted(handlers.seed(guide, guide_key), params)
        with JointDraws() as draws:
            guide_trace = handlers.trace(seeded_guide).get_trace(*args, **kwargs)
        if not draws.found:
            raise ValueError(
                "`JointELBO` found no GP site in the guide: use one of sgp.guides, or NumPyro's "
                "own ELBOs for a guide without GP sites."
            )
        mutable = mutable_values(guide_trace)
        replayed = handlers.replay(handlers.seed(model, model_key), guide_trace)
        given = substituted(replayed, {**params, **mutable})
        model_trace = handlers.trace(given).get_trace(*args, **kwargs)
        return summed(elbo_terms(model_trace, guide_trace)), {
            **mutable,
            **mutable_values(model_trace),
        }


class JointDraws(Messenger):
    """Draws the guide's GP sites from their processes instead of their marginals."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __enter__(self) -> "JointDraws":
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        """Draw at a site of the guide."""
        if msg["type"] == "sample" and isinstance(msg["fn"], AbstractVariationalGP):
            self.found.add(msg["name"])
            key = msg["kwargs"]["rng_key"]
            msg["value"] = msg["fn"].posterior().sample(key, msg["fn"].X)[0]
