"""Where hyperparameters of a guide start: prior medians, lengthscales and noise from the data."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.initialization import init_to_median
from numpyro.primitives import Messenger

from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.distributions.rows import role_of, unwrapped
from numpyro_scalegp.tracing.runs import (
    Staged,
    Trace,
    indices_of,
    is_latent,
    is_observed,
    substituted,
    trace_of_call,
)
from numpyro_scalegp.tracing.sites import Model
from numpyro_scalegp.tracing.starting_values import deviation, lengthscale_pairs, scaled_start


def _prior_median(site: dict[str, Any] | None = None) -> Any:
    return init_to_median(site)


# By which guides know that nobody told them where to start. A function, and no partial one: what
# copies or pickles a guide keeps its identity.
MEDIAN = _prior_median

# Of the observations' deviation, what the noise starts at, within a factor from the prior's median.
# The function starts at zero: from less noise the first gradients are so large that an optimizer
# which remembers their squares, as Adam does, takes short steps ever after.
_NOISE_SHARE = 0.8
_NOISE_FACTOR = 4.0

# Of the median distance between rows, what lengthscales start at. From longer ones, which say that
# the function is nearly the mean, columns that matter only beside another one are not found.
_DISTANCE_SHARE = 0.5


class _Priors(Messenger):
    """Puts zeros in the place of a model's functions, and records their priors."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.found: list[Any] = []

    def process_message(self, msg: dict[str, Any]) -> None:
        """Stop at a function, of which no handler outside need draw."""
        if msg["type"] != "sample" or role_of(msg["fn"]) != "prior" or msg["is_observed"]:
            return
        prior, _, _ = unwrapped(msg["fn"])
        self.found.append(prior)
        msg["value"] = jnp.zeros(msg["fn"].shape(), jnp.result_type(prior.X, float))
        msg["stop"] = True


@compiled
def starting_values(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Values of a model's latent sites but functions: prior medians, moved by `scaled_start`.

    So that functions vary over distances between rows: from lengthscales far from these the
    likelihood may say nothing of them. And so that the scale of an observed normal, Student t or
    the like leaves room for a function that is zero.

    Args:
        model: a model with functions, which may take a mini-batch of the rows.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        Values by name. Lengthscales that nothing but a function of fixed values decides stay.
    """
    key = jax.random.key(0)

    def run(handled: Callable[[_Priors], Any]) -> tuple[Trace, list[Any]]:
        priors = _Priors(model)
        with handlers.block():
            return trace_of_call(handled(priors), args, kwargs), priors.found

    def at_medians(priors: _Priors) -> Any:
        return handlers.substitute(handlers.seed(priors, key), substitute_fn=MEDIAN)

    medians, _ = run(at_medians)
    indices = indices_of(medians)
    sites = {name: site for name, site in medians.items() if is_latent(site)}
    sites = {name: one for name, one in sites.items() if not one["fn"].support.is_discrete}
    maps = {name: biject_to(site["fn"].support) for name, site in sites.items()}

    def values(params: dict[str, Array]) -> dict[str, Array]:
        return {name: maps[name](value) for name, value in params.items()}

    def scales(params: dict[str, Array]) -> list[tuple[Array, Array]]:
        def at_values(priors: _Priors) -> Any:
            return handlers.seed(substituted(priors, {}, values(params), indices), key)

        trace, found = run(at_values)
        kernels = [(getattr(prior, "kernel", None), prior.X) for prior in found]
        pairs = _noise_pairs(trace, medians)
        for kernel, X in kernels:
            if kernel and X.shape[-2] > 1:
                pairs += lengthscale_pairs(kernel, X, _DISTANCE_SHARE)
        return pairs

    params = {name: maps[name].inv(site["value"]) for name, site in sites.items()}
    if not params:
        return {}
    of_params = Staged(scales, params)
    return values(scaled_start(of_params, params) if of_params(params) else params)


def _noise_pairs(trace: Trace, at_medians: Trace) -> list[tuple[Array, Array]]:
    """The mean scale of each observed site that has one, and what it is wanted to be."""
    pairs = []
    for name, site in trace.items():
        if not (is_observed(site) and _has_scale(fn := unwrapped(site["fn"]).distribution)):
            continue
        median = jnp.mean(unwrapped(at_medians[name]["fn"]).distribution.scale)
        spread = deviation(jnp.ravel(site["value"] - fn.loc))
        wanted = jnp.clip(_NOISE_SHARE * spread, median / _NOISE_FACTOR, median * _NOISE_FACTOR)
        pairs.append((jnp.mean(fn.scale), jnp.where(spread > 0.0, wanted, 0.0)))
    return pairs


def _has_scale(fn: Any) -> bool:
    """Whether a distribution on the real line has a location and a scale."""
    return fn.support is constraints.real and hasattr(fn, "loc") and hasattr(fn, "scale")
