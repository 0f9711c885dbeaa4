"""Stochastic gradient descent with momentum on batches of rows."""

from jaxtyping import Array, Float

from numpyro_scalegp.solvers.batches import AbstractBatchDescent, DescentState
from numpyro_scalegp.solvers.solver import System


class StochasticGradientDescent(AbstractBatchDescent):
    """Gradient descent on v'Hv / 2 - b'v by batches of rows, with momentum.

    Each iteration computes the gradient's rows of one batch, g = (H v - b)[batch], and moves
    m <- momentum m - learning_rate g, v <- v + m: batch / n of an epoch. The gradient's noise
    vanishes at the solution, so that a constant rate converges.

    On the way the residual is kept row by row from each row's last visit: an estimate that lags
    behind, mostly from above. The one that is reported is computed from the solution.

    Args:
        batch_size: rows of a batch; at most n are used.
        learning_rate: None for the smaller of (1 + momentum) / lambda and (1 - momentum) / h, with
            lambda the largest eigenvalue of a batch's own block of H, from power iterations on a
            few batches at each call, and h the largest entry on the diagonal of H.
        momentum: in [0, 1).
        tolerance: as of `AlternatingProjections`.
        max_epochs: as of `AlternatingProjections`.

    Raises:
        ValueError: if an argument is out of its range.

    References:
        Lin et al. (2023), Sampling from Gaussian Process Posteriors using Stochastic Gradient
        Descent; Lin et al. (2024), algorithm 3, whose residual should start at b - H v. Time
        O(n^2 (d + k)) an epoch, memory O(n k) and one batch of rows.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.StochasticGradientDescent(batch_size=200, max_epochs=20)
    """

    def smooth_limit(self) -> float:
        """Half of what heavy-ball momentum allows."""
        return 1.0 + self.momentum

    def start(self, system: System) -> Float[Array, "n k"]:
        """Empty: the value is the iterate."""
        return system.value[:0]

    def point(self, state: DescentState) -> Float[Array, "n k"]:
        """The iterate."""
        return state.value

    def move(self, state: DescentState, weight: float) -> DescentState:
        """Along the momentum."""
        return state._replace(value=state.value + state.momentum)
