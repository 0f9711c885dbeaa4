"""Normal distributions of single values given their nearest neighbors, many at once."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core import linalg
from numpyro_scalegp.core.derivatives import lasting_jvp
from numpyro_scalegp.core.host import largest_of_batch
from numpyro_scalegp.kernels import AbstractKernel

# The name of what is worth keeping for the way back.
SOLUTIONS = "solutions"

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
    both = is_given[:, :, None] & is_given[:, None, :]
    diagonal = jnp.where(is_given, noise, 1.0)[:, :, None] * jnp.eye(K.shape[-1], dtype=dtype)
    H = jnp.where(both, K.astype(dtype), 0.0) + diagonal
    return Systems(H, jnp.where(is_given, C.astype(dtype), 0.0), variance.astype(dtype))


def moments(
    found: Systems, values: Float[Array, "b k s"]
) -> tuple[Float[Array, "b s"], Float[Array, " b"]]:
    """Means, for each of s sets of given values, and variances, in O(b k^3).

    With a = H^-1 r and b = H^-1 c: mean c'a, variance v - c'b, and derivatives
    a'dc - b'dH a + b'dr and dv - 2 b'dc + b'dH b, from the factor of the value.
    """
    return _moments(found.H, found.C, found.variance, values, _factor(found.H))


def weights(found: Systems) -> tuple[Float[Array, "b k"], Float[Array, " b"]]:
    """H^-1 c, which multiplies given values in the mean, and the variances."""
    b = _solutions(found.H, found.C[..., None], _factor(found.H))[..., 0]
    return b, found.variance - jnp.sum(b * found.C, axis=1)


def count_of_few_digits(variance: Float[Array, " b"], left: Float[Array, " b"]) -> Float[Array, ""]:
    """How many variances have so little left, given the others, that rounding shows."""
    rounding = linalg.FEW_ROUNDINGS * jnp.finfo(left.dtype).eps
    few = jax.lax.stop_gradient(left < rounding * variance)
    return jnp.sum(few.astype(left.dtype))


def warn_of_few_digits(count: Float[Array, ""]) -> None:
    """Warn, on the host, if there are any."""
    none = jnp.zeros((), jnp.int32)
    linalg.warn_of_steps(jnp.ones((), bool), none, few=jax.lax.stop_gradient(count) > 0)


@lasting_jvp
def _moments(H: Array, C: Array, variance: Array, values: Array, L: Array) -> tuple[Array, Array]:
    white = solve_triangular(L, jnp.concatenate([C[..., None], values], axis=2), lower=True)
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


def _solutions(H: Array, B: Array, L: Array) -> Array:
    """H^-1 B, given the factor of H, with derivatives of every order in H and B."""

    def solve(_: Any, B: Array) -> Array:
        white = solve_triangular(L, B, lower=True)
        return solve_triangular(L, white, lower=True, trans=1)

    return jax.lax.custom_linear_solve(lambda B: _product(H, B), B, solve, symmetric=True)


def _factor(H: Float[Array, "b k k"]) -> Float[Array, "b k k"]:
    """Cholesky factors, without a derivative; with jitter on the diagonal of those that need it."""
    H = jax.lax.stop_gradient(H)
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
        again = jnp.linalg.cholesky(H + (ladder[step] * unit)[:, None, None] * identity)
        return step, jnp.where(fails(L)[:, None, None], again, L)

    def with_jitter(L: Array) -> Array:
        step, L = jax.lax.while_loop(go_on, attempt, (jnp.zeros((), jnp.int32), L))
        linalg.warn_of_steps(jnp.all(~fails(L)), step)
        return L

    L = jnp.linalg.cholesky(H)
    # A loop costs more than the factors, even if it ends at once.
    return jax.lax.cond(largest_of_batch(jnp.any(fails(L))), with_jitter, lambda L: L, L)
