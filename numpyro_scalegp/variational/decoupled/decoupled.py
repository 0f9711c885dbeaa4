"""A variational family with one basis for its mean and one for its covariance."""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key
from numpyro.distributions import biject_to, constraints, transforms
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.core.chunks import rows_per_chunk, sum_rows
from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.numerics import lapack, linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.expansion import (
    ExpansionPosterior,
    KernelFunctions,
    WhitenedNormal,
    inducing_whitening,
)
from numpyro_scalegp.processes.whitening import Whitening
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.family import AbstractVariationalGP
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.same import same_prior
from numpyro_scalegp.variational.sparse.sparse import ScaleTril, unexplained_part


def squared_norm(
    kernel: AbstractKernel,
    points: Float[Array, "M d"],
    weights: Float[Array, "*batch M"],
    *,
    num_columns: int | None = None,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "*batch"]:
    """The squared norm a'K(Z, Z) a, or an unbiased estimate of it from random columns of K.

    Args:
        kernel: covariance function.
        points: Z, shape (M, d).
        weights: a, shape (M,), or (*batch, M) for several functions.
        num_columns: number of columns to draw, by `stratified_indices`; None for all.
        key: a typed JAX key for the columns.

    Returns:
        A value for each function, with an unbiased gradient. All functions share the columns.
        Time O(M num_columns d), in chunks.

    Raises:
        ValueError: if columns are to be drawn without a key, or more columns than there are.

    References:
        Cheng and Boots (2017), section 3.4, for the subset of columns.
    """
    M = points.shape[0]
    functions = weights.reshape(-1, M).T
    columns, factors, scale = points, functions, 1.0
    if num_columns is not None and num_columns != M:
        if key is None:
            raise ValueError("`key` must be given where `num_columns` are drawn at random.")
        index = stratified_indices(key, M, num_columns)
        columns, factors, scale = points[index], functions[index], M / num_columns

    def of_chunk(rows: tuple[Array, Array]) -> Array:
        Z, a = rows
        return jnp.sum(a * matmul(kernel.evaluate(Z, columns), factors), axis=0)

    size = rows_per_chunk(columns.shape[0])
    total = sum_rows(of_chunk, (points, functions), size, share=False)
    return scale * total.reshape(weights.shape[:-1])


@compiled
def _whitening(
    kernel: AbstractKernel,
    cov_points: Float[Array, "M_q d"],
    cov_scale_tril: Float[Array, "*batch M_q M_q"],
) -> Whitening:
    """Factorize M = I + L'K(Q, Q) L for each L, in O(M_q^3)."""
    # All eigenvalues are at least one, so that no jitter is needed, and no warning, for which a
    # batch would have to call the host.
    no_jitter = jnp.zeros((), cov_scale_tril.dtype)
    if cov_scale_tril.size == 0:
        return Whitening(cov_scale_tril, cov_scale_tril, no_jitter)
    K = kernel.evaluate_covariance(cov_points)

    def whiten(L: Float[Array, "M_q M_q"]) -> tuple[Array, Array]:
        M = matmul(L.T, matmul(K, L)) + jnp.eye(len(L), dtype=L.dtype)
        return M, linalg.inverse_cholesky(M, warn=False)

    M, inverse = batches.mapped(whiten, 2)(cov_scale_tril)
    return Whitening(M, inverse, no_jitter)


