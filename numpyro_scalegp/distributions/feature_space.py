"""The observations of a mini-batch under a GP of finitely many features."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import Distribution, constraints
from numpyro.primitives import mutable

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.distributions.frozen import is_key_frozen
from numpyro_scalegp.log_determinants import AbstractLogDeterminant
from numpyro_scalegp.log_determinants.learned import learned
from numpyro_scalegp.log_determinants.log_determinant import AbstractBound, Batch
from numpyro_scalegp.posteriors import FeaturePosterior
from numpyro_scalegp.posteriors.feature import feature_posterior, itself


class FeatureSpaceGP(Distribution):
    """y of a mini-batch under f(x) = phi(x)'w, w ~ N(0, I), with f integrated out.

    The site is an observed one, and y is centred: the prior mean is zero. `log_prob` estimates
    log N(y; 0, Phi Phi' + noise I) of all `num_data` rows from this batch's: so the site stands
    outside of plates, which would scale it once more. In the mean over batches, and at the best
    `weights`, it is the log marginal likelihood, up to what `logdet` says of itself.
    Hyperparameters, such as those of a network that computes the features, and `weights` are
    trained together, with no inducing points.

    What is learned of the log-determinant goes from step to step of `SVI` in a NumPyro mutable
    site. Where there is none, as in `SVI.evaluate`, a batch is compared with itself, and the
    estimate is too low. A batch of all rows needs nothing learned: there value and first
    derivatives are exact. Under MCMC, where NumPyro holds parameters and mutable sites at their
    first values, and for second derivatives, as in Laplace's approximation, take `MiniBatch` and
    all rows, which integrates the weights out; all else is refused there.

    Args:
        features: phi(x) of the batch's rows, shape (b, d): of `sgp.features` with independent
            weights (`RandomFourier`, `Learned`), a network, or plain arrays.
        noise_variance: one value, positive.
        weights: w, shape (d,), such as numpyro.param("weights", jnp.zeros(d)): the posterior mean,
            when trained.
        num_data: the number n of all rows, at least b.
        logdet: `Variational`, `Compositional`, `Minimax` or `MiniBatch` from `sgp.estimators`.

    Raises:
        ValueError: if an argument has a wrong shape or range, or does not suit the others; if the
            site stands in a plate, or several computations at once write the state.
        TypeError: if `logdet` is of another kind.

    References:
        Shoham and Avron (2025), Unbiased Stochastic Optimization for Gaussian Processes on Finite
        Dimensional RKHS. Time O(b d^2 + d^3), memory O(b d + d^2), whatever n is.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y, batch_size):
        ...     lengthscale = numpyro.param("lengthscale", 1.0)
        ...     phi = sgp.features.RandomFourier(sgp.kernels.RBF(lengthscale), 50, seed=0)
        ...     weights = numpyro.param("weights", jnp.zeros(50))
        ...     with sgp.plate("rows", len(X), batch_size) as index:
        ...         X_batch, y_batch = X[index], y[index]
        ...     logdet = sgp.log_determinants.Variational()
        ...     gp = sgp.FeatureSpaceGP(phi(X_batch), 0.1, weights, num_data=len(X), logdet=logdet)
        ...     numpyro.sample("y", gp, obs=y_batch)
    """

    arg_constraints = {"noise_variance": constraints.positive, "weights": constraints.real_vector}
    support = constraints.real_vector
    pytree_data_fields = ("features", "noise_variance", "weights", "logdet", "state")
    pytree_aux_fields = ("num_data",)

    def __init__(
        self,
        features: Float[ArrayLike, "b d"],
        noise_variance: Float[ArrayLike, ""],
        weights: Float[ArrayLike, " d"],
        *,
        num_data: int,
        logdet: AbstractLogDeterminant,
        validate_args: bool | None = None,
    ) -> None:
        self.features = checks.inputs("features", features)
        num, d = self.features.shape
        self.noise_variance = checks.as_positive(noise_variance, "noise_variance")
        checks.shape("noise_variance", self.noise_variance, (), why="one value for all rows")
        checks.positive("noise_variance", self.noise_variance)
        self.weights = checks.as_float(weights, "weights")
        checks.shape("weights", self.weights, (d,), why="one weight for each feature")
        checks.finite("weights", self.weights)
        if checks.count("num_data", num_data) < num:
            raise ValueError(
                f"`num_data` must be at least {num}, the rows of `features`, got {num_data}: it is "
                "the number of all rows."
            )
        if not isinstance(logdet, AbstractLogDeterminant):
            raise TypeError(
                "`logdet` must be one of `sgp.log_determinants`: `Variational`, `Compositional`, "
                f"`Minimax` or `MiniBatch`, got {type(logdet).__name__}."
            )
        if is_key_frozen() and (isinstance(logdet, AbstractBound) or num < num_data):
            raise ValueError(
                "a `FeatureSpaceGP` under NUTS, HMC and other users of a potential energy, or in a "
                "line search such as that of `numpyro.optim.Minimize`, takes "
                f"`logdet=MiniBatch()` and all rows, got `{type(logdet).__name__}` and {num} of "
                f"{num_data} rows: mini-batches and what is learned of the log-determinant are "
                "held at their first values there."
            )
        self.num_data = num_data
        self.logdet = logdet
        self.state: Any = None
        if isinstance(logdet, AbstractBound):
            # Here, since NumPyro collects mutable sites before it first calls `log_prob`. What a
            # run gets of them is a copy of the dictionary.
            self.state = learned(logdet, self.batch, mutable(logdet.name, {}))
        super().__init__((), (num,), validate_args=validate_args)

    @property
    def batch(self) -> Batch:
        """The batch as estimators see it."""
        dtype = jnp.result_type(self.features, self.noise_variance, self.weights)
        features, noise = self.features.astype(dtype), self.noise_variance.astype(dtype)
        return Batch(features, noise, self.num_data)

    @property
    def mean(self) -> Float[Array, " b"]:
        """The mean of the observations, zero."""
        return jnp.zeros(self.event_shape, self.features.dtype)

    @property
    def variance(self) -> Float[Array, " b"]:
        """The marginal variance of the observations, |phi(x)|^2 + noise."""
        return jnp.sum(jnp.square(self.features), axis=1) + self.noise_variance

    def expand(self, batch_shape: tuple[int, ...]) -> "FeatureSpaceGP":
        """The same, for the empty shape alone.

        Raises:
            ValueError: for any other shape, as of a plate.
        """
        if tuple(batch_shape) != ():
            raise ValueError(
                "`FeatureSpaceGP` stands inside a plate, or is expanded to the shape "
                f"{tuple(batch_shape)}: write its site outside of plates. It is one law over the "
                "rows of the batch, and scales to all `num_data` rows by itself."
            )
        return self

    def log_prob(
        self, value: Float[ArrayLike, "*batch b"], intermediates: list | None = None
    ) -> Float[Array, "*batch"]:
        """An estimate of the log marginal likelihood of all rows.

        Args:
            value: the batch's observations, shape (..., b).
            intermediates: unused, part of NumPyro's interface.

        Returns:
            Estimates, shape (...).

        Raises:
            ValueError: if `value` has the wrong length, or holds NaN or infinity.
        """
        y = checks.observations(value, self.event_shape, "features")
        return self.logdet.log_prob(self.batch, self.weights, y, self.state)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape b"]:
        """Draw observations of the batch's rows from the prior, noise included.

        Args:
            key: a JAX key.
            sample_shape: shape of the draws.

        Returns:
            Draws, shape (*sample_shape, b), in O(b d) each.
        """
        num, d = self.features.shape
        normal = jax.random.normal(
            checks.as_key(key), (math.prod(sample_shape), d + num), self.features.dtype
        )
        f = matmul(normal[:, :d], self.features.T)
        draws = f + jnp.sqrt(self.noise_variance) * normal[:, d:]
        return draws.reshape(*sample_shape, num)

    def condition(self, y: Float[ArrayLike, " n"]) -> FeaturePosterior:
        """The posterior given the observations of all rows; its inputs are features.

        With features that a function computes, `sgp.posteriors.feature_posterior` goes through the
        rows in chunks.

        Args:
            y: observations, shape (n,).

        Returns:
            A `FeaturePosterior`, in O(n d^2 + d^3); `weights` and `logdet` take no part.

        Raises:
            ValueError: if `features` are not those of all rows, or `y` has the wrong shape, or
                holds NaN or infinity.
        """
        if self.features.shape[0] != self.num_data:
            raise ValueError(
                f"`features` must be those of all {self.num_data} rows for a posterior, got "
                f"{self.features.shape[0]}: see `sgp.posteriors.feature_posterior`."
            )
        y = checks.observations(y, self.event_shape, "features")
        checks.shape("y", y, self.event_shape)
        return feature_posterior(itself, self.features, y, self.noise_variance)
