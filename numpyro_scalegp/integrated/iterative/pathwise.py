"""The pathwise gradient of the log marginal likelihood."""

from typing import ClassVar

from jaxtyping import Array, Float, Key

from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.integrated.iterative.iterative import AbstractIterative
from numpyro_scalegp.linear.operator import KernelOperator


class Pathwise(AbstractIterative):
    """The pathwise estimator: tr(H^-1 dH) ~ mean_j u_j'dH u_j with H u_j = xi_j ~ N(0, H).

    The right-hand sides xi_j = f_j(X) + sqrt(noise) w_j are noisy observations of prior draws.
    Their solutions are closer to zero, the initial guess, than the solutions of `Hutchinson`, at a
    distance that does not grow as the noise decreases. With v = H^-1 (y - m(X)), each solution
    gives a posterior sample, m + f_j + k(., X)(v - u_j), so that predictions need no further solve.

    The gradient is unbiased up to the solver's tolerance. `Hutchinson` describes the estimate of
    the value, its cost and use, and the other arguments.

    Args:
        solver: one of `sgp.solvers`, by default `AutoSolver()`.
        num_probes: number s of prior draws, and of stored posterior samples.
        num_features: number of random features of the draws. The kernel must have random features;
            all kernels of this package do.

    Raises:
        ValueError: if an argument is out of its range.

    References:
        Lin et al. (2024), Improving Linear System Solvers for Hyperparameter Optimisation in
        Iterative Gaussian Processes, section 3. Time: one batched solve and O(n^2 (d + s)) for the
        gradient, memory O(n (d + s)).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> estimator = sgp.estimators.Pathwise(sgp.solvers.AlternatingProjections())
    """

    stores_samples: ClassVar[bool] = True

    def targets(
        self, operator: KernelOperator, key: Key[Array, ""]
    ) -> Float[Array, "n num_probes"]:
        """Noisy observations of prior draws, xi_j ~ N(0, H)."""
        draws = PriorDraws.from_key(key, self.num_probes, self.num_features, operator.X)
        return draws.observations(operator.kernel, operator.X, operator.noise())
