"""The observations of a mini-batch under a GP of finitely many features."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints
from numpyro.primitives import mutable

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.functions import constant_function
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.distributions.collapsed import GaussianNoise
from numpyro_scalegp.distributions.frozen import is_key_frozen
from numpyro_scalegp.features import AbstractFeatures
from numpyro_scalegp.features.learned import as_features
from numpyro_scalegp.log_determinants.log_determinant import AbstractLogDeterminant, Batch
from numpyro_scalegp.log_determinants.state import placeholder, updated_state
from numpyro_scalegp.posteriors.feature import FeaturePosterior


class FeatureSpaceGP(GaussianNoise):
    """A collapsed GP of finitely many features: y of a mini-batch, with f = Phi w integrated out.

    y = phi(x)'w + noise with w ~ N(0, I); the latent one, of f itself, is `WeightSpaceGP`. The site
    is an observed one, and y is centered: the prior mean is zero. `log_prob` estimates
    log N(y; 0, Phi Phi' + noise I) of all `num_data` rows from this batch's: so the site stands
    outside of plates, which would scale it once more. In the mean over batches, and at the best
    `weights`, it is the log marginal likelihood, up to the bias of `logdet`.
    Hyperparameters, such as those of a network that computes the features, and `weights` are
    trained together, with no inducing points.

    What is learned of the log-determinant goes from step to step of `SVI` in a NumPyro mutable
    site. Where there is none, as in `SVI.evaluate`, a batch is compared with itself, and the
    estimate is too low. A batch of all rows needs nothing learned and leaves the state as it is:
    there value and first derivatives are exact. Under MCMC, where NumPyro holds parameters and
    mutable sites at their first values, and for second derivatives, as in Laplace's approximation,
    take `MiniBatch` and all rows, which integrates the weights out; all else is refused there.

    Args:
        features: phi, with d features: of `sgp.features` with independent weights
            (`RandomFourier`, `Learned`), or any function from inputs (b, p) to features (b, d),
            such as a network; an Equinox module maps one row. `lambda X: X` if X are features.
        X: inputs of the batch's rows, shape (b, p).
        noise_variance: one value, positive.
        weights: w, shape (d,), such as numpyro.param("weights", jnp.zeros(d)): the posterior mean,
            when trained.
        num_data: the number n of all rows, at least b.
        logdet: `Variational`, `Compositional`, `Minimax` or `MiniBatch` of `sgp.log_determinants`.

    Raises:
        ValueError: if an argument has a wrong shape or range, or does not suit the others; if the
            weights of `features` are not independent a priori; if the site stands in a plate, or
            several computations at once write the state.
        TypeError: if `features` is a kernel or no function, or `logdet` of another kind.

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
        ...     X_batch, y_batch = sgp.plate("rows", len(X), batch_size).take(X, y)
        ...     logdet = sgp.log_determinants.Variational()
        ...     gp = sgp.FeatureSpaceGP(phi, X_batch, 0.1, weights, num_data=len(X), logdet=logdet)
        ...     numpyro.sample("y", gp, obs=y_batch)
    """

    arg_constraints = {"noise_variance": constraints.positive, "weights": constraints.real_vector}
    support = constraints.real_vector
    pytree_data_fields = (
        "features",
        "X",
        "noise_variance",
        "weights",
        "logdet",
        "evaluated",
        "state",
    )
    pytree_aux_fields = ("num_data",)
    evaluated: Array | None

    def __init__(
        self,
        features: AbstractFeatures | Callable[[Array], Array],
        X: Float[ArrayLike, "b p"],
        noise_variance: Float[ArrayLike, ""],
        weights: Float[ArrayLike, " d"],
        *,
        num_data: int,
        logdet: AbstractLogDeterminant,
        validate_args: bool | None = None,
    ) -> None:
        self.features = as_features(features)
        if self.features.has_dense_precision:
            raise ValueError(
                "`features` must have independent weights a priori, got "
                f"`{type(self.features).__name__}`: its posterior is that of `SparseGP`."
            )
        self.X = checks.inputs("X", X)
        num = self.X.shape[0]
        self.noise_variance = checks.as_positive(noise_variance, "noise_variance")
        checks.shape("noise_variance", self.noise_variance, (), why="one value for all rows")
        checks.positive("noise_variance", self.noise_variance)
        self.weights = checks.as_float(weights, "weights")
        checks.finite("weights", self.weights)
        if checks.count("num_data", num_data) < num:
            raise ValueError(
                f"`num_data` must be at least {num}, the rows of `X`, got {num_data}: it is "
                "the number of all rows."
            )
        if not isinstance(logdet, AbstractLogDeterminant):
            raise TypeError(
                "`logdet` must be one of `sgp.log_determinants`: `Variational`, `Compositional`, "
                f"`Minimax` or `MiniBatch`, got {type(logdet).__name__}."
            )
        stateful = logdet.stateful
        if is_key_frozen() and (stateful is not None or num < num_data):
            raise ValueError(
                "a `FeatureSpaceGP` under NUTS, HMC and other users of a potential energy, or in a "
                "line search such as that of `numpyro.optim.Minimize`, takes "
                f"`logdet=MiniBatch()` and all rows, got `{type(logdet).__name__}` and {num} of "
                f"{num_data} rows: mini-batches and what is learned of the log-determinant are "
                "held at their first values there."
            )
        self.num_data = num_data
        self.logdet = logdet
        self.evaluated = None
        self.state: Any = None
        if stateful is not None and num < num_data:
            self.evaluated = self._phi()
        Phi = jax.eval_shape(lambda: self.batch.features)
        checks.shape("weights", self.weights, Phi.shape[1:], why="one weight for each feature")
        if stateful is not None:
            # Here, since NumPyro collects mutable sites before it first calls `log_prob`. What a
            # run gets of them is a copy of the dictionary. Features of all rows are left to
            # `log_prob`: `condition` never has them at once.
            site = mutable(stateful.name, {})
            if num < num_data:
                self.state = updated_state(stateful, self.batch, site)
            elif not site:
                site["state"] = placeholder(stateful, Phi.shape[1], Phi.dtype)
        super().__init__((), (num,), validate_args=validate_args)

    @property
    def is_of_batch(self) -> bool:
        """See `CollapsedDistribution.is_of_batch`."""
        return True

    def _phi(self) -> Float[Array, "b d"]:
        """The features of the batch's rows."""
        if self.evaluated is not None:
            return self.evaluated
        return checks.inputs("features", self.features(self.X))

    @property
    def batch(self) -> Batch:
        """The batch for log-determinants."""
        Phi = self._phi()
        dtype = jnp.result_type(Phi, self.noise_variance, self.weights)
        return Batch(Phi.astype(dtype), self.noise_variance.astype(dtype), self.num_data)

    @property
    def mean(self) -> Float[Array, " b"]:
        """The mean of the observations, zero."""
        return jnp.zeros(self.event_shape, self.X.dtype)

    @property
    def variance(self) -> Float[Array, " b"]:
        """The marginal variance of the observations, |phi(x)|^2 + noise."""
        return jnp.sum(jnp.square(self._phi()), axis=1) + self.noise_variance

    def expand(self, batch_shape: tuple[int, ...]) -> "FeatureSpaceGP":
        """The same, for the empty shape alone.

        Raises:
            ValueError: for any other shape, as of a plate.
        """
        if tuple(batch_shape) != ():
            raise ValueError(
                "`FeatureSpaceGP` stands inside a plate, or is expanded to the shape "
                f"{tuple(batch_shape)}: write its site outside of plates. It is one distribution "
                "over the rows of the batch, and scales to all `num_data` rows by itself."
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
        y = checks.observations(value, self.event_shape, "X")
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
        Phi = self._phi()
        num, d = Phi.shape
        shape = (math.prod(sample_shape), d + num)
        normal = jax.random.normal(checks.as_key(key), shape, Phi.dtype)
        f = matmul(normal[:, :d], Phi.T)
        draws = f + jnp.sqrt(self.noise_variance) * normal[:, d:]
        return draws.reshape(*sample_shape, num)

    def condition(
        self, y: Float[ArrayLike, " n"], *, progress_bar: bool = True
    ) -> FeaturePosterior:
        """The exact posterior of f given the observations of all rows.

        Three passes over the rows, in chunks, of which two refine the mean. It warns where
        that is not enough in this precision.

        Args:
            y: observations, shape (n,).
            progress_bar: unused: nothing is solved for iteratively.

        Returns:
            A `FeaturePosterior`, in time O(n d^2 + d^3) and memory O(d^2) besides a chunk;
            `weights` and `logdet` take no part.

        Raises:
            ValueError: if `X` are not all rows, or `y` has the wrong shape, or holds NaN or
                infinity.
        """
        if self.X.shape[0] != self.num_data:
            raise ValueError(
                f"`X` must have all {self.num_data} rows for a posterior, got {self.X.shape[0]}: "
                "condition the `FeatureSpaceGP` of all rows, as the model makes it without a "
                "`subsample_size`."
            )
        y = checks.observations(y, self.event_shape, "X")
        checks.shape("y", y, self.event_shape)
        Phi = jax.eval_shape(self.features, self.X)
        dtype = jnp.result_type(Phi.dtype, self.noise_variance, y)
        zero = constant_function(jnp.zeros((), y.dtype))
        given = self.X, y, self.noise_variance, zero, dtype
        return FeaturePosterior.from_features(self.features, Phi.shape[1], *given)
