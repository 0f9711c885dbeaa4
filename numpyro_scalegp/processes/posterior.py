"""The base classes of posteriors over functions."""

import abc
import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import checks, chunks, summary
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.processes.function_samples import AbstractFunctionSamples
from numpyro_scalegp.programs import exported
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import (
    ELSEWHERE,
    RowsFunction,
    holds_row_values,
    in_chunks_and_whole,
    is_of_rows,
    with_fixed_functions,
)
from numpyro_scalegp.programs.padded import PaddedRows

# Rows, or the inputs of each axis of a grid.
Inputs = Float[ArrayLike, "... m d"] | Sequence[Float[ArrayLike, "_m _d"]]

NEEDS_OBSERVATIONS = (
    "`leave_one_out` needs noisy observations, and this posterior is given values of the function, "
    "as in a draw of NUTS: pass `sgp.to_arviz(mcmc, key=key)` to `arviz.loo`, or write the model "
    "with a `sgp.GaussianProcess`."
)

# The first jitter on the covariance of joint draws, in units of rounding of the prior variance.
_DRAW_ROUNDINGS = 10.0
# Warn where the jitter exceeds this fraction of the variance of draws: the standard deviations are
# then too wide by half of it.
_WIDE = 0.25


class AbstractPosterior(eqx.Module):
    """The posterior of a function: moments, joint samples and predictions at new inputs.

    `noise_variance` is the variance of Gaussian observation noise, shape () or, with one value for
    each training row, (n,); for a `MultiOutputGP` shape (p,) or (n, p). It is None if the model has
    no Gaussian noise.
    """

    if TYPE_CHECKING:  # type checkers take an `AbstractVar` for the first argument of subclasses

        @property
        def noise_variance(self) -> Float[Array, "..."] | None: ...  # noqa: D102
    else:
        noise_variance: eqx.AbstractVar[Float[Array, "..."] | None]

    def __check_init__(self) -> None:
        # The posterior is valid for what the functions compute now: they raise if that changes.
        for name, value in vars(self).items():
            object.__setattr__(self, name, with_fixed_functions(value, self._num_columns))

    def __repr__(self) -> str:
        parts = []
        for name, value in vars(self).items():
            if name == "kernel" or (name == "process" and isinstance(value, AbstractPosterior)):
                parts.append(repr(value))
            elif isinstance(value, AbstractKernel):  # of a component
                parts.append(f"{name}={value!r}")
            elif name in ("X", "points"):
                parts.append(summary.counted_rows(value, "row" if name == "X" else "point"))
            elif name == "noise_variance" and value is not None:
                parts.append(f"{name}={summary.shown(value)}")
        return summary.one_line(self, [*parts, *self._summary()])

    def _summary(self) -> list[str]:
        """What `repr` says besides kernel, rows and noise."""
        return []

    @property
    def diagnostics(self) -> dict[str, Array]:
        """Diagnostics of the computation, by name."""
        return {}

    @abc.abstractmethod
    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "AbstractPosterior":
        """The posterior of the component of f whose kernel is `change(kernel)`."""

    def component(self, select: Callable[[AbstractKernel], AbstractKernel]) -> "Component":
        """The posterior of one component of a sum of kernels, such as the trend or the season.

        For f = f_1 + f_2, independent a priori, f_1 has the posterior mean k_1(x, X) v and
        covariance k_1(x, z) - k_1(x, X) G k_1(X, z), with the same v and G as for f. The means of
        all components, and the mean function, add up to the mean of f; the variances do not.

        Args:
            select: a function from the posterior's kernel to one of its components, such as
                `lambda kernel: kernel.left`.

        Returns:
            The posterior of the component, without mean function and noise. Its costs are those for
            f.

        Raises:
            ValueError: if the kernel has no such component, or the posterior has no kernel.

        References:
            Duvenaud (2014), Automatic Model Construction with Gaussian Processes, section 2.4.5.
        """
        checks.function("select", select)
        return Component(self.restrict(lambda kernel: kernel.component(select(kernel))))

    def mean(self, Xs: Inputs, *, chunk_size: int | None = None) -> Float[Array, "*values"]:
        """The posterior mean of f.

        Args:
            Xs: inputs, shape (m, d); also (*batch, m, d) for a batch of functions with separate
                kernels or data. For a `GridGP` also a sequence with the inputs of each axis of
                another grid, shapes (m_j, d_j).
            chunk_size: rows evaluated at a time; by default as many as fit 64 MiB in float32.

        Returns:
            Means, shape (m,); (*batch, m) for a batch of functions, (m, p) for a `MultiOutputGP`,
            (m_1, ..., m_k) for a grid.
        """
        rows, size = self._padded(Xs), checks.count_or_none("chunk_size", chunk_size)
        return rows.unpad(self._mean(rows.X, size), self._row_axis)

    def variance(self, Xs: Inputs, *, chunk_size: int | None = None) -> Float[Array, "*values"]:
        """The posterior variance of f, without observation noise; for the arguments see `mean`.

        Returns:
            Variances, of the shape of the means; zero where rounding would make them negative.
        """
        rows, size = self._padded(Xs), checks.count_or_none("chunk_size", chunk_size)
        return rows.unpad(self._variance(rows.X, size), self._row_axis)

    def covariance(self, Xs: Inputs) -> Float[Array, "*values"]:
        """The posterior covariance of f at all pairs of rows of Xs.

        Args:
            Xs: inputs; see `mean`.

        Returns:
            Covariances, shape (m, m); (*batch, m, m) for a batch of functions, (m, p, m, p) for a
            `MultiOutputGP`, where [a, j, b, l] is the covariance of output j at row a and output l
            at row b, and likewise (*shape, *shape) for a grid. The diagonal equals `variance` up to
            rounding, which may make it negative. It costs as much as joint draws, without their
            O(m^3).

        Raises:
            ValueError: if the posterior has no covariance: with `Vecchia`, `FullScale` and
                `VariationalNearestNeighborGP` each input has separate neighbors.
        """
        return self._covariance(self._check(Xs))

    def sample(
        self, key: Key[Array, ""], Xs: Inputs, num_samples: int = 1
    ) -> Float[Array, "num_samples *values"]:
        """Draw functions from the posterior, jointly at all rows of Xs.

        Args:
            key: a typed JAX key.
            Xs: inputs; see `mean`.
            num_samples: number of draws, at least 1.

        Returns:
            Draws of f without observation noise, shape (num_samples, *shape of the means), in
            O(m^3) unless the class documents another cost.

        Raises:
            ValueError: if `num_samples` is below 1, or `Xs` is not a finite matrix of d columns.
        """
        num_samples = checks.count("num_samples", num_samples)
        return self._sample(checks.as_key(key), self._check(Xs), num_samples)

    def sample_functions(
        self, key: Key[Array, ""], num_samples: int = 1, *, num_features: int | None = None
    ) -> AbstractFunctionSamples:
        """Draw functions from the posterior that can be called at any inputs, now or later.

        Unlike `sample`, which needs all inputs at once, this returns functions that can be
        evaluated, differentiated and maximized at inputs chosen later, as in Thompson sampling.
        Each is a prior draw made of random features, updated by the data or the inducing values
        (Matheron's rule). The mean is exact, and the covariance is exact on average over keys;
        given the features, which 16 draws share, a variance has an error of about
        sqrt(2 / num_features) times the prior variance. A posterior over finitely many features
        draws functions of these features, without this error.

        With the same key, the functions drawn for all components of a sum, and the mean function,
        add up to the functions drawn for f.

        Args:
            key: a typed JAX key.
            num_samples: number of functions, at least 1.
            num_features: number of random features of each prior draw, even; None for 2000 or, if
                the posterior stores samples, their number of features. A posterior over finitely
                many features ignores it.

        Returns:
            A pytree of functions: `functions(Xs)` has shape (num_samples, *shape of the means), and
            costs O(m (M d + num_features)) for each function and M data or inducing points. Drawing
            them costs a solve with a stored factor: O(n^2) for n data points, O(M^3) for M inducing
            points. A mixture conditions on the data once for each function.

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

    def export(
        self,
        file: str | os.PathLike[str],
        *,
        num_rows: int | None = None,
        platforms: Sequence[str] | None = None,
    ) -> None:
        """Write the mean and the variance to a file, as a program that needs JAX or ONNX alone.

        If its name ends with `.onnx`, the file is an ONNX model of the input `Xs`, in which all
        arrays are constants; jax2onnx converts it (`numpyro_scalegp[onnx]`). Otherwise it is an
        `.npz` with the `program`, as `jax.export` serializes it, and its arrays. To read it without
        this package:

            import jax.export
            import numpy as np

            file = np.load("posterior.npz")
            arrays = [file[name] for name in sorted(file) if name.startswith("array")]
            program = jax.jit(jax.export.deserialize(bytearray(file["program"])).call)
            moments = program(arrays, Xs)

        Then `moments["mean"]` and `moments["variance"]` have the shapes of `mean` and `variance`,
        and `moments["noise_variance"]` is there if new observations have one: add it to the
        variance. Each number of rows is compiled once. The program has no derivatives, and leaves
        out warnings. The file has the arrays that moments need: for an exact GP an n x n factor,
        for a sparse one a few M x M matrices. In float64 it needs `jax_enable_x64` when it is read.

        Args:
            file: the path, with the ending `.onnx` for ONNX; no ending is added.
            num_rows: the number of rows of `Xs`; None for any number.
            platforms: the platforms on which the program may run: "cpu", "cuda", "rocm" or "tpu";
                None for the current one, and for ONNX.

        Raises:
            ImportError: if flatbuffers, or jax2onnx for ONNX, is not installed.
            ValueError: if the posterior needs the number of rows, as `GridGP` does over time, does
                not know the number of columns, as a mixture, or calls Python; if jax2onnx does not
                convert one of its operations; within `jax.jit`.
        """

        def moments(posterior: AbstractPosterior, Xs: Array) -> dict[str, Array]:
            mean, variance = posterior._mean_and_variance(Xs, None)
            moments = {"mean": mean, "variance": variance}
            with contextlib.suppress(ValueError):  # there may be none for new rows
                moments["noise_variance"] = jnp.asarray(posterior._noise_or_raise())
            return moments

        exported.write(file, self, moments, self._num_columns, num_rows, platforms)

    def leave_one_out(self) -> dist.Distribution:
        """The predictive distribution of each training observation given all others.

        Raises:
            ValueError: if the posterior is variational, conditioned on values of f, for one
                component of f, or for a likelihood that is not normal.
        """
        raise ValueError(
            f"`{type(self).__name__}` has no `leave_one_out`: only a posterior given noisy "
            "observations has one, such as `GaussianProcess.condition` returns. Take pointwise log "
            "densities from `sgp.to_arviz`, or "
            "`sgp.infer.Predictive(...).draws(...).log_likelihood`, and pass them to `arviz.loo`."
        )

    def cavity(self) -> dist.Normal:
        """The marginals of f at the training rows, each given all other observations.

        Raises:
            ValueError: if the posterior is not from a `LaplaceGP`.
        """
        raise ValueError(
            f"`{type(self).__name__}` has no `cavity`: only `LaplaceGP.condition` returns a "
            "posterior with one. With normal noise take `leave_one_out`."
        )

    @property
    def _num_columns(self) -> int | None:
        """The number of input dimensions; None if any number is valid."""
        return None

    @property
    def _takes_batches(self) -> bool:
        """Whether each function of a batch may have its own matrix of inputs."""
        return False

    @property
    def _row_axis(self) -> int | None:
        """The axis of the moments along which the rows of inputs lie; None if it is not known."""
        return -1

    def _padded(self, Xs: Inputs) -> PaddedRows:
        """Checked inputs, with padding unless they are axes of a grid or the training rows."""
        checked = self._check(Xs)
        if isinstance(checked, tuple) or self._row_axis is None:
            return PaddedRows(checked, None)
        rows = PaddedRows.of(checked)
        # Only where there is padding, since this goes through all of the posterior.
        is_whole = rows.num_rows is not None and holds_row_values(self)
        return PaddedRows(checked, None) if is_whole else rows

    @property
    def _last_axis(self) -> str:
        """What the last axis of the moments stands for, in messages."""
        return "row of `Xs`"

    def _kernel_inputs(self, Xs: Float[Array, "... m d"]) -> Float[Array, "... m k"]:
        """The inputs in the form that the posterior's kernels take."""
        return Xs

    def _check(self, Xs: Inputs) -> Any:
        rows: Any = Xs
        X = checks.inputs("Xs", rows, width=self._num_columns, may_be_batch=self._takes_batches)
        for leaf in jax.tree.leaves(self, is_leaf=lambda node: isinstance(node, AbstractKernel)):
            if isinstance(leaf, AbstractKernel):
                leaf.check_values("Xs", self._kernel_inputs(X))
        return X

    @abc.abstractmethod
    def _mean(self, Xs: Any, chunk_size: int | None) -> Array:
        """The mean at checked inputs."""

    @abc.abstractmethod
    def _variance(self, Xs: Any, chunk_size: int | None) -> Array:
        """The variance at checked inputs."""

    def _mean_and_variance(self, Xs: Any, chunk_size: int | None) -> tuple[Array, Array]:
        """The mean and the variance at checked inputs; overridden where one pass computes both."""
        return self._mean(Xs, chunk_size), self._variance(Xs, chunk_size)

    def _covariance(self, Xs: Any) -> Array:
        """The covariance at checked inputs."""
        raise ValueError(
            f"`{type(self).__name__}` has no `covariance`: each input has separate neighbors, so "
            "there are no joint moments. Estimate it from joint draws by "
            "jnp.cov(posterior.sample(key, Xs, 1000), rowvar=False), or take "
            "`sgp.estimators.Cholesky()` or `sgp.guides.AutoSparseGP`."
        )

    @abc.abstractmethod
    def _sample(self, key: Array, Xs: Any, num_samples: int) -> Array:
        """Joint draws at checked inputs."""

    @abc.abstractmethod
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        """Draws as functions, for checked arguments."""

    def predictive(
        self,
        Xs: Inputs,
        noise_variance: Float[ArrayLike, "..."] | None = None,
        *,
        chunk_size: int | None = None,
    ) -> dist.Distribution:
        """The predictive distribution of new observations with Gaussian noise.

        Args:
            Xs: inputs; see `mean`.
            noise_variance: variance of the noise at the new inputs, shape () or (m,); for a batch
                of functions also (*batch, 1) or (*batch, m), for a `MultiOutputGP` (p,) or (m, p),
                on a grid any shape that broadcasts with it. None for the posterior's
                `noise_variance`.
            chunk_size: rows evaluated at a time.

        Returns:
            A `numpyro.distributions.Normal` of the means' shape: one marginal for each value.

        Raises:
            ValueError: if `noise_variance` has a wrong shape or a negative entry; if it is None,
                and the posterior has no noise variance or one for each training row.
        """
        noise_variance = self._noise_or_raise() if noise_variance is None else noise_variance
        noise = checks.as_positive(noise_variance, "noise_variance", or_zero=True)
        checks.positive("noise_variance", noise, or_zero=True)
        chunk_size = checks.count_or_none("chunk_size", chunk_size)
        rows = self._padded(Xs)
        mean, variance = self._mean_and_variance(rows.X, chunk_size)
        axis = self._row_axis
        is_same_for_rows = axis is not None and noise.ndim < -axis
        if not is_same_for_rows:
            mean, variance = rows.unpad(mean, axis), rows.unpad(variance, axis)
        if not _broadcasts(noise.shape, variance.shape):
            raise ValueError(
                f"`noise_variance` must have shape () or ({variance.shape[-1]},), got "
                f"{noise.shape}: one value, or one for each {self._last_axis}."
            )
        scale = jnp.sqrt(variance + noise)
        if is_same_for_rows:
            mean, scale = rows.unpad(mean, axis), rows.unpad(scale, axis)
        # Not validated: a posterior may be NaN, and warned when it was made.
        return dist.Normal(mean, scale, validate_args=False)

    def _noise_or_raise(self) -> Float[Array, "..."]:
        if self.noise_variance is None:
            raise ValueError(
                "`noise_variance` must be given: this posterior has no Gaussian noise. "
                "`sgp.posterior(model, ...)` finds it where the likelihood is Gaussian around f; "
                "for other likelihoods take `sgp.infer.Predictive`, or `LaplaceGP.predictive`."
            )
        if self._has_noise_of_rows:
            raise ValueError(
                "`noise_variance` must be given: the model has one noise variance for each "
                f"training row (shape {self.noise_variance.shape}) and none for new inputs."
            )
        return self.noise_variance

    @property
    def _has_noise_of_rows(self) -> bool:
        """Whether each training row has, or may have, its own noise variance."""
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
        # Rounding errors of the posterior covariance are relative to the prior variance.
        prior, variance = jnp.mean(prior_variance), jnp.mean(jnp.diagonal(covariance))
        first_jitter = _DRAW_ROUNDINGS * jnp.finfo(covariance.dtype).eps * prior
        jittered = covariance + first_jitter * jnp.eye(mean.size, dtype=covariance.dtype)
        factor = linalg.factorize(jittered, unit=jax.lax.stop_gradient(prior), warn=False)
        linalg.warn_of_steps(~jnp.isnan(factor.tril[0, 0]), jnp.zeros((), jnp.int32))
        if warn:
            call_where(first_jitter + factor.jitter > _WIDE * variance, _warn_of_wide_draws)
        L = linalg.cholesky_given(jittered, factor.tril)
        noise = jax.random.normal(key, (num_samples, mean.size), covariance.dtype)
        return mean[None, :] + linalg.matmul(noise, L.T)


