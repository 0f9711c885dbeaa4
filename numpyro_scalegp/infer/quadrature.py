"""The evidence lower bound with the function integrated by Gauss-Hermite quadrature."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.quadrature import normal_nodes
from numpyro_scalegp.families import AbstractVariationalGP
from numpyro_scalegp.quadruply_stochastic.problem import flat_provenance
from numpyro_scalegp.tracing.additivity import check_additive
from numpyro_scalegp.tracing.elbo import AbstractParticleELBO, elbo_terms, mutable_values, summed
from numpyro_scalegp.tracing.substitution import substituted


class QuadratureELBO(AbstractParticleELBO):
    """An ELBO whose expectation over the function's marginals is a Gauss-Hermite sum.

    E_q[log p(y | f)] ~ sum_j w_j sum_i log p(y_i | mean_i + sd_i x_j), with nodes x_j and weights
    w_j of the standard normal distribution; several GP sites use all combinations of nodes. Any
    NumPyro likelihood whose entries each depend on one row of f works, a mini-batch scaled by its
    plate included, and a Gaussian one is exact from two nodes. One that combines rows (a cumulative
    sum, a difference from the mean) raises, once, where a step is compiled: `JointELBO` is for it.
    Other sites are sampled, with their analytic divergences where NumPyro knows them; the GP sites'
    divergence is that of the processes. Functions in a plate share the nodes, so that each must
    have a likelihood of its own: one that combines them (a difference, a softmax, a mixing matrix)
    needs a GP site for each.

    The gradient has no Monte Carlo noise from f. For a factorising likelihood it is unbiased under
    mini-batches.

    Args:
        num_nodes: nodes for each GP site, positive.
        num_particles: draws of the other sites.
        vectorize_particles: as in NumPyro's ELBOs.

    Raises:
        ValueError: if `num_nodes` is not positive; in a step, if the guide has no GP site, a site
            of it depends on the function of another, a term of the bound combines rows of the
            function or functions of a plate, or a site has other scales in model and guide.

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
        self.nodes, self.weights = normal_nodes(num_nodes)
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
        with _Marginals() as sites:
            guide_trace = handlers.trace(seeded_guide).get_trace(*args, **kwargs)
        marginals = sites.marginals
        if not marginals:
            raise ValueError(
                "`QuadratureELBO` found no GP site in the guide: use one of sgp.guides, or "
                "NumPyro's own ELBOs for a guide without GP sites."
            )
        if len(guide_trace) > 1:
            _check_guide(handlers.seed(guide, guide_key), params, marginals, args, kwargs)
        mutable = mutable_values(guide_trace)
        given = {**params, **mutable}

        def run(values: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Any]]:
            drawn = {name: {**guide_trace[name], "value": f} for name, f in values.items()}
            trace = {**guide_trace, **drawn}
            replayed = handlers.replay(handlers.seed(model, model_key), trace)
            model_trace = handlers.trace(substituted(replayed, given)).get_trace(*args, **kwargs)
            return elbo_terms(model_trace, trace), mutable_values(model_trace)

        # Not at the means of the other functions: with zeros there, a product shows nothing.
        generator = np.random.default_rng(2)
        others = {
            name: jnp.asarray(generator.uniform(0.2, 0.8, mean.shape), mean.dtype)
            for name, (mean, _) in marginals.items()
        }
        for name in marginals:

            def of_function(f: Array, name: str = name) -> dict[str, Array]:
                terms = run({**others, name: f})[0]
                return {other: term for other, term in terms.items() if other not in marginals}

            check_additive(of_function, others[name], name)

        def at_nodes(index: Array) -> tuple[Array, dict[str, Any]]:
            values = {}
            for (name, (mean, variance)), node in zip(marginals.items(), index, strict=True):
                scale = jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))
                values[name] = mean + scale * jnp.asarray(self.nodes, mean.dtype)[node]
            terms, new_mutable = run(values)
            return summed(terms), new_mutable

        grid = np.indices((len(self.nodes),) * len(marginals)).reshape(len(marginals), -1).T
        weights = jnp.asarray(np.prod(self.weights[grid], axis=1))
        # Values that do not depend on the nodes are computed once and only repeated.
        elbos, new_mutable = jax.vmap(at_nodes)(jnp.asarray(grid))
        mutable.update(jax.tree.map(lambda leaf: leaf[0], new_mutable))
        return jnp.sum(weights.astype(elbos.dtype) * elbos), mutable


def _check_guide(
    guide: Callable,
    params: dict[str, Any],
    marginals: dict[str, tuple[Array, Array]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise where the guide's distribution of one site depends on the function of another."""

    def distributions(**values: Array) -> dict[str, list[Array]]:
        given = jax.tree.map(lambda leaf: leaf, params)  # mutable state is written to
        with _Marginals(values):
            trace = handlers.trace(substituted(guide, given)).get_trace(*args, **kwargs)
        sites = {name: site["fn"] for name, site in trace.items() if site["type"] == "sample"}
        return {name: list(map(jnp.asarray, jax.tree.leaves(fn))) for name, fn in sites.items()}

    means = {name: mean for name, (mean, _) in marginals.items()}
    for name, leaves in eval_provenance(distributions, **means).items():
        if functions := sorted(frozenset().union(*flat_provenance(leaves))):
            raise ValueError(
                f"the guide's distribution of the site `{name}` depends on the function "
                f"`{functions[0]}`, as where one GP is a function of another: it has other moments "
                "for each value of that function. Train with sgp.infer.JointELBO, which draws one "
                "after the other."
            )


class _Marginals(Messenger):
    """Computes the moments of the guide's GP sites, instead of drawing from them.

    Args:
        values: of these sites, in place of their means and without their moments.
    """

    def __init__(self, values: dict[str, Array] | None = None) -> None:
        super().__init__()
        self.values = values
        self.marginals: dict[str, tuple[Array, Array]] = {}

    def __enter__(self) -> "_Marginals":
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or not isinstance(msg["fn"], AbstractVariationalGP):
            return
        if self.values is not None:
            msg["value"] = self.values[msg["name"]]
        else:
            self.marginals[msg["name"]] = msg["fn"].marginals()
            msg["value"] = self.marginals[msg["name"]][0]
