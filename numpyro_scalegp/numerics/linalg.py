"""Factorizations of symmetric positive definite matrices, with derivatives made of products.

Triangular solves are far slower than matrix products, and take most of the time of differentiating
a factorization. Here the derivatives reuse the factor and are products with its explicit inverse,
which a recursive splitting computes at the speed of products as well. All rules are forward-mode
rules, so forward, reverse and second derivatives work.
"""

import functools
import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.core.mesh import divided, filled, mesh_of, stack_shares
from numpyro_scalegp.numerics import blocked, lapack, rounding
from numpyro_scalegp.numerics.derivatives import custom_jvp_all_orders
from numpyro_scalegp.programs.compiled import compiled_unless_traced

# A factorization tries these jitters one after another, in units of `eps` times the mean diagonal.
JITTER_LADDER = (0.0, 1e1, 1e2, 1e3, 1e4)
# Below this, a conditional variance of an observation in units of rounding has few digits.
FEW_ROUNDINGS = 30.0
# A recursive splitting stops at blocks of this size, or at a sixteenth of the matrix.
_LEAF = 256
_MAX_LEAVES = 16


# Products in full precision: TF32, the default for float32 on GPUs, has too few digits here.
matmul = functools.partial(jnp.matmul, precision="highest")
# Settings of `jax_default_matmul_precision` with the digits of float32, in several passes of the
# tensor cores.
_SEVERAL_PASSES = ("TF32_TF32_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9")


class Factor(NamedTuple):
    """A Cholesky factor, and the jitter that was added to obtain it."""

    tril: Float[Array, "n n"]  # lower triangular; NaN where every attempt failed
    jitter: Float[Array, ""]  # added to the diagonal, in units of the matrix