class DecoupledGP(AbstractVariationalGP):
    """A variational GP with many points for the mean and few for the covariance.

    It has mean k(x, P) a and covariance k(x, x') - k(x, Q) (B^-1 + K(Q, Q))^-1 k(Q, x') with
    B = L L'. Its variance is at most the prior variance, and equal to it if L = 0.
    `AbstractVariationalGP` describes its use in a model.

    With M = I + L'K(Q, Q) L, the KL divergence from the prior process is
    (a'K(P, P) a + log|M| - tr(I - M^-1)) / 2. With `num_columns`, its first term is an unbiased
    estimate from that many random columns of K(P, P), and the cost of a step is linear in the
    number of mean points.

    Args:
        kernel: covariance function of the prior.
        X: inputs, shape (n, d).
        mean_points: P, shape (M_p, d).
        mean_weights: a, shape (M_p,), or (*batch, M_p) for independent functions.
        cov_points: Q, shape (M_q, d); without any (M_q = 0), the optimal mean is kernel ridge
            regression.
        cov_scale_tril: L, shape (*batch, M_q, M_q); it need not be triangular.
        unexplained_scale: factor on the variance that the values at the covariance points leave
            unexplained, in the training objective, as in `SparseGP`; shape `batch`.
        num_columns: number of columns of K(P, P) that the KL divergence draws; None for all.
        key: a typed JAX key for the columns.

    Raises:
        ValueError: if a shape does not fit, inputs hold NaN or infinity, or `num_columns` is given
            without `key` or out of range when the divergence is computed.

    References:
        Cheng and Boots (2017), Variational Inference for Gaussian Process Models with Linear
        Complexity, eq. 7 to 9. Time O(n (d M_p + M_q^2) + M_q^3 + d M_p num_columns).

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 20)[:, None]
        >>> kernel = sgp.kernels.RBF(0.3)
        >>> guide = sgp.DecoupledGP(kernel, X, X, jnp.zeros(20), X[::4], jnp.eye(5))
        >>> guide.mean.shape, guide.variance.shape
        ((20,), (20,))
    """

    arg_constraints = {
        "mean_points": constraints.real_matrix,
        "mean_weights": constraints.real_vector,
        "cov_points": constraints.real_matrix,
        "cov_scale_tril": constraints.real_matrix,
        "unexplained_scale": constraints.positive,
    }
    reparametrized_params = list(arg_constraints)
    pytree_data_fields = ("kernel", "X", *arg_constraints, "key")
    pytree_aux_fields = ("num_columns",)

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "n d"],
        mean_points: Float[ArrayLike, "M_p d"],
        mean_weights: Float[ArrayLike, "*batch M_p"],
        cov_points: Float[ArrayLike, "M_q d"],
        cov_scale_tril: Float[ArrayLike, "*batch M_q M_q"],
        *,
        num_columns: int | None = None,
        key: Key[Array, ""] | None = None,
        unexplained_scale: Float[ArrayLike, "*batch"] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = as_single("kernel", kernel)
        self.X = checks.inputs("X", X)
        self.kernel.check_hooks(self.X)
        self.mean_points = checks.inputs("mean_points", mean_points, self.X.shape[1])
        self.mean_weights = checks.as_float(mean_weights, "mean_weights")
        batch = self.mean_weights.shape[:-1]
        expected = (*batch, len(self.mean_points))
        checks.shape("mean_weights", self.mean_weights, expected, why="one for each mean point")
        checks.finite("mean_weights", self.mean_weights)
        self.cov_points = checks.inputs(
            "cov_points", cov_points, self.X.shape[1], may_be_empty=True
        )
        M = self.cov_points.shape[0]
        self.cov_scale_tril = checks.as_float(cov_scale_tril, "cov_scale_tril")
        why = "a row for each covariance point"
        checks.shape("cov_scale_tril", self.cov_scale_tril, (*batch, M, M), why=why)
        checks.finite("cov_scale_tril", self.cov_scale_tril)
        self.num_columns = checks.count_or_none("num_columns", num_columns)
        self.key = key if key is None else checks.as_key(key)
        self.unexplained_scale = unexplained_part(unexplained_scale, batch)
        super().__init__(batch, (self.X.shape[0],), validate_args=validate_args)

    def split_marginals(self) -> tuple[Float[Array, "*batch n"], ...]:
        """The mean, the variance from the values at the covariance points, and the rest at X.

        The rest is conditional on these values, as for inducing points, in O(M_q^3) more.
        """
        if not len(self.cov_points):
            return self.marginals()
        whitening = inducing_whitening(self.kernel, self.cov_points, None)
        R = cast(Array, whitening.factor)

        def scale_of(L: Float[Array, "M_q M_q"]) -> Float[Array, "M_q M_q"]:
            G = matmul(L.T, R)
            precision = matmul(G.T, G) + jnp.eye(len(L), dtype=G.dtype)
            return linalg.inverse_cholesky(precision, warn=False).T

        scale = batches.mapped(scale_of, 2)(self.cov_scale_tril)
        coupled = ExpansionPosterior.of_inducing_values(
            self.kernel,
            self.cov_points,
            WhitenedNormal(jnp.zeros(scale.shape[:-1], scale.dtype), scale),
            further=KernelFunctions(self.mean_points, self.mean_weights),
            whitening=whitening,
        )
        return coupled.split_marginals(self.X)

    def posterior(self) -> ExpansionPosterior:
        """The approximate posterior, with moments and joint samples at any inputs."""
        return ExpansionPosterior(
            self.kernel,
            self.cov_points,
            _whitening(self.kernel, self.cov_points, self.cov_scale_tril),
            projection=self.cov_scale_tril,
            further=KernelFunctions(self.mean_points, self.mean_weights),
        )


