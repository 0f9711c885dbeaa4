"""The sparse variational family with inducing points, SVGP."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import biject_to, constraints, transforms
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.features.selection import kmeans_points
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.processes.expansion import ExpansionPosterior, WhitenedNormal
from numpyro_scalegp.processes.whitening import whitened_divergence
from numpyro_scalegp.sites.family import AbstractVariationalGP
from numpyro_scalegp.variational.bases import InitialPoints, hold_categories
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.same import same_prior


class SparseGP(AbstractVariationalGP):
    """A sparse variational Gaussian process (SVGP) at inputs X, with whitened inducing values.

    With K(Z, Z) = L L', A = L^-1 k(Z, x) and q(v) = N(loc, S S') over the whitened inducing values
    v = L^-1 f(Z), f(x) has mean A'loc and variance k(x, x) - ||A||^2 + ||S'A||^2.

    The KL divergence from the prior process is (||S||_F^2 + ||loc||^2 - M - 2 sum log diag S) / 2.
    `AbstractVariationalGP` describes its use in a model.

    Args:
        kernel: covariance function of the prior, or a batch of them.
        X: inputs, shape (n, d), or (*batch, n, d).
        inducing_points: Z, shape (M, d), or (*batch, M, d).
        loc: mean of v, shape (M,), or (*batch, M) for independent functions.
        scale_tril: S, lower triangular with a positive diagonal, shape (*batch, M, M).
        jitter: added to the diagonal of K(Z, Z), relative to its mean; None for 100 times machine
            epsilon.
        unexplained_scale: factor on the variance that the inducing values leave unexplained, in the
            bound of `QuadratureELBO` for likelihoods that are not Gaussian; positive, shape
            (*batch,); None for 1. Moments and draws do not depend on it.

    Raises:
        ValueError: if a shape does not fit, `X` or `inducing_points` holds NaN or infinity, or
            `scale_tril` is not lower triangular with a positive diagonal.

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
        "unexplained_scale": constraints.positive,
    }
    reparametrized_params = list(arg_constraints)
    pytree_data_fields = ("kernel", "X", *arg_constraints)
    pytree_aux_fields = ("jitter",)

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "... n d"],
        inducing_points: Float[ArrayLike, "... M d"],
        loc: Float[ArrayLike, "*batch M"],
        scale_tril: Float[ArrayLike, "*batch M M"],
        *,
        jitter: float | None = None,
        unexplained_scale: Float[ArrayLike, "*batch"] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = checks.instance("kernel", kernel, AbstractKernel)
        self.X = checks.inputs("X", X, may_be_batch=True)
        self.kernel.check_hooks(self.X)
        width = self.X.shape[-1]
        points = checks.inputs("inducing_points", inducing_points, width, may_be_batch=True)
        self.inducing_points = points
        self.loc, self.scale_tril = whitened_parts(loc, scale_tril, points.shape[-2])
        self.jitter = checks.jitter(jitter)
        batch_shape = self.loc.shape[:-1]
        shapes = {"kernel": self.kernel.batch_shape, "X": self.X.shape[:-2], "loc": batch_shape}
        shapes["inducing_points"] = points.shape[:-2]
        common = batches.common_shape("the leading axes of a batch must fit together", **shapes)
        checks.shape("loc", self.loc, (*common, points.shape[-2]), why="one for each function")
        self.unexplained_scale = unexplained_part(unexplained_scale, batch_shape)
        super().__init__(batch_shape, (self.X.shape[-2],), validate_args=validate_args)

    def split_marginals(self) -> tuple[Float[Array, "*batch n"], ...]:
        """The mean, the variance from the inducing values, and the unexplained variance at X."""
        return self.posterior().split_marginals(self.X)

    def posterior(self) -> ExpansionPosterior:
        """The approximate posterior, with moments and joint samples at any inputs."""
        values = WhitenedNormal(self.loc, self.scale_tril)
        return ExpansionPosterior.of_inducing_values(
            self.kernel, self.inducing_points, values, jitter=self.jitter
        )


@kl_divergence.register(SparseGP, LatentGP)
def _kl_sparse_latent(q: SparseGP, p: LatentGP) -> Float[Array, "*batch"]:
    """KL(q(v) || N(0, I)), the divergence of the processes regardless of the sites' inputs."""
    return same_prior(q, p) * whitened_divergence(q.loc, q.scale_tril)


def initial_inducing_points(
    num_inducing: int, inducing_points: Float[ArrayLike, "... M d"] | None
) -> InitialPoints:
    """Initial inducing points: the user's, or k-means centers of inputs from all over the data."""
    return InitialPoints(
        "inducing_points",
        "num_inducing",
        num_inducing,
        inducing_points,
        _cluster_centers,
        "sgp.features.kmeans_points(key, X, num_points)",
    )


def _cluster_centers(
    key: Array, X: Float[Array, "n d"], num: int, categories: tuple[int, ...]
) -> Float[Array, "num d"]:
    return kmeans_points(key, X, num, categories=categories)


