"""`FeatureSpaceGP`: the observations of a mini-batch under a GP of finitely many features."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints

from numpyro_scalegp.core import checks, summary
from numpyro_scalegp.features.feature_map import AbstractFeatures
from numpyro_scalegp.features.learned import as_features
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import AbstractLogDeterminant, Batch
from numpyro_scalegp.integrated.finite_rkhs.state import placeholder, updated_state
from numpyro_scalegp.integrated.frozen import is_key_frozen
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.feature import FeaturePosterior
from numpyro_scalegp.programs.functions import constant_function
from numpyro_scalegp.sites.collapsed import GaussianNoise
from numpyro_scalegp.sites.mutable_state import state_site


class FeatureSpaceGP(GaussianNoise):
    """A collapsed GP with finitely many features, whose density is estimated from mini-batches.

    y = phi(x)'w + noise with w ~ N(0, I); see `WeightSpaceGP` for a prior over f itself. The site
    must be observed, and y centered, as the prior mean is zero. `log_prob` estimates
    log N(y; 0, Phi Phi' + noise I) of all `num_data` observations from a mini-batch. So put the
    site outside of plates, which would scale it again. At the optimal `weights`, the mean of the
    estimate over mini-batches is the log marginal likelihood, up to the bias of `logdet`.
    Hyperparameters, such as the parameters of a network that computes the features, and `weights`
    are trained together, without inducing points.

    A NumPyro mutable site stores the estimate of F = Phi'Phi + noise I, whose log-determinant is
    part of the density, between the steps of `SVI`. Without that site, as in `SVI.evaluate`, F is
    estimated from the current mini-batch alone, and log|F| is too low. With a batch of all rows,
    the value and first derivatives are exact, and the state is unchanged. MCMC, in which NumPyro
    keeps parameters and mutable sites at their initial values, and second derivatives, as in a
    Laplace approximation, require `MiniBatch` and all rows: this integrates the weights out.
    Anything else raises an error.

    Args:
        features: phi, with d features: one of `sgp.features` with independent weights
            (`RandomFourier`, `Learned`), or any function from inputs (b, p) to features (b, d),
            such as a network (an Equinox module maps one input). `lambda X: X` if X holds features.
        X: inputs of the batch, shape (b, p).
        noise_variance: one value, positive.
        weights: w, shape (d,), such as numpyro.param("weights", jnp.zeros(d)); after training, the
            posterior mean.
        num_data: the total number n of observations, at least b.
        logdet: `Variational`, `Compositional`, `Minimax` or `MiniBatch` of `sgp.log_determinants`.

    Raises:
        ValueError: if an argument has a wrong shape or range; if the weights of `features` are not
            independent a priori; if the site stands in a plate, or several computations write the
            state at the same time.
        TypeError: if `features` is a kernel or not a function, or if `logdet` is not one of
            `sgp.log_determinants`.

    References:
        Shoham and Avron (2025), Unbiased Stochastic Optimization for Gaussian Processes on Finite
        Dimensional RKHS. Time O(b d^2 + d^3), memory O(b d + d^2), independent of n.

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
                f"`{type(self.features).__name__}`: use a `SparseGP` for its posterior."
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
                "a `FeatureSpaceGP` under NUTS, HMC and other users of a potential energy, or in "
                "the line search of `numpyro.optim.Minimize`, takes `logdet=MiniBatch()` and all "
                f"rows, got `{type(logdet).__name__}` and {num} of {num_data} rows: these hold "
                "mini-batches and the state of the log-determinant at their initial values."
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
            # Not in `log_prob`, since NumPyro collects mutable sites before it calls that. Each run
            # gets a copy of the site's dictionary. With all rows, `log_prob` evaluates the
            # features, which `condition` only needs in chunks.
            site = state_site(stateful.name, {})
            if num < num_data:
                self.state = updated_state(stateful, self.batch, site)
            elif not site:
                site["state"] = placeholder(stateful, Phi.shape[1], Phi.dtype)
        super().__init__((), (num,), validate_args=validate_args)

    @property
    def is_of_batch(self) -> bool:
        """True: the density is estimated from a mini-batch and scaled to all observations."""
        return True

    def __repr__(self) -> str:
        rows = f"{summary.counted_rows(self.X)} in a mini-batch"
        return summary.one_line(self, [repr(self.features), rows, repr(self.logdet)])

    @property
    def posterior_inputs(self) -> Float[Array, "b p"]:
        """The inputs of the batch, as the methods of a posterior take them."""
        return self.X

    def _phi(self) -> Float[Array, "b d"]:
        """The features of the batch's rows."""
        if self.evaluated is not None:
            return self.evaluated
        return checks.inputs("features", self.features(self.X))

    @property
    def batch(self) -> Batch:
        """The features and the noise variance of the mini-batch, for log-determinants."""
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
        """Return this distribution; only the empty shape is supported.

        Raises:
            ValueError: for any other shape, such as the shape of a plate.
        """
        if tuple(batch_shape) != ():
            raise ValueError(
                "`FeatureSpaceGP` stands inside a plate, or is expanded to the shape "
                f"{tuple(batch_shape)}: write its site outside of plates. It is one distribution "
                "over all rows of the batch, and is already scaled to `num_data` rows."
            )
        return self

    def log_prob(
        self, value: Float[ArrayLike, "*batch b"], intermediates: list | None = None
    ) -> Float[Array, "*batch"]:
        """An estimate of the log marginal likelihood of all observations.

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

        Makes three passes over the data, in chunks; the last two refine the mean. Warns if rounding
        errors still make the mean inaccurate.

        Args:
            y: observations, shape (n,).
            progress_bar: unused, as there is no iterative solve.

        Returns:
            A `FeaturePosterior`, in time O(n d^2 + d^3) and memory O(d^2) plus one chunk. It does
            not depend on `weights` and `logdet`.

        Raises:
            ValueError: if `X` does not have all rows, or `y` has the wrong shape or holds NaN or
                infinity.
        """
        if self.X.shape[0] != self.num_data:
            raise ValueError(
                f"`X` must have all {self.num_data} rows for a posterior, got {self.X.shape[0]}: "
                "condition the `FeatureSpaceGP` that the model creates without a `subsample_size`."
            )
        y = checks.observations(y, self.event_shape, "X")
        checks.shape("y", y, self.event_shape)
        Phi = jax.eval_shape(self.features, self.X)
        dtype = jnp.result_type(Phi.dtype, self.noise_variance, y)
        zero = constant_function(jnp.zeros((), y.dtype))
        data = self.X, y, self.noise_variance, zero, dtype
        return FeaturePosterior.from_features(self.features, Phi.shape[1], *data)