@kl_divergence.register(DecoupledGP, LatentGP)
def _kl_decoupled_latent(q: DecoupledGP, p: LatentGP) -> Float[Array, "*batch"]:
    """The divergence of the processes, regardless of the sites' inputs."""
    W = q.posterior().whitening.inverse
    diagonal = jnp.diagonal(W, axis1=-2, axis2=-1)
    log_determinant = -2.0 * jnp.sum(jnp.log(diagonal), axis=-1)
    covariance = log_determinant - W.shape[-1] + jnp.sum(jnp.square(W), axis=(-2, -1))
    norm = squared_norm(
        q.kernel, q.mean_points, q.mean_weights, num_columns=q.num_columns, key=q.key
    )
    return same_prior(q, p) * 0.5 * (norm + covariance)


# Adam moves all parameters at about the same rate, and the noise of pseudo-observations decreases
# from the prior's scale to hundredths: in units of two, in half of the steps.
_LOG_SCALE_UNIT = 2.0


class _NoiseTril(ScaleTril):
    """Another constraint to the same matrices, whose unconstrained values are by rows."""


noise_tril = _NoiseTril()


class _FromSquare(transforms.ParameterFreeTransform):
    """Maps A to D (I + N): N is strictly below the diagonal, and D = exp(unit * diag(A)).

    The rows scale with D, so that one rate of learning suits noise of any size.
    """

    domain = constraints.real_matrix
    codomain = noise_tril

    def __call__(self, x: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
        return _scaled_rows(x)

    def _inverse(self, y: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
        return _unscaled_rows(y)


# Compiled, since NumPyro initializes parameters outside of compiled code.
@jax.jit
def _scaled_rows(x: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    D = jnp.exp(_LOG_SCALE_UNIT * jnp.diagonal(x, axis1=-2, axis2=-1))
    return D[..., None] * (jnp.tril(x, -1) + jnp.eye(x.shape[-1], dtype=x.dtype))


@jax.jit
def _unscaled_rows(y: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    D = jnp.diagonal(y, axis1=-2, axis2=-1)
    diagonal = jnp.eye(y.shape[-1], dtype=y.dtype) * (jnp.log(D) / _LOG_SCALE_UNIT)[..., None]
    return jnp.tril(y, -1) / D[..., None] + diagonal


@biject_to.register(_NoiseTril)
def _(constraint: _NoiseTril) -> _FromSquare:
    return _FromSquare()


@jax.jit
def scale_of_pseudo_observations(
    noise_tril: Float[Array, "*batch M_q M_q"],
) -> Float[Array, "*batch M_q M_q"]:
    """L = E^-T, with which the covariance is conditional on observations of noise E E' at Q."""
    eye = jnp.eye(noise_tril.shape[-1], dtype=noise_tril.dtype)
    inverse_transpose = functools.partial(lapack.solve_lower, B=eye, trans=1)
    return batches.mapped(inverse_transpose, 2)(noise_tril)
