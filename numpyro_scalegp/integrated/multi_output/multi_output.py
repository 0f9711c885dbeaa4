"""`MultiOutputGP`: a distribution over a matrix of observations, with correlated outputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int
from numpyro.distributions import constraints

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.gaussian_process import GaussianProcess
from numpyro_scalegp.integrated.members import as_boolean
from numpyro_scalegp.integrated.multi_output import kronecker
from numpyro_scalegp.integrated.multi_output.posterior import (
    MultiOutputPosterior,
    OutputsOfFunctions,
)
from numpyro_scalegp.kernels.coregion import Coregion, long_format
from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.kernels.nonstationary import refuse_kernel
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.derivatives import refuse_derivatives
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs import functions
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import row_values
from numpyro_scalegp.sites.collapsed import GaussianNoise
from numpyro_scalegp.sites.rows import RowsDistribution

_MISSING = " If these are entries without a target, give `observed=~jnp.isnan(Y)`."
# Variance in place of zero, in units of the noise.
_MIN_VARIANCE = 1e-20
_NO_DERIVATIVES = (
    "the structured posterior of several outputs has no derivatives with respect to `outputs` and "
    "`noise_variance`, only with respect to the kernel, X and Y: differentiate `log_prob` instead."
)


class MultiOutputGP(GaussianNoise, RowsDistribution):
    """Noisy observations of p correlated functions at n shared inputs.

    Cov(Y[a, j], Y[b, l]) = k(x_a, x_b) B[j, l], plus the noise if these are the same entry: the
    intrinsic coregionalization model, with outputs as columns of Y. `log_prob(Y)` is the exact log
    marginal likelihood.

    If each row has observations of all p outputs or of none, and the noise has shape () or (p,),
    the Kronecker structure of the covariance reduces the cost to p factorizations of n x n
    matrices. Otherwise the covariance matrix of all observed entries is factorized.

    Args:
        kernel: a single covariance function k of the inputs. Its variance should be one, since B
            has the variances of the outputs.
        outputs: covariance B = W W' + diag(diag) between the p outputs.
        X: inputs, shape (n, d).
        noise_variance: variance of the observation noise, positive, in squared units of Y: shape
            (), one for each output, (p,), or one for each entry, (n, p).
        mean: the mean function: None for zero, a constant, one for each output, (p,), or a callable
            that maps (n, d) inputs to (n, p) values. Or an array of its values at X, shape (n, p);
            the posterior then has moments only at the complete X.
        observed: boolean mask of the observed entries, shape (n, p); None if all are observed. The
            density and the posterior ignore the values of Y in the other entries, which may be NaN.
            If the mask is concrete while the model is traced, such as a NumPy array, unobserved
            entries cost nothing. `sample` draws all entries.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has the wrong shape or sign, or holds NaN or infinity; if
            `kernel` or `outputs` is a batch; if no entry is observed.

    References:
        Bonilla, Chai and Williams (2007), Multi-task Gaussian Process Prediction; Stegle, Lippert,
        Mooij, Lawrence and Borgwardt (2011), Efficient inference in matrix-variate Gaussian models
        with iid observation noise, section 3, for the Kronecker structure; here only B is
        diagonalized. Time O(p n^3) and memory O(p n^2) with this structure, otherwise O(N^3) and
        O(N^2) for N observed entries.

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
        self.kernel.check_inputs("X", self.X)
        p = outputs.W.shape[0]
        shape = self.X.shape[0], p
        self.noise_variance = checks.as_positive(noise_variance, "noise_variance")
        meaning = "one value, or one for each output, or for each entry"
        checks.shape("noise_variance", self.noise_variance, (), (p,), shape, why=meaning)
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
        return (
            self.kernel.evaluate_diag(self.X)[:, None] * jnp.diagonal(self._B) + self.noise_variance
        )

    @property
    def _B(self) -> Float[Array, "p p"]:
        categories = jnp.arange(self.event_shape[1], dtype=self.X.dtype)
        return self.outputs.evaluate_covariance(categories[:, None])

    @property
    def _noise(self) -> Float[Array, " p"]:
        """The noise variance of each output, for a noise of shape () or (p,)."""
        return jnp.broadcast_to(self.noise_variance, self.event_shape[1:])

    def log_prob(
        self, value: Float[ArrayLike, "... n p"], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """The log marginal likelihood of observations.

        Args:
            value: observations, shape (..., n, p); all matrices Y share the same factorizations.
            intermediates: unused, part of NumPyro's interface.

        Returns:
            Log densities, shape (...), with first and second derivatives.

        Raises:
            ValueError: if `value` has the wrong shape, or holds NaN or infinity in an observed
                entry, or X is a mini-batch that a plate draws.
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
            Draws, shape (*sample_shape, n, p), in O(n^2 p) each after O(n^3) for the
            factorization of K, with jitter on its diagonal.
        """
        function_key, noise_key = jax.random.split(checks.as_key(key))
        n, p = self.event_shape
        K = self.kernel.evaluate_covariance(self.X)
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
            progress_bar: unused, as there is no iterative solve.

        Returns:
            The posterior, from the same factorizations as in `log_prob`. If these use the Kronecker
            structure, the posterior has no derivatives with respect to `outputs` and
            `noise_variance`.

        Raises:
            ValueError: if `Y` has the wrong shape, or holds NaN or infinity in an observed entry.
        """
        Y = self._observations(Y)
        checks.shape("Y", Y, self.event_shape, why="a column for each output")
        residual, rows, p = self._residual(Y), self._complete_rows, self.event_shape[1]
        mixing: Array | None = None
        observed_rows: Any = None if self.observed is None else rows
        if rows is None:
            gp, values = self._in_long_format(), residual.ravel()
            observed_rows = gp.shown_rows
        else:
            B, noise = refuse_derivatives(_NO_DERIVATIVES, (self._B, self._noise))
            V, variances = kronecker.rotation(B, noise)
            # Draws need a positive variance. The bound is not relative to the largest variance: in
            # units of the noise, the variance of an output with a large noise is small as well.
            kernel = jnp.maximum(variances, _MIN_VARIANCE) * self.kernel
            gp, values = GaussianProcess(kernel, self.X[rows], 1.0), matmul(residual[rows], V).T
            mixing = noise[:, None] * V
        posterior: Any = gp.condition(values)
        return MultiOutputPosterior(
            functions=posterior,
            outputs=OutputsOfFunctions(mixing, p),
            X=self.X,
            y=Y,
            noise_variance=self.noise_variance,
            mean_function=self.mean_function,
            observed=None if self.observed is None else jnp.asarray(self.observed),
            places=None if observed_rows is None else jnp.asarray(observed_rows),
        )

    def _observations(self, value: ArrayLike) -> Float[Array, "... n p"]:
        """Checked observations, zero in entries without a target."""
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
        """Observations minus the mean, zero in entries without a target."""
        residual = Y - self.mean
        return residual if self.observed is None else jnp.where(self.observed, residual, 0.0)

    @property
    def _complete_rows(self) -> Int[np.ndarray, " k"] | slice | None:
        """The rows with targets if the structure applies, None otherwise."""
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
        """The Gaussian process of all entries minus the mean, in row-major order."""
        (n, p), d = self.event_shape, self.X.shape[1]
        kernel = self.kernel.on(range(d)) * self.outputs.on((d,))
        noise = jnp.broadcast_to(self.noise_variance, (n, p)).ravel()
        observed = None if self.observed is None else self.observed.ravel()
        return GaussianProcess(kernel, long_format(self.X, p), noise, observed=observed)


# NUTS searches for its initial values outside of compiled code: this makes it one program.
@compiled
def _structured(
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    B: Float[Array, "p p"],
    noise: Float[Array, " p"],
    residual: Float[Array, "*batch n p"],
) -> Float[Array, "*batch"]:
    K = kernel.evaluate_covariance(X)
    dtype = jnp.result_type(K, B, noise, residual)
    return kronecker.log_density(*(array.astype(dtype) for array in (K, B, noise, residual)))


def _as_mean_function(
    mean: Callable[[Array], Array] | ArrayLike | None, num_outputs: int, X: Float[Array, "n d"]
) -> functions.RowsFunction:
    refuse_kernel("mean", mean)
    if callable(mean):
        return functions.as_pytree(mean, "mean")
    constant = checks.as_float(0.0 if mean is None else mean, "mean")
    meaning = "a number, one for each output, or for each row and output, a callable or None"
    shape = len(X), num_outputs
    checks.shape("mean", constant, (), (num_outputs,), shape, why=meaning)
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
