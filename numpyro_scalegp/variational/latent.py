"""The prior over a function's values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.features.feature_map import AbstractFeatures
from numpyro_scalegp.integrated.members import as_mean_function, mean_at
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics import linalg, memory, rounding
from numpyro_scalegp.processes.batch import BatchPosterior
from numpyro_scalegp.processes.exact import ExactPosterior
from numpyro_scalegp.processes.posterior import AbstractConditioned
from numpyro_scalegp.programs import functions
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.family import AbstractPriorGP


class LatentGP(AbstractPriorGP):
    """A latent GP with a kernel: the prior over a function's values, f(X) ~ N(m(X), K(X, X)).

    `WeightSpaceGP` is a latent GP with finitely many features; `GaussianProcess` integrates the
    function out. `log_prob` and `sample` are exact, so NUTS works for small n, and mixes better in
    the whitened coordinates of `sgp.infer.WhitenReparam`. In variational inference a guide from
    `sgp.guides` samples a variational family at this site, and NumPyro computes the registered KL
    divergence between the two *processes*: it calls neither `log_prob` nor `sample`, and X may be a
    mini-batch. Put the GP site outside the data plate.

    A batch of kernels, or a stack of input matrices, makes it a batch of independent functions: for
    instance one function for each group in a plate, each with separate hyperparameters.

    Args:
        kernel: covariance function, or a batch of them.
        X: inputs, shape (n, d), or (*batch, n, d) for separate inputs of each function.
        mean: the mean function m: None for zero, a scalar for a constant, an array of shape (n,)
            for values at X (for a batch also (*batch,) or (*batch, n)), or a callable that maps
            inputs to such values.
        jitter: added to the diagonal of K(X, X), relative to its mean; None for 100 times machine
            epsilon.

    Raises:
        ValueError: if `X` is not a matrix, holds NaN or infinity, or has a batch shape that does
            not fit the kernel's; if `mean` has another shape.

    References:
        Rasmussen and Williams (2006), section 2.2. `log_prob` and `sample`: O(n^3) time.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> prior = sgp.LatentGP(sgp.kernels.Matern52(0.3), jnp.linspace(0.0, 1.0, 20)[:, None])
        >>> prior.sample(jax.random.key(0), (3,)).shape
        (3, 20)
    """

    made_of = "kernel"
    arg_constraints: dict[str, Any] = {}
    reparametrized_params: list[str] = []
    pytree_data_fields = ("kernel", "X", "mean_function")
    pytree_aux_fields = ("jitter",)

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "... n d"],
        *,
        mean: Callable[[Array], Array] | ArrayLike | None = None,
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = _as_kernel(kernel)
        self.X = checks.inputs("X", X, may_be_batch=True)
        self.kernel.check_inputs("X", self.X)
        self.jitter = checks.jitter(jitter)
        batch_shape = batches.shape_of(*self._parts)
        self.mean_function = None if mean is None else as_mean_function(mean, batch_shape, self.X)
        super().__init__(batch_shape, (self.X.shape[-2],), validate_args=validate_args)

    @property
    def _parts(self) -> tuple[batches.Batch, batches.Batch]:
        return self.kernel.as_batch(), batches.Batch(self.X, self.X.ndim - 2)

    @property
    def mean(self) -> Float[Array, "... n"]:
        """The mean m(X)."""
        if self.mean_function is None:
            return super().mean
        return mean_at(self.mean_function, self.X, self.batch_shape + self.event_shape)

    def _centered(self, value: Float[Array, "... n"]) -> Float[Array, "... n"]:
        return value if self.mean_function is None else value - self.mean

    @property
    def variance(self) -> Float[Array, "... n"]:
        """The marginal variance k(x, x)."""
        return self.kernel.each(lambda kernel, X: kernel.evaluate_diag(X), self.X)

    def covariance(self) -> Float[Array, "... n n"]:
        """The covariance K(X, X), jitter included, shape (n, n), or (*batch, n, n)."""
        memory.warn_of_size(
            "LatentGP",
            self.X.shape[-2],
            self.X.dtype,
            "train it with a guide such as sgp.guides.AutoSparseGP, which makes no such matrix",
        )
        return batches.each(lambda kernel, X: self._covariance_of(kernel, X), *self._parts)

    def _covariance_of(self, kernel: AbstractKernel, X: Float[Array, "n d"]) -> Float[Array, "n n"]:
        return linalg.add_jitter(kernel.evaluate_covariance(X), self.jitter)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "... n"]:
        """Draw function values: shape (*sample_shape, *batch, n), O(n^3) for each function."""
        shape = *sample_shape, *self.batch_shape, *self.event_shape
        return self.of_white(jax.random.normal(checks.as_key(key), shape, self.variance.dtype))

    @compiled
    def of_white(self, white: Float[Array, "... n"]) -> Float[Array, "... n"]:
        """Transform standard normal values v to prior draws m(X) + L v, with L L' = K(X, X).

        Args:
            white: shape (..., *batch, n).
        """
        K = self.covariance()
        L = batches.mapped(linalg.cholesky, 2)(K)
        draws = linalg.matmul(white[..., None, :], jnp.swapaxes(L, -1, -2))[..., 0, :]
        return draws if self.mean_function is None else self.mean + draws

    def condition(self, f: Float[ArrayLike, "... n"]) -> AbstractConditioned:
        """The posterior of the function given its values at X, such as one draw from NUTS.

        Args:
            f: function values, shape (n,), or (*batch, n).

        Returns:
            An `ExactPosterior`, or a `BatchPosterior` of them, from one O(n^3) factorization for
            each function.
        """
        f = checks.as_float(f, "f")
        shape = self.batch_shape + self.event_shape
        checks.shape("f", f, shape, why="one value for each row of `X`")
        checks.finite("f", f)
        return self._posterior(f)

    @compiled
    def _posterior(self, f: Float[Array, "... n"]) -> AbstractConditioned:
        zero = functions.constant_function(checks.as_float(0.0))
        mean_function = zero if self.mean_function is None else self.mean_function
        member_mean = zero if self.batch_shape else mean_function

        def condition(
            kernel: AbstractKernel, X: Array, f: Array, residual: Array
        ) -> ExactPosterior:
            K = self._covariance_of(kernel, X)
            factor = linalg.factorize(K, limit=rounding.NO_DIGITS)
            factorized = linalg.with_jitter(K, factor)
            factor = factor._replace(tril=linalg.cholesky_given(K, factor.tril))
            posterior = ExactPosterior.from_factor(
                kernel, X, f, residual, None, member_mean, factor, factorized
            )
            return dataclasses.replace(posterior, of_values=True)

        residual = self._centered(f)
        values = [
            batches.Batch(array, len(self.batch_shape))
            for array in (residual if self.batch_shape else f, residual)
        ]
        posterior = batches.each(condition, *self._parts, *values)
        if not self.batch_shape:
            return posterior
        return BatchPosterior(
            members=posterior,
            X=self.X,
            y=f,
            noise_variance=None,
            mean_function=mean_function,
            observed=None,
            batch_shape=self.batch_shape,
        )


def _as_kernel(value: Any) -> AbstractKernel:
    """Check the kernel; for a feature map, the error names the prior to use."""
    if isinstance(value, AbstractFeatures):
        raise TypeError(
            f"`kernel` must be a kernel, got the feature map `{type(value).__name__}`: the latent "
            "GP of features is `sgp.WeightSpaceGP(features, X)`."
        )
    return checks.instance("kernel", value, AbstractKernel)
