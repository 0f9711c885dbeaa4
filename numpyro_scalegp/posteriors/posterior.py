"""What every posterior over a function offers."""

import abc
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import checks, chunks, linalg
from numpyro_scalegp.core.functions import RowsFunction, with_fixed_functions
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.row_values import (
    ELSEWHERE,
    holds_row_values,
    in_chunks_and_whole,
    is_of_rows,
)
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.function_samples import AbstractFunctionSamples

OF_VALUES = (
    "`leave_one_out` is for noisy observations, and this posterior is that given the function's "
    "own values, as in a draw of NUTS: give `sgp.to_arviz(mcmc, key=key)` to `arviz.loo`, or write "
    "the model with a `sgp.GaussianProcess`."
)

# Joint draws start with this much on the diagonal of their covariance, in units of rounding of the
# prior variance.
_DRAW_ROUNDINGS = 10.0
# The part of the variance of draws that what was put there may be without a warning: deviations
# are wider by half of it.
_WIDE = 0.25


class AbstractPosterior(eqx.Module):
    """A posterior over a function: moments, joint samples and predictions at new inputs.

    `noise_variance` is that of the observations, where the model has one that is Gaussian and the
    same for all; shape (), or (n,) with one value for each training row, of a `MultiOutputGP` (p,)
    or (n, p), or None.
    """

    if TYPE_CHECKING:  # checkers take an `AbstractVar` for the first argument of all subclasses

        @property
        def noise_variance(self) -> Float[Array, "..."] | None: ...  # noqa: D102
    else:
        noise_variance: eqx.AbstractVar[Float[Array, "..."] | None]

    def __check_init__(self) -> None:
        # Weights of what functions gave do not go with what they give later.
        for name, part in vars(self).items():
            object.__setattr__(self, name, with_fixed_functions(part, self._num_columns))

    @property
    def diagnostics(self) -> dict[str, Array]:
        """How the computation went, by name."""
        return {}

    @abc.abstractmethod
    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "AbstractPosterior":
        """The posterior of a part of f, of which `change` gives the kernel; see `component`."""

    def component(self, select: Callable[[AbstractKernel], AbstractKernel]) -> "Component":
        """The posterior of one part of a sum of kernels: the trend alone, or the season alone.

        Of f = f_1 + f_2 with independent parts a priori, f_1 has the posterior mean k_1(x, X) v and
        covariance k_1(x, z) - k_1(x, X) G k_1(X, z), with the v and G of the whole. The means of
        all parts, and the mean function, add up to that of the whole; their variances do not.

        Args:
            select: a function from the posterior's kernel to a part of it, such as
                `lambda kernel: kernel.left`.

        Returns:
            The posterior of that part, without mean function and noise. Costs are the whole's.

        Raises:
            ValueError: if the part is none of the kernel's, or the posterior has no kernel.

        References:
            Duvenaud (2014), Automatic Model Construction with Gaussian Processes, section 2.4.5.
        """
        checks.function("select", select)
        return Component(self.restrict(lambda kernel: kernel.component(select(kernel))))

    def mean(
        self, Xs: Float[ArrayLike, "... m d"], *, chunk_size: int | None = None
    ) -> Float[Array, "*values"]:
        """The posterior mean of f.

        Args:
            Xs: inputs, shape (m, d); where functions of a batch have kernels or data of their own
                also (*batch, m, d).
            chunk_size: rows worked on at a time; by default what fits 64 MiB in float32.

        Returns:
            Means, shape (m,); of a batch of functions (*batch, m), of a `MultiOutputGP` (m, p).
        """
        return self._mean(self._check(Xs), checks.count_or_none("chunk_size", chunk_size))

    def variance(
        self, Xs: Float[ArrayLike, "... m d"], *, chunk_size: int | None = None
    ) -> Float[Array, "*values"]:
        """The posterior variance of f, without observation noise; arguments as of `mean`.

        Returns:
            Variances, of the shape of the means; what rounding made negative is zero.
        """
        return self._variance(self._check(Xs), checks.count_or_none("chunk_size", chunk_size))

    def covariance(self, Xs: Float[ArrayLike, "... m d"]) -> Float[Array, "*values"]:
        """The posterior covariance of f at all pairs of rows of Xs.

        Args:
            Xs: inputs, as of `mean`.

        Returns:
            Covariances, shape (m, m), of a batch of functions (*batch, m, m), of a `MultiOutputGP`
            (m, p, m, p), entry [a, j, b, l] that of output j at row a with output l at row b. Their
            diagonal is `variance`, but for rounding, which may leave an entry below zero. Cost is
            that of joint draws without their O(m^3).

        Raises:
            ValueError: if the posterior has none: with `Vecchia`, `FullScale` and
                `VariationalNearestNeighborGP` each input has neighbors of its own.
        """
        return self._covariance(self._check(Xs))

    def sample(
        self, key: Key[Array, ""], Xs: Float[ArrayLike, "... m d"], num_samples: int = 1
    ) -> Float[Array, "num_samples *values"]:
        """Draw functions from the posterior, jointly at all rows of Xs.

        Args:
            key: a typed JAX key.
            Xs: inputs, shape (m, d).
            num_samples: number of draws, at least 1.

        Returns:
            Draws of f without observation noise, the shape of the means behind num_samples. Cost
            O(m^3), unless the class documents another.

        Raises:
            ValueError: if `num_samples` is below 1, or `Xs` is not a finite matrix of d columns.
        """
        num_samples = checks.count("num_samples", num_samples)
        return self._sample(checks.as_key(key), self._check(Xs), num_samples)

    def sample_functions(
        self, key: Key[Array, ""], num_samples: int = 1, *, num_features: int | None = None
    ) -> AbstractFunctionSamples:
        """Draw functions from the posterior that can be called at any inputs, now or later.

        Where `sample` needs all inputs at once, these are evaluated, differentiated and maximized
        wherever it turns out to be worth it, as in Thompson sampling. A draw of the prior is made
        of random features and updated by what is known of the function (Matheron's rule). Its mean
        is exact, and so is its covariance on average over keys; given the features, which each 16
        draws share, a variance is off by about sqrt(2 / num_features) of the prior's. A posterior
        over finitely many features has functions of these, with no such error.

        With the same key, the functions of all components of a sum, and the mean function, add up
        to those of the whole.

        Args:
            key: a typed JAX key.
            num_samples: number of functions, at least 1.
            num_features: random features of each prior draw, even; None for 2000 or, of a
                posterior that stores samples, theirs. A posterior over features has its own.

        Returns:
            A pytree of functions: `functions(Xs)` has the shape of the means behind num_samples,
            in O(m (M d + num_features)) for each function and M data or inducing points. Drawing
            them costs a solve with a factor that is there: O(n^2) for n data points, O(M^3) for M
            inducing points; of a mixture, what conditioning on the data costs for each function.

        Raises:
            ValueError: if `num_samples` is below 1, `num_features` not even and positive, or the
                kernel has no random features; then `sample` draws at all inputs at once.

        References:
            Wilson et al. (2020), Efficiently Sampling Functions from Gaussian Process Posteriors,
            eq. 13.

        Example:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import numpyro_scalegp as sgp
            >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
            >>> gp = sgp.GaussianProcess(sgp.kernels.RBF(0.3), X, 0.01)
            >>> functions = gp.condition(jnp.sin(6.0 * X[:, 0])).sample_functions(jax.random.key(0))
            >>> functions(X[:2]).shape, jax.grad(lambda x: functions(x[None])[0, 0])(X[0]).shape
            ((1, 2), (1,))
        """
        num_samples = checks.count("num_samples", num_samples)
        if num_features is not None:
            num_features = checks.count("num_features", num_features, 2, even=True)
        if holds_row_values(self):
            raise ValueError(ELSEWHERE)
        return self._functions(checks.as_key(key), num_samples, num_features)

    def leave_one_out(self) -> dist.Distribution:
        """The predictive distribution of each observation given all others, at the rows of the fit.

        Raises:
            ValueError: if the posterior has none: a variational one, one given a function's own
                values, one of a part of a function, or of a likelihood that is not normal.
        """
        raise ValueError(
            f"`{type(self).__name__}` has no `leave_one_out`: that is of a function given noisy "
            "observations, as of `GaussianProcess.condition`. Take pointwise log densities from "
            "`sgp.to_arviz`, or `sgp.infer.Predictive(...).draws(...).log_likelihood`, and give "
            "them to `arviz.loo`."
        )

    def cavity(self) -> dist.Normal:
        """The marginals of f at the rows of the fit given all other observations.

        Raises:
            ValueError: if the posterior is not that of a `LaplaceGP`.
        """
        raise ValueError(
            f"`{type(self).__name__}` has no `cavity`: that is of `LaplaceGP.condition`, where the "
            "likelihood is not normal. With normal noise take `leave_one_out`."
        )

    @property
    def _num_columns(self) -> int | None:
        """Columns of the inputs; None if any number will do."""
        return None

    @property
    def _takes_batches(self) -> bool:
        """Whether there may be a matrix of inputs for each of a batch of functions."""
        return False

    @property
    def _last_axis(self) -> str:
        """What moments have along their last axis."""
        return "row of `Xs`"

    def _seen(self, Xs: Float[Array, "... m d"]) -> Float[Array, "... m k"]:
        """Inputs as the kernels within take them."""
        return Xs

    def _check(self, Xs: ArrayLike) -> Float[Array, "... m d"]:
        X = checks.inputs("Xs", Xs, width=self._num_columns, may_be_batch=self._takes_batches)
        for part in jax.tree.leaves(self, is_leaf=lambda one: isinstance(one, AbstractKernel)):
            if isinstance(part, AbstractKernel):
                part.check_categories("Xs", self._seen(X))
        return X

    @abc.abstractmethod
    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        """The mean at inputs that were checked."""

    @abc.abstractmethod
    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        """The variance at inputs that were checked."""

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        """Both at inputs that were checked; one pass, where a class has one for both."""
        return self._mean(Xs, chunk_size), self._variance(Xs, chunk_size)

    def _covariance(self, Xs: Array) -> Array:
        """The covariance at inputs that were checked."""
        raise ValueError(
            f"`{type(self).__name__}` has no `covariance`: each input has neighbors of its own, "
            "and no joint moments. That of joint draws is jnp.cov(posterior.sample(key, Xs, 1000), "
            "rowvar=False); `sgp.estimators.Cholesky()` and `sgp.guides.AutoSparseGP` have one."
        )

    @abc.abstractmethod
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        """Joint draws at inputs that were checked."""

    @abc.abstractmethod
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        """Draws as functions, given arguments that were checked."""

    def predictive(
        self,
        Xs: Float[ArrayLike, "... m d"],
        noise_variance: Float[ArrayLike, "..."] | None = None,
        *,
        chunk_size: int | None = None,
    ) -> dist.Distribution:
        """The predictive distribution of new observations with Gaussian noise.

        Args:
            Xs: inputs, shape (m, d).
            noise_variance: variance of the noise at the new inputs, shape () or (m,); for a batch
                of functions also (*batch, 1) or (*batch, m), for a `MultiOutputGP` (p,) or (m, p).
                None for the model's own.
            chunk_size: rows worked on at a time.

        Returns:
            A `numpyro.distributions.Normal` of the means' shape: one marginal for each value.

        Raises:
            ValueError: if `noise_variance` has another shape, or a negative entry; if it is not
                given, and the posterior has none, or one for each training row.
        """
        noise_variance = self._noise_or_raise() if noise_variance is None else noise_variance
        noise = checks.as_positive(noise_variance, "noise_variance", or_zero=True)
        checks.positive("noise_variance", noise, or_zero=True)
        chunk_size = checks.count_or_none("chunk_size", chunk_size)
        mean, variance = self._mean_and_variance(self._check(Xs), chunk_size)
        if noise.ndim and noise.shape[-1] not in (1, variance.shape[-1]):
            raise ValueError(
                f"`noise_variance` must have shape () or ({variance.shape[-1]},), got "
                f"{noise.shape}: one value, or one for each {self._last_axis}."
            )
        # NaN where a posterior is, with a warning when it was made.
        return dist.Normal(mean, jnp.sqrt(variance + noise), validate_args=False)

    def _noise_or_raise(self) -> Float[Array, "..."]:
        if self.noise_variance is None:
            raise ValueError(
                "`noise_variance` must be given: this posterior has no Gaussian noise. "
                "`sgp.posterior(model, ...)` finds it where the likelihood is Gaussian around f; "
                "for any other take `sgp.infer.Predictive`."
            )
        if self._has_noise_of_rows:
            raise ValueError(
                "`noise_variance` must be given: the model has one noise variance for each "
                f"training row (shape {self.noise_variance.shape}) and none for new inputs."
            )
        return self.noise_variance

    @property
    def _has_noise_of_rows(self) -> bool:
        """Whether each training row has, or may have, a noise variance of its own."""
        noise: Any = self.noise_variance
        return jnp.shape(noise)[-1:] not in [(), (1,)]

    @staticmethod
    def _joint_sample(
        key: Key[Array, ""],
        mean: Float[Array, " m"],
        covariance: Float[Array, "m m"],
        prior_variance: Float[Array, " m"],
        num_samples: int,
        *,
        warn: bool = True,
    ) -> Float[Array, "num_samples m"]:
        # What rounding leaves in the posterior covariance is relative to the prior variance.
        prior, variance = jnp.mean(prior_variance), jnp.mean(jnp.diagonal(covariance))
        first = _DRAW_ROUNDINGS * jnp.finfo(covariance.dtype).eps * prior
        jittered = covariance + first * jnp.eye(mean.size, dtype=covariance.dtype)
        factor = linalg.factorize(jittered, unit=jax.lax.stop_gradient(prior), warn=False)
        linalg.warn_of_steps(~jnp.isnan(factor.tril[0, 0]), jnp.zeros((), jnp.int32))
        if warn:
            call_where(first + factor.jitter > _WIDE * variance, _warn_of_wide_draws)
        L = linalg.cholesky_given(jittered, factor.tril)
        noise = jax.random.normal(key, (num_samples, mean.size), covariance.dtype)
        return mean[None, :] + linalg.matmul(noise, L.T)


