"""Normal distributions of single values given their nearest neighbors, many at once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core import linalg, rounding
from numpyro_scalegp.core.derivatives import lasting_jvp
from numpyro_scalegp.core.host import largest_of_batch
from numpyro_scalegp.kernels import AbstractKernel

# The name of what is worth keeping for the way back.
SOLUTIONS = "solutions"
# Operations of a batched call of LAPACK from which jaxlib 0.10 shares it among the threads that run
# the program, and waits for them. As many such calls at once as there are threads wait for ever.
# Calls stay below, at the same speed.
_MAX_OPERATIONS = 200_000

_product = functools.partial(jnp.matmul, precision="highest")


class Systems(NamedTuple):
    """What the conditional distributions of b values given k others each rest on."""

    H: Float[Array, "b k k"]  # covariance of the given values
    C: Float[Array, "b k"]  # their covariance with the value
    variance: Float[Array, " b"]  # of the value


def systems(
    kernel: AbstractKernel,
    given: Float[Array, "b k d"],
    noise: Float[Array, "b k"],
    is_given: Bool[Array, "b k"],
    points: Float[Array, "b d"],
    part: AbstractKernel | None = None,
    is_part: Bool[Array, "b k"] | None = None,
) -> Systems:
    """The systems of values of f at points, given noisy ones at others.

    Args:
        kernel: covariance function of what is given, without its noise.
        given: inputs of the given values.
        noise: their noise variances.
        is_given: where there are fewer, which of them count.
        points: inputs of the values.
        part: covariance function of the values, with each other and with what is given, where they
            are those of a part of f.
        is_part: which of the given values are of that part, too.
    """
    own = kernel if part is None else part
    dtype = noise.dtype

    def of_one(rows: Array, point: Array, is_part: Array | None) -> tuple[Array, Array, Array]:
        K = kernel.covariance(rows)
        if is_part is not None and part is not None:
            K = jnp.where(is_part[:, None] | is_part[None, :], part.covariance(rows), K)
        return K, own(rows, point[None])[:, 0], own.diag(point[None])[0]

    K, C, variance = jax.vmap(of_one)(given, points, is_part)
    H = _covariances(K, noise, is_given)
    return Systems(H, jnp.where(is_given, C.astype(dtype), 0.0), variance.astype(dtype))


def _covariances(
    K: Float[Array, "b k k"], noise: Float[Array, "b k"], is_given: Bool[Array, "b k"]
) -> Float[Array, "b k k"]:
    """Covariances of noisy values; where there are fewer, the identity."""
    both = is_given[:, :, None] & is_given[:, None, :]
    diagonal = jnp.where(is_given, noise, 1.0)[:, :, None] * jnp.eye(K.shape[-1], dtype=noise.dtype)
    return jnp.where(both, K.astype(noise.dtype), 0.0) + diagonal


class Trouble(NamedTuple):
    """What is to be warned of, outside of loops and of what is computed anew for derivatives.

    Each adds up over rows.
    """

    num_failed: Float[Array, ""]  # factors that are none
    num_lifted: Float[Array, ""]  # factors that took jitter
    num_few: Float[Array, ""]  # variances so small, beside what they were, that rounding shows

    def warn(self) -> None:
        """Warn, on the host, if there is any."""
        failed, lifted, few = jax.lax.stop_gradient(tuple(self))
        linalg.warn_of_steps(failed == 0, (lifted > 0).astype(jnp.int32), few=few > 0)


def few_digits(
    variance: Float[Array, "*b"],
    left: Float[Array, "*b"],
    size: int,
    limit: float = rounding.FEW_DIGITS,
) -> Trouble:
    """The trouble with what is left of variances.

    Args:
        variance: what they were.
        left: what is left of them.
        size: number of values each is left by. The norm of their covariance is at most the sum of
            their variances, and about that for neighbors.
        limit: of rounding relative to what is left; see `rounding.relative_rounding`.
    """
    errors = rounding.unit(left.dtype) * size * variance
    few = jax.lax.stop_gradient(errors > limit * left)
    none = jnp.zeros((), left.dtype)
    return Trouble(none, none, jnp.sum(few.astype(left.dtype)))


class Groups(NamedTuple):
    """Noisy values in groups of k, of which o stand at some places, each given those before it."""

    H: Float[Array, "b k k"]  # covariance of the values
    places: Int[Array, "b o"]


def groups(
    kernel: AbstractKernel,
    rows: Float[Array, "b k d"],
    noise: Float[Array, "b k"],
    is_given: Bool[Array, "b k"],
    places: Int[Array, "b o"],
) -> Groups:
    """Groups of values of f with noise.

    Args:
        kernel: covariance function of f.
        rows: inputs of the values.
        noise: noise variances.
        is_given: where there are fewer, which of them count.
        places: of those in question.
    """
    return Groups(_covariances(jax.vmap(kernel.covariance)(rows), noise, is_given), places)


def errors(
    found: Groups, values: Float[Array, "b k s"]
) -> tuple[Float[Array, "b o s"], Float[Array, "b o"], Trouble]:
    """Values minus their means given those before, for s sets, and variances, in O(b k^2 (k + o)).

    Trouble is for the caller to warn of, outside of what is computed anew for derivatives.

    One factor H = L L' has them all: errors L_ii z_i with z = L^-1 r, variances L_ii^2. With a, b
    the solutions for what comes before value i, of which c are the covariances with it, derivatives
    are dr_i - a'dc + b'dH a - b'dr and dH_ii - 2 b'dc + b'dH b.
    """
    L, trouble = _factors(found.H)
    return *_errors(found.H, values, found.places, L), trouble


def variances(found: Groups) -> Float[Array, "b o"]:
    """What the values vary by alone."""
    return _diagonals(*found)


def weights_in_groups(found: Groups) -> tuple[Float[Array, "b o k"], Float[Array, "b o"]]:
    """What multiplies the values before each in its mean, and the variances."""
    H, places = found
    C = _before(H, places)
    b = _leading_solutions(H, C[..., None], places, _factor(H))[..., 0]
    return b.mT, variances(found) - jnp.sum(b * C, axis=1)


def moments(
    found: Systems, values: Float[Array, "b k s"], limit: float = rounding.FEW_DIGITS
) -> tuple[Float[Array, "b s"], Float[Array, " b"]]:
    """Means, for each of s sets of given values, and variances, in O(b k^3).

    Warns where the pivots of H are so small that both have few digits.

    With a = H^-1 r and b = H^-1 c: mean c'a, variance v - c'b, and derivatives
    a'dc - b'dH a + b'dr and dv - 2 b'dc + b'dH b, from the factor of the value.
    """
    L, trouble = _factors(found.H)
    variances, pivots = (jnp.diagonal(A, axis1=1, axis2=2) for A in (found.H, L))
    few = few_digits(variances, jnp.square(pivots), L.shape[1], limit)
    jax.tree.map(jnp.add, trouble, few).warn()
    return _moments(found.H, found.C, found.variance, values, L)


def weights(found: Systems) -> tuple[Float[Array, "b k"], Float[Array, " b"]]:
    """H^-1 c, which multiplies given values in the mean, and the variances."""
    b = _solutions(found.H, found.C[..., None], _factor(found.H))[..., 0]
    return b, found.variance - jnp.sum(b * found.C, axis=1)


@lasting_jvp
def _moments(H: Array, C: Array, variance: Array, values: Array, L: Array) -> tuple[Array, Array]:
    white = _solve(L, jnp.concatenate([C[..., None], values], axis=2))
    mean = jnp.sum(white[..., :1] * white[..., 1:], axis=1)
    return mean, variance - jnp.sum(jnp.square(white[..., 0]), axis=1)


@_moments.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[tuple, tuple]:
    (H, C, variance, values, L), (dH, dC, dvariance, dvalues, _) = primals, tangents
    found = _solutions(H, jnp.concatenate([C[..., None], values], axis=2), L)
    found = checkpoint_name(found, SOLUTIONS)
    b, A = found[..., :1], found[..., 1:]
    changed = dC[..., None] - _product(dH, b)
    dmean = jnp.sum(A * changed + b * dvalues, axis=1)
    moved = dvariance - jnp.sum(b[..., 0] * (dC + changed[..., 0]), axis=1)
    mean, rest = jnp.sum(C[..., None] * A, axis=1), variance - jnp.sum(C * b[..., 0], axis=1)
    return (mean, rest), (dmean, moved)


def _cholesky(H: Float[Array, "b k k"]) -> Float[Array, "b k k"]:
    factorize = functools.partial(jax.lax.linalg.cholesky, symmetrize_input=False)
    return _in_calls(factorize, H.shape[1] ** 3 // 3, H)


def _solve(L: Float[Array, "b k k"], B: Float[Array, "b k s"], trans: int = 0) -> Array:
    solve = functools.partial(solve_triangular, lower=True, trans=trans)
    return _in_calls(solve, B.shape[1] ** 2 * B.shape[2], L, B)


def _in_calls(function: Callable[..., Array], operations: int, *batches: Array) -> Array:
    """A function of each member of batches; on CPUs in calls of few operations each."""
    size = len(batches[0])
    if jax.default_backend() == "cpu":
        size = max(1, (_MAX_OPERATIONS - 1) // max(1, operations))
    starts = range(0, len(batches[0]), size)
    parts = [function(*(batch[start : start + size] for batch in batches)) for start in starts]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _at(values: Float[Array, "b k *s"], places: Int[Array, "b o"]) -> Float[Array, "b o *s"]:
    return jax.vmap(lambda values, places: values[places])(values, places)


def _diagonals(H: Float[Array, "b k k"], places: Int[Array, "b o"]) -> Float[Array, "b o"]:
    return _at(jnp.diagonal(H, axis1=1, axis2=2), places)


def _is_before(size: int, places: Int[Array, "b o"]) -> Bool[Array, "b k o"]:
    return jnp.arange(size, dtype=places.dtype)[:, None] < places[:, None, :]


def _before(H: Float[Array, "b k k"], places: Int[Array, "b o"]) -> Float[Array, "b k o"]:
    """Covariances of the values at places with those before."""
    return jnp.where(_is_before(H.shape[1], places), _at(H, places).mT, 0.0)


@lasting_jvp
def _errors(H: Array, values: Array, places: Array, L: Array) -> tuple[Array, Array]:
    white = _solve(L, values)
    scale = _diagonals(L, places)
    return scale[..., None] * _at(white, places), jnp.square(scale)


@_errors.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[tuple, tuple]:
    (H, values, places, L), (dH, dvalues, _, _) = primals, tangents
    found = checkpoint_name(_given_before(H, values, places, L), SOLUTIONS)
    b, A = found[..., 0], found[..., 1:]
    C, dC = _before(H, places), _before(dH, places)
    changed = dC - _product(dH, b)
    variance, dvariance = _diagonals(H, places), _diagonals(dH, places)
    error = _at(values, places) - jnp.sum(C[..., None] * A, axis=1)
    dmean = jnp.sum(A * changed[..., None], axis=1) + _product(b.mT, dvalues)
    derror = _at(dvalues, places) - dmean
    left = variance - jnp.sum(C * b, axis=1)
    return (error, left), (derror, dvariance - jnp.sum(b * (dC + changed), axis=1))


@lasting_jvp
def _given_before(H: Array, values: Array, places: Array, L: Array) -> Array:
    """Solutions for the covariances with, and for the values before, each of the places.

    L^-1 of the former are rows of L.
    """
    before = _is_before(H.shape[1], places)[..., None]
    white = _solve(L, values)[:, :, None]
    both = [
        _at(L, places).mT[..., None],
        jnp.broadcast_to(white, before.shape[:3] + white.shape[3:]),
    ]
    return _of_columns(
        lambda B: _solve(L, B, 1),
        jnp.where(before, jnp.concatenate(both, axis=3), 0.0),
    )


@_given_before.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    (H, _, places, L), (dH, dvalues, _, _) = primals, tangents
    found = _given_before(*primals)
    before = _is_before(H.shape[1], places)[..., None]
    both = [_before(dH, places)[..., None], jnp.where(before, dvalues[:, :, None], 0.0)]
    moved = jnp.where(before, _of_columns(lambda B: _product(dH, B), found), 0.0)
    return found, _leading_solutions(H, jnp.concatenate(both, axis=3) - moved, places, L)


def _of_columns(function: Callable[[Array], Array], B: Float[Array, "b k o s"]) -> Array:
    return function(B.reshape(*B.shape[:2], -1)).reshape(B.shape)


def _leading_solutions(
    H: Float[Array, "b k k"],
    B: Float[Array, "b k o s"],
    places: Int[Array, "b o"],
    L: Float[Array, "b k k"],
) -> Float[Array, "b k o s"]:
    """Solutions with the blocks of H before each of the places, given the factor of H.

    B is zero from these on, and so are they. Derivatives of every order in H and B.
    """
    before = _is_before(H.shape[1], places)[..., None]

    def solve(_: Any, B: Array) -> Array:
        white = _of_columns(lambda B: _solve(L, B), B)
        white = jnp.where(before, white, 0.0)
        return _of_columns(lambda B: _solve(L, B, 1), white)

    def product(B: Array) -> Array:
        seen = _of_columns(lambda B: _product(H, B), jnp.where(before, B, 0.0))
        return jnp.where(before, seen, B)

    return jax.lax.custom_linear_solve(product, B, solve, symmetric=True)


def _solutions(H: Array, B: Array, L: Array) -> Array:
    """H^-1 B, given the factor of H, with derivatives of every order in H and B."""

    def solve(_: Any, B: Array) -> Array:
        white = _solve(L, B)
        return _solve(L, white, 1)

    return jax.lax.custom_linear_solve(lambda B: _product(H, B), B, solve, symmetric=True)


def _factor(H: Float[Array, "b k k"]) -> Float[Array, "b k k"]:
    """Cholesky factors, as `_factors` makes them; with a warning where they took jitter."""
    L, trouble = _factors(H)
    trouble.warn()
    return L


def _factors(H: Float[Array, "b k k"]) -> tuple[Float[Array, "b k k"], Trouble]:
    """Cholesky factors, without a derivative; with jitter on the diagonal of those that need it."""
    # LAPACK wants columns, which those of the transpose are as they lie in memory.
    H = jax.lax.stop_gradient(H).mT
    identity = jnp.eye(H.shape[-1], dtype=H.dtype)
    unit = jnp.finfo(H.dtype).eps * jnp.mean(jnp.diagonal(H, axis1=1, axis2=2), axis=1)
    ladder = jnp.array(linalg.JITTER_LADDER, H.dtype)

    def fails(L: Array) -> Array:
        return ~jnp.all(jnp.isfinite(jnp.diagonal(L, axis1=1, axis2=2)), axis=1)

    def go_on(state: tuple[Array, Array]) -> Array:
        step, L = state
        return largest_of_batch(jnp.any(fails(L)) & (step + 1 < ladder.size))

    def attempt(state: tuple[Array, Array]) -> tuple[Array, Array]:
        step, L = state[0] + 1, state[1]
        again = _cholesky(H + (ladder[step] * unit)[:, None, None] * identity)
        return step, jnp.where(fails(L)[:, None, None], again, L)

    def with_jitter(L: Array) -> Array:
        return jax.lax.while_loop(go_on, attempt, (jnp.zeros((), jnp.int32), L))[1]

    L = first = _cholesky(H)
    # A loop costs more than the factors, even if it ends at once.
    L = jax.lax.cond(largest_of_batch(jnp.any(fails(first))), with_jitter, lambda L: L, first)
    num_lifted, num_failed = (jnp.sum(fails(one).astype(L.dtype)) for one in (first, L))
    return L, Trouble(num_failed, num_lifted, jnp.zeros_like(num_lifted))
