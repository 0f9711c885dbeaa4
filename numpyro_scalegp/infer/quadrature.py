"""The evidence lower bound with the functions integrated by quadrature."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.ops.provenance import eval_provenance

from numpyro_scalegp.core import checks
from numpyro_scalegp.tracing.elbo import AbstractParticleELBO, Pair, elbo_terms
from numpyro_scalegp.tracing.expectation import ExpectedTerms
from numpyro_scalegp.tracing.runs import Staged, Trace, flat_provenance, mutable_values, traced
from numpyro_scalegp.tracing.sites import StandIn
from numpyro_scalegp.tracing.unexplained import row_scales, tightened


class QuadratureELBO(AbstractParticleELBO):
    """An ELBO whose expectation over the functions' marginals is a quadrature sum.

    E_q[log p(y | f)] ~ sum_j w_j sum_i log p(y_i | mean_i + sd_i x_j), with nodes x_j and weights
    w_j of the Gauss-Hermite rule for the standard normal distribution. Any NumPyro likelihood whose
    entries each depend on one row of f works, a mini-batch scaled by its plate included, and a
    Gaussian one is exact from two nodes. One that combines rows (a cumulative sum, a difference
    from the mean) raises, once, where a step is compiled: `JointELBO` is for it.

    Several functions, as sites of their own or in a plate, are independent under q. What an entry
    of the likelihood makes of those at its row decides how they are integrated:

    - one function, or an affine combination (a sum of sites, a difference, outputs that a matrix
      mixes): one normal variable with mean a_0 + sum_q a_q mean_q and variance
      sum_q a_q^2 sd_q^2, and `num_nodes` nodes, however many the functions are;
    - two functions or combinations (mean and scale, rate and probability): all pairs of nodes;
    - more (a softmax): the mean over `num_points` points of a Sobol' sequence, shifted at random in
      each step and mirrored at the mean. It is unbiased, so that SVI comes to the optimum of the
      exact bound, and its noise falls almost as 1 / num_points.

    A combination is taken for affine only if each operation that makes it is known to be; otherwise
    its functions count one by one. Other sites are sampled, with their analytic divergences where
    NumPyro has them; the GP sites' divergence is that of the processes.

    Up to two functions the gradient has no Monte Carlo noise from f. For a factorizing likelihood
    it is unbiased under mini-batches.

    Args:
        num_nodes: of the Gauss-Hermite rules, for each variable, positive.
        num_points: of the Sobol' sequence and its mirror, a power of two, at least 2.
        num_particles: draws of the other sites.
        vectorize_particles: as in NumPyro's ELBOs.
        tight: whether the bound of inducing points is Titsias's new one: at its best for a Gaussian
            likelihood, for others by one number that the guide learns; if not, that of Hensman,
            Matthews and Ghahramani.

    Raises:
        ValueError: if `num_nodes` is not positive or `num_points` no power of two; in a step, if
            the guide has no GP site, a site of it depends on the function of another, a term of the
            bound combines rows of the function, or a site has other scales in model and guide.

    References:
        Hensman, Matthews and Ghahramani (2015), section 4; Buchholz, Wenzel and Mandt (2018),
        Quasi-Monte Carlo Variational Inference. The likelihood is evaluated `num_nodes`,
        `num_nodes**2` or `num_points` times; the moments of f once.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> loss = sgp.infer.QuadratureELBO(num_nodes=20)
    """

    def __init__(
        self,
        num_nodes: int = 20,
        *,
        num_points: int = 64,
        num_particles: int = 1,
        vectorize_particles: bool | Callable = True,
        tight: bool = True,
    ) -> None:
        self.num_nodes = checks.count("num_nodes", num_nodes)
        self.num_points = checks.count("num_points", num_points)
        if num_points < 2 or num_points & (num_points - 1):
            raise ValueError(f"`num_points` must be a power of two, at least 2, got {num_points}.")
        self.tight = checks.instance("tight", tight, bool, "True or False")
        super().__init__(num_particles, vectorize_particles)

    def particle(self, key: Array, pair: Pair) -> tuple[Float[Array, ""], dict[str, Any]]:
        """The bound at one draw of the other sites, in expectation over the functions."""
        params, model, guide, args, kwargs = pair
        model_key, guide_key, point_key = jax.random.split(key, 3)

        def run_guide(stand_in: StandIn) -> Trace:
            with stand_in:
                return traced(guide, guide_key, params, args, kwargs)

        guide_trace = run_guide(sites := StandIn())
        if not sites.families:
            raise ValueError(
                "`QuadratureELBO` found no GP site in the guide: use one of sgp.guides, or "
                "NumPyro's own ELBOs for a guide without GP sites."
            )
        moments = {name: family.split_marginals() for name, family in sites.families.items()}
        means = {name: mean for name, (mean, *_) in moments.items()}
        _check_guide(run_guide, guide_trace, means)
        mutable = mutable_values(guide_trace)
        given = {**params, **mutable}

        def run_model(*functions: Array) -> tuple[dict[str, Array], dict[str, Any], dict]:
            drawn = {
                name: {**guide_trace[name], "value": f}
                for name, f in zip(moments, functions, strict=True)
            }
            trace = {**guide_trace, **drawn}
            model_trace = traced(model, model_key, given, args, kwargs, replayed=trace)
            terms = elbo_terms(model_trace, trace)
            return terms, mutable_values(model_trace), row_scales(model_trace)

        run = Staged(run_model, *means.values())
        expected = ExpectedTerms(run, means)
        _, new_mutable, scales = run(*means.values())

        def observed(*functions: Array) -> dict[str, Array]:
            return {name: term for name, term in run(*functions)[0].items() if name in scales}

        pairs, costs = {}, jnp.zeros(())
        for name, (mean, *variances) in moments.items():
            if self.tight and len(variances) == 2:
                scale = guide_trace[name]["scale"]
                shared = getattr(sites.families[name], "unexplained_scale", None)
                axes = expected.axes.get(name, ())
                variances, cost = tightened(
                    observed, means, name, axes, variances, scales, scale, shared
                )
                costs += cost
            pairs[name] = (mean, functools.reduce(jnp.add, variances))
        elbo = expected(point_key, pairs, self.num_nodes, self.num_points)
        return elbo - costs, {**mutable, **new_mutable}


def _check_guide(
    run: Callable[[StandIn], Trace], guide_trace: Trace, means: dict[str, Array]
) -> None:
    """Raise where the guide's distribution of one site depends on the function of another."""
    names = [name for name, site in guide_trace.items() if site["type"] == "sample"]
    if names[-1] in means and len(means) == 1:
        return  # nothing comes after the one function

    def distributions(**functions: Array) -> dict[str, list[Array]]:
        trace = run(StandIn(lambda name, family, key: functions[name]))
        return {name: list(map(jnp.asarray, jax.tree.leaves(trace[name]["fn"]))) for name in names}

    for name, leaves in eval_provenance(distributions, **means).items():
        if functions := sorted(frozenset().union(*flat_provenance(leaves))):
            raise ValueError(
                f"the guide's distribution of the site `{name}` depends on the function "
                f"`{functions[0]}`, as where one GP is a function of another: it has other moments "
                "for each value of that function. Train with sgp.infer.JointELBO, which draws one "
                "after the other."
            )