class AbstractConditioned(AbstractPosterior):
    """A posterior given noisy observations y at X, with the mean function m."""

    X: eqx.AbstractVar[Float[Array, "... n d"]]
    y: eqx.AbstractVar[Float[Array, "... n"]]
    noise_variance: eqx.AbstractVar[Float[Array, "..."] | None]
    mean_function: eqx.AbstractVar[RowsFunction]

    @abc.abstractmethod
    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given all other observations; shape (n,)."""

    def _check(self, Xs: ArrayLike) -> Float[Array, "... m d"]:
        X = super()._check(Xs)
        if is_of_rows(self.mean_function):
            self.mean_function(X)  # which raises at other rows
        return X

    @property
    def _is_of_values(self) -> bool:
        """Whether y are the function's own values, such as a draw of NUTS has."""
        return False

    def _refuse_unknown_observations(self) -> None:
        """Raise where a noise goes with observations that are not known here."""
        if self._is_of_values and self.noise_variance is not None:
            raise ValueError(OF_VALUES)

    def at_data(self) -> dist.Normal:
        """The predictive distribution at the training inputs, for replicates of y; shape (n,)."""
        return self.predictive(self.X, self.noise_variance)

    @property
    def _num_columns(self) -> int:
        return self.X.shape[-1]

    @property
    def _has_noise_of_rows(self) -> bool:
        # Of a single row, one value in an array may be that row's.
        noise: Any = self.noise_variance
        return super()._has_noise_of_rows or () != jnp.shape(noise) == self.y.shape