def solve_lower(tril: Float[Array, "m m"], B: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Solve L X = B in O(m^2 n); on a mesh, each device solves for its columns."""
    if (mesh := mesh_of(B)) is None:
        return lapack.solve_lower(tril, B)
    # As a batch, which XLA divides; it would gather the columns of a single solve.
    shares = filled(mesh, B.T, repeat=False).reshape(mesh.size, -1, len(tril)).mT
    trils = jnp.broadcast_to(tril, (mesh.size, *tril.shape))
    solutions = solve_triangular(*divided((trils, shares), mesh), lower=True)
    return jnp.moveaxis(solutions, 0, 1).reshape(len(tril), -1)[:, : B.shape[1]]


def orthonormal_basis(A: Float[Array, "n k"]) -> Float[Array, "n k"]:
    """The orthonormal basis Q of A = Q R with a positive diagonal of R, n >= k, in O(n k^2).

    If rows lie on a mesh, only the triangular factors are gathered.
    """
    if (mesh := mesh_of(A)) is None:
        Q, R = jnp.linalg.qr(A)
    else:
        bases, triangles = stack_shares(mesh, jnp.linalg.qr, A)
        joint, R = jnp.linalg.qr(jax.lax.collapse(triangles, 0, 2))
        shares = matmul(bases, joint.reshape(mesh.size, -1, A.shape[1]))
        Q = jax.lax.collapse(shares, 0, 2)[: len(A)]
    return Q * jnp.where(jnp.diagonal(R) < 0, -1.0, 1.0).astype(A.dtype)


def default_jitter(dtype: jnp.dtype) -> float:
    """The default jitter of a covariance without noise, relative to the prior variance."""
    return 100.0 * float(jnp.finfo(dtype).eps)


def add_jitter(K: Float[Array, "n n"], jitter: float | None = None) -> Float[Array, "n n"]:
    """Add `jitter` times the mean diagonal to the diagonal, differentiably."""
    return K + added_variance(jnp.diagonal(K), jitter) * jnp.eye(K.shape[0], dtype=K.dtype)


def added_variance(variance: Float[Array, " n"], jitter: float | None = None) -> Float[Array, ""]:
    """The jitter of a covariance with these variances: `jitter` times their mean."""
    return (default_jitter(variance.dtype) if jitter is None else jitter) * jnp.mean(variance)


def least_diagonal(trace: Float[Array, ""]) -> Float[Array, ""]:
    """The smallest diagonal for which rounding does not spoil the inverse of a matrix."""
    return 10.0 * jnp.finfo(trace.dtype).eps * trace


@compiled_unless_traced
def factorize(
    K: Float[Array, "n n"],
    *,
    escalate: bool = True,
    warn: bool = True,
    noise: Float[Array, "..."] | None = None,
    limit: float | None = None,
    unit: Float[Array, ""] | None = None,
) -> Factor:
    """Factorize K = L L' without a derivative, and add jitter only if that fails.

    The result holds the jitter. A warning tells of added jitter, or that every attempt failed.

    Args:
        K: symmetric positive definite matrix, shape (n, n).
        escalate: whether to try the steps of `JITTER_LADDER` if the factorization of K fails.
        warn: whether to warn of added jitter or failure.
        noise: noise variances on the diagonal of K; the warning compares the jitter to their
            minimum.
        limit: the relative rounding of the factor above which to warn, too; by default
            `rounding.FEW_DIGITS` if `noise` is given, and no limit otherwise.
        unit: the variance to which `JITTER_LADDER` is relative, by default the mean diagonal.

    Returns:
        The factor and the added jitter, in O(n^3) time for each attempt.
    """
    K = jax.lax.stop_gradient(K)
    scale = jnp.finfo(K.dtype).eps * (jnp.mean(jnp.diagonal(K)) if unit is None else unit)
    ladder = jnp.array(JITTER_LADDER if escalate else JITTER_LADDER[:1], K.dtype) * scale

    def is_factor(tril: Array) -> Array:
        # After an infinite pivot, later pivots may still be finite.
        return jnp.all(jnp.isfinite(jnp.diagonal(tril)))

    def failed(state: tuple[Array, Array]) -> Array:
        step, tril = state
        return (step < 0) | (~is_factor(tril) & (step + 1 < ladder.size))

    def attempt(state: tuple[Array, Array]) -> tuple[Array, Array]:
        step = state[0] + 1
        jittered = K + ladder[step] * jnp.eye(K.shape[0], dtype=K.dtype)
        return step, factorize_on_platform(jittered)

    untried = (jnp.full((), -1, jnp.int32), jnp.zeros_like(K))

    def tried_in_loop() -> tuple[Array, Array]:
        return jax.lax.while_loop(failed, attempt, untried)  # one copy of the factorization

    def tried_before() -> tuple[Array, Array]:
        # On an accelerator each condition takes a round trip to the host.
        return jax.lax.while_loop(failed, attempt, attempt(untried))

    step, tril = jax.lax.platform_dependent(cpu=tried_in_loop, default=tried_before)
    works = is_factor(tril)
    if warn:
        ratio, few = jnp.zeros((), K.dtype), jnp.zeros((), bool)
        if noise is not None:
            ratio = ladder[step] / jnp.min(jax.lax.stop_gradient(noise))
            limit = rounding.FEW_DIGITS if limit is None else limit
        if limit is not None:
            few = rounding.relative_rounding(tril) > limit
        warn_of_steps(works, step, ratio, few)
    return Factor(jnp.where(works, tril, jnp.nan), ladder[step])


def with_jitter(K: Float[Array, "n n"], factor: Factor) -> Float[Array, "n n"]:
    """The matrix that was factorized: K with the added jitter."""
    return K + factor.jitter * jnp.eye(K.shape[0], dtype=K.dtype)


def warn_of_steps(
    works: Bool[Array, ""],
    step: Int[Array, ""],
    ratio: ArrayLike = 0.0,
    few: ArrayLike = False,
) -> None:
    """Warn on the host of added jitter, of a failed factorization or of few digits.

    Args:
        works: whether there is a factor.
        step: the step of `JITTER_LADDER`.
        ratio: the added jitter divided by the noise variance; zero without noise.
        few: whether the factor has few digits.
    """
    few = jnp.asarray(few)
    call_where(~works | (step > 0) | few, _warn_of_jitter, ~works, step, ratio, few)


def warn_of_rounding(tril: Float[Array, "n n"], limit: float = rounding.FEW_DIGITS) -> None:
    """Warn as `factorize` does if a factor has few digits; see `rounding.relative_rounding`."""
    few = rounding.relative_rounding(tril) > limit
    warn_of_steps(jnp.ones((), bool), jnp.zeros((), jnp.int32), few=few)


def added_jitter(factor: Factor) -> Float[Array, ""]:
    """The jitter added to the diagonal, or NaN if the factorization failed."""
    return factor.jitter + 0.0 * factor.tril[0, 0]


def warn_of_added_jitter(jitters: Float[Array, "..."]) -> None:
    """Warn as `factorize` does, but on the host: JAX does not cache programs that can warn on disk.

    Args:
        jitters: results of `added_jitter`. If they are traced, there is no warning.
    """
    if checks.is_concrete(jitters):
        values = np.asarray(jitters)
        works = not np.isnan(values).any()
        if not works or (values > 0).any():
            _warn_of_jitter(not works, 1, 0.0, False)


def _warn_of_jitter(fails: ArrayLike, step: ArrayLike, ratio: ArrayLike, few: ArrayLike) -> None:
    """Warn on the host, once for each message under Python's default filter.

    The ratio to the noise variance is rounded to a power of ten, so that there are few messages.
    """
    if fails:
        warnings.warn(
            "a covariance matrix is not positive definite or not finite: the result is NaN. Check "
            "the inputs for NaN, raise the noise variance or the `jitter` argument, remove "
            "duplicate rows, or work in float64. During warmup a sampler may try hyperparameters "
            "for which this is so: it rejects them, and no change is needed.",
            RuntimeWarning,
            stacklevel=1,
        )
    elif np.asarray(step) > 0:
        relative = "" if ratio == 0.0 else f", about {10.0 ** np.round(np.log10(ratio)):g} times"
        relative += relative and " the noise variance"
        warnings.warn(
            "a covariance matrix was not positive definite in this precision, so jitter was added "
            f"to its diagonal{relative} (see `diagnostics`). Raise the noise variance or the "
            "`jitter` argument, or work in float64, unless a sampler only tried it in warmup.",
            RuntimeWarning,
            stacklevel=1,
        )
    elif few:
        warnings.warn(
            "a covariance matrix is so close to singular that its log density and gradient, and "
            "posterior means relative to their standard deviations, have few digits left in this "
            "precision (see `diagnostics`). Work in float64 (numpyro.enable_x64()), raise the "
            "noise variance or the `jitter` argument, or take a rougher kernel, unless a sampler "
            "only tried it in warmup.",
            RuntimeWarning,
            stacklevel=1,
        )


def factorize_on_platform(K: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The Cholesky factor, NaN or infinite on its diagonal where K is not positive definite."""
    if K.shape[0] > blocked.MAX_SIZE:
        return lapack.cholesky(K)
    return jax.lax.platform_dependent(K, cpu=blocked.cholesky, default=lapack.cholesky)


def large_matmul(A: Float[Array, "n m"], B: Float[Array, "m k"]) -> Float[Array, "n k"]:
    """`matmul`, in several passes of the tensor cores if JAX's precision of products says so."""
    setting = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return jnp.matmul(A, B, precision=setting if setting in _SEVERAL_PASSES else "highest")


def transposed_matmul(A: Float[Array, "m n"], B: Float[Array, "m k"]) -> Float[Array, "n k"]:
    """A'B, where the smaller factor is transposed: copies of a large one are slow on a CPU."""
    is_wide = not is_symbolic_dim(B.shape[1]) and B.shape[1] >= A.shape[1]
    return matmul(A.T, B) if is_wide else matmul(B.T, A).T


def triangular_inverse(L: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Invert a lower triangular matrix: n^3 / 3 operations, nearly all in products."""
    if L.shape[0] > blocked.MAX_SIZE:
        return _split_inverse(L, _leaf_size(L.shape[0]))
    split = functools.partial(_split_inverse, leaf=_leaf_size(L.shape[0]))
    return jax.lax.platform_dependent(L, cpu=blocked.triangular_inverse, default=split)


def _split_inverse(L: Float[Array, "n n"], leaf: int) -> Float[Array, "n n"]:
    n = L.shape[0]
    if n <= leaf:
        return lapack.solve_lower(L, jnp.eye(n, dtype=L.dtype))
    h = n // 2
    top, bottom = _split_inverse(L[:h, :h], leaf), _split_inverse(L[h:, h:], leaf)
    return blocked.merge_inverses(top, bottom, L[h:, :h], L[h:, h:])


def inverse_from_factor(L: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Compute (L L')^-1, symmetric, from a lower triangular L in 2 n^3 / 3 operations."""

    def gram(W: Array, leaf: int) -> Array:  # W'W for a lower triangular W
        n = W.shape[0]
        if n <= leaf:
            return matmul(W.T, W)
        h = n // 2
        top, corner, bottom = W[:h, :h], W[h:, :h], W[h:, h:]
        off = matmul(bottom.T, corner)
        first = gram(top, leaf) + matmul(corner.T, corner)
        return jnp.block([[first, off.T], [off, gram(bottom, leaf)]])

    return gram(triangular_inverse(L), _leaf_size(L.shape[0]))


def triangular_outer(W: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """W W' for a lower triangular W, with as few as a third of a full product's operations."""

    def outer(W: Array, leaf: int) -> Array:
        n = W.shape[0]
        if n <= leaf:
            return matmul(W, W.T)
        h = n // 2
        top, corner, bottom = W[:h, :h], W[h:, :h], W[h:, h:]
        off = matmul(corner, top.T)
        last = outer(bottom, leaf) + matmul(corner, corner.T)
        return jnp.block([[outer(top, leaf), off.T], [off, last]])

    return outer(W, _leaf_size(W.shape[0]))


def triangular_product(A: Float[Array, "n n"], B: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """A B for lower triangular A and B, with as few as a third of a full product's operations."""

    def product(A: Array, B: Array, leaf: int) -> Array:
        n = A.shape[0]
        if n <= leaf:
            return matmul(A, B)
        h = n // 2
        corner = matmul(A[h:, :h], B[:h, :h]) + matmul(A[h:, h:], B[h:, :h])
        top, bottom = product(A[:h, :h], B[:h, :h], leaf), product(A[h:, h:], B[h:, h:], leaf)
        return jnp.block([[top, jnp.zeros_like(corner.T)], [corner, bottom]])

    return product(A, B, _leaf_size(A.shape[0]))


def _leaf_size(n: int) -> int:
    return max(_LEAF, math.ceil(n / _MAX_LEAVES))


def half(A: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Keep the lower triangle and half the diagonal: B with B + B' = A, for a symmetric A."""
    n = A.shape[0]
    mask = jnp.tril(jnp.ones((n, n), A.dtype)) - 0.5 * jnp.eye(n, dtype=A.dtype)
    return A * mask


def _log_derivative(W: Float[Array, "n n"], dK: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """L^-1 dL = half(W dK W'), for K = L L' and W = L^-1."""
    return half(matmul(matmul(W, dK), W.T))


# Each differentiable function below takes the matrix and, as an auxiliary input without derivative,
# its factor, so that a factor is computed once for the value and all derivatives.


@compiled_unless_traced
def cholesky(K: Float[Array, "n n"], *, warn: bool = True) -> Float[Array, "n n"]:
    """Factorize K = L L'; dL = L half(L^-1 dK L^-T). Returns L, shape (n, n)."""
    return cholesky_given(K, factorize(K, warn=warn).tril)


@compiled_unless_traced
def inverse_cholesky(K: Float[Array, "n n"], *, warn: bool = True) -> Float[Array, "n n"]:
    """Whiten K = L L': W = L^-1, shape (n, n); dW = -half(W dK W') W. Warns as `factorize`."""
    return inverse_cholesky_given(K, factorize(K, warn=warn).tril)


def gaussian_log_density(
    K: Float[Array, "n n"], y: Float[Array, "*batch n"], factor: Factor
) -> Float[Array, "*batch"]:
    """The log density of each row of y under N(0, K), given `factor = factorize(K)`.

    d log p = (a'dK a - tr(K^-1 dK)) / 2 - a'dy with a = K^-1 y, from the factor's explicit inverse.
    """
    rows = y.astype(jnp.result_type(y, K)).reshape(-1, y.shape[-1])
    log_density = jax.vmap(lambda row: _log_density(K, row, factor.tril))
    return log_density(rows).reshape(y.shape[:-1])


@custom_jvp_all_orders
def cholesky_given(K: Float[Array, "n n"], L: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The factor L of K, with the derivative of `cholesky(K)`."""
    return L


@cholesky_given.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (K, L), (dK, _) = primals, tangents
    W = inverse_cholesky_given(K, L)
    value = cholesky_given(K, L)
    return value, matmul(value, _log_derivative(W, dK))


@custom_jvp_all_orders
def inverse_cholesky_given(K: Float[Array, "n n"], L: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """`inverse_cholesky(K)`, given the factor L of K."""
    return triangular_inverse(L)


@inverse_cholesky_given.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (K, L), (dK, _) = primals, tangents
    W = inverse_cholesky_given(K, L)
    return W, -matmul(_log_derivative(W, dK), W)


@custom_jvp_all_orders
def _inverse(K: Array, L: Array) -> Array:
    return inverse_from_factor(L)


@_inverse.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (K, L), (dK, _) = primals, tangents
    P = _inverse(K, L)
    return P, -matmul(matmul(P, dK), P)


@custom_jvp_all_orders
def _log_density(K: Array, y: Array, L: Array) -> Array:
    white = lapack.solve_lower(L, y)
    log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(L)))
    return -0.5 * (white.dot(white) + log_det + y.size * math.log(2.0 * math.pi))


@_log_density.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    (K, y, L), (dK, dy, _) = primals, tangents
    P = _inverse(K, L)
    a = matmul(P, y)
    tangent = 0.5 * (a.dot(matmul(dK, a)) - jnp.sum(P * dK)) - a.dot(dy)
    return _log_density(K, y, L), tangent
