"""The latent family: the prior over a function's values, and its sparse variational posterior."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import checks, functions, linalg
from numpyro_scalegp.distributions.rows import RowsDistribution
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.predict import ExactPosterior, SparsePosterior


class LatentGP(RowsDistribution):
    """A zero-mean Gaussian-process prior over a function's values, f(X) ~ N(0, K(X, X)).

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
        self.kernel = kernel
        self.X = checks.inputs("X", X)
        self.jitter = jitter
        super().__init__((), (self.X.shape[0],), validate_args=validate_args)

    @property
    def mean(self) -> Float[Array, " n"]:
        """The mean, zero everywhere."""
        return jnp.zeros_like(self.variance)

    @property
    def variance(self) -> Float[Array, " n"]:
        """The marginal variance k(x, x)."""
        return self.kernel.diag(self.X)

    def covariance(self) -> Float[Array, "n n"]:
        """The covariance K(X, X), jitter included, shape (n, n)."""
        return linalg.add_jitter(self.kernel.covariance(self.X), self.jitter)

    def log_prob(
        self, value: Float[ArrayLike, "*batch n"], intermediates: list | None = None
    ) -> Float[Array, "*batch"]:
        """The log density of function values of shape (..., n), in O(n^3)."""
        K = self.covariance()
        return linalg.gaussian_log_density(K, checks.as_float(value), linalg.factorise(K))

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape n"]:
        """Draw functions from the prior: shape (*sample_shape, n), in O(n^3)."""
        K = self.covariance()
        normal = jax.random.normal(key, (*sample_shape, *self.event_shape), K.dtype)
        return linalg.matmul(normal, linalg.cholesky(K).T)

    def condition(self, f: Float[ArrayLike, " n"]) -> ExactPosterior:
        """The law of the function elsewhere given its values at X, such as one draw of NUTS.

        Args:
            f: function values, shape (n,).

        Returns:
            An `ExactPosterior`, from one factorisation in O(n^3).
        """
        f = checks.as_float(f)
        checks.shape("f", f, self.event_shape, why="one value for each row of `X`")
        factor = linalg.factorise(self.covariance())
        zero = functions.constant_function(checks.as_float(0.0))
        return ExactPosterior.from_factor(
            self.kernel, self.X, f, f, jnp.zeros((), f.dtype), zero, factor
        )