class AbstractConditioned(AbstractPosterior):
    """A posterior given noisy observations y at X, with the mean function m."""

    if TYPE_CHECKING:

        @property
        def X(self) -> Float[Array, "... n d"]: ...  # noqa: D102
    else:
        X: eqx.AbstractVar[Float[Array, "... n d"]]
    y: eqx.AbstractVar[Float[Array, "... n"]]
    noise_variance: eqx.AbstractVar[Float[Array, "..."] | None]
    mean_function: eqx.AbstractVar[RowsFunction]

    @abc.abstractmethod
    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given all other observations; shape (n,)."""

    def _precision(self) -> Float[Array, "... n"]:
        """The diagonal of the inverse covariance of the observations."""
        raise NotImplementedError

    def _check(self, Xs: Inputs) -> Any:
        X = super()._check(Xs)
        if is_of_rows(self.mean_function):
            self.mean_function(X)  # raises if the rows are not the training rows
        return X

    @property
    def _is_of_values(self) -> bool:
        """Whether y are values of f, as in a draw of NUTS, not noisy observations."""
        return False

    def _refuse_unknown_observations(self) -> None:
        """Raise if the noise belongs to observations that this posterior does not have."""
        if self._is_of_values and self.noise_variance is not None:
            raise ValueError(NEEDS_OBSERVATIONS)

    def at_data(self) -> dist.Normal:
        """The predictive distribution at the training inputs, for replicates of y; shape (n,)."""
        return self.predictive(self.X, self.noise_variance)

    @property
    def _num_columns(self) -> int:
        return self.X.shape[-1]

    @property
    def _has_noise_of_rows(self) -> bool:
        # With a single training row, an array of one value may belong to that row.
        noise: Any = self.noise_variance
        return super()._has_noise_of_rows or () != jnp.shape(noise) == self.y.shape


class AbstractInChunks(AbstractConditioned):
    """A posterior of one function whose moments are computed in chunks of rows."""

    @property
    @abc.abstractmethod
    def _row_width(self) -> int:
        """Entries of intermediate arrays for each row of inputs in a chunk."""

    # Whether the devices of a mesh share the rows of inputs, not the training data.
    _shares_rows: ClassVar[bool] = True

    @abc.abstractmethod
    def _centered_mean(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        """The posterior mean without m."""

    @abc.abstractmethod
    def _marginal_variance(self, rows: Float[Array, "r d"]) -> Float[Array, " r"]:
        """The posterior variance."""

    def _map(self, function: Callable[[Array], Array], Xs: Array, chunk_size: int | None) -> Array:
        size = chunks.rows_per_chunk(self._row_width) if chunk_size is None else chunk_size
        return chunks.map_rows(function, Xs, size, share=self._shares_rows)

    @compiled
    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        chunked_mean, full_mean = in_chunks_and_whole(self.mean_function)

        def mean(rows: Array) -> Array:
            return chunked_mean(rows) + self._centered_mean(rows)

        return full_mean(Xs) + self._map(mean, Xs, chunk_size)

    @compiled
    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        return self._map(self._marginal_variance, Xs, chunk_size)


class AbstractDerived(AbstractPosterior):
    """A posterior with the moments and the draws of another posterior, `process`."""

    process: eqx.AbstractVar[Any]

    @property
    def diagnostics(self) -> dict[str, Array]:
        """The diagnostics of `process`."""
        return self.process.diagnostics

    @property
    def _num_columns(self) -> int | None:
        return self.process._num_columns

    @property
    def _takes_batches(self) -> bool:
        return self.process._takes_batches

    @property
    def _row_axis(self) -> int | None:
        return self.process._row_axis

    def _check(self, Xs: Inputs) -> Any:
        return self.process._check(Xs)

    def _mean(self, Xs: Any, chunk_size: int | None) -> Array:
        return self.process._mean(Xs, chunk_size)

    def _variance(self, Xs: Any, chunk_size: int | None) -> Array:
        return self.process._variance(Xs, chunk_size)

    def _mean_and_variance(self, Xs: Any, chunk_size: int | None) -> tuple[Array, Array]:
        return self.process._mean_and_variance(Xs, chunk_size)

    def _covariance(self, Xs: Any) -> Array:
        return self.process._covariance(Xs)

    def _sample(self, key: Array, Xs: Any, num_samples: int) -> Array:
        return self.process._sample(key, Xs, num_samples)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        return self.process._functions(key, num_samples, num_features)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> AbstractPosterior:
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        return self.process.restrict(change)


class Component(AbstractDerived):
    """The posterior of one component of a function: moments and draws, without noise."""

    process: AbstractPosterior
    noise_variance: None = None


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of a shape fits moments, without more entries than these have."""
    try:
        return jnp.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _warn_of_wide_draws() -> None:
    warnings.warn(
        "joint draws from a posterior are wider than its variances say: in this precision the "
        "jitter that their covariance needs is a large part of it. Work in float64 "
        "(numpyro.enable_x64()), draw at fewer inputs, or take `sample_functions`.",
        RuntimeWarning,
        stacklevel=1,
    )
