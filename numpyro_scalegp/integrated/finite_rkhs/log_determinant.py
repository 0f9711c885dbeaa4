"""The log marginal likelihood of a finite number of features, estimated from mini-batches."""

import abc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.summary import OneLine
from numpyro_scalegp.numerics.derivatives import once_differentiable
from numpyro_scalegp.numerics.linalg import inverse_cholesky, matmul, triangular_outer

# Largest product of the rate of updates and the spread between batches.
_MAX_RATE_TIMES_SPREAD = 0.2


_REFUSAL = (
    "`Variational`, `Compositional` and `Minimax` have only first derivatives: they hold their "
    "state fixed, so that second derivatives would be wrong. For `jax.hessian` or a Laplace "
    "approximation use `logdet=MiniBatch()` and all rows."
)


class Batch(NamedTuple):
    """The features of a mini-batch of b out of n observations."""

    features: Float[Array, "b d"]
    noise_variance: Float[Array, ""]
    num_data: int

    @property
    def scale(self) -> float:
        """The weight n / b of each row."""
        return self.num_data / self.features.shape[0]

    @property
    def is_full(self) -> bool:
        """Whether it holds all rows."""
        return self.features.shape[0] == self.num_data

    def gram(self) -> Float[Array, "d d"]:
        """An unbiased estimate of F = Phi'Phi + noise I of all n observations."""
        eye = jnp.eye(self.features.shape[1], dtype=self.features.dtype)
        return self.scale * matmul(self.features.T, self.features) + self.noise_variance * eye

    def covariance(self) -> Float[Array, "b b"]:
        """H = Phi Phi' + noise I of the batch."""
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
        """An initial estimate of F: the mean eigenvalue is added to all eigenvalues.

        One batch determines F in a few directions only; without the addition, F^-1 would be large
        in the other directions.
        """
        F = self.gram()
        size = F.shape[0]
        return F + jnp.trace(F) / size * jnp.eye(size, dtype=F.dtype)


class AbstractLogDeterminant(OneLine):
    """Estimates log N(y; 0, Phi Phi' + noise I) from mini-batches, by an estimate of log|F|."""

    @property
    def stateful(self) -> "AbstractStateful | None":
        """This estimator if it has a state with an estimate of F from earlier batches, or None."""
        return None

    @abc.abstractmethod
    def log_prob(
        self, batch: Batch, weights: Float[Array, " d"], y: Float[Array, "*batch b"], state: Any
    ) -> Float[Array, "*batch"]:
        """An estimate for all n observations; its derivatives hold the state fixed.

        If `state` is None, F is estimated from the batch: exact for a batch of all rows.
        """


class AbstractStateful(AbstractLogDeterminant):
    """Estimates log|F| by a sum over observations, given an estimate of F from earlier batches.

    The earlier estimate is in the state, a pytree of arrays in the NumPyro mutable site `name` of a
    `FeatureSpaceGP`.
    """

    name: eqx.AbstractVar[str]

    def __check_init__(self) -> None:
        checks.instance("name", self.name, str, "a string")

    @property
    def stateful(self) -> "AbstractStateful":
        """This estimator."""
        return self

    def start(self, F: Float[Array, "d d"], num_batches: int = 1) -> Any:
        """The state with A = F, for an F estimated from `num_batches` batches."""
        return self.start_from(F, inverse_cholesky(F, warn=False), num_batches)

    def start_from_scale(self, batch: Batch) -> Any:
        """The state with A = c I, where c is twice the mean eigenvalue of F, in O(b d)."""
        features, noise = batch.features, batch.noise_variance
        d = features.shape[1]
        scale = 2.0 * (batch.scale * jnp.sum(jnp.square(features)) / d + noise)
        eye = jnp.eye(d, dtype=features.dtype)
        return self.start_from(scale * eye, eye / jnp.sqrt(scale), 1)

    @abc.abstractmethod
    def start_from(self, F: Float[Array, "d d"], W: Float[Array, "d d"], num_batches: int) -> Any:
        """The state with A = F = (W'W)^-1, with a field `W`."""

    @abc.abstractmethod
    def advance(self, batch: Batch, state: Any, spread: Float[ArrayLike, ""] = 0.0) -> Any:
        """The state after a batch.

        Args:
            batch: the mini-batch.
            state: the previous state.
            spread: of the previous batches, see `FitRecord.spread`. The larger it is, the more
                batches the state averages over.
        """

    def trace(self, batch: Batch, state: Any) -> Float[Array, ""]:
        """tr(Q F), where <Q, dF> is the gradient of `estimate`; by default Q = A^-1."""
        return batch.trace(state.W)

    def estimate(self, batch: Batch, state: Any) -> Float[Array, ""]:
        """An estimate of log|F|, given the state.

        By default log|A| + tr(A^-1 F) - d, whose mean over batches is at least log|F|.
        """
        W = state.W
        return -2.0 * jnp.sum(jnp.log(jnp.diagonal(W))) + batch.trace(W) - W.shape[0]

    def log_prob(
        self, batch: Batch, weights: Float[Array, " d"], y: Float[Array, "*batch b"], state: Any
    ) -> Float[Array, "*batch"]:
        """Estimate log p(y) by mini-batches.

        The estimate is -1/2 of |y - Phi w|^2 / noise + |w|^2 + log|F| + (n - d) log noise
        + n log 2 pi, which is -2 log p(y) at the optimal w.

        Raises:
            TypeError: for second derivatives.
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

        density = once_differentiable(density, _REFUSAL)
        return density(batch.features, batch.noise_variance, weights, y, state)


def within_spread(rate: Float[ArrayLike, ""], spread: Float[ArrayLike, ""]) -> Float[Array, ""]:
    """The rate of a state's updates, reduced if the spread between batches is large.

    The relative variance of A is then at most about `_MAX_RATE_TIMES_SPREAD` / 2 per feature. The
    spread is from the previous batches, so the rate is independent of the batch and adds no bias.
    """
    return jnp.minimum(rate, _MAX_RATE_TIMES_SPREAD / jnp.maximum(spread, _MAX_RATE_TIMES_SPREAD))


def at_step(
    rate: float | Callable[[Array], ArrayLike], step: Int[Array, ""]
) -> Float[ArrayLike, ""]:
    """A rate, or the value of a schedule at a step."""
    return rate(step) if callable(rate) else rate
