"""Stochastic gradient descent with momentum on batches of rows."""

from jaxtyping import Array, Float

from numpyro_scalegp.linear.batches import AbstractBatchDescent, DescentState


class StochasticGradientDescent(AbstractBatchDescent):
    """Gradient descent on v'Hv / 2 - b'v by batches of rows, with momentum.

    Each iteration computes the rows of the gradient in one batch, g = (H v - b)[batch], and updates
    m <- momentum m - learning_rate g, v <- v + m, at a cost of `batch_size` / n epochs. The noise
    of the gradient vanishes at the solution, so the iterations converge with a constant learning
    rate.

    Until the end, the residual of each row is from the last batch with this row, and is mostly too
    large. The residual of the result is computed from the solution.

    Args:
        batch_size: rows of a batch, at most n.
        learning_rate: None for the smaller of (1 + momentum) / lambda and (1 - momentum) / h, with
            lambda the largest eigenvalue of a batch's diagonal block of H, from power iterations on
            a few batches at each call, and h the largest entry on the diagonal of H.
        momentum: in [0, 1).
        tolerance: see `AlternatingProjections`.
        max_epochs: see `AlternatingProjections`.

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
        """Half of the largest stable rate with heavy-ball momentum."""
        return 1.0 + self.momentum

    def first_iterate(self, value: Float[Array, "n k"]) -> Float[Array, "rows k"]:
        """Empty: the value is the iterate."""
        return value[:0]

    def point(self, state: DescentState) -> Float[Array, "n k"]:
        """The gradient is evaluated at the iterate."""
        return state.value

    def move(self, state: DescentState, weight: float) -> DescentState:
        """Move the iterate along the momentum."""
        return state._replace(value=state.value + state.momentum)
