"""What this package's objectives share."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key
from numpyro.infer.elbo import ELBO

from numpyro_scalegp.core import checks


class AbstractParticleELBO(ELBO, abc.ABC):
    """An ELBO that is the mean over particles, each of which may update mutable state."""

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

        def particle(key: Array) -> tuple[Array, dict[str, Any]]:
            return self._particle(key, param_map, model, guide, args, kwargs)

        if self.num_particles == 1:
            elbo, mutable = particle(rng_key)
            return {"loss": -elbo, "mutable_state": mutable or None}
        elbos, mutable = self.vectorize_particles_fn(
            particle, jax.random.split(rng_key, self.num_particles)
        )
        if mutable:
            raise ValueError(
                f"mutable state ({', '.join(mutable)}) needs num_particles=1, got "
                f"{self.num_particles}: each particle would write its own."
            )
        return {"loss": -jnp.mean(elbos), "mutable_state": None}

    @abc.abstractmethod
    def _particle(
        self,
        key: Array,
        params: dict[str, Any],
        model: Callable,
        guide: Callable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Float[Array, ""], dict[str, Any]]:
        """The ELBO from one draw of the guide's other sites, and the new mutable state."""
