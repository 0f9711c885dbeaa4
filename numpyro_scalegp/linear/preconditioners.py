"""Cheap approximations of an operator and its inverse."""

import abc
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.device import memory_share
from numpyro_scalegp.core.mesh import divided, mesh_of, stack_shares
from numpyro_scalegp.core.summary import OneLine
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.pivoted_cholesky import pivoted_cholesky, randomly_pivoted_cholesky
from numpyro_scalegp.numerics import lapack, linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.compiled import compiled_unless_traced

# The default rank: its multiple of sqrt(n), and the bytes that L may take on a CPU, or the share of
# an accelerator's memory.
_RANKS = 10.0
_MAX_BYTES = 2**28
_SHARE = 1 / 16

# Columns of A that are factorized at a time, in multiples of the rank.
_RANKS_PER_CHUNK = 4


class AbstractFactor(eqx.Module):
    """A positive definite P that approximates an operator, with its inverse and its root."""

    @abc.abstractmethod
    def solve(self, R: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """P^-1 R."""

    @abc.abstractmethod
    def log_determinant(self) -> Float[Array, ""]:
        """log|P|."""

    @abc.abstractmethod
    def sample(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "n num_samples"]:
        """Draw columns from N(0, P)."""


class PreconditionerFactor(AbstractFactor):
    """P = L'L + D close to H, with L of low rank, inverted by Woodbury's identity.

    With A = L D^-1/2 and I + A A' = R'R, P^-1 = D^-1/2 (I - A'R^-1 R^-T A) D^-1/2 and
    log|P| = log|D| + 2 log|R|. R is from a QR factorization of [A', I], which does not square the
    condition number. Time O(n rank^2), memory O(n rank) for L and O(rank^2) for R.
    """

    low_rank: Float[Array, "rank n"]  # L
    diagonal: Float[Array, " n"]  # of D
    triangle: Float[Array, "rank rank"]  # R

    def __init__(self, low_rank: Float[Array, "rank n"], diagonal: Float[Array, " n"]) -> None:
        self.low_rank, self.diagonal = low_rank, diagonal
        self.triangle = _triangle(low_rank, jax.lax.rsqrt(diagonal))

    @compiled_unless_traced
    def solve(self, R: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """P^-1 R, shape (n, k), in O(n rank k)."""
        scaled = R / self.diagonal[:, None]
        if not len(self.low_rank):
            return scaled
        inner = lapack.cholesky_solve(self.triangle.T, matmul(self.low_rank, scaled))
        return scaled - matmul(self.low_rank.T, inner) / self.diagonal[:, None]

    @compiled_unless_traced
    def log_determinant(self) -> Float[Array, ""]:
        """log|P|, in O(n)."""
        diagonal = jnp.abs(jnp.diagonal(self.triangle))
        return jnp.sum(jnp.log(self.diagonal)) + 2.0 * jnp.sum(jnp.log(diagonal))

    @compiled_unless_traced
    def sample(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "n num_samples"]:
        """Draw columns from N(0, P), shape (n, num_samples), in O(n rank num_samples)."""
        rank, n = self.low_rank.shape
        keys, dtype = jax.random.split(key), self.diagonal.dtype
        normal = jax.random.normal(keys[0], (n, num_samples), dtype)
        white = jnp.sqrt(self.diagonal)[:, None] * divided(normal, mesh_of(self.low_rank))
        shared = jax.random.normal(keys[1], (rank, num_samples), dtype)
        return matmul(self.low_rank.T, shared) + white


def _triangle(low_rank: Float[Array, "rank n"], scale: Float[Array, " n"]) -> Array:
    """R of [A', I] = Q R for A = L scale, chunk by chunk, without Q."""
    rank = len(low_rank)
    identity = jnp.eye(rank, dtype=scale.dtype)
    if not rank:
        return identity
    if (mesh := mesh_of(low_rank)) is None:
        return _updated_triangle(identity, low_rank, scale)

    def of_share(columns: Array, scale: Array) -> Array:
        return _updated_triangle(jnp.zeros_like(identity), columns.T, scale)

    triangles = jax.lax.collapse(stack_shares(mesh, of_share, low_rank.T, scale), 0, 2)
    return lapack.qr_triangle(jnp.concatenate([triangles, identity]))


def _updated_triangle(
    triangle: Array, low_rank: Float[Array, "rank n"], scale: Float[Array, " n"]
) -> Array:
    """R of [A', R_0] = Q R given a triangle R_0."""
    rank, n = low_rank.shape
    size = min(n, _RANKS_PER_CHUNK * rank)
    num_chunks = -(-n // size)

    def append(R: Array, chunk: Array) -> tuple[Array, None]:
        # If n is not a multiple, the last chunk begins earlier, with zeros for appended columns.
        first = jnp.minimum(chunk * size, n - size)
        is_new = first + jnp.arange(size) >= chunk * size
        columns = jax.lax.dynamic_slice_in_dim(low_rank, first, size, axis=1)
        weights = jnp.where(is_new, jax.lax.dynamic_slice_in_dim(scale, first, size), 0.0)
        return lapack.qr_triangle(jnp.concatenate([(columns * weights).T, R])), None

    return jax.lax.scan(append, triangle, jnp.arange(num_chunks))[0]


def _damped(low_rank: Float[Array, "rank n"], operator: KernelOperator) -> PreconditionerFactor:
    """P = L'L + D, where D is the noise, or a larger value if the noise is below rounding errors.

    P^-1 removes almost all of a vector along the largest eigenvectors of L'L. With a smaller D,
    rounding errors of that cancellation would make P^-1 indefinite.
    """
    least = linalg.least_diagonal(jnp.sum(jnp.square(low_rank)))
    return PreconditionerFactor(low_rank, jnp.maximum(operator.noise(), least))


class AbstractPreconditioner(OneLine):
    """A method to approximate an operator by a `PreconditionerFactor`."""

    @abc.abstractmethod
    def factorize(self, operator: KernelOperator) -> PreconditionerFactor:
        """Compute the factor, which depends on the operator alone."""


class Identity(AbstractPreconditioner):
    """No preconditioning, P = I."""

    @compiled_unless_traced
    def factorize(self, operator: KernelOperator) -> PreconditionerFactor:
        """Return the identity of the size of the operator."""
        ones = jnp.ones(operator.size, operator.dtype)
        return PreconditionerFactor(jnp.zeros((0, operator.size), operator.dtype), ones)


class PivotedCholesky(AbstractPreconditioner):
    """P = L'L + noise with L from `rank` steps of the pivoted Cholesky factorization of K.

    Args:
        rank: number of pivots; at most n are used.

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

    @compiled_unless_traced
    def factorize(self, operator: KernelOperator) -> PreconditionerFactor:
        """Compute L and R; noise must be positive."""
        rank = min(self.rank, operator.size)
        low_rank, _ = pivoted_cholesky(operator.kernel, operator.X, rank)
        return _damped(low_rank.astype(operator.dtype), operator)


class RandomlyPivotedCholesky(AbstractPreconditioner):
    """P = L'L + noise with L from `rank` pivots of K, drawn by their remaining variances.

    `PivotedCholesky` selects outliers; random pivots follow the variance instead, and conjugate
    gradients need fewer iterations at the same rank.

    Args:
        rank: number of pivots; at most n are used. None for 10 sqrt(n), limited so that L takes at
            most a quarter of a GiB.
        seed: seed of the pivots, which are the same in every call.

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

    rank: int | None = eqx.field(static=True, converter=checks.plain, default=None)
    seed: int = eqx.field(static=True, converter=checks.plain, default=0)

    def __check_init__(self) -> None:
        if self.rank is not None:
            checks.count("rank", self.rank)
        checks.count("seed", self.seed, 0)

    @compiled_unless_traced
    def factorize(self, operator: KernelOperator) -> PreconditionerFactor:
        """Draw the pivots, compute L and R; noise must be positive."""
        n, key = operator.size, jax.random.key(self.seed)
        rank = min(n, _default_rank(operator) if self.rank is None else self.rank)
        low_rank, _ = randomly_pivoted_cholesky(operator.kernel, operator.X, rank, key)
        return _damped(low_rank.astype(operator.dtype), operator)


def _default_rank(operator: KernelOperator) -> int:
    n = operator.size
    limit = memory_share(_SHARE, _MAX_BYTES) // (n * operator.dtype.itemsize)
    return max(1, min(math.ceil(_RANKS * math.sqrt(n)), limit))


class Nystrom(AbstractPreconditioner):
    """P = F'F + noise with F'F the Nystrom approximation K Z (Z'K Z)^-1 Z'K of K, Z random.

    It is the most accurate preconditioner for its rank, and the only one that needs all of K, for a
    product with `rank` vectors. Use it for small noise and many iterations, or for many solves with
    the same H.

    Args:
        rank: number of random directions; at most n are used.
        seed: seed of the directions, which are the same in every call.

    Raises:
        ValueError: if `rank` is less than 1.

    References:
        Frangella, Tropp and Udell (2023), Randomized Nystrom Preconditioning, algorithm 2.1, with
        the noise in place of the smallest eigenvalue as damping. Time O(n^2 (d / 2 + rank) +
        n rank^2), memory O(n rank).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> preconditioner = sgp.preconditioners.Nystrom(rank=200)
        >>> solver = sgp.solvers.ConjugateGradients(preconditioner=preconditioner)
    """

    rank: int = eqx.field(static=True, converter=checks.plain, default=100)
    seed: int = eqx.field(static=True, converter=checks.plain, default=0)

    def __check_init__(self) -> None:
        checks.count("rank", self.rank)
        checks.count("seed", self.seed, 0)

    @compiled_unless_traced
    def factorize(self, operator: KernelOperator) -> PreconditionerFactor:
        """Multiply K with the directions, compute F and R; noise must be positive."""
        shape = operator.size, min(self.rank, operator.size)
        normal = jax.random.normal(jax.random.key(self.seed), shape, operator.dtype)
        Z = linalg.orthonormal_basis(divided(normal, operator.mesh))
        product = operator.matmul(Z) - operator.noise()[:, None] * Z
        return _damped(nystrom_factor(Z, product), operator)


def nystrom_factor(
    Z: Float[Array, "n rank"], product: Float[Array, "n rank"]
) -> Float[Array, "rank n"]:
    """F with F'F = K Z (Z'K Z)^-1 Z'K, given orthonormal directions Z and the product K Z."""
    # Jitter keeps rounding errors in F small where K is singular along Z.
    jittered = product + jnp.finfo(Z.dtype).eps * jnp.linalg.norm(product) * Z
    tril = linalg.factorize(matmul(Z.T, jittered), warn=False).tril
    return linalg.solve_lower(tril, jittered.T)


def whitener(H: Float[Array, "b b"], noise: Float[Array, " b"]) -> Float[Array, "b b"]:
    """A lower triangular W with W'W close to the inverse of a block, in O(b^3).

    If the noise is below rounding errors, the diagonal is raised: small eigenvalues would be
    rounding errors, and their inverses would make a solver diverge. With a larger diagonal it takes
    smaller steps along their eigenvectors, and its fixed point is still the solution.

    Args:
        H: rows and the same columns of the matrix, shape (b, b).
        noise: noise variances that are part of its diagonal, shape (b,).
    """
    damped = H + jnp.diag(jnp.maximum(linalg.least_diagonal(jnp.trace(H)) - noise, 0.0))
    return linalg.triangular_inverse(linalg.factorize(damped, warn=False).tril)
