"""The collapsed family for other likelihoods than normal noise: Laplace's approximation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Bool, Float, Num
from numpyro.distributions import constraints

from numpyro_scalegp.core import batches, checks, functions, laplace, linalg, memory
from numpyro_scalegp.core.additivity import combining_rows
from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.distributions.collapsed import CollapsedDistribution
from numpyro_scalegp.distributions.members import (
    MISSING,
    as_mean_function,
    as_observed,
    batch_shape_of,
    mean_at,
)
from numpyro_scalegp.distributions.rows import RowsDistribution
from numpyro_scalegp.distributions.under_normal import LikelihoodUnderNormal, as_likelihood
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.nonstationary import refuse_kernel
from numpyro_scalegp.posteriors.batch import BatchPosterior
from numpyro_scalegp.posteriors.exact import ExactPosterior
from numpyro_scalegp.posteriors.laplace import LaplacePosterior

_cholesky = jnp.vectorize(linalg.cholesky, signature="(n,n)->(n,n)")


class LaplaceGP(CollapsedDistribution, RowsDistribution):
    """Observations of a Gaussian process through any log-concave likelihood.

    y_i ~ p(y_i | f_i), f ~ N(m(X), K(X, X)). `log_prob(y)` is Laplace's approximation of the log
    marginal likelihood, log p(y | f) - (f - m)'K^-1 (f - m) / 2 - log|I + W K| / 2 at the mode of
    f, with W the negative second derivatives of log p(y_i | f_i). So NUTS has a few hyperparameters
    to sample instead of n function values besides. The gradient is exact for this density, and
    follows the mode without a derivative of the iterations; with derivatives of every order.

    With counts, classes and durations the approximation is good where a row, or its neighbors, say
    more than a yes or no; check it against NUTS over `LatentGP` where much depends on it.

    Args:
        kernel: covariance function, or a batch of them as of `GaussianProcess`.
        X: inputs, shape (n, d), or (*batch, n, d) where each member has its own.
        likelihood: maps the function's values at X, shape (*batch, n), to the distribution of the
            observations, of batch shape (*batch, n); each entry depends on one value, as in
            `lambda f: dist.Poisson(exposure * jnp.exp(f))`. What it closes over may be learned.
        mean: the mean function m, as of `GaussianProcess`: None, a number, one for each row, or a
            callable.
        observed: which rows have a target, boolean, shape (n,) or (*batch, n); None for all. The
            others drop out of density and posterior, whatever y holds there; what the likelihood
            holds of these rows has to be valid, such as an exposure of one.

    Raises:
        TypeError: if an argument has the wrong type, or the likelihood gives no distribution.
        ValueError: if an argument has the wrong shape, or holds NaN or infinity; if the likelihood
            gives a distribution of another shape, or one that combines rows.

    References:
        Rasmussen and Williams (2006), sections 3.4 and 5.5.1; Margossian et al. (2020), Hamiltonian
        Monte Carlo using an adjoint-differentiated Laplace approximation. Time O(n^3) for each of
        some five to ten steps of Newton's method, memory O(n^2).

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
    pytree_data_fields = ("kernel", "X", "likelihood", "mean_function", "observed")

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "... n d"],
        likelihood: Callable[[Array], dist.Distribution],
        *,
        mean: Callable[[Array], Array] | ArrayLike | None = None,
        observed: Bool[ArrayLike, "... n"] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = checks.instance("kernel", kernel, AbstractKernel)
        self.X = checks.inputs("X", X, may_be_batch=True)
        self.kernel.check_categories("X", self.X)
        self.observed = None if observed is None else as_observed(observed, self.X.shape[-2])
        batch_shape = batch_shape_of(self.kernel, self.X, self.observed)
        self.mean_function = as_mean_function(mean, batch_shape, self.X)
        self.likelihood = _as_likelihood(likelihood)
        super().__init__(batch_shape, self.X.shape[-2:-1], validate_args=validate_args)
        self._check_likelihood()

    def _check_likelihood(self) -> None:
        shape = self.batch_shape + self.event_shape
        like = jax.ShapeDtypeStruct(shape, self.X.dtype)
        found = jax.eval_shape(lambda f: self.given(f), like)
        if not isinstance(found, dist.Distribution):
            raise TypeError(
                "`likelihood` must map values of the function to a distribution, as in "
                f"`lambda f: dist.Poisson(jnp.exp(f))`, and gives {checks.described(found)}."
            )
        if found.batch_shape != shape or found.event_shape:
            event = f" and event shape {found.event_shape}" if found.event_shape else ""
            raise ValueError(
                f"`likelihood` must give a distribution of batch shape {shape}, one observation "
                f"for each row of `X`, got batch shape {found.batch_shape}{event}."
            )

    @property
    def support(self) -> Any:
        """That of the likelihood."""
        return constraints.independent(self._support, 1)

    @property
    def _support(self) -> Any:
        """That of each observation."""
        return self.given(jnp.zeros(self.batch_shape + self.event_shape, self.X.dtype)).support

    @property
    def _covariance(self) -> Float[Array, "... n n"]:
        memory.warn_of_size(
            "LaplaceGP",
            self.X.shape[-2],
            self.X.dtype,
            "train a `sgp.LatentGP` with a guide such as sgp.guides.AutoSparseGP, which makes no "
            "such matrix",
        )
        parts = self.kernel.as_batch(), batches.Batch(self.X, self.X.ndim - 2)
        K = batches.each(lambda kernel, X: kernel.covariance(X), *parts)
        return jnp.broadcast_to(K, self.batch_shape + 2 * self.event_shape)

    @property
    def prior_mean(self) -> Float[Array, "... n"]:
        """The prior mean of the function, m(X)."""
        return mean_at(self.mean_function, self.X, self.batch_shape + self.event_shape)

    @property
    def _prior_predictive(self) -> LikelihoodUnderNormal:
        variance = jnp.broadcast_to(self.kernel.diag(self.X), self.batch_shape + self.event_shape)
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
        """What log likelihoods take besides f."""
        observed = None if self.observed is None else jnp.asarray(self.observed)
        return self.likelihood, y, observed

    def log_prob(
        self, value: Num[ArrayLike, "... n"], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """Laplace's approximation of the log marginal likelihood.

        Args:
            value: observations, shape (..., n), of a batch (..., *batch, n).
            intermediates: unused, part of NumPyro's interface.

        Returns:
            Log densities, shape (...). NaN, with a warning, where the likelihood is not
            log-concave at the mode, or there is no mode.

        Raises:
            ValueError: if `value` has the wrong length, holds NaN or infinity where a row is
                observed, or lies outside of the likelihood's support; if the rows are those of a
                mini-batch that a plate takes.
        """
        self.check_all_rows()
        y = self._observations(value)
        shape = self.batch_shape + self.event_shape
        samples = jnp.broadcast_shapes(y.shape, shape)[: max(0, y.ndim - len(shape))]
        y = jnp.broadcast_to(y, (*samples, *shape))
        self._check_rows(y)
        if not samples:
            return self._log_density(y)
        # Not the method itself: JAX keeps what it traced of a function that it has seen.
        found = jax.lax.map(lambda y: self._log_density(y), y.reshape(-1, *shape))
        return found.reshape(*samples, *self.batch_shape)

    # One program also where NUTS looks for a place to start, outside of compiled code.
    @compiled
    def _log_density(self, y: Num[Array, "... n"]) -> Float[Array, "..."]:
        return laplace.log_marginal(_entries, self._covariance, self.prior_mean, self._data(y))

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Num[Array, "*sample_shape n"]:
        """Draw observations from the prior: shape (*sample_shape, *batch, n), in O(n^3)."""
        function_key, key = jax.random.split(checks.as_key(key))
        L = _cholesky(jnp.vectorize(linalg.add_jitter, signature="(n,n)->(n,n)")(self._covariance))
        shape = *sample_shape, *self.batch_shape, 1, *self.event_shape
        normal = jax.random.normal(function_key, shape, L.dtype)
        f = self.prior_mean + linalg.matmul(normal, jnp.swapaxes(L, -1, -2))[..., 0, :]
        return self.given(f).sample(key)

    def condition(
        self, y: Num[ArrayLike, "... n"], *, progress_bar: bool = True
    ) -> LaplacePosterior:
        """The normal approximation of the posterior of f given observations.

        Args:
            y: observations, shape (n,), or (*batch, n).
            progress_bar: unused.

        Returns:
            The posterior, in O(n^3) time for each step of Newton's method.

        Raises:
            ValueError: as `log_prob`; if `y` has further axes.
        """
        y = self._observations(y)
        checks.shape("y", y, self.batch_shape + self.event_shape)
        self._check_rows(y)
        return self._condition(y)

    @compiled
    def _condition(self, y: Num[Array, "... n"]) -> LaplacePosterior:
        mean = self.prior_mean
        sites = laplace.normal_sites(_entries, self._covariance, mean, self._data(y))
        zero = functions.constant_function(jnp.zeros((), mean.dtype))

        def of_one(kernel: AbstractKernel, X: Array, f: Array, weights: Array, L: Array) -> Any:
            linalg.warn_of_rounding(L)
            return ExactPosterior(
                kernel=kernel,
                X=X,
                y=f,
                noise_variance=None,
                mean_function=zero if self.batch_shape else self.mean_function,
                factor=linalg.Factor(L, jnp.zeros((), L.dtype)),
                representer_weights=weights,
            )

        num = len(self.batch_shape)
        arrays = (batches.Batch(array, num) for array in (sites.f, sites.weights, sites.tril))
        parts = self.kernel.as_batch(), batches.Batch(self.X, self.X.ndim - 2), *arrays
        process = batches.each(of_one, *parts)
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
        """The distribution of new observations at X, each by itself.

        Args:
            posterior: over the function, such as `condition` of the `LaplaceGP` of a fit returns.
            at_data: unused: it is the same at rows of the fit.

        Returns:
            Draws and log densities of batch shape (*batch, n), with f integrated out.
        """
        scale = jnp.sqrt(posterior.variance(self.X))
        # NaN where there was no mode, with a warning then.
        f = dist.Normal(posterior.mean(self.X), scale, validate_args=False)
        return LikelihoodUnderNormal(self.likelihood, f)

    def leave_one_out(self, posterior: LaplacePosterior) -> LikelihoodUnderNormal:
        """The distribution of each observation given all others; see `LaplacePosterior.cavity`."""
        return LikelihoodUnderNormal(self.likelihood, posterior.cavity())

    def _observations(self, value: ArrayLike) -> Num[Array, "... n"]:
        """Observations that were checked, with one that is there where a row has no target."""
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
            some = jnp.take_along_axis(jnp.broadcast_to(y, shape), first, axis=-1)
            y = jnp.where(self.observed, y, some)
        checks.finite("y", y, "" if self.observed is not None else MISSING)
        support = self._support
        inside = support(y)
        if checks.is_concrete(inside) and not np.all(inside):
            wrong = np.asarray(y)[~np.broadcast_to(inside, y.shape)]
            raise ValueError(
                f"`y` must lie in the support of the likelihood, {support}, got {wrong[0]}."
            )
        return y

    def _check_rows(self, y: Num[Array, "... n"]) -> None:
        """Raise if a log likelihood depends on more than one value of f."""

        def entries(f: Array) -> dict[str, list[Array]]:
            first = y.reshape(-1, *self.batch_shape, *self.event_shape)[0]
            return {"y": [_entries(f, self._data(first))]}

        like = jnp.zeros(self.batch_shape + self.event_shape, self.X.dtype)
        if combining_rows(entries, like):
            raise ValueError(
                "`likelihood` combines rows of the function, and each of its entries may depend on "
                "one value alone: take `sgp.LatentGP` under NUTS."
            )


def _entries(f: Float[Array, "... n"], data: Any) -> Float[Array, "... n"]:
    """Log likelihoods, zero where a row has no target."""
    likelihood, y, observed = data
    found = likelihood(f).log_prob(y)
    return found if observed is None else jnp.where(observed, found, 0.0)


def _as_likelihood(value: Any) -> RowsFunction:
    refuse_kernel("likelihood", value)
    if isinstance(value, dist.Distribution):
        raise TypeError(
            "`likelihood` must be a function of the function's values, as in "
            f"`lambda f: dist.{type(value).__name__}(...)`, got a distribution."
        )
    return as_likelihood(value)
