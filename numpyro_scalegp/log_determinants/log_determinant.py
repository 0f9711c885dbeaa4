"""The log marginal likelihood of a finite feature map, from mini-batches."""

import abc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.derivatives import once_differentiable
from numpyro_scalegp.core.linalg import inverse_cholesky, matmul, triangular_outer

# The variance of A that rates are chosen for: rate x spread is at most this.
_VARIANCE = 0.2


_REFUSAL = (
    "`Variational`, `Compositional` and `Minimax` have first derivatives alone: what they have "
    "learned of the log-determinant is held fixed in them, and second derivatives would be wrong. "
    "For `jax.hessian` or a Laplace approximation take `logdet=MiniBatch()` and all rows."
)


class Batch(NamedTuple):
    """The features of a mini-batch of rows, of n in all."""

    features: Float[Array, "b d"]
    noise_variance: Float[Array, ""]
    num_data: int

    @property
    def scale(self) -> float:
        """How many rows stand for each of the batch."""
        return self.num_data / self.features.shape[0]

    @property
    def is_full(self) -> bool:
        """Whether it holds all rows."""
        return self.features.shape[0] == self.num_data

    def gram(self) -> Float[Array, "d d"]:
        """An unbiased estimate of F = Phi'Phi + noise I, from all rows."""
        eye = jnp.eye(self.features.shape[1], dtype=self.features.dtype)
        return self.scale * matmul(self.features.T, self.features) + self.noise_variance * eye

    def covariance(self) -> Float[Array, "b b"]:
        """H = Phi Phi' + noise I of the batch's own rows."""
        eye = jnp.eye(self.features.shape[0], dtype=self.features.dtype)
        return matmul(self.features, self.features.T) + self.noise_variance * eye

    def whitened(self, W: Float[Array, "d d"]) -> Float[Array, "b d"]:
        """W phi of each row."""
        return matmul(self.features, W.T)

    def whitened_gram(self, W: Float[Array, "d d"]) -> Float[Array, "d d"]:
        """An unbiased estimate of W F W', for a lower triangular W."""
        white = self.whitened(W)
        return self.scale * matmul(white.T, white) + self.noise_variance * triangular_outer(W)

    def trace(self, W: Float[Array, "d d"]) -> Float[Array, ""]:
        """An unbiased estimate of tr(W F W'), in O(b d^2)."""
        white = jnp.sum(jnp.square(self.whitened(W)))
        return self.scale * white + self.noise_variance * jnp.sum(jnp.square(W))

    def first_gram(self) -> Float[Array, "d d"]:
        """F to start from: the mean eigenvalue is added to all.

        For F is then known in a few directions only, and 1 / F must not be large in the others.
        """
        F = self.gram()
        size = F.shape[0]
        return F + jnp.trace(F) / size * jnp.eye(size, dtype=F.dtype)


class AbstractLogDeterminant(eqx.Module):
    """An estimator of log N(y; 0, Phi Phi' + noise I) from mini-batches, by its log|F|."""

    @property
    def stateful(self) -> "AbstractStateful | None":
        """Itself, if it has a mutable state with an estimate of F from earlier batches."""
        return None

    @abc.abstractmethod
    def log_prob(
        self, batch: Batch, weights: Float[Array, " d"], y: Float[Array, "*batch b"], state: Any
    ) -> Float[Array, "*batch"]:
        """An estimate for all n rows, differentiable but in the state, which is held fixed.

        Without a state, F is that of the batch: exact for a batch of all rows.
        """


