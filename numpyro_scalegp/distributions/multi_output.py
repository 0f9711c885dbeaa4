"""The collapsed family for a matrix of observations: several outputs that know of each other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int
from numpyro.distributions import constraints

from numpyro_scalegp.core import checks, functions, kronecker, linalg
from numpyro_scalegp.core.derivatives import refuse_derivatives
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.row_values import row_values
from numpyro_scalegp.distributions.collapsed import GaussianNoise
from numpyro_scalegp.distributions.gaussian_process import GaussianProcess
from numpyro_scalegp.distributions.members import as_boolean
from numpyro_scalegp.distributions.rows import RowsDistribution
from numpyro_scalegp.kernels import AbstractKernel, Coregion
from numpyro_scalegp.kernels.coregion import long_format
from numpyro_scalegp.kernels.kernel import as_single
from numpyro_scalegp.kernels.nonstationary import refuse_kernel
from numpyro_scalegp.posteriors.multi_output import MultiOutputPosterior, OutputsOfFunctions

_MISSING = " Where these are entries without a target, give `observed=~jnp.isnan(Y)`."
# Of a function that is zero, in units of the noise.
_LEAST_VARIANCE = 1e-20
_NO_DERIVATIVES = (
    "the posterior of several outputs by its structure has no derivatives in `outputs` and "
    "`noise_variance`, only in the kernel, X and Y: take those of `log_prob`."
)


class MultiOutputGP(GaussianNoise, RowsDistribution):
    """Noisy observations of p functions that know of each other, at n shared inputs.

    Cov(Y[a, j], Y[b, l]) = k(x_a, x_b) B[j, l], plus the noise where both are the same entry: the
    intrinsic coregionalization model, for outputs in columns. `log_prob(Y)` is the exact log
    marginal likelihood.

    The matrix of all entries' covariances is never made where the rows that have a target have all
    p, and noise has shape () or (p,): p factorizations of n x n matrices do. Otherwise the matrix
    of the observed entries is factorized.

    Args:
        kernel: covariance function k between rows, one and no batch. Let its variance be one, since
            B has the variances.
        outputs: covariance B = W W' + diag(diag) between the p outputs.
        X: inputs, shape (n, d).
        noise_variance: variance of the observation noise, positive, in squared units of Y: shape
            (), one for each output, (p,), or one for each entry, (n, p).
        mean: the mean function: None for zero, a number, one for each output, (p,), or a callable
            that maps (n, d) inputs to (n, p) values. Or its values at the rows of X, shape (n, p):
            then the posterior has moments at these rows alone, all at once.
        observed: which entries have a target, boolean, shape (n, p); None for all. The others drop
            out of the density and the posterior, whatever Y holds there, NaN included. Of a mask
            that is known while the model is traced, such as an array of NumPy, they cost nothing;
            otherwise all entries count. `sample` draws all of them.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has the wrong shape or sign, or holds NaN or infinity; if a
            kernel is a batch; if no entry is observed.

    References:
        Bonilla, Chai and Williams (2007), Multi-task Gaussian Process Prediction; Stegle, Lippert,
        Mooij, Lawrence and Borgwardt (2011), Efficient inference in matrix-variate Gaussian models
        with iid observation noise, section 3, for the structure, with eigenvalues of B alone here.
        Time O(p n^3) and memory O(p n^2) by the structure, otherwise O(N^3) and O(N^2) for N
        observed entries.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X, Y = jnp.linspace(0.0, 1.0, 5)[:, None], jnp.ones((5, 2))
        >>> outputs = sgp.kernels.Coregion(jnp.array([[1.0], [0.5]]), jnp.array([0.1, 0.2]))
        >>> gp = sgp.MultiOutputGP(sgp.kernels.RBF(0.3), outputs, X, noise_variance=0.1)
        >>> gp.log_prob(Y).shape, gp.condition(Y).mean(X[:3]).shape
        ((), (3, 2))
        >>> Y = Y.at[1, 0].set(jnp.nan)
        >>> gp = sgp.MultiOutputGP(sgp.kernels.RBF(0.3), outputs, X, 0.1, observed=~jnp.isnan(Y))
        >>> gp.condition(Y).leave_one_out().loc.shape
        (5, 2)
    """

    arg_constraints = {"noise_variance": constraints.positive}
    support = constraints.real_matrix
    reparametrized_params = ["noise_variance"]
    pytree_data_fields = (
        "kernel", "outputs", "X", "noise_variance", "mean_function", "observed",
    )  # fmt: skip

    def __init__(
        self,
        kernel: AbstractKernel,
        outputs: Coregion,
        X: Float[ArrayLike, "n d"],
        noise_variance: Float[ArrayLike, "..."],
        *,
        mean: Callable[[Array], Array] | ArrayLike | None = None,
        observed: Bool[ArrayLike, "n p"] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = as_single("kernel", kernel)
        self.outputs = checks.instance("outputs", outputs, Coregion, "a `sgp.kernels.Coregion`")
        as_single("outputs", outputs)
        self.X = checks.inputs("X", X)
        self.kernel.check_categories("X", self.X)
        p = outputs.W.shape[0]
        shape = self.X.shape[0], p
        self.noise_variance = checks.as_positive(noise_variance, "noise_variance")
        whose = "one value, or one for each output, or for each entry"
        checks.shape("noise_variance", self.noise_variance, (), (p,), shape, why=whose)
        checks.positive("noise_variance", self.noise_variance)
        self.mean_function = _as_mean_function(mean, p, self.X)
        self.observed = None if observed is None else _as_observed(observed, shape)
        super().__init__((), shape, validate_args=validate_args)

    @property
    def mean(self) -> Float[Array, "n p"]:
        """The mean of the observations, m(X)."""
        mean = self.mean_function(self.X)
        if jnp.shape(mean) != self.event_shape:
            raise ValueError(
                f"`mean` must map inputs of shape {self.X.shape} to shape {self.event_shape}, got "
                f"{jnp.shape(mean)}."
            )
        return mean

    @property
    def variance(self) -> Float[Array, "n p"]:
        """The marginal variance of the observations, k(x, x) B_jj + noise."""
        return self.kernel.diag(self.X)[:, None] * jnp.diagonal(self._B) + self.noise_variance

    @property
    def _B(self) -> Float[Array, "p p"]:
        categories = jnp.arange(self.event_shape[1], dtype=self.X.dtype)
        return self.outputs.covariance(categories[:, None])

    @property
    def _noise(self) -> Float[Array, " p"]:
        """The noise of each output, where it is that of all rows."""
        return jnp.broadcast_to(self.noise_variance, self.event_shape[1:])

    def log_prob(
        self, value: Float[ArrayLike, "... n p"], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """The log marginal likelihood of observations.

        Args:
            value: observations, shape (..., n, p); the same factorizations serve all.
            intermediates: unused, part of NumPyro's interface.

        Returns:
            Log densities, shape (...), with first and second derivatives.

        Raises:
            ValueError: if `value` has the wrong shape, or holds NaN or infinity where an entry is
                observed, or the rows are those of a mini-batch that a plate takes.
        """
        self.check_all_rows()
        residual = self._residual(self._observations(value))
        rows = self._complete_rows
        if rows is None:
            return self._in_long_format().log_prob(residual.reshape(*residual.shape[:-2], -1))
        X, residual = self.X[rows], residual[..., rows, :]
        return _structured(self.kernel, X, self._B, self._noise, residual)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape n p"]:
        """Draw observations from the prior, noise included.

        Args:
            key: a JAX key.
            sample_shape: shape of the draws.

        Returns:
            Draws, shape (*sample_shape, n, p), in O(n^3 + n^2 p) each after O(n^3) for the
            factorization of K, with jitter on its diagonal.
        """
        function_key, noise_key = jax.random.split(checks.as_key(key))
        n, p = self.event_shape
        K = self.kernel.covariance(self.X)
        categories = jnp.arange(p, dtype=self.X.dtype)[:, None]
        loadings = self.outputs.evaluate_features(function_key, categories, p, None)  # B = A A'
        L = linalg.cholesky(linalg.add_jitter(K))
        shape = (*sample_shape, n, loadings.shape[1])
        white = jax.random.normal(function_key, shape, jnp.result_type(K, loadings))
        f = matmul(matmul(L.astype(white.dtype), white), loadings.T)
        noise = jax.random.normal(noise_key, (*sample_shape, n, p), f.dtype)
        return self.mean + f + jnp.sqrt(self.noise_variance) * noise

    def condition(
        self, Y: Float[ArrayLike, "n p"], *, progress_bar: bool = True
    ) -> MultiOutputPosterior:
        """The posterior of the p functions given observations.

        Args:
            Y: observations, shape (n, p).
            progress_bar: unused: nothing is solved for iteratively.

        Returns:
            The posterior, from the factorizations that `log_prob` makes. Where these are those of
            the structure, it has no derivatives in `outputs` and `noise_variance`.

        Raises:
            ValueError: if `Y` has the wrong shape, or holds NaN or infinity where an entry is
                observed.
        """
        Y = self._observations(Y)
        checks.shape("Y", Y, self.event_shape, why="a column for each output")
        residual, rows, p = self._residual(Y), self._complete_rows, self.event_shape[1]
        mixing: Array | None = None
        places: Any = None if self.observed is None else rows
        if rows is None:
            gp, values = self._in_long_format(), residual.ravel()
            places = gp.shown_rows
        else:
            B, noise = refuse_derivatives(_NO_DERIVATIVES, (self._B, self._noise))
            V, variances = kronecker.rotation(B, noise)
            # There are no draws without a variance. Small beside the largest is no zero: a noisy
            # output's own is, where another's noise is small.
            kernel = jnp.maximum(variances, _LEAST_VARIANCE) * self.kernel
            gp, values = GaussianProcess(kernel, self.X[rows], 1.0), matmul(residual[rows], V).T
            mixing = noise[:, None] * V
        found: Any = gp.condition(values)
        return MultiOutputPosterior(
            functions=found,
            outputs=OutputsOfFunctions(mixing, p),
            X=self.X,
            y=Y,
            noise_variance=self.noise_variance,
            mean_function=self.mean_function,
            observed=None if self.observed is None else jnp.asarray(self.observed),
            places=None if places is None else jnp.asarray(places),
        )

    def _observations(self, value: ArrayLike) -> Float[Array, "... n p"]:
        """Observations that were checked, zero where there is no target."""
        Y, shape = checks.as_float(value, "Y"), self.event_shape
        if Y.shape[-2:] != shape:
            raise ValueError(
                f"`Y` must have shape {shape}, got {Y.shape}: a row for each row of `X`, and a "
                "column for each output."
            )
        if self.observed is not None:
            Y = jnp.where(self.observed, Y, jnp.zeros((), Y.dtype))
        checks.finite("Y", Y, "" if self.observed is not None else _MISSING)
        return Y

    def _residual(self, Y: Float[Array, "... n p"]) -> Float[Array, "... n p"]:
        """Observations minus the mean, zero where there is no target."""
        residual = Y - self.mean
        return residual if self.observed is None else jnp.where(self.observed, residual, 0.0)

    @property
    def _complete_rows(self) -> Int[np.ndarray, " k"] | slice | None:
        """The rows that have targets, where these are known to have all; None if not so."""
        if self.noise_variance.ndim == 2:
            return None
        if self.observed is None:
            return slice(None)
        if not checks.is_concrete(self.observed):
            return None
        observed = np.asarray(self.observed)
        rows = np.flatnonzero(observed.any(axis=1))
        return rows if observed[rows].all() else None

    def _in_long_format(self) -> GaussianProcess:
        """The same, less the mean, of all entries row by row."""
        (n, p), d = self.event_shape, self.X.shape[1]
        kernel = self.kernel.on(range(d)) * self.outputs.on((d,))
        noise = jnp.broadcast_to(self.noise_variance, (n, p)).ravel()
        observed = None if self.observed is None else self.observed.ravel()
        return GaussianProcess(kernel, long_format(self.X, p), noise, observed=observed)


# One program also where NUTS looks for a place to start, outside of compiled code.
@compiled
def _structured(
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    B: Float[Array, "p p"],
    noise: Float[Array, " p"],
    residual: Float[Array, "*batch n p"],
) -> Float[Array, "*batch"]:
    K = kernel.covariance(X)
    dtype = jnp.result_type(K, B, noise, residual)
    return kronecker.log_density(*(part.astype(dtype) for part in (K, B, noise, residual)))


def _as_mean_function(
    mean: Callable[[Array], Array] | ArrayLike | None, num_outputs: int, X: Float[Array, "n d"]
) -> functions.RowsFunction:
    refuse_kernel("mean", mean)
    if callable(mean):
        return functions.as_pytree(mean, "mean")
    constant = checks.as_float(0.0 if mean is None else mean, "mean")
    whose = "a number, one for each output, or for each row and output, a callable or None"
    shape = len(X), num_outputs
    checks.shape("mean", constant, (), (num_outputs,), shape, why=whose)
    checks.finite("mean", constant)
    if constant.shape == shape:
        return row_values(constant, X)
    return functions.constant_rows(jnp.broadcast_to(constant, (num_outputs,)))


def _as_observed(
    value: ArrayLike, shape: tuple[int, int]
) -> Bool[Array, "n p"] | Bool[np.ndarray, "n p"]:
    observed = as_boolean(value, "an entry")
    checks.shape("observed", observed, shape, why="one entry for each of `Y`")
    if checks.is_concrete(observed) and not np.asarray(observed).any():
        raise ValueError("`observed` must be True for at least one entry.")
    return observed
