"""Stochastic dual descent: batches of rows, Nesterov's momentum and an average of the iterates."""

from jaxtyping import Array, Float

from numpyro_scalegp.solvers.batches import AbstractBatchDescent, DescentState
from numpyro_scalegp.solvers.solver import System


class StochasticDualDescent(AbstractBatchDescent):
    """Gradient descent on v'Hv / 2 - b'v by batches of rows, which looks ahead and averages.

    Each iteration computes the gradient's rows of one batch ahead of the iterate,
    g = (H (v + momentum m) - b)[batch], and moves m <- momentum m - learning_rate g, v <- v + m:
    batch / n of an epoch. The solution is the geometric average of the iterates, a <- w v + (1 - w)
    a, over about a hundredth of the budget, and at most an epoch.

    The residual on the way is as of `StochasticGradientDescent`.

    Args:
        batch_size: rows of a batch; at most n are used.
        learning_rate: None for the smaller of 1 / lambda and (1 - momentum) / h, as of
            `StochasticGradientDescent`.
        momentum: in [0, 1).
        tolerance: as of `AlternatingProjections`.
        max_epochs: as of `AlternatingProjections`.

    Raises:
        ValueError: if an argument is out of its range.

    References:
        Lin, Padhy, Antoran, Tripp, Terenin, Szepesvari, Hernandez-Lobato and Janz (2024),
        Stochastic Gradient Descent for Gaussian Processes Done Right, algorithm 1, whose rate is
        tuned by hand and whose batches are drawn with replacement. Time O(n^2 (d + k)) an epoch,
        memory O(n k) and one batch of rows.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.StochasticDualDescent(batch_size=200, max_epochs=20)
    """

    def smooth_limit(self) -> float:
        """Below (2 + 2 momentum) / (1 + 2 momentum), where Nesterov's momentum diverges."""
        return 1.0

    def start(self, system: System) -> Float[Array, "n k"]:
        """The average and the iterate start alike."""
        return system.value

    def point(self, state: DescentState) -> Float[Array, "n k"]:
        """Ahead along the momentum."""
        return state.iterate + self.momentum * state.momentum

    def move(self, state: DescentState, weight: float) -> DescentState:
        """Along the momentum, and the average after the iterate."""
        iterate = state.iterate + state.momentum
        value = state.value + weight * (iterate - state.value)
        return state._replace(iterate=iterate, value=value)
