"""A sparse variational family with additional basis functions for its mean."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.expansion import (
    ExpansionPosterior,
    KernelFunctions,
    WhitenedNormal,
)
from numpyro_scalegp.processes.whitening import whitened_divergence
from numpyro_scalegp.sites.family import AbstractVariationalGP
from numpyro_scalegp.variational.decoupled.decoupled import squared_norm
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.same import same_prior
from numpyro_scalegp.variational.sparse.sparse import unexplained_part, whitened_parts


class HybridGP(AbstractVariationalGP):
    """A `SparseGP` plus k(x, R) a in the mean, with many residual points R at linear cost.

    With Z the inducing points, K(Z, Z) = L L' and q(v) = N(loc, S S') over v = L^-1 f(Z), the mean
    is A'loc + k(x, R) a with A = L^-1 k(Z, x). The covariance is `SparseGP`'s.
    `AbstractVariationalGP` describes its use in a model.

    The KL divergence from the prior process is `SparseGP`'s plus
    loc'L^-1 K(Z, R) a + a'K(R, R) a / 2. With `num_columns`, the last term is an unbiased estimate
    from that many random columns of K(R, R).

    `kernel`, `X`, `inducing_points`, `scale_tril`, `jitter` and `unexplained_scale` are as in
    `SparseGP`.

    Args:
        loc: mean of v if the residual weights a are zero, shape (M,), or (*batch, M) for
            independent functions.
        residual_points: R, shape (M_r, d).
        residual_weights: a, shape (*batch, M_r).
        num_columns: number of columns of K(R, R) that the KL divergence draws; None for all.
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
        self.kernel.check_hooks(self.X)
        width = self.X.shape[1]
        self.inducing_points = checks.inputs("inducing_points", inducing_points, width)
        self.loc, self.scale_tril = whitened_parts(loc, scale_tril, len(self.inducing_points))
        self.residual_points = checks.inputs("residual_points", residual_points, width)
        self.residual_weights = checks.as_float(residual_weights, "residual_weights")
        batch = self.loc.shape[:-1]
        expected = (*batch, len(self.residual_points))
        why = "one for each residual point"
        checks.shape("residual_weights", self.residual_weights, expected, why=why)
        checks.finite("residual_weights", self.residual_weights)
        self.num_columns = checks.count_or_none("num_columns", num_columns)
        self.key = key if key is None else checks.as_key(key)
        self.jitter = checks.jitter(jitter)
        self.unexplained_scale = unexplained_part(unexplained_scale, batch)
        super().__init__(batch, (self.X.shape[0],), validate_args=validate_args)

    def split_marginals(self) -> tuple[Float[Array, "*batch n"], ...]:
        """The mean, the variance from the inducing values, and the unexplained variance at X."""
        return self.posterior().split_marginals(self.X)

    def posterior(self) -> ExpansionPosterior:
        """The approximate posterior, with moments and joint samples at any inputs."""
        return ExpansionPosterior.of_inducing_values(
            self.kernel,
            self.inducing_points,
            WhitenedNormal(self.loc, self.scale_tril),
            jitter=self.jitter,
            further=KernelFunctions(self.residual_points, self.residual_weights),
        )


@kl_divergence.register(HybridGP, LatentGP)
def _kl_hybrid_latent(q: HybridGP, p: LatentGP) -> Float[Array, "*batch"]:
    """The divergence of the processes, regardless of the sites' inputs."""
    a = q.residual_weights
    K = linalg.add_jitter(q.kernel.evaluate_covariance(q.inducing_points), q.jitter)
    at_inducing = matmul(a, q.kernel.evaluate(q.residual_points, q.inducing_points))
    cross_term = jnp.sum(q.loc * matmul(at_inducing, linalg.inverse_cholesky(K).T), axis=-1)
    norm = squared_norm(q.kernel, q.residual_points, a, num_columns=q.num_columns, key=q.key)
    divergence = whitened_divergence(q.loc, q.scale_tril) + cross_term + 0.5 * norm
    return same_prior(q, p) * divergence
