"""A variational family with one basis for its mean and one for its covariance."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import batches, checks, linalg
from numpyro_scalegp.core.chunks import map_rows, rows_per_chunk, sum_rows
from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.families.family import AbstractVariationalGP
from numpyro_scalegp.families.latent import LatentGP
from numpyro_scalegp.families.same import one_if_same
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.kernel import as_single
from numpyro_scalegp.posteriors.variational import AbstractKernelPosterior

# A row of L starts at this on its diagonal: it takes its square off the prior's variance.
_SMALL_SCALE = 1e-2


def expansion(
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    points: Float[Array, "M d"],
    weights: Float[Array, "*batch M"],
    *,
    chunk_size: int | None = None,
) -> Float[Array, "*batch n"]:
    """The function k(., Z) a at the rows of X, K(X, Z) a.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        points: Z, shape (M, d).
        weights: a, shape (M,), or (*batch, M) for several functions.
        chunk_size: rows worked on at a time; None for all.

    Returns:
        Values of shape (*batch, n), in O(n M d).
    """
    functions = weights.reshape(-1, weights.shape[-1]).T

    def at(rows: Array) -> Array:
        return matmul(divided(kernel(rows, points), mesh_of(rows)), functions)

    values = at(X) if chunk_size is None else map_rows(at, X, chunk_size)
    return values.T.reshape(*weights.shape[:-1], X.shape[0])


def squared_norm(
    kernel: AbstractKernel,
    points: Float[Array, "M d"],
    weights: Float[Array, "*batch M"],
    *,
    num_columns: int | None = None,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "*batch"]:
    """The squared norm a'K(Z, Z) a, or an unbiased estimate of it from some columns of K.

    Args:
        kernel: covariance function.
        points: Z, shape (M, d).
        weights: a, shape (M,), or (*batch, M) for several functions.
        num_columns: how many columns are drawn, by `stratified_indices`; None for all.
        key: a typed JAX key for them.

    Returns:
        A value for each function, whose gradient is unbiased, too. They share the columns.
        O(M num_columns d), in chunks.

    Raises:
        ValueError: if columns are to be drawn, and there is no key or there are fewer of them.

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
        return jnp.sum(a * matmul(kernel(Z, columns), factors), axis=0)

    size = rows_per_chunk(columns.shape[0])
    total = sum_rows(of_chunk, (points, functions), size, share=False)
    return scale * total.reshape(weights.shape[:-1])