class SparseGP(RowsDistribution):
    """A sparse variational Gaussian process at the rows X: the whitened SVGP family.

    With K(Z, Z) = L L', A = L^-1 k(Z, X) and q(v) = N(loc, S S') over the whitened inducing values
    v = L^-1 f(Z): f(x) has mean A'loc and variance k(x, x) - ||A||^2 + ||S'A||^2.

    The value of the site is the function at the rows of one mini-batch. `sample` and `log_prob` are
    those of the *marginals*, independent across rows: all that a likelihood needs that factorises
    over rows, at a cost linear in n. Joint draws come from `posterior().sample`.

    Use it with an objective that knows the divergence between processes, `QuadratureELBO` or
    NumPyro's `TraceMeanField_ELBO`: KL = (||S||_F^2 + ||loc||^2 - M - 2 sum log diag S) / 2. The
    density at the rows of a mini-batch, which `Trace_ELBO` would use, bounds nothing.

    Args:
        kernel: covariance function of the prior.
        X: inputs, shape (n, d).
        inducing_points: Z, shape (M, d).
        loc: mean of v, shape (M,).
        scale_tril: S, lower triangular with a positive diagonal, shape (M, M).
        jitter: what K(Z, Z) gets on its diagonal, relative to its mean; None for 100 `eps`.

    Raises:
        ValueError: if a shape does not fit, or `X` or `inducing_points` holds NaN or infinity.

    References:
        Titsias (2009); Hensman, Matthews and Ghahramani (2015), Scalable Variational Gaussian
        Process Classification. Time O(n M^2 + M^3), memory O(n M + M^2).

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 20)[:, None]
        >>> kernel = sgp.kernels.RBF(0.3)
        >>> guide = sgp.SparseGP(kernel, X, X[::4], loc=jnp.zeros(5), scale_tril=jnp.eye(5))
        >>> guide.mean.shape, guide.variance.shape
        ((20,), (20,))
    """

    arg_constraints = {
        "inducing_points": constraints.real_matrix,
        "loc": constraints.real_vector,
        "scale_tril": constraints.lower_cholesky,
    }
    reparametrized_params = ["inducing_points", "loc", "scale_tril"]
    pytree_data_fields = ("kernel", "X", "inducing_points", "loc", "scale_tril")
    pytree_aux_fields = ("jitter",)

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "n d"],
        inducing_points: Float[ArrayLike, "M d"],
        loc: Float[ArrayLike, " M"],
        scale_tril: Float[ArrayLike, "M M"],
        *,
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = kernel
        self.X = checks.inputs("X", X)
        self.inducing_points = checks.inputs("inducing_points", inducing_points, self.X.shape[1])
        M = self.inducing_points.shape[0]
        self.loc = checks.as_float(loc)
        checks.shape("loc", self.loc, (M,), why="one value for each inducing point")
        self.scale_tril = checks.as_float(scale_tril)
        checks.shape("scale_tril", self.scale_tril, (M, M), why="a row for each inducing point")
        self.jitter = jitter
        super().__init__((), (self.X.shape[0],), validate_args=validate_args)

    def posterior(self) -> SparsePosterior:
        """The process itself, for moments and joint samples at any inputs."""
        return SparsePosterior(
            self.kernel, self.inducing_points, self.loc, self.scale_tril, self.jitter
        )

    def marginals(self) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """The mean and the variance of f at each row of X, from one factorisation."""
        return self.posterior().marginals(self.X)

    @property
    def mean(self) -> Float[Array, " n"]:
        """The mean of f at each row."""
        return self.marginals()[0]

    @property
    def variance(self) -> Float[Array, " n"]:
        """The variance of f at each row."""
        return self.marginals()[1]

    def _normal(self) -> dist.Normal:
        mean, variance = self.marginals()
        # The square root's derivative stays finite where nothing is left unexplained.
        tiny = jnp.finfo(variance.dtype).tiny
        return dist.Normal(mean, jnp.sqrt(jnp.maximum(variance, tiny)))

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape n"]:
        """Draw from the marginals, independently across rows: shape (*sample_shape, n)."""
        law = self._normal()
        # Not the law's own `sample`, which draws in JAX's default type.
        noise = jax.random.normal(key, (*sample_shape, *self.event_shape), law.loc.dtype)
        return law.loc + law.scale * noise

    def log_prob(
        self, value: Float[ArrayLike, "*batch n"], intermediates: list | None = None
    ) -> Float[Array, "*batch"]:
        """The log density of values under the independent marginals, shape (...).

        No part of a variational bound: it warns, because an objective that calls it is wrong.
        """
        warnings.warn(
            "the density of `SparseGP` at the rows of a mini-batch gives no variational bound: "
            "use loss=numpyro_scalegp.infer.QuadratureELBO() or numpyro.infer.TraceMeanField_ELBO "
            "with a `LatentGP` in the model, which take the divergence between the processes.",
            UserWarning,
            stacklevel=2,
        )
        return jnp.sum(self._normal().log_prob(value), axis=-1)


@kl_divergence.register(SparseGP, LatentGP)
def _kl_sparse_latent(q: SparseGP, p: LatentGP) -> Float[Array, ""]:
    """KL(q(v) || N(0, I)): that of the processes, whatever rows the two sites are evaluated at."""
    trace = jnp.sum(jnp.square(q.scale_tril)) + jnp.sum(jnp.square(q.loc)) - q.loc.size
    return 0.5 * trace - jnp.sum(jnp.log(jnp.diagonal(q.scale_tril)))
