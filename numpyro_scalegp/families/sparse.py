"""The coupled sparse variational family: SVGP."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key
from numpyro.distributions import biject_to, constraints, transforms
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import batches, checks, linalg
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.whitening import Whitening, whitened_divergence, whitened_moments
from numpyro_scalegp.families.bases import InitialPoints, hold_categories
from numpyro_scalegp.families.family import AbstractVariationalGP
from numpyro_scalegp.families.latent import LatentGP
from numpyro_scalegp.families.same import one_if_same
from numpyro_scalegp.features import kmeans_points
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.variational import AbstractKernelPosterior


class SparsePosterior(AbstractKernelPosterior):
    """The variational posterior of a whitened sparse Gaussian process.

    With K(Z, Z) = L L', A = L^-1 k(Z, X) and q(v) = N(loc, S S') over v = L^-1 f(Z):
    mean A'loc, covariance k(x, x') - A'A + A'S S'A.

    The fields are the arguments of `SparseGP`: functions of a batch share kernel and points, or
    have their own. With M inducing points, what costs O(M^3) is computed when it is made. The mean
    at m inputs costs O(m M) and the variance O(m M^2), in chunks of rows; joint samples cost O(m^3)
    on top.

    References:
        Hensman, Matthews and Ghahramani (2015), Scalable Variational Gaussian Process
        Classification, eq. 9, in whitened form.
    """

    kernel: AbstractKernel
    inducing_points: Float[Array, "... M d"]
    loc: Float[Array, "*batch M"]
    scale_tril: Float[Array, "*batch M M"]
    jitter: float | None = eqx.field(static=True, default=None)
    noise_variance: Float[Array, "..."] | None = None
    part: AbstractKernel | None = None  # of f, in place of the whole
    # Made of the others.
    whitening: Whitening = None  # type: ignore[assignment]
    representer_weights: Float[Array, "*batch M"] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.whitening is None:
            prior = self.kernel, self.inducing_points
            leading = self.kernel.as_batch().leading, self.inducing_points.ndim - 2
            self.whitening = _whitening(batches.Batch(prior, leading), self.jitter)
            inverse = self.whitening.inverse
            self.representer_weights = _representer_weights(
                batches.Batch(inverse, inverse.ndim - 2), self.loc
            )

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "SparsePosterior":
        """The posterior of a part of f; see `AbstractPosterior.restrict`."""
        return dataclasses.replace(self, part=change(self._of_f))

    @property
    def _of_f(self) -> AbstractKernel:
        return self.kernel if self.part is None else self.part

    @property
    def _whole(self) -> AbstractKernel:
        return self.kernel

    @property
    def _shares_kernel(self) -> bool:
        return not self.kernel.batch_shape and self.inducing_points.ndim == 2

    @property
    def _centers(self) -> Float[Array, "... M d"]:
        return self.inducing_points

    @property
    def _num_columns(self) -> int:
        return self.inducing_points.shape[-1]

    @property
    def _row_width(self) -> int:
        return self.inducing_points.shape[-2]

    def _members(self) -> batches.Batch:
        _, leading = super()._members()
        axes = self.whitening.lift.ndim
        own: list[Any] = [
            self.kernel.as_batch().leading,
            self.inducing_points.ndim - 2,
            jax.tree.map(lambda _: axes, self.whitening),
        ]
        leading = eqx.tree_at(
            lambda one: [one.kernel, one.inducing_points, one.whitening], leading, own
        )
        if self.part is not None:
            leading = eqx.tree_at(lambda one: one.part, leading, self.part.as_batch().leading)
        return batches.Batch(self, leading)

    def _weights(self) -> tuple[Any, ...]:
        return self.loc, self.scale_tril, self.representer_weights

    @property
    def _lift(self) -> Float[Array, "..."]:
        return self.whitening.lift

    def _expansions(self) -> list[tuple[Array, Array]]:
        return [(self.inducing_points, self.representer_weights)]

    def _moments(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        across = divided(self._of_f(self.inducing_points, X), mesh_of(X), axis=1)
        diagonal = self._of_f.diag(X)
        return whitened_moments(self.whitening, across, diagonal, self.loc, self.scale_tril)

    def _joint(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        A = matmul(self.whitening.inverse, self._of_f(self.inducing_points, X))
        SA = matmul(self.scale_tril.T, A)
        covariance = self._of_f.covariance(X) - matmul(A.T, A) + matmul(SA.T, SA)
        return matmul(self.loc, A), covariance

    def _update(self, prior: Float[Array, "M s"], key: Key[Array, ""]) -> Float[Array, "M s"]:
        """L^-T (v - L^-1 p(Z)) for draws v of q, and p of the prior."""
        K, W, _ = self.whitening
        added = jnp.diagonal(K) - self.kernel.diag(self.inducing_points)
        normals = jax.random.normal(key, (2, *prior.shape), prior.dtype)
        values = prior + jnp.sqrt(jnp.maximum(added, 0.0))[:, None] * normals[0]
        v = self.loc[:, None] + matmul(self.scale_tril, normals[1])
        return matmul(W.T, v - matmul(W, values))


@compiled
def _whitening(prior: batches.Batch, jitter: float | None) -> Whitening:
    """Of the inducing values of each of a batch of kernels and points."""

    def of_one(prior: tuple[AbstractKernel, Float[Array, "M d"]]) -> Whitening:
        kernel, points = prior
        return Whitening.of(linalg.add_jitter(kernel.covariance(points), jitter))

    return batches.each(of_one, prior)


@compiled
def _representer_weights(
    inverse: batches.Batch, loc: Float[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """L^-T loc."""
    return batches.each(lambda W, loc: matmul(loc, W), inverse, batches.Batch(loc, loc.ndim - 1))


class SparseGP(AbstractVariationalGP):
    """A sparse variational Gaussian process at the rows X: the whitened SVGP family.

    With K(Z, Z) = L L', A = L^-1 k(Z, X) and q(v) = N(loc, S S') over the whitened inducing values
    v = L^-1 f(Z): f(x) has mean A'loc and variance k(x, x) - ||A||^2 + ||S'A||^2.

    The divergence from the prior process is (||S||_F^2 + ||loc||^2 - M - 2 sum log diag S) / 2. How
    the site behaves in a model is described in `AbstractVariationalGP`.

    Args:
        kernel: covariance function of the prior, or one for each of a batch of functions.
        X: inputs, shape (n, d), or (*batch, n, d).
        inducing_points: Z, shape (M, d), or (*batch, M, d).
        loc: mean of v, shape (M,), or (*batch, M) for independent functions.
        scale_tril: S, lower triangular with a positive diagonal, shape (*batch, M, M).
        jitter: what K(Z, Z) gets on its diagonal, relative to its mean; None for 100 `eps`.
        unexplained_scale: by what the variance that inducing values leave is multiplied in the
            bound of `QuadratureELBO` where no better one is known, positive, shape (*batch,); None
            for 1. Moments and draws are as without it.

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
        width = self.X.shape[-1]
        points = checks.inputs("inducing_points", inducing_points, width, may_be_batch=True)
        self.inducing_points = points
        self.loc, self.scale_tril = whitened_parts(loc, scale_tril, points.shape[-2])
        self.jitter = checks.jitter(jitter)
        batch_shape = self.loc.shape[:-1]
        shapes = {"kernel": self.kernel.batch_shape, "X": self.X.shape[:-2], "loc": batch_shape}
        shapes["inducing_points"] = points.shape[:-2]
        whole = batches.common_shape("the leading axes of a batch must fit together", **shapes)
        checks.shape("loc", self.loc, (*whole, points.shape[-2]), why="one for each of the batch")
        self.unexplained_scale = unexplained_part(unexplained_scale, batch_shape)
        super().__init__(batch_shape, (self.X.shape[-2],), validate_args=validate_args)

    def split_marginals(self) -> tuple[Float[Array, "*batch n"], ...]:
        """Mean, variance of the inducing values' part, and unexplained variance at each row."""
        return self.posterior().split_marginals(self.X)

    def posterior(self) -> SparsePosterior:
        """The process itself, for moments and joint samples at any inputs."""
        return SparsePosterior(
            self.kernel, self.inducing_points, self.loc, self.scale_tril, self.jitter
        )


