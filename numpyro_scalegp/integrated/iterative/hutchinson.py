"""The standard gradient of the log marginal likelihood: Hutchinson's trace estimator."""

import jax
from jaxtyping import Array, Float, Key

from numpyro_scalegp.integrated.iterative.iterative import AbstractIterative
from numpyro_scalegp.linear.operator import KernelOperator


class Hutchinson(AbstractIterative):
    """The standard estimator: tr(H^-1 dH) ~ mean_j (H^-1 z_j)'dH z_j with random signs z_j.

    It works with every kernel. The solves take longer than the solves of `Pathwise`, increasingly
    so for smaller noise, and `condition` cannot use the solutions: it needs another solve.

    The gradient is unbiased up to the solver's tolerance. The value estimates log|H| by stochastic
    Lanczos quadrature: with `ConjugateGradients` from extra columns of the same solve, otherwise
    from a separate Lanczos process, which costs at most `logdet_epochs` epochs (evaluations of all
    entries of H). A state records the standard error of the value. Each evaluation is random, so
    use the estimator with stochastic optimizers, not with NUTS or line searches, which evaluate it
    with a constant key.

    Args:
        solver: one of `sgp.solvers`, by default `AutoSolver()`.
        num_probes: number s of probe vectors for the gradient.
        num_logdet_probes: probe vectors for the value; 0 omits log|H| from the value, which then
            is -(y'H^-1 y + n log 2 pi) / 2, and leaves the gradient unchanged.
        logdet_epochs: number of Lanczos steps for the value, with solvers other than conjugate
            gradients.
        fresh_probes: with a state, whether each step draws new probe vectors; then only the solve
            for the observations starts from the previous solution.
        num_solutions: number of previous solutions in a new state, of shape (n, 1 + num_probes)
            each. A step starts from the linear combination of them that is best for its linear
            system: with 1 from a multiple of the last solution, following Lin et al. (2024); with
            2, the combination can extrapolate.
        num_records: number of steps whose residuals and epochs a new state records.
        num_features: number of random features of the prior draws in `condition`.

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
