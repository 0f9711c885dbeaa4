"""The collapsed family: a distribution over observations with the function integrated out."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints
from numpyro.primitives import mutable

from numpyro_scalegp.core import checks, functions
from numpyro_scalegp.distributions.frozen import is_key_frozen
from numpyro_scalegp.distributions.rows import RowsDistribution
from numpyro_scalegp.estimators import AbstractEstimator, Cholesky, SolverState
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.nonstationary import refuse_kernel
from numpyro_scalegp.posteriors.posterior import AbstractConditioned
from numpyro_scalegp.solvers import KernelOperator


class GaussianProcess(RowsDistribution):
    """Noisy observations of a Gaussian process, y ~ N(m(X), K(X, X) + noise).

    `log_prob(y)` is the log marginal likelihood. The default estimator is exact; others estimate it
    and its gradient, for data too large to factorize.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        noise_variance: variance of the observation noise, positive, in squared units of y; shape ()
            or, one a row, (n,).
        mean: the mean function: None for zero, a number for a constant, or a callable that maps
            (n, d) inputs to (n,) values.
        estimator: how the log marginal likelihood is computed; one of `sgp.estimators`.
        key: a typed JAX key for an estimator that draws at random; by default the next key of the
            model's seed handler, so that each step of SVI has fresh probes. A constant key fixes
            them, as a line search needs.
        state: for an iterative estimator, the name of a NumPyro mutable site that the distribution
            makes, a `SolverState`. Each step's solves start from the last solutions (a warm start)
            and leave theirs there, with the residuals and epochs of each step for `sgp.to_arviz`;
            the probe vectors stay the same, unless the estimator has `fresh_probes=True`.
            `SVI.run`, `update` and `stable_update` keep it in `SVIState.mutable_state`, with arrays
            as its leaves, so that a saved state resumes; `handlers.substitute` puts it into a model
            or a call. Outside of a model without one, the distribution has a new state of its own,
            as its attribute `state`. It serves one computation: no `num_particles > 1`, and another
            name for each further site.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has the wrong shape or sign, or holds NaN or infinity; if the
            estimator has no use for a state, or a new state gets no key; under NUTS and the like,
            if the estimator's value leaves something out. There an estimator that draws at random
            warns: it is one frozen draw.

    References:
        Rasmussen and Williams (2006), section 2.2. Cost with `Cholesky`: O(n^3) time and O(n^2)
        memory, nothing before `log_prob` or `sample` is called.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> gp = sgp.GaussianProcess(sgp.kernels.RBF(0.3), X, noise_variance=0.1)
        >>> gp.log_prob(jnp.zeros(5)).shape, gp.condition(jnp.ones(5)).mean(X).shape
        ((), (5,))
        >>> estimator = sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients())
        >>> def model(X, y, kernel):  # many data points: each step of SVI goes on from the last
        ...     gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator, state="solver")
        ...     return numpyro.sample("y", gp, obs=y)
    """

    role = "collapsed"
    arg_constraints = {"noise_variance": constraints.positive}
    reparametrized_params = ["noise_variance"]
    pytree_data_fields = (
        "kernel", "X", "noise_variance", "mean_function", "estimator", "key", "state",
    )  # fmt: skip

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "n d"],
        noise_variance: Float[ArrayLike, "..."],
        *,
        mean: Callable[[Array], Array] | ArrayLike | None = None,
        estimator: AbstractEstimator | None = None,
        key: Array | None = None,
        state: str | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = checks.instance("kernel", kernel, AbstractKernel)
        self.X = checks.inputs("X", X)
        self.kernel.check_categories("X", self.X)
        n = self.X.shape[0]
        self.noise_variance = checks.as_positive(noise_variance, "noise_variance")
        checks.shape(
            "noise_variance", self.noise_variance, (), (n,), why="one value, or one for each row"
        )
        checks.positive("noise_variance", self.noise_variance)
        self.mean_function = _as_mean_function(mean)
        self.estimator = Cholesky() if estimator is None else estimator
        checks.instance("estimator", self.estimator, AbstractEstimator)
        if is_key_frozen():
            self.estimator.check_frozen_key()
        if key is None and self.estimator.is_stochastic:
            # Outside of a model there is none, and NumPyro would warn.
            key = numpyro.prng_key() if numpyro.primitives._PYRO_STACK else None
        self.key = key if key is None else checks.as_key(key)
        self.state = None if state is None else self._state(state)
        super().__init__((), (n,), validate_args=validate_args)

    def _state(self, name: str) -> SolverState:
        checks.instance("state", name, str, "the name of a mutable site, such as 'solver'")
        state: Any = mutable(name, SolverState())
        # NumPyro collects the state before it first calls `log_prob`.
        self.estimator.prepare(state, self._operator(), self.key)
        return state

    @property
    def mean(self) -> Float[Array, " n"]:
        """The mean of the observations, m(X)."""
        mean = self.mean_function(self.X)
        if jnp.shape(mean) != self.event_shape:
            raise ValueError(
                f"`mean` must map inputs of shape {self.X.shape} to shape {self.event_shape}, "
                f"got {jnp.shape(mean)}."
            )
        return mean

    @property
    def variance(self) -> Float[Array, " n"]:
        """The marginal variance of the observations, k(x, x) + noise."""
        return self.kernel.diag(self.X) + self.noise_variance

    def log_prob(
        self, value: Float[ArrayLike, "*batch n"], intermediates: list | None = None
    ) -> Float[Array, "*batch"]:
        """The log marginal likelihood of observations.

        Args:
            value: observations, shape (..., n); one factorization serves all.
            intermediates: unused, part of NumPyro's interface.

        Returns:
            Log densities, shape (...).

        Raises:
            ValueError: if `value` has the wrong length, or holds NaN or infinity.
        """
        residual = checks.observations(value, self.event_shape, "X") - self.mean
        shape, arguments = residual.shape[:-1], (self._operator(), residual)
        options = {"key": self.key, "state": self.state}
        return checks.call_hook(self.estimator, "log_prob", shape, *arguments, **options)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape n"]:
        """Draw observations from the prior, noise included.

        Args:
            key: a JAX key.
            sample_shape: shape of the draws.

        Returns:
            Draws, shape (*sample_shape, n), as the estimator makes them: exact ones in O(n^3) with
            `Cholesky`; with one that has `num_features`, by that many random features, in
            O(n num_features) a draw.
        """
        count, key = math.prod(sample_shape), checks.as_key(key)
        shape, arguments = (count, *self.event_shape), (self._operator(), key, count)
        draws = checks.call_hook(self.estimator, "sample_prior", shape, *arguments)
        return self.mean + draws.reshape(*sample_shape, *self.event_shape)

    def condition(
        self,
        y: Float[ArrayLike, " n"],
        *,
        key: Array | None = None,
        num_samples: int | None = None,
        max_epochs: int | float | None = None,
        start: AbstractConditioned | None = None,
        progress_bar: bool = True,
    ) -> AbstractConditioned:
        """The posterior of f given observations.

        With an iterative estimator it is solved for, which may take minutes and can be gone on
        with: `start` is a posterior before, such as one that the budget ended or that
        `sgp.load` has read, for other observations or hyperparameters, or for the first rows of
        these data. With a `state`, the last posterior conditioned with it is the default.

        Args:
            y: observations, shape (n,).
            key: a typed JAX key for an estimator that draws at random, by default the
                distribution's own. A `state` of an estimator without `fresh_probes` keeps its own.
            num_samples: posterior samples to store with an iterative estimator, by default its
                `num_probes`.
            max_epochs: budget of the solve with an iterative estimator, by default the solver's: a
                budget that suits a step of training may be too small for the final result.
            start: a `PathwisePosterior` at whose solution the solve with an iterative estimator
                starts, and whose samples are kept, unless `num_samples` is another number. Its
                inputs are the first rows of X, and new rows start at zero.
            progress_bar: whether a solve that takes longer than a few seconds shows its epochs,
                residual and time on the standard error; it never does where something is traced.

        Returns:
            With `Cholesky` and `SingleSampleRFF` an `ExactPosterior`, from one factorization in
            O(n^3); with `RandomFourier` a `FeaturePosterior`. With an iterative estimator a
            `PathwisePosterior`: from the solution of `start` or the state, with no further solve,
            if that is the one for these hyperparameters, inputs, observations and samples, and
            within the solver's tolerance; otherwise from one batched solve, which starts there.

        Raises:
            ValueError: if `y` has the wrong length, or holds NaN or infinity, or an estimator that
                draws at random has neither a key nor a state nor a start; if X does not begin with
                the rows of `start`, or, where it has more rows, with those of the state.
            TypeError: if `start` is no `PathwisePosterior`, with an iterative estimator.
        """
        y = checks.observations(y, self.event_shape, "X")
        if (y - self.mean).ndim != 1:
            raise ValueError(f"`y` must have shape {self.event_shape}, got {y.shape}.")
        checks.count_or_none("num_samples", num_samples)
        if max_epochs is not None:
            checks.number("max_epochs", max_epochs, "(0, inf]")
        return self.estimator.condition(
            self._operator(),
            y,
            self.mean_function,
            key=self.key if key is None else checks.as_key(key),
            state=self.state,
            num_samples=num_samples,
            max_epochs=max_epochs,
            start=start,
            progress_bar=checks.instance("progress_bar", progress_bar, bool, "True or False"),
        )

    def _operator(self) -> KernelOperator:
        return KernelOperator(self.kernel, self.X, self.noise_variance)


def _as_mean_function(
    mean: Callable[[Array], Array] | ArrayLike | None,
) -> functions.RowsFunction:
    refuse_kernel("mean", mean)
    if callable(mean):
        return functions.as_pytree(mean, "mean")
    constant = checks.as_float(0.0 if mean is None else mean, "mean")
    checks.shape("mean", constant, (), why="a number, a callable or None")
    checks.finite("mean", constant)
    return functions.constant_function(constant)
