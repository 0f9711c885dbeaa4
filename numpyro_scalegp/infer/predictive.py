"""Draws of a model's sites under a posterior, a few at a time and kept on the host."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key
from numpyro import handlers

from numpyro_scalegp.core import checks
from numpyro_scalegp.distributions import FeatureSpaceGP, GaussianProcess
from numpyro_scalegp.distributions.rows import unwrapped
from numpyro_scalegp.guides.base import set_up
from numpyro_scalegp.guides.substitution import substituted


class Draws(NamedTuple):
    """What a model gives for draws of its latent sites; arrays with a leading axis of draws."""

    sites: dict[str, Any]  # latent and deterministic sites
    predictive: dict[str, Any]  # replicates of the observed sites
    log_likelihood: dict[str, Any]  # pointwise, for the observed sites
    observed: dict[str, Any]  # values of the observed sites, the same in each draw
    diagnostics: dict[str, dict[str, Any]]  # of the solves, for collapsed sites

    def log_predictive_density(self) -> dict[str, np.ndarray]:
        """The log of the likelihood averaged over draws, pointwise, for each observed site.

        At test rows this is the log predictive density, shape (rows,). (For a `GaussianProcess` or
        `FeatureSpaceGP` it averages leave-one-out densities at its own rows.)
        """
        return {
            name: np.asarray(jax.nn.logsumexp(values, axis=0)) - np.log(len(values))
            for name, values in self.log_likelihood.items()
        }


class Predictive:
    """Posterior predictive draws of a model, like `numpyro.infer.Predictive`, for large models.

    Draws are made one after another, `chunk_size` in a compiled call, and moved to the host:
    memory follows the chunk, and the guide's parameters are never repeated for each draw.

    An observed `GaussianProcess` or `FeatureSpaceGP` site is replicated from its *posterior* given
    the observations, at their inputs, where NumPyro's own would draw from the prior.

    Args:
        model: the model.
        guide: a guide, with its `params`.
        params: the guide's and the model's parameters, as from `SVI.get_params`; with a solver
            state in the model, together with `SVIState.mutable_state`, so that solves start there.
        posterior_samples: instead of a guide, draws of the latent sites, as from
            `MCMC.get_samples`, leading axis the draws.
        num_samples: number of draws, where a guide makes them.
        chunk_size: draws in one compiled call.

    Raises:
        ValueError: if there is neither a guide nor draws, or both.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> def model():
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal()), 1.0))
        >>> draws = sgp.infer.Predictive(model, posterior_samples={"mu": jnp.zeros(7)})
        >>> draws(jax.random.key(0))["y"].shape
        (7,)
    """

    def __init__(
        self,
        model: Callable,
        *,
        guide: Callable | None = None,
        params: dict[str, Any] | None = None,
        posterior_samples: dict[str, Any] | None = None,
        num_samples: int = 1000,
        chunk_size: int = 100,
    ) -> None:
        if (guide is None) == (posterior_samples is None):
            raise ValueError("give either a `guide` with its `params`, or `posterior_samples`.")
        self.model = checks.function("model", model)
        self.guide = guide
        self.params = {} if params is None else params
        self.posterior_samples = posterior_samples
        if posterior_samples is not None:
            num_samples = len(next(iter(posterior_samples.values())))
        self.num_samples = checks.count("num_samples", num_samples)
        self.chunk_size = checks.count("chunk_size", chunk_size)

    def __call__(self, key: Key[Array, ""], *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Draw.

        Args:
            key: a typed JAX key.
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            Draws of all latent and deterministic sites and replicates of the observed ones, as
            NumPy arrays of shape (num_samples, *site_shape).
        """
        draws = self.draws(key, *args, **kwargs)
        return {**draws.sites, **draws.predictive}

    def draws(self, key: Key[Array, ""], *args: Any, **kwargs: Any) -> Draws:
        """Draw, with pointwise log-likelihoods and observations as well; see `Draws`."""
        if self.guide is not None:
            set_up(self.guide, self.params, args, kwargs)

        # All that may be large is an argument: a constant would be compiled into the program.
        @eqx.filter_jit
        def chunk(keys: Array, samples: dict, params: dict, args: tuple, kwargs: dict) -> Draws:
            def one(item: tuple[Array, dict]) -> Draws:
                return self._one(*item, params, args, kwargs)

            return jax.lax.map(one, (keys, samples))

        samples = jax.tree.map(jnp.asarray, self.posterior_samples or {})
        keys = jax.random.split(checks.as_key(key), self.num_samples)
        chunks = []
        for start in range(0, self.num_samples, self.chunk_size):
            part = slice(start, start + self.chunk_size)
            some = jax.tree.map(lambda leaf, part=part: leaf[part], samples)
            chunks.append(jax.device_get(chunk(keys[part], some, self.params, args, kwargs)))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *chunks)

    def _one(self, key: Array, sample: dict, params: dict, args: tuple, kwargs: dict) -> Draws:
        guide_key, model_key, replicate_key = jax.random.split(key, 3)
        model = handlers.seed(self.model, model_key)
        if self.guide is not None:
            guide = substituted(handlers.seed(self.guide, guide_key), params)
            model = handlers.replay(model, handlers.trace(guide).get_trace(*args, **kwargs))
        # Draws may hold parameters that vary from one to the next.
        trace = handlers.trace(substituted(model, {**params, **sample}, sample)).get_trace(
            *args, **kwargs
        )
        draws = Draws({}, {}, {}, {}, {})
        for number, (name, site) in enumerate(trace.items()):
            if site["type"] == "deterministic" or (
                site["type"] == "sample" and not site["is_observed"]
            ):
                draws.sites[name] = site["value"]
            elif site["type"] == "sample":
                _replicate(draws, jax.random.fold_in(replicate_key, number), name, site)
        return draws


def _replicate(draws: Draws, key: Array, name: str, site: dict[str, Any]) -> None:
    """Add a replicate of an observed site and its pointwise log-likelihood to `draws`."""
    fn, value = site["fn"], site["value"]
    if isinstance(unwrapped(fn)[0], GaussianProcess | FeatureSpaceGP) and not isinstance(
        fn, GaussianProcess | FeatureSpaceGP
    ):
        raise ValueError(
            f"the collapsed GP site `{name}` stands inside a plate, or has a `to_event` or `mask` "
            "around it, where replicates would come from the prior: write a site for each function."
        )
    if isinstance(fn, GaussianProcess | FeatureSpaceGP):
        posterior = fn.condition(value)
        draws.predictive[name] = posterior.at_data().sample(key)
        draws.log_likelihood[name] = posterior.leave_one_out().log_prob(value)
        draws.diagnostics[name] = posterior.diagnostics
    else:
        draws.predictive[name] = fn.sample(key)
        draws.log_likelihood[name] = fn.log_prob(value)
    draws.observed[name] = value