class AbstractInChunks(AbstractConditioned):
    """A posterior of one function whose moments are computed in chunks of rows."""

    @property
    @abc.abstractmethod
    def _row_width(self) -> int:
        """Entries of intermediate arrays for each row of inputs in a chunk."""

    # Whether the devices of a mesh share the rows, or what each of them is multiplied with.
    _shares_rows: ClassVar[bool] = True

    @abc.abstractmethod
    def _explained(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        """The posterior mean without m."""

    @abc.abstractmethod
    def _unexplained(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        """The posterior variance."""

    def _map(self, function: Callable[[Array], Array], Xs: Array, chunk_size: int | None) -> Array:
        size = chunks.rows_per_chunk(self._row_width) if chunk_size is None else chunk_size
        return chunks.map_rows(function, Xs, size, share=self._shares_rows)

    @compiled
    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        in_chunks, whole = in_chunks_and_whole(self.mean_function)

        def mean(rows: Array) -> Array:
            return in_chunks(rows) + self._explained(rows)

        return whole(Xs) + self._map(mean, Xs, chunk_size)

    @compiled
    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._map(self._unexplained, Xs, chunk_size)


class Component(AbstractPosterior):
    """The posterior of a part of a function: moments and draws, without noise."""

    part: AbstractPosterior
    noise_variance: None = None

    def _check(self, Xs: ArrayLike) -> Float[Array, "... m d"]:
        return self.part._check(Xs)

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.part._mean(Xs, chunk_size)

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self.part._variance(Xs, chunk_size)

    def _mean_and_variance(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        return self.part._mean_and_variance(Xs, chunk_size)

    def _covariance(self, Xs: Array) -> Array:
        return self.part._covariance(Xs)

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        return self.part.sample(key, Xs, num_samples)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        return self.part._functions(key, num_samples, num_features)

    @property
    def diagnostics(self) -> dict[str, Array]:
        """Those of the whole."""
        return self.part.diagnostics

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> AbstractPosterior:
        """The posterior of a part of the part."""
        return self.part.restrict(change)


def _warn_of_wide_draws() -> None:
    warnings.warn(
        "joint draws from a posterior are wider than its variances say: in this precision the "
        "jitter that their covariance needs is a good part of it. Work in float64 "
        "(numpyro.enable_x64()), draw at fewer inputs, or take `sample_functions`.",
        RuntimeWarning,
        stacklevel=1,
    )
