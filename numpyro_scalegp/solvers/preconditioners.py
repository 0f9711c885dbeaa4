"""Cheap approximate inverses of an operator."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.kernels.pivoted_cholesky import pivoted_cholesky, randomly_pivoted_cholesky
from numpyro_scalegp.solvers.operator import KernelOperator


class PreconditionerFactor(eqx.Module):
    """P = L'L + D close to H, with L of low rank, solved with by Woodbury's identity.

    With A = L D^-1/2 and I + A A' = R'R from a QR factorization of [A', I], which never squares the
    condition number: P^-1 = D^-1/2 (I - A'R^-1 R^-T A) D^-1/2 and log|P| = log|D| + 2 log|R|.
    """

    low_rank: Float[Array, "rank n"]  # L
    diagonal: Float[Array, " n"]  # of D
    triangle: Float[Array, "rank rank"]  # R

    def __init__(self, low_rank: Float[Array, "rank n"], diagonal: Float[Array, " n"]) -> None:
        self.low_rank, self.diagonal = low_rank, diagonal
        identity = jnp.eye(len(low_rank), dtype=diagonal.dtype)
        tall = jnp.concatenate([(low_rank * jax.lax.rsqrt(diagonal)).T, identity])
        self.triangle = jnp.linalg.qr(tall, mode="r") if len(low_rank) else identity

    def solve(self, R: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """P^-1 R, shape (n, k), in O(n rank k)."""
        scaled = R / self.diagonal[:, None]
        if not len(self.low_rank):
            return scaled
        inner = solve_triangular(self.triangle, matmul(self.low_rank, scaled), trans=1)
        inner = solve_triangular(self.triangle, inner)
        return scaled - matmul(self.low_rank.T, inner) / self.diagonal[:, None]

    def log_determinant(self) -> Float[Array, ""]:
        """log|P|, in O(n)."""
        diagonal = jnp.abs(jnp.diagonal(self.triangle))
        return jnp.sum(jnp.log(self.diagonal)) + 2.0 * jnp.sum(jnp.log(diagonal))

    def sample(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "n num_samples"]:
        """Draw columns from N(0, P), shape (n, num_samples), in O(n rank num_samples)."""
        rank, n = self.low_rank.shape
        normal = jax.random.normal(key, (rank + n, num_samples), self.diagonal.dtype)
        white = jnp.sqrt(self.diagonal)[:, None] * normal[rank:]
        return matmul(self.low_rank.T, normal[:rank]) + white


class AbstractPreconditioner(eqx.Module):
    """A recipe that approximates an operator."""

    @abc.abstractmethod
    def factorize(self, operator: KernelOperator) -> PreconditionerFactor:
        """Do the work that depends on the operator only."""


class Identity(AbstractPreconditioner):
    """No preconditioning, P = I."""

    def factorize(self, operator: KernelOperator) -> PreconditionerFactor:
        """Return the identity of the operator's size."""
        ones = jnp.ones(operator.size, operator.dtype)
        return PreconditionerFactor(jnp.zeros((0, operator.size), operator.dtype), ones)


class PivotedCholesky(AbstractPreconditioner):
    """P = L'L + noise with L from `rank` steps of the pivoted Cholesky factorization of K.

    Args:
        rank: number of pivots; more than n are cut to n.

    Raises:
        ValueError: if `rank` is less than 1.

    References:
        Gardner, Pleiss, Bindel, Weinberger and Wilson (2018), GPyTorch: Blackbox Matrix-Matrix
        Gaussian Process Inference, section 4.1. Time O(n rank (rank + d)), memory O(n rank).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> preconditioner = sgp.preconditioners.PivotedCholesky(rank=50)
    """

    rank: int = eqx.field(static=True, converter=checks.plain, default=100)

    def __check_init__(self) -> None:
        checks.count("rank", self.rank)

    def factorize(self, operator: KernelOperator) -> PreconditionerFactor:
        """Compute L and R; noise must be positive."""
        rank = min(self.rank, operator.size)
        low_rank, _ = pivoted_cholesky(operator.kernel, operator.X, rank)
        return PreconditionerFactor(low_rank.astype(operator.dtype), operator.noise())


class RandomlyPivotedCholesky(AbstractPreconditioner):
    """P = L'L + noise with L from `rank` pivots of K, drawn in proportion to what is left there.

    `PivotedCholesky` goes after outliers, this one after what carries the variance: at the same
    rank it needs fewer iterations.

    Args:
        rank: number of pivots; more than n are cut to n.
        seed: of the pivots, the same in every call.

    Raises:
        ValueError: if `rank` is less than 1.

    References:
        Chen, Epperly, Tropp and Webber (2025), Randomly pivoted Cholesky; Diaz, Epperly, Frangella,
        Tropp and Webber (2023), Robust, randomized preconditioning for kernel ridge regression.
        Time O(n rank (rank + d)), memory O(n rank).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> preconditioner = sgp.preconditioners.RandomlyPivotedCholesky(rank=500)
        >>> solver = sgp.solvers.ConjugateGradients(preconditioner=preconditioner)
    """

    rank: int = eqx.field(static=True, converter=checks.plain, default=100)
    seed: int = eqx.field(static=True, converter=checks.plain, default=0)

    def __check_init__(self) -> None:
        checks.count("rank", self.rank)
        checks.count("seed", self.seed, 0)

    def factorize(self, operator: KernelOperator) -> PreconditionerFactor:
        """Draw the pivots, compute L and R; noise must be positive."""
        rank, key = min(self.rank, operator.size), jax.random.key(self.seed)
        low_rank, _ = randomly_pivoted_cholesky(operator.kernel, operator.X, rank, key)
        return PreconditionerFactor(low_rank.astype(operator.dtype), operator.noise())
