"""The latent family's prior over a function's values."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import batches, checks, functions, linalg, memory, rounding
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.families.family import AbstractPriorGP
from numpyro_scalegp.features import AbstractFeatures
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors import ExactPosterior
from numpyro_scalegp.posteriors.batch import BatchPosterior
from numpyro_scalegp.posteriors.posterior import AbstractConditioned


class LatentGP(AbstractPriorGP):
    """A latent GP of a kernel: the prior over a function's values, f(X) ~ N(0, K(X, X)).

    The latent GP of finitely many features is `WeightSpaceGP`, the collapsed one `GaussianProcess`.
    `log_prob` and `sample` are exact, so NUTS works for small n, and moves further in the whitened
    coordinates of `sgp.infer.WhitenReparam`. In variational inference a guide from `sgp.guides`
    stands in for it, and the divergence between the two *processes* is registered with NumPyro:
    then neither `log_prob` nor `sample` is called, and X may be a mini-batch. A GP site stays
    outside the data plate.

    A batch of kernels, or a matrix of inputs for each of a batch, makes it a batch of independent
    functions: one for each group of a plate, with hyperparameters of its own.

    Args:
        kernel: covariance function, or a batch of them.
        X: inputs, shape (n, d), or (*batch, n, d) where each member has its own.
        jitter: what K(X, X) gets on its diagonal, relative to its mean; None for 100 `eps`.

    Raises:
        ValueError: if `X` is no matrix, or holds NaN or infinity, or its batch does not fit that
            of the kernel.

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
    pytree_data_fields = ("kernel", "X")
    pytree_aux_fields = ("jitter",)

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "... n d"],
        *,
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = _as_kernel(kernel)
        self.X = checks.inputs("X", X, may_be_batch=True)
        self.kernel.check_categories("X", self.X)
        self.jitter = checks.jitter(jitter)
        batch_shape = batches.shape_of(*self._parts)
        super().__init__(batch_shape, (self.X.shape[-2],), validate_args=validate_args)

    @property
    def _parts(self) -> tuple[batches.Batch, batches.Batch]:
        return self.kernel.as_batch(), batches.Batch(self.X, self.X.ndim - 2)

    @property
    def variance(self) -> Float[Array, "... n"]:
        """The marginal variance k(x, x)."""
        return self.kernel.diag(self.X)

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
        return linalg.add_jitter(kernel.covariance(X), self.jitter)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "... n"]:
        """Draw functions from the prior: shape (*sample_shape, *batch, n), in O(n^3) a member."""
        shape = *sample_shape, *self.batch_shape, *self.event_shape
        return self.of_white(jax.random.normal(checks.as_key(key), shape, self.variance.dtype))

    @compiled
    def of_white(self, white: Float[Array, "... n"]) -> Float[Array, "... n"]:
        """Make draws from the prior, L v with L L' = K(X, X), of standard normal values v.

        Args:
            white: shape (..., *batch, n).
        """
        K = self.covariance()
        L = batches.each(linalg.cholesky, batches.Batch(K, len(self.batch_shape)))
        return linalg.matmul(white[..., None, :], jnp.swapaxes(L, -1, -2))[..., 0, :]

    def condition(self, f: Float[ArrayLike, "... n"]) -> AbstractConditioned:
        """The posterior of the function given its values at X, such as one draw of NUTS.

        Args:
            f: function values, shape (n,), or (*batch, n).

        Returns:
            An `ExactPosterior`, or a `BatchPosterior` of such, from one factorization for each
            member in O(n^3).
        """
        f = checks.as_float(f, "f")
        shape = self.batch_shape + self.event_shape
        checks.shape("f", f, shape, why="one value for each row of `X`")
        checks.finite("f", f)
        return self._posterior(f)

    @compiled
    def _posterior(self, f: Float[Array, "... n"]) -> AbstractConditioned:
        zero = functions.constant_function(checks.as_float(0.0))

        def of_one(kernel: AbstractKernel, X: Array, f: Array) -> ExactPosterior:
            K = self._covariance_of(kernel, X)
            factor = linalg.factorize(K, limit=rounding.NO_DIGITS)
            factorized = linalg.with_jitter(K, factor)
            factor = factor._replace(tril=linalg.cholesky_given(K, factor.tril))
            given = kernel, X, f, f, None, zero, factor, factorized
            return dataclasses.replace(ExactPosterior.from_factor(*given), of_values=True)

        values = batches.Batch(f, len(self.batch_shape))
        found = batches.each(of_one, *self._parts, values)
        if not self.batch_shape:
            return found
        return BatchPosterior(
            members=found,
            X=self.X,
            y=f,
            noise_variance=None,
            mean_function=zero,
            observed=None,
            batch_shape=self.batch_shape,
        )


def _as_kernel(value: Any) -> AbstractKernel:
    """A kernel as it is; for a feature map the error names the prior that takes it."""
    if isinstance(value, AbstractFeatures):
        raise TypeError(
            f"`kernel` must be a kernel, got the feature map `{type(value).__name__}`: the latent "
            "GP of features is `sgp.WeightSpaceGP(features, X)`."
        )
    return checks.instance("kernel", value, AbstractKernel)
