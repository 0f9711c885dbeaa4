"""The latent family's prior over a function's values."""

from typing import Any

import jax
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks, functions, linalg, memory
from numpyro_scalegp.families.family import AbstractPriorGP
from numpyro_scalegp.features import AbstractFeatures
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors import ExactPosterior


class LatentGP(AbstractPriorGP):
    """A latent GP of a kernel: the prior over a function's values, f(X) ~ N(0, K(X, X)).

    The latent GP of finitely many features is `WeightSpaceGP`, the collapsed one `GaussianProcess`.
    `log_prob` and `sample` are exact, so plain NUTS works for small n. In variational inference a
    guide from `sgp.guides` stands in for it, and the divergence between the two *processes* is
    registered with NumPyro: then neither `log_prob` nor `sample` is called, and X may be a
    mini-batch. A GP site stays outside the data plate.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        jitter: what K(X, X) gets on its diagonal, relative to its mean; None for 100 `eps`.

    Raises:
        ValueError: if `X` is not of rank 2, or holds NaN or infinity.

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
        X: Float[ArrayLike, "n d"],
        *,
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = _as_kernel(kernel)
        self.X = checks.inputs("X", X)
        self.kernel.check_categories("X", self.X)
        self.jitter = checks.jitter(jitter)
        super().__init__((), (self.X.shape[0],), validate_args=validate_args)

    @property
    def variance(self) -> Float[Array, " n"]:
        """The marginal variance k(x, x)."""
        return self.kernel.diag(self.X)

    def covariance(self) -> Float[Array, "n n"]:
        """The covariance K(X, X), jitter included, shape (n, n)."""
        memory.warn_of_size(
            "LatentGP",
            self.X.shape[0],
            self.X.dtype,
            "train it with a guide such as sgp.guides.AutoSparseGP, which makes no such matrix",
        )
        return linalg.add_jitter(self.kernel.covariance(self.X), self.jitter)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape n"]:
        """Draw functions from the prior: shape (*sample_shape, n), in O(n^3)."""
        key, K = checks.as_key(key), self.covariance()
        normal = jax.random.normal(key, (*sample_shape, *self.event_shape), K.dtype)
        return linalg.matmul(normal, linalg.cholesky(K).T)

    def condition(self, f: Float[ArrayLike, " n"]) -> ExactPosterior:
        """The posterior of the function given its values at X, such as one draw of NUTS.

        Args:
            f: function values, shape (n,).

        Returns:
            An `ExactPosterior`, from one factorization in O(n^3).
        """
        f = checks.as_float(f, "f")
        checks.shape("f", f, self.event_shape, why="one value for each row of `X`")
        checks.finite("f", f)
        K = self.covariance()
        factor = linalg.factorize(K)
        factor = factor._replace(tril=linalg.cholesky_given(K, factor.tril))
        zero = functions.constant_function(checks.as_float(0.0))
        return ExactPosterior.from_factor(self.kernel, self.X, f, f, None, zero, factor)


def _as_kernel(value: Any) -> AbstractKernel:
    """A kernel as it is; for a feature map the error names the prior that takes it."""
    if isinstance(value, AbstractFeatures):
        raise TypeError(
            f"`kernel` must be a kernel, got the feature map `{type(value).__name__}`: the latent "
            "GP of features is `sgp.WeightSpaceGP(features, X)`."
        )
    return checks.instance("kernel", value, AbstractKernel)
