"""The solver state as a NumPyro site."""

from typing import Any

from numpyro.primitives import mutable

from numpyro_scalegp.core import checks
from numpyro_scalegp.estimators import SolverState


def solver_state(
    name: str,
    *,
    num_records: int = 10_000,
    fresh_probes: bool = False,
    num_solutions: int = 2,
) -> SolverState:
    """A site that carries an iterative estimator's solution from one step of SVI to the next.

    Pass it as `state=` to a `GaussianProcess`. Solves then start from the last solutions (a warm
    start), for which the probes are drawn once and stay; work that a budget cuts short goes on at
    the next step; and the residuals and epochs of each step are kept, for `sgp.to_arviz` and
    `history()`.

    It is a NumPyro mutable site: `SVI.run`, `update` and `stable_update` carry it in
    `SVIState.mutable_state`, with arrays as its leaves, so that a saved state resumes. A step that
    fails leaves the last good solution. It cannot serve `num_particles > 1`.

    Args:
        name: the site's name.
        num_records: for how many of the last steps residuals and epochs are kept.
        fresh_probes: draw new probes at each step, so that the data's column alone is warm.
        num_solutions: how many of the last solutions are kept, (n, 1 + num_probes) each. A step
            starts from their best linear combination for its own system: with 1 from the last one,
            as in Lin et al. (2024); with 2 it also extrapolates, wherever that helps.

    Returns:
        The state: empty at first, shaped by the `GaussianProcess` that gets it.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro_scalegp as sgp
        >>> estimator = sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients(), num_probes=8)
        >>> def model(X, y):
        ...     kernel = sgp.kernels.Matern32(numpyro.param("lengthscale", 1.0))
        ...     state = sgp.solver_state("solver")
        ...     gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator, state=state)
        ...     numpyro.sample("y", gp, obs=y)
    """
    checks.instance("name", name, str, "a string")
    empty = SolverState(num_records, fresh_probes=fresh_probes, num_solutions=num_solutions)
    state: Any = mutable(name, empty)
    return state
