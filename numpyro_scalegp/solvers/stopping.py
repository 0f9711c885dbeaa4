"""Distributions of a random stopping index, and the weights that keep a sum cut short unbiased.

A sum of terms 1..N is evaluated up to a random index J only. Weighting each term by the inverse of
the probability that it is evaluated keeps the mean of the result that of the whole sum, whatever
the terms are, as long as J is drawn independently of them.

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
            by their sum. The last one should be positive: terms after the last index of positive
            probability are never evaluated.

    Raises:
        ValueError: if concrete probabilities are negative, not finite or all zero.

    Example:
        >>> import jax
        >>> from numpyro_scalegp.solvers.stopping import StoppingTime
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

        Few terms beyond the minimum are paid for, and late terms, where they are evaluated, weigh
        exp(decay (j - minimum)): the terms should fall faster than that.

        Args:
            decay: rate lambda, not negative; 0 for equal probabilities.
            minimum: the least index, from 1 to `maximum`.
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
        # Summed from the small end, so that even the least are accurate.
        return jnp.cumsum(self.probabilities[::-1])[::-1]

    @property
    def mean(self) -> Float[Array, ""]:
        """E[J]: what the sum costs, in terms."""
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
        # J >= j for the largest j with uniform < P(J >= j); indices without probability are passed
        # over, as theirs is the survival of the next.
        return jnp.searchsorted(-self.survival, -uniform, side="left").astype(int)

    def roulette_weights(self, stop: Int[ArrayLike, "*shape"]) -> Float[Array, "*shape N"]:
        """Weights of the terms when the sum stops at `stop`: 1(j <= J) / P(J >= j).

        Args:
            stop: indices J.

        Returns:
            Weights with a trailing axis for the terms, zero after J. Their mean is one.
        """
        evaluated = jnp.arange(1, self.num_terms + 1) <= jnp.asarray(stop)[..., None]
        survival = self.survival
        return jnp.where(evaluated, 1.0 / jnp.where(survival > 0, survival, 1.0), 0.0)

    def single_sample_weight(self, stop: Int[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
        """The weight 1 / P(J) when the J-th term alone is evaluated.

        Args:
            stop: indices J.

        Returns:
            Weights of the same shape.
        """
        return 1.0 / self.probabilities[jnp.asarray(stop) - 1]


def decay_and_minimum(mean: int | float, maximum: int, *, share: float = 0.8) -> tuple[float, int]:
    """The decay and the minimum of the exponential distribution with a wanted E[J].

    Args:
        mean: wanted E[J].
        maximum: the number N of terms.
        share: the minimum as a share of the mean, in (0, 1).

    Returns:
        The decay, and the minimum: the rounded share of the mean, at least 1.

    Raises:
        ValueError: if no exponential distribution has this mean: it must lie between the minimum
            and half way from there to `maximum`.
    """
    checks.number("mean", mean, "(0, inf)")
    checks.number("share", share, "(0, 1)")
    checks.count("maximum", maximum)
    minimum = max(1, round(share * mean))
    if not minimum < mean <= 0.5 * (minimum + maximum):
        raise ValueError(
            f"`mean` must lie above the minimum, here {minimum}, and at most half way from there "
            f"to `maximum`, here {maximum}; got {mean}."
        )
    steps = np.arange(maximum - minimum + 1.0)

    def excess(decay: float) -> float:
        p = np.exp(-decay * steps)
        return float(steps @ p / p.sum()) - (mean - minimum)

    # Here alone, since a fit that needs none of it would wait for its import.
    from scipy.optimize import brentq

    high = 1.0
    while excess(high) > 0:
        high *= 2.0
    decay = 0.0 if excess(0.0) <= 0 else brentq(excess, 0.0, high, xtol=1e-300, rtol=1e-15)
    return decay, minimum
