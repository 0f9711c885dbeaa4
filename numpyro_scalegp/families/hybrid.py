"""A sparse variational family with further basis functions for its mean."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import checks, linalg
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.whitening import whitened_divergence
from numpyro_scalegp.families.decoupled import expansion, squared_norm
from numpyro_scalegp.families.family import AbstractVariationalGP
from numpyro_scalegp.families.latent import LatentGP
from numpyro_scalegp.families.same import one_if_same
from numpyro_scalegp.families.sparse import (
    SparsePosterior,
    unexplained_part,
    whitened_parts,
)
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.kernel import as_single
from numpyro_scalegp.posteriors.variational import AbstractKernelPosterior


class HybridPosterior(AbstractKernelPosterior):
    """A sparse posterior plus k(x, R) a in the mean, for residual points R with weights a.

    With M inducing and M_r residual points, the mean at m inputs costs O(m d (M + M_r)), the
    variance O(m M^2).

    Args:
        sparse: the posterior without the residual part.
        residual_points: R, shape (M_r, d).
        residual_weights: a, shape (M_r,), or (*batch, M_r) for several functions.

    References:
        Cheng and Boots (2017), Variational Inference for Gaussian Process Models with Linear
        Complexity, appendix A.3.
    """

    sparse: SparsePosterior
    residual_points: Float[Array, "M_r d"]
    residual_weights: Float[Array, "*batch M_r"]
    noise_variance: Float[Array, "..."] | None = None

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "HybridPosterior":
        """The posterior of a part of f; see `AbstractPosterior.restrict`."""
        return dataclasses.replace(self, sparse=self.sparse.restrict(change))

    @property
    def _of_f(self) -> AbstractKernel:
        return self.sparse._of_f

    @property
    def _whole(self) -> AbstractKernel:
        return self.sparse.kernel

    @property
    def _centers(self) -> Float[Array, "M d"]:
        return jnp.concatenate([self.sparse.inducing_points, self.residual_points])

    @property
    def _num_columns(self) -> int:
        return self.sparse._num_columns

    @property
    def _row_width(self) -> int:
        return self.sparse._row_width + self.residual_points.shape[0]

    def _weights(self) -> tuple[Any, ...]:
        return self.residual_weights, *self.sparse._weights()

    @property
    def _lift(self) -> Float[Array, "..."]:
        return self.sparse._lift

    def _expansions(self) -> list[tuple[Array, Array]]:
        return [*self.sparse._expansions(), (self.residual_points, self.residual_weights)]

    def _residual(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        return expansion(self._of_f, X, self.residual_points, self.residual_weights)

    def _moments(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        mean, *variances = self.sparse._moments(X)
        return mean + self._residual(X), *variances

    def _joint(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        mean, covariance = self.sparse._joint(X)
        return mean + self._residual(X), covariance

    def _update(self, prior: Float[Array, "M s"], key: Key[Array, ""]) -> Float[Array, "M s"]:
        sparse = self.sparse._update(prior[: len(self.sparse.inducing_points)], key)
        shape = (len(self.residual_points), prior.shape[1])
        residual = jnp.broadcast_to(self.residual_weights[:, None], shape)
        return jnp.concatenate([sparse, residual])


class HybridGP(AbstractVariationalGP):
    """A `SparseGP` plus k(x, R) a in the mean: many residual points R that cost linear time.

    With Z the inducing points, K(Z, Z) = L L' and q(v) = N(loc, S S') over v = L^-1 f(Z), the mean
    is A'loc + k(x, R) a with A = L^-1 k(Z, x); the covariance is that of `SparseGP`, as is the
    whole with a = 0. `AbstractVariationalGP` describes the site in a model.

    The divergence from the prior process is that of `SparseGP` plus loc'L^-1 K(Z, R) a
    + a'K(R, R) a / 2. With `num_columns`, the last term is estimated from that many random columns
    of K(R, R), without bias.

    `kernel`, `X`, `inducing_points`, `scale_tril`, `jitter` and `unexplained_scale` are as of
    `SparseGP`.

    Args:
        loc: mean of v without the residual part, shape (M,), or (*batch, M) for independent
            functions.
        residual_points: R, shape (M_r, d).
        residual_weights: a, shape (*batch, M_r).
        num_columns: columns of K(R, R) that the divergence draws; None for all.
        key: a typed JAX key for the columns.

    Raises:
        ValueError: if a shape does not fit, inputs hold NaN or infinity, or `num_columns` is given
            without `key` or out of range when the divergence is computed.

    References:
        Cheng and Boots (2017), Variational Inference for Gaussian Process Models with Linear
        Complexity, appendix A.3 (eq. 14 lacks a factor of one half: the term is
        -log|K_Z^-1 S| / 2). Time O(n (M^2 + d M_r) + M^3 + d M_r num_columns).

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 20)[:, None]
        >>> guide = sgp.HybridGP(
        ...     sgp.kernels.RBF(0.3), X, X[::4], jnp.zeros(5), jnp.eye(5), X, jnp.zeros(20)
        ... )
        >>> guide.mean.shape
        (20,)
    """

    arg_constraints = {
        "inducing_points": constraints.real_matrix,
        "loc": constraints.real_vector,
        "scale_tril": constraints.lower_cholesky,
        "residual_points": constraints.real_matrix,
        "residual_weights": constraints.real_vector,
        "unexplained_scale": constraints.positive,
    }
    reparametrized_params = list(arg_constraints)
    pytree_data_fields = ("kernel", "X", *arg_constraints, "key")
    pytree_aux_fields = ("num_columns", "jitter")

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "n d"],
        inducing_points: Float[ArrayLike, "M d"],
        loc: Float[ArrayLike, "*batch M"],
        scale_tril: Float[ArrayLike, "*batch M M"],
        residual_points: Float[ArrayLike, "M_r d"],
        residual_weights: Float[ArrayLike, "*batch M_r"],
        *,
        num_columns: int | None = None,
        key: Key[Array, ""] | None = None,
        jitter: float | None = None,
        unexplained_scale: Float[ArrayLike, "*batch"] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = as_single("kernel", kernel)
        self.X = checks.inputs("X", X)
        width = self.X.shape[1]
        self.inducing_points = checks.inputs("inducing_points", inducing_points, width)
        self.loc, self.scale_tril = whitened_parts(loc, scale_tril, len(self.inducing_points))
        self.residual_points = checks.inputs("residual_points", residual_points, width)
        self.residual_weights = checks.as_float(residual_weights, "residual_weights")
        batch = self.loc.shape[:-1]
        expected = (*batch, len(self.residual_points))
        checks.shape("residual_weights", self.residual_weights, expected, why="one a point")
        checks.finite("residual_weights", self.residual_weights)
        self.num_columns = checks.count_or_none("num_columns", num_columns)
        self.key = key if key is None else checks.as_key(key)
        self.jitter = checks.jitter(jitter)
        self.unexplained_scale = unexplained_part(unexplained_scale, batch)
        super().__init__(batch, (self.X.shape[0],), validate_args=validate_args)

    def split_marginals(self) -> tuple[Float[Array, "*batch n"], ...]:
        """Mean, variance of the inducing values' part, and unexplained variance at each row."""
        return self.posterior().split_marginals(self.X)

    def posterior(self) -> HybridPosterior:
        """The process itself, for moments and joint samples at any inputs."""
        sparse = SparsePosterior(
            self.kernel, self.inducing_points, self.loc, self.scale_tril, self.jitter
        )
        return HybridPosterior(sparse, self.residual_points, self.residual_weights)


@kl_divergence.register(HybridGP, LatentGP)
def _kl_hybrid_latent(q: HybridGP, p: LatentGP) -> Float[Array, "*batch"]:
    """The divergence of the processes, whatever rows the two sites are evaluated at."""
    a = q.residual_weights
    K = linalg.add_jitter(q.kernel.covariance(q.inducing_points), q.jitter)
    at_inducing = matmul(a, q.kernel(q.residual_points, q.inducing_points))
    across = jnp.sum(q.loc * matmul(at_inducing, linalg.inverse_cholesky(K).T), axis=-1)
    norm = squared_norm(q.kernel, q.residual_points, a, num_columns=q.num_columns, key=q.key)
    divergence = whitened_divergence(q.loc, q.scale_tril) + across + 0.5 * norm
    return one_if_same("kernel", q.kernel, p.kernel) * divergence
