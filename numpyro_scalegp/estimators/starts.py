"""Where the solve of a posterior starts: from a posterior before it, or from the last step."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.comparison import begins_with, is_same
from numpyro_scalegp.features.prior_draws import PriorDraws, rows_stay
from numpyro_scalegp.posteriors.pathwise import PathwisePosterior
from numpyro_scalegp.solvers import KernelOperator, Solution
from numpyro_scalegp.solvers.solver import solved


class Start(NamedTuple):
    """Where a solve starts, or the solution itself."""

    candidates: Float[Array, "p n k"]  # of which each column takes the best combination
    is_solution: Bool[Array, ""]  # whether `last` solves this very system, within the tolerance
    last: Solution


def check_start(start: PathwisePosterior, X: Float[Array, "n d"]) -> None:
    """Raise unless a posterior is one that a solve for inputs X can start from."""
    checks.instance(
        "start", start, PathwisePosterior, "a posterior from an iterative estimator's `condition`"
    )
    if not begins_with(X, start.X):
        raise ValueError(
            f"`start` is a posterior for inputs of shape {start.X.shape}, and the inputs here, of "
            f"shape {X.shape}, do not begin with these rows: append new rows after those of "
            "`start`, in their order, or leave `start` out."
        )


def from_posterior(
    posterior: PathwisePosterior,
    operator: KernelOperator,
    target: Float[Array, " n"],
    draws: PriorDraws,
    tolerance: float,
) -> Start:
    """Start at a posterior's solution, with zeros for the rows that were appended to its own.

    The samples' columns take part where the draws are the same.
    """
    system = operator.kernel, operator.noise_variance, operator.X, target
    own_target = (posterior.y - posterior.mean_function(posterior.X)).astype(operator.dtype)
    before = posterior.kernel, posterior.noise_variance, posterior.X, own_target
    num_new = operator.size - posterior.X.shape[0]
    found = posterior.solution.value
    same_draws = draws.is_same(posterior.draws)
    # In another type the draws are other functions.
    same_draws &= found.dtype == operator.dtype and (num_new == 0 or rows_stay())
    is_solution = is_same(system, before) & same_draws
    is_solution &= jnp.all(draws.origin == posterior.draws.origin)
    # A failed solve is no start.
    value = jnp.where(jnp.isfinite(found), found, 0.0).astype(operator.dtype)
    value = jnp.pad(value, ((0, num_new), (0, 0)))
    residual = posterior.solution.residual.astype(operator.dtype)
    is_solution &= jnp.maximum(residual[0], jnp.mean(residual[1:])) <= tolerance
    if posterior.num_samples != draws.num_draws:
        shape = operator.size, 1 + draws.num_draws
        value = jnp.zeros(shape, value.dtype).at[:, 0].set(value[:, 0])
        residual = jnp.full(1 + draws.num_draws, jnp.inf, value.dtype)
    candidates = value.at[:, 1:].multiply(same_draws)
    return Start(candidates[None], is_solution, solved(value, residual))