class DecoupledPosterior(AbstractKernelPosterior):
    """A Gaussian process with mean k(x, P) a and covariance k(x, x') - k(x, Q) G k(Q, x').

    With L the scale, B = L L' and M = I + L'K(Q, Q) L: G = (B^-1 + K(Q, Q))^-1 = L M^-1 L'.

    The fields are the arguments of `DecoupledGP`. With M_p mean and M_q covariance points, what
    costs O(M_q^3) is computed when it is made. The mean at m inputs costs O(m M_p d), the variance
    O(m M_q^2).

    References:
        Cheng and Boots (2017), Variational Inference for Gaussian Process Models with Linear
        Complexity, eq. 8.
    """

    kernel: AbstractKernel
    mean_points: Float[Array, "M_p d"]
    mean_weights: Float[Array, "*batch M_p"]
    cov_points: Float[Array, "M_q d"]
    cov_scale_tril: Float[Array, "*batch M_q M_q"]
    noise_variance: Float[Array, "..."] | None = None
    part: AbstractKernel | None = None  # of f, in place of the whole
    # Made of the others: the inverse C^-1 of the lower Cholesky factor of M.
    whitening: Float[Array, "*batch M_q M_q"] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.whitening is None:
            self.whitening = _whitening(self.kernel, self.cov_points, self.cov_scale_tril)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "DecoupledPosterior":
        """The posterior of a part of f; see `AbstractPosterior.restrict`."""
        return dataclasses.replace(self, part=change(self._of_f))

    @property
    def _of_f(self) -> AbstractKernel:
        return self.kernel if self.part is None else self.part

    @property
    def _whole(self) -> AbstractKernel:
        return self.kernel

    @property
    def _centers(self) -> Float[Array, "M d"]:
        return jnp.concatenate([self.mean_points, self.cov_points])

    @property
    def _num_columns(self) -> int:
        return self.mean_points.shape[1]

    @property
    def _row_width(self) -> int:
        return self.mean_points.shape[0] + self.cov_points.shape[0]

    def _weights(self) -> tuple[Any, ...]:
        return self.mean_weights, self.cov_scale_tril, self.whitening

    def _expansions(self) -> list[tuple[Array, Array]]:
        return [(self.mean_points, self.mean_weights)]

    def _expanded(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return expansion(self._of_f, X, self.mean_points, self.mean_weights)

    def _white(self, across: Float[Array, "M_q n"]) -> Float[Array, "M_q n"]:
        """C^-1 L' k(Q, x) of each column."""
        return matmul(self.whitening, matmul(self.cov_scale_tril.T, across))

    def _moments(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        across = divided(self._of_f(self.cov_points, X), mesh_of(X), axis=1)
        removed = jnp.sum(jnp.square(self._white(across)), axis=0)
        return self._expanded(X), jnp.maximum(self._of_f.diag(X) - removed, 0.0)

    def _joint(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        white = self._white(self._of_f(self.cov_points, X))
        return self._expanded(X), self._of_f.covariance(X) - matmul(white.T, white)

    def _update(self, prior: Float[Array, "M s"], key: Key[Array, ""]) -> Float[Array, "M s"]:
        """The weights a at P, and at Q those of an observation of p(Q) with noise B^-1.

        -G (p(Q) + e) = -L M^-1 (L'p(Q) + L'e) with e ~ N(0, B^-1), so that L'e is standard normal,
        also where L has no inverse.
        """
        num = len(self.mean_points)
        at_cov = prior[num:]
        noise = jax.random.normal(key, at_cov.shape, prior.dtype)
        white = self._white(at_cov) + matmul(self.whitening, noise)
        mean = jnp.broadcast_to(self.mean_weights[:, None], (num, prior.shape[1]))
        back = matmul(self.cov_scale_tril, matmul(self.whitening.T, white))
        return jnp.concatenate([mean, -back])


@compiled
def _whitening(
    kernel: AbstractKernel,
    cov_points: Float[Array, "M_q d"],
    cov_scale_tril: Float[Array, "*batch M_q M_q"],
) -> Float[Array, "*batch M_q M_q"]:
    """The inverse of the lower Cholesky factor of M for each L, in O(M_q^3)."""
    if cov_scale_tril.size == 0:
        return cov_scale_tril
    K = kernel.covariance(cov_points)

    def of_one(L: Float[Array, "M_q M_q"]) -> Float[Array, "M_q M_q"]:
        M = matmul(L.T, matmul(K, L)) + jnp.eye(len(L), dtype=L.dtype)
        # Eigenvalues of one or more: there is nothing to warn of, for which a batch would have to
        # ask the host.
        return linalg.inverse_cholesky(M, warn=False)

    return batches.each(of_one, batches.Batch(cov_scale_tril, cov_scale_tril.ndim - 2))


class DecoupledGP(AbstractVariationalGP):
    """A variational process with many basis functions for its mean and few for its covariance.

    Mean k(x, P) a and covariance k(x, x') - k(x, Q) (B^-1 + K(Q, Q))^-1 k(Q, x') with B = L L',
    never more than the prior's: with L = 0 it is the prior's own. How the site behaves in a model
    is described in `AbstractVariationalGP`.

    With M = I + L'K(Q, Q) L, the divergence from the prior process is a'K(P, P) a / 2
    + (log|M| - tr(I - M^-1)) / 2. With `num_columns`, its first term is estimated from that many
    random columns of K(P, P), without bias, and a step is linear in the number of mean points.

    Args:
        kernel: covariance function of the prior.
        X: inputs, shape (n, d).
        mean_points: P, shape (M_p, d).
        mean_weights: a, shape (M_p,), or (*batch, M_p) for independent functions.
        cov_points: Q, shape (M_q, d); without any (M_q = 0) the mean at its optimum is kernel ridge
            regression.
        cov_scale_tril: L, lower triangular, shape (*batch, M_q, M_q).
        num_columns: columns of K(P, P) that the divergence draws; None for all.
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
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = as_single("kernel", kernel)
        self.X = checks.inputs("X", X)
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
        checks.shape("cov_scale_tril", self.cov_scale_tril, (*batch, M, M), why="a row a point")
        checks.finite("cov_scale_tril", self.cov_scale_tril)
        self.num_columns = checks.count_or_none("num_columns", num_columns)
        self.key = key if key is None else checks.as_key(key)
        super().__init__(batch, (self.X.shape[0],), validate_args=validate_args)

    def posterior(self) -> DecoupledPosterior:
        """The process itself, for moments and joint samples at any inputs."""
        return DecoupledPosterior(
            self.kernel, self.mean_points, self.mean_weights, self.cov_points, self.cov_scale_tril
        )


def small_scale_tril(
    cov_points: Float[Array, "M_q d"], batch_shape: tuple[int, ...]
) -> Float[Array, "*batch M_q M_q"]:
    """Where L starts: not at zero, where the objective has no gradient in it."""
    start = _SMALL_SCALE * jnp.eye(len(cov_points), dtype=cov_points.dtype)
    return jnp.broadcast_to(start, (*batch_shape, *start.shape))


@kl_divergence.register(DecoupledGP, LatentGP)
def _kl_decoupled_latent(q: DecoupledGP, p: LatentGP) -> Float[Array, "*batch"]:
    """The divergence of the processes, whatever rows the two sites are evaluated at."""
    W = q.posterior().whitening
    diagonal = jnp.diagonal(W, axis1=-2, axis2=-1)
    log_determinant = -2.0 * jnp.sum(jnp.log(diagonal), axis=-1)
    covariance = log_determinant - W.shape[-1] + jnp.sum(jnp.square(W), axis=(-2, -1))
    norm = squared_norm(
        q.kernel, q.mean_points, q.mean_weights, num_columns=q.num_columns, key=q.key
    )
    return one_if_same("kernel", q.kernel, p.kernel) * 0.5 * (norm + covariance)
