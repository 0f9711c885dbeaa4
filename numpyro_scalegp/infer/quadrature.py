"""The evidence lower bound with the function integrated by Gauss-Hermite quadrature."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.distributions import AbstractVariationalGP
from numpyro_scalegp.guides.likelihood import check_keeps_functions_apart, log_density
from numpyro_scalegp.infer.base import AbstractParticleELBO
from numpyro_scalegp.infer.traces import Trace, check_factorises, divergence, mutable_values


class QuadratureELBO(AbstractParticleELBO):
    """An ELBO whose expectation over the function's marginals is a Gauss-Hermite sum.

    E_q[log p(y | f)] ~ sum_j w_j sum_i log p(y_i | mean_i + sd_i x_j), with nodes x_j and weights
    w_j of the standard normal law; several GP sites use all combinations of nodes. Any NumPyro
    likelihood that factorises over rows works, a mini-batch scaled by its plate included, and a
    Gaussian one is exact from two nodes. Other sites are sampled, with their analytic divergences
    where NumPyro knows them; the GP sites' divergence is that of the processes. Functions in a
    plate share the nodes, so that each must have a likelihood of its own: one that combines them (a
    difference, a softmax, a mixing matrix) needs a GP site for each.

    The gradient has no Monte Carlo noise from f. For a factorising likelihood it is unbiased under
    mini-batches.

    Args:
        num_nodes: nodes for each GP site, positive.
        num_particles: draws of the other sites.
        vectorize_particles: as in NumPyro's ELBOs.

    Raises:
        ValueError: if `num_nodes` is not positive; in a step, if the guide has no GP site or an
            observed site couples the rows (a multivariate normal over them, say), or has rows but
            not the shape of the functions in a plate.

    References:
        Hensman, Matthews and Ghahramani (2015), section 4. The likelihood is evaluated
        `num_nodes ** number of GP sites` times; the moments of f once.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> loss = sgp.infer.QuadratureELBO(num_nodes=20)
    """

    def __init__(
        self,
        num_nodes: int = 20,
        *,
        num_particles: int = 1,
        vectorize_particles: bool | Callable = True,
    ) -> None:
        checks.count("num_nodes", num_nodes)
        checks.count("num_particles", num_particles)
        nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
        self.nodes, self.weights = nodes, weights / weights.sum()
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
        seeded_guide = handlers.substitute(handlers.seed(guide, guide_key), data=params)
        with _Marginals() as sites:
            guide_trace = handlers.trace(seeded_guide).get_trace(*args, **kwargs)
        marginals = sites.marginals
        if not marginals:
            raise ValueError(
                "`QuadratureELBO` found no GP site in the guide: use one of sgp.guides, or "
                "NumPyro's own ELBOs for a guide without GP sites."
            )
        mutable = mutable_values(guide_trace)
        given = {**params, **mutable}

        def at_nodes(index: Array) -> tuple[Array, dict[str, Any]]:
            trace = dict(guide_trace)
            for (name, (mean, variance)), node in zip(marginals.items(), index, strict=True):
                tiny = jnp.finfo(variance.dtype).tiny
                scale = jnp.sqrt(jnp.maximum(variance, tiny))
                value = mean + scale * jnp.asarray(self.nodes, mean.dtype)[node]
                trace[name] = {**guide_trace[name], "value": value}
            replayed = handlers.replay(handlers.seed(model, model_key), trace)
            model_trace = handlers.trace(handlers.substitute(replayed, data=given)).get_trace(
                *args, **kwargs
            )
            shapes = {mean.shape for mean, _ in marginals.values()}
            return _elbo_of_traces(model_trace, trace, shapes), mutable_values(model_trace)

        grid = np.indices((len(self.nodes),) * len(marginals)).reshape(len(marginals), -1).T
        weights = jnp.asarray(np.prod(self.weights[grid], axis=1))
        # Values that do not depend on the nodes are computed once and only repeated.
        elbos, new_mutable = jax.vmap(at_nodes)(jnp.asarray(grid))
        mutable.update(jax.tree.map(lambda leaf: leaf[0], new_mutable))
        return jnp.sum(weights.astype(elbos.dtype) * elbos), mutable


class _Marginals(Messenger):
    """Computes the moments of the guide's GP sites, instead of drawing from them."""

    def __init__(self) -> None:
        super().__init__()
        self.marginals: dict[str, tuple[Array, Array]] = {}

    def __enter__(self) -> "_Marginals":
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and isinstance(msg["fn"], AbstractVariationalGP):
            self.marginals[msg["name"]] = msg["fn"].marginals()
            msg["value"] = self.marginals[msg["name"]][0]


def _elbo_of_traces(
    model_trace: Trace, guide_trace: Trace, shapes: set[tuple[int, ...]]
) -> Float[Array, ""]:
    """The sum of log-densities of observed sites minus the divergences of latent ones."""
    total = jnp.zeros(())
    for name, site in model_trace.items():
        if site["type"] != "sample":
            continue
        if site["is_observed"]:
            check_factorises(site, {shape[-1] for shape in shapes})
            for *batch, n in shapes:
                check_keeps_functions_apart(site, tuple(batch), n)
            total += log_density(site)
            continue
        if name not in guide_trace:
            raise ValueError(f"the guide has no site `{name}`, which the model samples.")
        total -= divergence(guide_trace[name], site)
    for name, site in guide_trace.items():
        if site["type"] == "sample" and name not in model_trace:
            total -= log_density(site)
    return total
