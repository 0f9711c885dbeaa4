"""Stochastic dual descent: random batches, Nesterov's momentum and averaged iterates."""

from jaxtyping import Array, Float

from numpyro_scalegp.linear.batches import AbstractBatchDescent, DescentState


class StochasticDualDescent(AbstractBatchDescent):
    """Gradient descent on v'Hv / 2 - b'v by batches, with Nesterov's momentum and an average.

    Each iteration computes the rows of the gradient in one batch, ahead of the iterate,
    g = (H (v + momentum m) - b)[batch], and updates m <- momentum m - learning_rate g, v <- v + m,
    at a cost of `batch_size` / n epochs. The solution is the exponential moving average of the
    iterates, a <- w v + (1 - w) a, over about a hundredth of the budget, and at most an epoch.

    Until the end, the residual is estimated as in `StochasticGradientDescent`.

    Args:
        batch_size: rows of a batch, at most n.
        learning_rate: None for the smaller of 1 / lambda and (1 - momentum) / h, with lambda and h
            as in `StochasticGradientDescent`.
        momentum: in [0, 1).
        tolerance: see `AlternatingProjections`.
        max_epochs: see `AlternatingProjections`.

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
        """One; Nesterov's momentum diverges at (2 + 2 momentum) / (1 + 2 momentum) and above."""
        return 1.0

    def first_iterate(self, value: Float[Array, "n k"]) -> Float[Array, "rows k"]:
        """The iterate and the average start at the same value."""
        return value

    def point(self, state: DescentState) -> Float[Array, "n k"]:
        """The gradient is evaluated ahead of the iterate, along the momentum."""
        return state.iterate + self.momentum * state.momentum

    def move(self, state: DescentState, weight: float) -> DescentState:
        """Move the iterate along the momentum, then update the average."""
        iterate = state.iterate + state.momentum
        value = state.value + weight * (iterate - state.value)
        return state._replace(iterate=iterate, value=value)
