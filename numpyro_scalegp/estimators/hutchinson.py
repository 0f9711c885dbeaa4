"""The standard gradient of the log marginal likelihood: Hutchinson's trace estimator."""

import jax
from jaxtyping import Array, Float, Key

from numpyro_scalegp.estimators.iterative import AbstractIterative
from numpyro_scalegp.solvers import KernelOperator


class Hutchinson(AbstractIterative):
    """The standard estimator: tr(H^-1 dH) ~ mean_j (H^-1 z_j)'dH z_j with random signs z_j.

    It works with every kernel. Its solves take longer than those of `Pathwise`, the more so the
    smaller the noise, and they are of no use for predictions: `condition` solves once more.

    The gradient is unbiased up to the solver's tolerance. The value's log|H| comes from stochastic
    Lanczos quadrature, with the standard error among the state's records: with
    `ConjugateGradients` from extra columns of the same solve, otherwise from a Lanczos process of
    its own, which costs at most `logdet_epochs` epochs. Each evaluation is random, so it is for
    stochastic optimizers, not for NUTS or line searches (under a constant key, NumPyro's samplers
    would use one frozen draw).

    Args:
        solver: one of `sgp.solvers`, by default `AutoSolver()`.
        num_probes: number s of probe vectors for the gradient.
        num_logdet_probes: probe vectors for the value; 0 leaves log|H| out of the value, which then
            is -(y'H^-1 y + n log 2 pi) / 2, and the gradient as it is.
        logdet_epochs: Lanczos steps for the value, with solvers other than conjugate gradients.
        fresh_probes: with a state, whether each step draws new probe vectors, so that the data's
            column alone starts from the last solutions.
        num_solutions: how many of the last solutions a new state keeps, (n, 1 + num_probes) each. A
            step starts from their best linear combination for its own system: with 1 from the last
            one, as in Lin et al. (2024); with 2 it also extrapolates, wherever that helps.
        num_records: for how many of the last steps a new state keeps residuals and epochs.
        num_features: random features of the prior draws that `condition` makes.

    Raises:
        ValueError: if an argument is out of its range.

    References:
        Hutchinson (1990); Gardner et al. (2018), GPyTorch; Lin et al. (2024), eq. 6. Time: one
        batched solve and O(n^2 (d + s)) for the gradient, memory O(n (d + s)).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> estimator = sgp.estimators.Hutchinson(sgp.solvers.ConjugateGradients(1e-2))
    """

    def targets(
        self, operator: KernelOperator, key: Key[Array, ""]
    ) -> Float[Array, "n num_probes"]:
        """Random signs: E[z z'] = I, with less variance than normal probes."""
        return jax.random.rademacher(key, (operator.size, self.num_probes), operator.dtype)
