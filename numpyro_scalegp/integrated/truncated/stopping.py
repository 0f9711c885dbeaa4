"""Distributions of a random stopping index, and weights that keep a truncated sum unbiased.

A sum of terms 1..N is evaluated only up to a random index J. If each term is weighted by the
inverse of the probability that it is evaluated, the mean of the result is the complete sum, for any
terms that are independent of J.

References:
    Kahn (1955), Use of Different Monte Carlo Sampling Techniques; Lyne et al. (2015), On Russian
    Roulette Estimates for Bayesian Inference with Doubly-Intractable Likelihoods; Potapczynski et
    al. (2021), Bias-Free Scalable Gaussian Processes via Randomized Truncations, section 2.3.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key

from numpyro_scalegp.core import checks

__all__ = ["StoppingTime", "decay_and_minimum"]


class StoppingTime(eqx.Module):
    """The distribution of a stopping index J in 1..N, given as a table.

    Args:
        probabilities: P(J = 1), ..., P(J = N), shape (N,), at least one positive; they are divided
            by their sum. P(J = N) should be positive: terms after the last index of positive
            probability are never evaluated.

    Raises:
        ValueError: if concrete probabilities are negative, not finite or all zero.

    Example:
        >>> import jax
        >>> from numpyro_scalegp.integrated.truncated.stopping import StoppingTime
        >>> distribution = StoppingTime.exponential(decay=0.05, minimum=80, maximum=10_000)
        >>> stop = distribution.sample(jax.random.key(0))
        >>> weights = distribution.roulette_weights(stop)
        >>> weights.shape
        (10000,)
    """

    probabilities: Float[Array, " N"]

    def __init__(self, probabilities: Float[ArrayLike, " N"]) -> None:
        p = checks.as_float(probabilities, "probabilities")
        if p.ndim != 1 or p.size == 0:
            raise ValueError(f"`probabilities` must have shape (N,) with N > 0, got {p.shape}.")
        if checks.is_concrete(p):
            table = np.asarray(p)
            if not (np.all(np.isfinite(table)) and np.all(table >= 0) and np.any(table > 0)):
                raise ValueError(
                    "`probabilities` must be finite and not negative, and at least one of them "
                    f"positive, got values from {table.min()} to {table.max()}."
                )
        self.probabilities = p / jnp.sum(p)

    @classmethod
    def exponential(cls, decay: int | float, minimum: int, maximum: int) -> "StoppingTime":
        """P(J = j) in proportion to exp(-decay j) for j from `minimum` to `maximum`.

        A large decay evaluates few terms beyond the minimum. Term j has a weight of about
        exp(decay (j - minimum)), so the terms should decrease faster than the inverse of that.

        Args:
            decay: rate lambda, not negative; 0 for equal probabilities.
            minimum: the smallest index, from 1 to `maximum`.
            maximum: the number N of terms.

        Raises:
            ValueError: if an argument is out of its range.
        """
        checks.number("decay", decay, "[0, inf)")
        if checks.count("minimum", minimum) > checks.count("maximum", maximum):
            raise ValueError(
                "`minimum` and `maximum` must satisfy 1 <= minimum <= maximum, got "
                f"{minimum} and {maximum}."
            )
        index = np.arange(1, maximum + 1)
        return cls(np.where(index >= minimum, np.exp(-decay * (index - float(minimum))), 0.0))

    @property
    def num_terms(self) -> int:
        """The number N of terms."""
        return self.probabilities.shape[0]

    @property
    def survival(self) -> Float[Array, " N"]:
        """P(J >= 1), ..., P(J >= N), shape (N,)."""
        # Summed from the small end, so that small probabilities stay accurate.
        return jnp.cumsum(self.probabilities[::-1])[::-1]

    @property
    def mean(self) -> Float[Array, ""]:
        """E[J], the expected number of terms."""
        return jnp.sum(self.survival)

    def sample(self, key: Key[Array, ""], shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
        """Draw indices J from 1 to N.

        Args:
            key: a typed JAX key.
            shape: shape of the draws.

        Returns:
            Integers of shape `shape`.
        """
        uniform = jax.random.uniform(checks.as_key(key), shape, self.probabilities.dtype)
        # J is the largest j with uniform < P(J >= j). Indices of zero probability are skipped, as
        # their survival is equal to the survival of the next index.
        return jnp.searchsorted(-self.survival, -uniform, side="left").astype(int)

    def roulette_weights(self, stop: Int[ArrayLike, "*shape"]) -> Float[Array, "*shape N"]:
        """Weights of the terms when the sum stops at `stop`: 1(j <= J) / P(J >= j).

        Args:
            stop: indices J.

        Returns:
            Weights with a trailing axis for the terms, zero after J. The mean of each is one.
        """
        evaluated = jnp.arange(1, self.num_terms + 1) <= jnp.asarray(stop)[..., None]
        survival = self.survival
        return jnp.where(evaluated, 1.0 / jnp.where(survival > 0, survival, 1.0), 0.0)

    def single_sample_weight(self, stop: Int[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
        """The weight 1 / P(J) if only the J-th term is evaluated.

        Args:
            stop: indices J.

        Returns:
            Weights of the same shape.
        """
        return 1.0 / self.probabilities[jnp.asarray(stop) - 1]


def decay_and_minimum(mean: int | float, maximum: int, *, share: float = 0.8) -> tuple[float, int]:
    """The decay and the minimum of the exponential distribution with a specified E[J].

    Args:
        mean: E[J].
        maximum: the number N of terms.
        share: the minimum as a fraction of the mean, in (0, 1).

    Returns:
        The decay, and the minimum: the rounded fraction of the mean, at least 1.

    Raises:
        ValueError: if no exponential distribution has this mean: it must lie between the minimum
            and the midpoint of the minimum and `maximum`.
    """
    checks.number("mean", mean, "(0, inf)")
    checks.number("share", share, "(0, 1)")
    checks.count("maximum", maximum)
    minimum = max(1, round(share * mean))
    if not minimum < mean <= 0.5 * (minimum + maximum):
        raise ValueError(
            f"`mean` must lie above the minimum, here {minimum}, and not above the midpoint of the "
            f"minimum and `maximum`, here {maximum}; got {mean}."
        )
    steps = np.arange(maximum - minimum + 1.0)

    def excess(decay: float) -> float:
        p = np.exp(-decay * steps)
        return float(steps @ p / p.sum()) - (mean - minimum)

    # Imported here because the import is slow and most fits do not need it.
    from scipy.optimize import brentq

    high = 1.0
    while excess(high) > 0:
        high *= 2.0
    decay = 0.0 if excess(0.0) <= 0 else brentq(excess, 0.0, high, xtol=1e-300, rtol=1e-15)
    return decay, minimum