class AbstractStateful(AbstractLogDeterminant):
    """One whose estimate of log|F| is a sum over rows, given an estimate of F from earlier batches.

    That is its mutable state, a pytree of arrays in the NumPyro mutable site `name` of a
    `FeatureSpaceGP`.
    """

    name: eqx.AbstractVar[str]

    def __check_init__(self) -> None:
        checks.instance("name", self.name, str, "a string")

    @property
    def stateful(self) -> "AbstractStateful":
        """Itself."""
        return self

    def start(self, F: Float[Array, "d d"], num_batches: int = 1) -> Any:
        """The state with A = F, for an F estimated from `num_batches` batches."""
        return self.start_from(F, inverse_cholesky(F, warn=False), num_batches)

    def start_from_scale(self, batch: Batch) -> Any:
        """The state with A a multiple of I, twice the mean eigenvalue of F, in O(b d)."""
        features, noise = batch.features, batch.noise_variance
        d = features.shape[1]
        scale = 2.0 * (batch.scale * jnp.sum(jnp.square(features)) / d + noise)
        eye = jnp.eye(d, dtype=features.dtype)
        return self.start_from(scale * eye, eye / jnp.sqrt(scale), 1)

    @abc.abstractmethod
    def start_from(self, F: Float[Array, "d d"], W: Float[Array, "d d"], num_batches: int) -> Any:
        """The state with A = F = (W'W)^-1; its field `W` is such that A^-1 = W'W."""

    @abc.abstractmethod
    def advance(self, batch: Batch, state: Any, spread: Float[ArrayLike, ""] = 0.0) -> Any:
        """The state after a batch.

        Args:
            batch: the rows.
            state: the state before.
            spread: how much batches differ, from those before this one: see `FitRecord.spread`. The
                larger it is, the more rows the state averages over.
        """

    def trace(self, batch: Batch, state: Any) -> Float[Array, ""]:
        """tr(Q F), where <Q, dF> is the gradient of the estimate; Q = A^-1 for a bound."""
        return batch.trace(state.W)

    def estimate(self, batch: Batch, state: Any) -> Float[Array, ""]:
        """An estimate of log|F|, by a state that is held fixed.

        By default log|A| + tr(A^-1 F) - d, at least log|F| in the mean over batches.
        """
        W = state.W
        return -2.0 * jnp.sum(jnp.log(jnp.diagonal(W))) + batch.trace(W) - W.shape[0]

    def log_prob(
        self, batch: Batch, weights: Float[Array, " d"], y: Float[Array, "*batch b"], state: Any
    ) -> Float[Array, "*batch"]:
        """-1/2 of an estimate of |y - Phi w|^2 / noise + |w|^2 + log|F| + (n - d) log noise.

        Without n log 2 pi, which is added. At the best w the sum is -2 log p(y).

        Raises:
            TypeError: in second derivatives.
        """
        n, d = batch.num_data, batch.features.shape[1]
        if state is None:
            state = self.start(Batch(*jax.lax.stop_gradient(batch[:2]), n).gram())

        def density(
            features: Array, noise_variance: Array, weights: Array, y: Array, state: Any
        ) -> Array:
            batch = Batch(features, noise_variance, n)
            squares = batch.scale * jnp.sum(jnp.square(y - matmul(features, weights)), axis=-1)
            fit = squares / noise_variance + jnp.sum(jnp.square(weights))
            if batch.is_full and n < d:  # log|F| and (n - d) log noise would cancel
                W = inverse_cholesky(batch.covariance())
                volume = -2.0 * jnp.sum(jnp.log(jnp.diagonal(W)))
            else:
                volume = self.estimate(batch, state) + (n - d) * jnp.log(noise_variance)
            return -0.5 * (fit + volume + n * math.log(2.0 * math.pi))

        once = once_differentiable(density, _REFUSAL)
        return once(batch.features, batch.noise_variance, weights, y, state)


def within_spread(rate: Float[ArrayLike, ""], spread: Float[ArrayLike, ""]) -> Float[Array, ""]:
    """The rate of a state's updates, or less where the spread between batches is large.

    A then varies by about `_VARIANCE` / 2, relative to itself and for each feature. As the spread
    is that of batches before, the rate does not depend on the batch, and adds no bias.
    """
    return jnp.minimum(rate, _VARIANCE / jnp.maximum(spread, _VARIANCE))


def at_step(
    rate: float | Callable[[Array], ArrayLike], step: Int[Array, ""]
) -> Float[ArrayLike, ""]:
    """A rate, or the value of a schedule at a step."""
    return rate(step) if callable(rate) else rate
