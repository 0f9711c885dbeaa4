"""The evidence lower bound, with the functions integrated by quadrature."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.ops.provenance import eval_provenance

from numpyro_scalegp.core import checks
from numpyro_scalegp.likelihoods.elbo import AbstractParticleELBO, ModelAndGuide, elbo_terms
from numpyro_scalegp.likelihoods.expectation import ExpectedTerms
from numpyro_scalegp.likelihoods.unexplained import row_scales, tightened
from numpyro_scalegp.tracing.runs import (
    Trace,
    TracedProgram,
    flat_provenance,
    mutable_values,
    traced,
)
from numpyro_scalegp.tracing.sites import StandIn


class QuadratureELBO(AbstractParticleELBO):
    """An ELBO whose expectation over the functions' marginals is a quadrature sum.

    E_q[log p(y | f)] ~ sum_j w_j sum_i log p(y_i | mean_i + sd_i x_j), with nodes x_j and weights
    w_j of the Gauss-Hermite rule for the standard normal distribution. It works for any NumPyro
    likelihood in which each entry depends on f at one input, and in mini-batches, which their plate
    scales. For a Gaussian likelihood the sum is exact, with two nodes. A likelihood that combines
    inputs (a cumulative sum, a difference from the mean) raises an error when a step is compiled:
    use `JointELBO` for it.

    Several functions, in separate sites or in a plate, are independent under q. How an entry of the
    likelihood depends on the functions at its input decides how they are integrated:

    - one function, or one affine combination (a sum of sites, a difference, outputs mixed by a
      matrix): one normal variable with mean a_0 + sum_q a_q mean_q and variance
      sum_q a_q^2 sd_q^2, and one Gauss-Hermite rule for any number of functions;
    - two functions or combinations (mean and scale, rate and probability): all pairs of nodes;
    - more (a softmax): the mean over `num_points` points of a Sobol' sequence, randomly shifted in
      each step and reflected at the mean. It is unbiased, so that SVI converges to the optimum of
      the exact bound, and its standard error falls almost as 1 / num_points.

    A combination counts as affine only if each operation in it is recognized as affine; otherwise
    its functions count separately. Other sites are sampled, with analytic KL divergences where
    NumPyro has them; the KL divergence of a GP site is between processes.

    With up to two functions the gradient has no Monte Carlo noise from f. For a factorizing
    likelihood it is unbiased under mini-batches.

    Args:
        num_nodes: nodes of the Gauss-Hermite rules, for each variable, positive. None for 2 nodes
            where the log likelihood is quadratic in the functions, as for a `Normal` whose scale
            does not depend on them, since 2 are exact, and 20 elsewhere.
        num_points: points of the Sobol' sequence and its reflection, a power of two, at least 2.
        num_particles: draws of the other sites.
        vectorize_particles: as in NumPyro's ELBOs.
        tight: whether to use the tighter bound of Titsias (2025) for inducing points, which
            scales the variance that these leave unexplained: optimally for a Gaussian likelihood,
            by one factor that the guide learns for others. If not, the bound of Hensman, Matthews
            and Ghahramani.

    Raises:
        ValueError: if `num_nodes` is not positive or `num_points` is not a power of two; in a step,
            if the guide has no GP site, a site of the guide depends on the function of another, a
            term of the bound combines inputs of the function, or the scale of a site differs
            between model and guide.

    References:
        Hensman, Matthews and Ghahramani (2015), section 4; Buchholz, Wenzel and Mandt (2018),
        Quasi-Monte Carlo Variational Inference; Titsias (2025), New Bounds for Sparse Variational
        Gaussian Processes. The likelihood is evaluated `num_nodes`, `num_nodes**2` or `num_points`
        times; the moments of f once.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> loss = sgp.infer.QuadratureELBO()
    """

    def __init__(
        self,
        num_nodes: int | None = None,
        *,
        num_points: int = 64,
        num_particles: int = 1,
        vectorize_particles: bool | Callable = True,
        tight: bool = True,
    ) -> None:
        self.num_nodes = checks.count_or_none("num_nodes", num_nodes)
        self.num_points = checks.count("num_points", num_points)
        if num_points < 2 or num_points & (num_points - 1):
            raise ValueError(f"`num_points` must be a power of two, at least 2, got {num_points}.")
        self.tight = checks.instance("tight", tight, bool, "True or False")
        super().__init__(num_particles, vectorize_particles)

    def particle(self, key: Array, pair: ModelAndGuide) -> tuple[Float[Array, ""], dict[str, Any]]:
        """The bound at one draw of the other sites, integrated over the functions."""
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
        model_params = {**params, **mutable}

        def run_model(*functions: Array) -> tuple[dict[str, Array], dict[str, Any], dict]:
            drawn = {
                name: {**guide_trace[name], "value": f}
                for name, f in zip(moments, functions, strict=True)
            }
            trace = {**guide_trace, **drawn}
            model_trace = traced(model, model_key, model_params, args, kwargs, replayed=trace)
            terms = elbo_terms(model_trace, trace)
            return terms, mutable_values(model_trace), row_scales(model_trace)

        run = TracedProgram(run_model, *means.values())
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
                    observed, means, name, expected.table, axes, variances, scales, scale, shared
                )
                costs += cost
            pairs[name] = (mean, functools.reduce(jnp.add, variances))
        elbo = expected(point_key, pairs, self.num_nodes, self.num_points)
        return elbo - costs, {**mutable, **new_mutable}


def _check_guide(
    run: Callable[[StandIn], Trace], guide_trace: Trace, means: dict[str, Array]
) -> None:
    """Raise if the guide's distribution of a site depends on the function of another site."""
    names = [name for name, site in guide_trace.items() if site["type"] == "sample"]
    if names[-1] in means and len(means) == 1:
        return  # no site follows the only function

    def distributions(**functions: Array) -> dict[str, list[Array]]:
        trace = run(StandIn(lambda name, family, key: functions[name]))
        return {name: list(map(jnp.asarray, jax.tree.leaves(trace[name]["fn"]))) for name in names}

    for name, leaves in eval_provenance(distributions, **means).items():
        if functions := sorted(frozenset().union(*flat_provenance(leaves))):
            raise ValueError(
                f"the guide's distribution of the site `{name}` depends on the function "
                f"`{functions[0]}`, as where one GP is a function of another: its moments change "
                "with the values of that function. Train with sgp.infer.JointELBO, which draws the "
                "sites in sequence."
            )