def declare_points(
    param: Callable[..., Any],
    start: InitialPoints,
    rows: Callable[[], Float[Array, "... n d"]],
    kernel: AbstractKernel,
) -> Float[Array, "... M d"]:
    """Declare inducing points, with the arguments of `declare_whitened`."""
    return hold_categories(param("inducing_points", lambda key: start(key, rows, kernel)), kernel)


def declare_whitened(
    param: Callable[..., Any],
    start: InitialPoints,
    rows: Callable[[], Float[Array, "... n d"]],
    kernel: AbstractKernel,
    batch_shape: tuple[int, ...],
) -> tuple[Float[Array, "... M d"], Float[Array, "*batch M"], Float[Array, "*batch M M"]]:
    """Declare inducing points, and mean and scale of the whitened inducing values, at the prior.

    Args:
        param: like `numpyro.param`, with a short name.
        start: the initial points.
        rows: computes the inputs to choose from.
        kernel: covariance function of the prior.
        batch_shape: of independent functions.
    """
    Z = declare_points(param, start, rows, kernel)
    M = Z.shape[-2]
    loc = param("loc", lambda _: jnp.zeros((*batch_shape, M), Z.dtype), constraint=whitened_loc)
    scale_tril = param(
        "scale_tril",
        lambda _: jnp.broadcast_to(jnp.eye(M, dtype=Z.dtype), (*batch_shape, M, M)),
        constraint=_scale_tril,
    )
    return Z, loc, scale_tril


# Adam moves all parameters at about the same rate. Whitened means move further, up to tens where
# the data are most informative, and so do scales, from one to hundredths: in these units Adam takes
# a quarter and half of the steps.
_LOC_UNIT, _LOG_SCALE_UNIT = 4.0, 2.0


class _WhitenedLoc(constraints.ParameterFreeConstraint):
    """Like `constraints.real_vector`, with unconstrained values in units of `_LOC_UNIT`."""

    event_dim = 1

    def __call__(self, x: Array) -> Array:
        return constraints.real_vector(x)


class ScaleTril(constraints.ParameterFreeConstraint):
    """Like `constraints.lower_cholesky`, with square matrices as unconstrained values."""

    event_dim = 2

    def __call__(self, x: Array) -> Array:
        """Whether matrices are lower triangular with a positive diagonal."""
        return constraints.lower_cholesky(x)


whitened_loc, _scale_tril = _WhitenedLoc(), ScaleTril()


class _FromSquare(transforms.ParameterFreeTransform):
    """Takes the lower triangle, and the exponential of its diagonal in units of `_LOG_SCALE_UNIT`.

    NumPyro's transform, from vectors, needs gather and scatter operations.
    """

    domain = constraints.real_matrix
    codomain = _scale_tril

    def __call__(self, x: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
        return _with_diagonal(x, _scale_of)

    def _inverse(self, y: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
        return _with_diagonal(y, _unit_of)


def _scale_of(unit: Array) -> Array:
    return jnp.exp(_LOG_SCALE_UNIT * unit)


def _unit_of(scale: Array) -> Array:
    return jnp.log(scale) / _LOG_SCALE_UNIT


@functools.partial(jax.jit, static_argnums=1)
def _with_diagonal(
    A: Float[Array, "*batch M M"], transform: Callable[[Array], Array]
) -> Float[Array, "*batch M M"]:
    """Lower triangles, with transformed diagonals."""
    eye = jnp.eye(A.shape[-1], dtype=A.dtype)
    return jnp.tril(A, -1) + eye * transform(_diagonal(A))[..., None, :]


def _diagonal(A: Float[Array, "*batch M M"]) -> Float[Array, "*batch M"]:
    return jnp.diagonal(A, axis1=-2, axis2=-1)


@biject_to.register(_WhitenedLoc)
def _(constraint: _WhitenedLoc) -> transforms.IndependentTransform:
    return transforms.IndependentTransform(transforms.AffineTransform(0.0, _LOC_UNIT), 1)


@biject_to.register(ScaleTril)
def _(constraint: ScaleTril) -> _FromSquare:
    return _FromSquare()


def unexplained_part(
    scale: Float[ArrayLike, "..."] | None, batch: tuple[int, ...]
) -> Float[Array, "..."] | None:
    """Check the factor on the variance that inducing values leave unexplained."""
    if scale is None:
        return None
    array = checks.as_positive(scale, "unexplained_scale")
    checks.shape("unexplained_scale", array, batch, why="one for each function")
    checks.positive("unexplained_scale", array)
    return array


def whitened_parts(
    loc: Float[ArrayLike, "..."], scale_tril: Float[ArrayLike, "..."], M: int
) -> tuple[Float[Array, "*batch {M}"], Float[Array, "*batch {M} {M}"]]:
    """Check the mean and the scale of M whitened inducing values."""
    mean, scale = checks.as_float(loc, "loc"), checks.as_float(scale_tril, "scale_tril")
    batch = mean.shape[:-1]
    checks.shape("loc", mean, (*batch, M), why="one value for each inducing point")
    checks.shape("scale_tril", scale, (*batch, M, M), why="a row for each inducing point")
    checks.finite("loc", mean)
    checks.finite("scale_tril", scale)
    checks.lower_triangular("scale_tril", scale)
    return mean, scale
