"""`LaplaceGP`: Laplace's approximation for likelihoods other than normal noise."""

import copy
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Bool, Float, Key, Num
from numpyro.distributions import constraints

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.integrated.cholesky import Cholesky
from numpyro_scalegp.integrated.laplace.estimator import AbstractLaplaceEstimator, LaplaceProblem
from numpyro_scalegp.integrated.laplace.log_expectation import LikelihoodUnderNormal, as_likelihood
from numpyro_scalegp.integrated.laplace.posterior import LaplacePosterior
from numpyro_scalegp.integrated.laplace.search import Sites
from numpyro_scalegp.integrated.members import (
    MISSING,
    as_mean_function,
    as_observed,
    batch_shape_of,
    mean_at,
)
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.nonstationary import refuse_kernel
from numpyro_scalegp.likelihoods.dependence import table_of
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.processes.batch import BatchPosterior
from numpyro_scalegp.programs import functions
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction
from numpyro_scalegp.sites.collapsed import CollapsedDistribution
from numpyro_scalegp.sites.rows import RowsDistribution


class LaplaceGP(CollapsedDistribution, RowsDistribution):
    """Observations of a Gaussian process under any log-concave likelihood.

    y_i ~ p(y_i | f_i), f ~ N(m(X), K(X, X)). `log_prob(y)` is Laplace's approximation of the log
    marginal likelihood, log p(y | f) - (f - m)'K^-1 (f - m) / 2 - log|I + W K| / 2 at the mode of
    f, with W the negative second derivatives of log p(y_i | f_i). So NUTS samples only the
    hyperparameters and not the n function values. Gradients of this density are exact, by
    implicit differentiation of the mode, with derivatives of every order.

    For counts, classes and durations the approximation is good if an observation and its neighbors
    together carry more information than one binary outcome. When accuracy is critical, compare it
    with NUTS on a `LatentGP`.

    Args:
        kernel: covariance function, or a batch of them, see `GaussianProcess`.
        X: inputs, shape (n, d), or (*batch, n, d) if each member of the batch has different inputs.
        likelihood: maps the function's values at X, shape (*batch, n), to the distribution of the
            observations, of batch shape (*batch, n); each entry depends on one of these values, as
            in `lambda f: dist.Poisson(exposure * jnp.exp(f))`. Variables that it closes over may be
            learned.
        mean: the mean function m, see `GaussianProcess`: None, a constant, values at the rows of X,
            or a callable.
        observed: boolean mask of the observed rows, shape (n,) or (*batch, n); None if all are
            observed. The density and the posterior ignore the values of y in the other rows. The
            likelihood must be valid in these rows as well, with an exposure of one for example.
        estimator: how the approximation is computed: `sgp.estimators.Cholesky()`, the default, for
            up to a few thousand rows; `sgp.estimators.StateSpace()` for functions of time, with
            the same value in linear time; or `sgp.estimators.Vecchia()` for functions of space,
            with a nearest-neighbor prior, for up to millions of rows.
        key: a typed JAX key for the probes of `Vecchia`; by default the next key of the model's
            seed handler, so that each step of SVI has fresh probes. Outside of a model the probes
            are fixed.

    Raises:
        TypeError: if an argument has the wrong type, or the likelihood does not return a
            distribution.
        ValueError: if an argument has the wrong shape, or holds NaN or infinity; if the likelihood
            returns a distribution of another shape, or one that combines rows.

    References:
        Rasmussen and Williams (2006), sections 3.4 and 5.5.1; Margossian et al. (2020), Hamiltonian
        Monte Carlo using an adjoint-differentiated Laplace approximation. Newton's method takes
        about five to ten steps: of O(n^3) time and O(n^2) memory with `Cholesky`, of O(n s^3) and
        O(n s^2) with `StateSpace`, s the number of state variables, and of O(n m) for each
        iteration of conjugate gradients with `Vecchia` and m neighbors.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y=None):  # for NUTS
        ...     lengthscale = numpyro.sample("lengthscale", sgp.infer.lengthscale_prior(0.1, 1.0))
        ...     level = numpyro.sample("level", dist.Normal())
        ...     counts = lambda f: dist.Poisson(jnp.exp(f))
        ...     gp = sgp.LaplaceGP(sgp.kernels.RBF(lengthscale), X, counts, mean=level)
        ...     numpyro.sample("y", gp, obs=y)
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> gp = sgp.LaplaceGP(sgp.kernels.RBF(0.3), X, lambda f: dist.Bernoulli(logits=f))
        >>> gp.condition(jnp.array([0, 0, 1, 0, 1])).mean(X).shape
        (5,)
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = (
        "kernel",
        "X",
        "likelihood",
        "mean_function",
        "observed",
        "estimator",
        "key",
    )

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "... n d"],
        likelihood: Callable[[Array], dist.Distribution],
        *,
        mean: Callable[[Array], Array] | ArrayLike | None = None,
        observed: Bool[ArrayLike, "... n"] | None = None,
        estimator: AbstractLaplaceEstimator | None = None,
        key: Array | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = checks.instance("kernel", kernel, AbstractKernel)
        self.X = checks.inputs("X", X, may_be_batch=True)
        self.kernel.check_inputs("X", self.X)
        self.observed = None if observed is None else as_observed(observed, self.X.shape[-2])
        batch_shape = batch_shape_of(self.kernel, self.X, self.observed)
        self.mean_function = as_mean_function(mean, batch_shape, self.X)
        self.likelihood = _as_likelihood(likelihood)
        self.estimator = _as_estimator(estimator)
        draws_probes = self.estimator.draws_probes(self.X.shape[-2])
        if key is None and draws_probes and numpyro.primitives._PYRO_STACK:
            key = numpyro.prng_key()
        self.key = key if key is None else checks.as_key(key)
        super().__init__(batch_shape, self.X.shape[-2:-1], validate_args=validate_args)
        self._check_likelihood()

    def _check_likelihood(self) -> None:
        shape = self.batch_shape + self.event_shape
        f = jax.ShapeDtypeStruct(shape, self.X.dtype)
        distribution = jax.eval_shape(lambda f: self.given(f), f)
        if not isinstance(distribution, dist.Distribution):
            raise TypeError(
                "`likelihood` must map values of the function to a distribution, as in "
                f"`lambda f: dist.Poisson(jnp.exp(f))`, got {checks.described(distribution)}."
            )
        if distribution.batch_shape != shape or distribution.event_shape:
            event_shape = distribution.event_shape
            event = f" and event shape {event_shape}" if event_shape else ""
            raise ValueError(
                f"`likelihood` must give a distribution of batch shape {shape}, one observation "
                f"for each row of `X`, got batch shape {distribution.batch_shape}{event}."
            )

    @property
    def support(self) -> Any:
        """The support of the likelihood, with n as an event axis."""
        return constraints.independent(self._support, 1)

    @property
    def _support(self) -> Any:
        """The support of each observation."""
        return self.given(jnp.zeros(self.batch_shape + self.event_shape, self.X.dtype)).support

    @property
    def prior_mean(self) -> Float[Array, "... n"]:
        """The prior mean of the function, m(X)."""
        return mean_at(self.mean_function, self.X, self.batch_shape + self.event_shape)

    @property
    def _prior_predictive(self) -> LikelihoodUnderNormal:
        variance = self.kernel.each(lambda kernel, X: kernel.evaluate_diag(X), self.X)
        variance = jnp.broadcast_to(variance, self.batch_shape + self.event_shape)
        return LikelihoodUnderNormal(
            self.likelihood, dist.Normal(self.prior_mean, jnp.sqrt(variance))
        )

    @property
    def mean(self) -> Float[Array, "... n"]:
        """The mean of the observations, by quadrature over f."""
        return self._prior_predictive.mean

    @property
    def variance(self) -> Float[Array, "... n"]:
        """The marginal variance of the observations, by quadrature over f."""
        return self._prior_predictive.variance

    def given(self, f: Float[Array, "... n"]) -> dist.Distribution:
        """The distribution of the observations given the function's values at X."""
        return self.likelihood(f)

    def _data(self, y: Num[Array, "... n"]) -> Any:
        """The arguments of `_entries` other than f."""
        observed = None if self.observed is None else jnp.asarray(self.observed)
        return self.likelihood, y, observed

    def log_prob(
        self, value: Num[ArrayLike, "... n"], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """Laplace's approximation of the log marginal likelihood.

        Args:
            value: observations, shape (..., n), or (..., *batch, n) for a batch.
            intermediates: unused, part of NumPyro's interface.

        Returns:
            Log densities, shape (...). NaN, with a warning, if the likelihood is not log-concave at
            the mode, or there is no mode.

        Raises:
            ValueError: if `value` has the wrong length, holds NaN or infinity in an observed row,
                or lies outside of the likelihood's support; if X is a mini-batch that a plate
                draws.
        """
        self.check_all_rows()
        y = self._observations(value)
        shape = self.batch_shape + self.event_shape
        samples = jnp.broadcast_shapes(y.shape, shape)[: max(0, y.ndim - len(shape))]
        y = jnp.broadcast_to(y, (*samples, *shape))
        self._check_rows(y)
        gp = self._for_inputs()
        if not samples:
            return gp._log_density(y)
        # Not the method itself: JAX caches the trace of a function, with values it closes over.
        densities = jax.lax.map(lambda y: gp._log_density(y), y.reshape(-1, *shape))
        return densities.reshape(*samples, *self.batch_shape)

    def _for_inputs(self) -> "LaplaceGP":
        """This distribution with what its estimator finds from the inputs on the host."""
        gp = copy.copy(self)
        gp.estimator = self.estimator.for_inputs(self.kernel, self.X)
        return gp

    @property
    def _key(self) -> Key[Array, ""]:
        return jax.random.key(0) if self.key is None else self.key

    # NUTS searches for its initial values outside of compiled code: this makes it one program.
    @compiled
    def _log_density(self, y: Num[Array, "... n"]) -> Float[Array, "..."]:
        return self.estimator.laplace_log_prob(self._problem(y))

    def _problem(self, y: Num[Array, "... n"]) -> LaplaceProblem:
        return LaplaceProblem(
            self.kernel, self.X, _entries, self.prior_mean, self._data(y), self._key
        )

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Num[Array, "*sample_shape n"]:
        """Draw observations from the prior: shape (*sample_shape, *batch, n)."""
        function_key, key = jax.random.split(checks.as_key(key))
        num_samples = math.prod(sample_shape)

        estimator = self._for_inputs().estimator

        def draw(kernel: AbstractKernel, X: Array, key: Array) -> Float[Array, "num_samples n"]:
            jitter = linalg.added_variance(kernel.evaluate_diag(X))
            operator = KernelOperator.from_checked(kernel, X, jitter)
            return estimator.sample_prior(operator, key, num_samples)

        keys = batches.keys(function_key, self.batch_shape)
        members = self.kernel.as_batch(), batches.Batch(self.X, self.X.ndim - 2)
        draws = jnp.moveaxis(batches.each(draw, *members, keys), -2, 0)
        f = self.prior_mean + draws.reshape(*sample_shape, *draws.shape[1:])
        return self.given(f).sample(key)

    def condition(
        self,
        y: Num[ArrayLike, "... n"],
        *,
        key: Array | None = None,
        num_samples: int | None = None,
        progress_bar: bool = True,
    ) -> LaplacePosterior:
        """The normal approximation of the posterior of f given observations.

        Args:
            y: observations, shape (n,), or (*batch, n).
            key: a typed JAX key for the draws that `Vecchia` stores; None for fixed draws.
            num_samples: the number of these draws, by default 256; variances have a relative
                standard error of sqrt(2 / num_samples).
            progress_bar: unused.

        Returns:
            The posterior, whose cost is dominated by the steps of Newton's method.

        Raises:
            ValueError: as in `log_prob`, and if `y` has more axes.
        """
        y = self._observations(y)
        checks.shape("y", y, self.batch_shape + self.event_shape)
        self._check_rows(y)
        if num_samples is not None:
            checks.count("num_samples", num_samples)
        key = self._key if key is None else checks.as_key(key)
        return self._for_inputs()._condition(y, key, num_samples)

    @compiled
    def _condition(
        self, y: Num[Array, "... n"], key: Key[Array, ""], num_samples: int | None
    ) -> LaplacePosterior:
        sites, mean = self.estimator.laplace_sites(self._problem(y)), self.prior_mean
        zero = functions.constant_function(jnp.zeros((), mean.dtype))

        def posterior(kernel: AbstractKernel, X: Array, sites: Sites, mean: Array) -> Any:
            mean_function = zero if self.batch_shape else self.mean_function
            arguments = kernel, X, sites, mean, mean_function
            return self.estimator.laplace_posterior(*arguments, key, num_samples)

        num = len(self.batch_shape)
        members = batches.Batch(sites, num), batches.Batch(mean, num)
        arguments = self.kernel.as_batch(), batches.Batch(self.X, self.X.ndim - 2), *members
        process = batches.each(posterior, *arguments)
        if self.batch_shape:
            process = BatchPosterior(
                members=process,
                X=self.X,
                y=sites.f,
                noise_variance=None,
                mean_function=self.mean_function,
                observed=None,
                batch_shape=self.batch_shape,
            )
        return LaplacePosterior(process, self.X, sites.f, sites.weights, sites.precision)

    def predictive(self, posterior: Any, *, at_data: bool = False) -> LikelihoodUnderNormal:
        """The marginal distribution of each new observation at X.

        Args:
            posterior: the posterior of the function, such as the result of `condition` of a fitted
                `LaplaceGP`.
            at_data: unused, since the result is the same at the data.

        Returns:
            A distribution of batch shape (*batch, n), with f integrated out.
        """
        scale = jnp.sqrt(posterior.variance(self.X))
        # NaN if there was no mode, of which `condition` has warned.
        f = dist.Normal(posterior.mean(self.X), scale, validate_args=False)
        return LikelihoodUnderNormal(self.likelihood, f)

    def leave_one_out(self, posterior: LaplacePosterior) -> LikelihoodUnderNormal:
        """The distribution of each observation given all others; see `LaplacePosterior.cavity`."""
        return LikelihoodUnderNormal(self.likelihood, posterior.cavity())

    def _observations(self, value: ArrayLike) -> Num[Array, "... n"]:
        """Checked observations; rows without a target get the member's first observation."""
        checks.not_masked("y", value)
        y = jnp.asarray(value)
        if y.shape[-1:] != self.event_shape:
            raise ValueError(
                f"`y` must have shape {self.event_shape}, got {y.shape}: one value for each row of "
                "`X`."
            )
        if self.observed is not None:
            first = jnp.argmax(jnp.asarray(self.observed), axis=-1)[..., None]
            shape = jnp.broadcast_shapes(y.shape, first.shape)
            first = jnp.broadcast_to(first, (*shape[:-1], 1))
            valid_value = jnp.take_along_axis(jnp.broadcast_to(y, shape), first, axis=-1)
            y = jnp.where(self.observed, y, valid_value)
        checks.finite("y", y, "" if self.observed is not None else MISSING)
        support = self._support
        is_valid = support(y)
        if checks.is_concrete(is_valid) and not np.all(is_valid):
            invalid = np.asarray(y)[~np.broadcast_to(is_valid, y.shape)]
            raise ValueError(
                f"`y` must lie in the support of the likelihood, {support}, got {invalid[0]}."
            )
        return y

    def _check_rows(self, y: Num[Array, "... n"]) -> None:
        """Raise if a log likelihood depends on more than one value of f."""

        def entries(f: Array) -> dict[str, list[Array]]:
            first = y.reshape(-1, *self.batch_shape, *self.event_shape)[0]
            return {"y": [_entries(f, self._data(first))]}

        f = jnp.zeros(self.batch_shape + self.event_shape, self.X.dtype)
        if table_of(entries, f).combining_rows():
            raise ValueError(
                "`likelihood` combines rows of the function, but each of its entries must depend "
                "on one value only: use `sgp.LatentGP` under NUTS."
            )


def _entries(f: Float[Array, "... n"], data: Any) -> Float[Array, "... n"]:
    """Log likelihoods, zero in rows without a target."""
    likelihood, y, observed = data
    entries = likelihood(f).log_prob(y)
    return entries if observed is None else jnp.where(observed, entries, 0.0)


def _as_estimator(value: Any) -> AbstractLaplaceEstimator:
    if value is None:
        return Cholesky()
    names = "`sgp.estimators.Cholesky()`, `StateSpace()` or `Vecchia()`"
    what = f"{names}, which take Laplace's approximation,"
    return checks.instance("estimator", value, AbstractLaplaceEstimator, what)


def _as_likelihood(value: Any) -> RowsFunction:
    refuse_kernel("likelihood", value)
    if isinstance(value, dist.Distribution):
        raise TypeError(
            "`likelihood` must be a function of the function's values, as in "
            f"`lambda f: dist.{type(value).__name__}(...)`, got a distribution."
        )
    return as_likelihood(value)