@kl_divergence.register(SparseGP, LatentGP)
def _kl_sparse_latent(q: SparseGP, p: LatentGP) -> Float[Array, "*batch"]:
    """KL(q(v) || N(0, I)): that of the processes, whatever rows the two sites are evaluated at."""
    return one_if_same("kernel", q.kernel, p.kernel) * whitened_divergence(q.loc, q.scale_tril)


def initial_inducing_points(
    num_inducing: int, inducing_points: Float[ArrayLike, "... M d"] | None
) -> InitialPoints:
    """Where inducing points start: as given, or at cluster centers of rows from all over."""
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
    """Declare inducing points, with arguments as of `declare_whitened`."""
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
        param: as `numpyro.param`, with a short name.
        start: of the points.
        rows: makes the rows to choose from.
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


# Adam moves all parameters alike. Whitened means go further, up to tens where data say most, and so
# do scales, from one to hundredths: in these units it takes a quarter and half of the steps.
_LOC_UNIT, _LOG_SCALE_UNIT = 4.0, 2.0


class _WhitenedLoc(constraints.ParameterFreeConstraint):
    """As `constraints.real_vector`, for optimizers: in units of `_LOC_UNIT` on the other side."""

    event_dim = 1

    def __call__(self, x: Array) -> Array:
        return constraints.real_vector(x)


class _ScaleTril(constraints.ParameterFreeConstraint):
    """As `constraints.lower_cholesky`, for optimizers: square matrices are its other side."""

    event_dim = 2

    def __call__(self, x: Array) -> Array:
        return constraints.lower_cholesky(x)


whitened_loc, _scale_tril = _WhitenedLoc(), _ScaleTril()


class _FromSquare(transforms.ParameterFreeTransform):
    """Drops what is above the diagonal, and takes the exponential of that, in `_LOG_SCALE_UNIT`.

    NumPyro's own, from vectors, gathers and scatters.
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
    A: Float[Array, "*batch M M"], change: Callable[[Array], Array]
) -> Float[Array, "*batch M M"]:
    """Lower triangles, with their diagonals changed."""
    eye = jnp.eye(A.shape[-1], dtype=A.dtype)
    return jnp.tril(A, -1) + eye * change(_diagonal(A))[..., None, :]


def _diagonal(A: Float[Array, "*batch M M"]) -> Float[Array, "*batch M"]:
    return jnp.diagonal(A, axis1=-2, axis2=-1)


@biject_to.register(_WhitenedLoc)
def _(constraint: _WhitenedLoc) -> transforms.IndependentTransform:
    return transforms.IndependentTransform(transforms.AffineTransform(0.0, _LOC_UNIT), 1)


@biject_to.register(_ScaleTril)
def _(constraint: _ScaleTril) -> _FromSquare:
    return _FromSquare()


def unexplained_part(
    scale: Float[ArrayLike, "..."] | None, batch: tuple[int, ...]
) -> Float[Array, "..."] | None:
    """Check the scale of what inducing values leave unexplained."""
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
