"""Conditional normal distributions of single values given their nearest neighbors, batched."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.export import is_symbolic_dim
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core.host import largest_of_batch
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics import linalg, rounding
from numpyro_scalegp.numerics.derivatives import custom_jvp_all_orders

# The checkpoint name of the solutions that the backward pass reuses.
SOLUTIONS = "solutions"
# From this many operations on, jaxlib 0.10 splits a batched LAPACK call among the threads that run
# the program, and waits for them: with as many such calls as threads, all wait forever. Smaller
# calls avoid this deadlock, at the same speed.
_MAX_OPERATIONS = 200_000

_product = functools.partial(jnp.matmul, precision="highest")


class Systems(NamedTuple):
    """Covariances that determine the conditional distributions of b values given k values each."""

    H: Float[Array, "b k k"]  # covariance of the conditioning values
    C: Float[Array, "b k"]  # their covariance with the value
    variance: Float[Array, " b"]  # prior variance of the value


def systems(
    kernel: AbstractKernel,
    neighbors: Float[Array, "b k d"],
    noise: Float[Array, "b k"],
    is_neighbor: Bool[Array, "b k"],
    points: Float[Array, "b d"],
    component: AbstractKernel | None = None,
    is_component: Bool[Array, "b k"] | None = None,
) -> Systems:
    """The systems of values of f at points, given noisy values at their neighbors.

    Args:
        kernel: covariance function of f.
        neighbors: inputs of the conditioning values.
        noise: their noise variances.
        is_neighbor: False for padding, at points with fewer than k neighbors.
        points: inputs of the values.
        component: if the values are of a component of f, its covariance function, which is also
            its covariance with f.
        is_component: which of the conditioning values are of that component, too.
    """
    own_kernel = kernel if component is None else component
    dtype = noise.dtype

    def of_point(
        rows: Array, point: Array, is_component: Array | None
    ) -> tuple[Array, Array, Array]:
        K = kernel.evaluate_covariance(rows)
        if is_component is not None and component is not None:
            is_either = is_component[:, None] | is_component[None, :]
            K = jnp.where(is_either, component.evaluate_covariance(rows), K)
        cross = own_kernel.evaluate(rows, point[None])[:, 0]
        return K, cross, own_kernel.evaluate_diag(point[None])[0]

    K, C, variance = jax.vmap(of_point)(neighbors, points, is_component)
    H = _covariances(K, noise, is_neighbor)
    return Systems(H, jnp.where(is_neighbor, C.astype(dtype), 0.0), variance.astype(dtype))


def _covariances(
    K: Float[Array, "b k k"], noise: Float[Array, "b k"], is_value: Bool[Array, "b k"]
) -> Float[Array, "b k k"]:
    """Covariances of noisy values, with the identity for padding."""
    is_pair = is_value[:, :, None] & is_value[:, None, :]
    diagonal = jnp.where(is_value, noise, 1.0)[:, :, None] * jnp.eye(K.shape[-1], dtype=noise.dtype)
    return jnp.where(is_pair, K.astype(noise.dtype), 0.0) + diagonal


class FactorizationIssues(NamedTuple):
    """Counts of numerical problems, summed over rows.

    The caller warns of them once, outside of loops and of rematerialized code.
    """

    num_failed: Float[Array, ""]  # failed factorizations
    num_with_jitter: Float[Array, ""]  # factorizations that needed jitter
    num_inaccurate: Float[Array, ""]  # conditional variances with few accurate digits

    def warn(self) -> None:
        """Warn, on the host, if a count is positive."""
        failed, with_jitter, inaccurate = jax.lax.stop_gradient(tuple(self))
        linalg.warn_of_steps(failed == 0, (with_jitter > 0).astype(jnp.int32), few=inaccurate > 0)


def few_digits(
    variance: Float[Array, "*b"],
    remaining: Float[Array, "*b"],
    size: int,
    limit: float = rounding.FEW_DIGITS,
) -> FactorizationIssues:
    """Count the conditional variances that have few accurate digits.

    Args:
        variance: prior variances.
        remaining: conditional variances.
        size: number of conditioning values. The norm of their covariance is at most the sum of
            their variances, and about equal to it for neighbors.
        limit: on the rounding error relative to the conditional variance; see
            `rounding.relative_rounding`.
    """
    errors = rounding.unit(remaining.dtype) * size * variance
    is_inaccurate = jax.lax.stop_gradient(errors > limit * remaining)
    none = jnp.zeros((), remaining.dtype)
    return FactorizationIssues(none, none, jnp.sum(is_inaccurate.astype(remaining.dtype)))


class Groups(NamedTuple):
    """Noisy values in groups of k; the o values at `places` are each given all values before."""

    H: Float[Array, "b k k"]  # covariance of the values
    places: Int[Array, "b o"]


def groups(
    kernel: AbstractKernel,
    rows: Float[Array, "b k d"],
    noise: Float[Array, "b k"],
    is_value: Bool[Array, "b k"],
    places: Int[Array, "b o"],
) -> Groups:
    """Groups of noisy values of f.

    Args:
        kernel: covariance function of f.
        rows: inputs of the values.
        noise: noise variances.
        is_value: False for padding, in groups of fewer than k values.
        places: places in the group of the values to predict.
    """
    return Groups(_covariances(jax.vmap(kernel.evaluate_covariance)(rows), noise, is_value), places)


def errors(
    group: Groups, values: Float[Array, "b k s"]
) -> tuple[Float[Array, "b o s"], Float[Array, "b o"], FactorizationIssues]:
    """Prediction errors given all values before, for s sets of values, and their variances.

    The caller warns of the issues, outside of rematerialized code. Time O(b k^2 (k + o)).

    A single factor H = L L' yields all of them: errors L_ii z_i with z = L^-1 r, variances L_ii^2.
    For value i, let a and b be the solutions of the system of the values before i, for their values
    and for their covariances c with value i. Then the derivatives are dr_i - a'dc + b'dH a - b'dr
    and dH_ii - 2 b'dc + b'dH b.
    """
    L, issues = _factors(group.H)
    return *_errors(group.H, values, group.places, L), issues


def variances(group: Groups) -> Float[Array, "b o"]:
    """The marginal variances of the values at `places`, noise included."""
    return _diagonals(*group)


def weights_in_groups(group: Groups) -> tuple[Float[Array, "b o k"], Float[Array, "b o"]]:
    """The weights of the values before each value in its conditional mean, and the variances."""
    H, places = group
    C = _before(H, places)
    b = _leading_solutions(H, C[..., None], places, _factor(H))[..., 0]
    return b.mT, variances(group) - jnp.sum(b * C, axis=1)


def moments(
    system: Systems, values: Float[Array, "b k s"], limit: float = rounding.FEW_DIGITS
) -> tuple[Float[Array, "b s"], Float[Array, " b"]]:
    """Conditional means, for each of s sets of values, and variances, in O(b k^3).

    Warns if pivots of H are so small that mean and variance have few accurate digits.

    With a = H^-1 r and b = H^-1 c, the mean is c'a and the variance v - c'b. Their derivatives,
    a'dc - b'dH a + b'dr and dv - 2 b'dc + b'dH b, reuse the factor of H.
    """
    L, issues = _factors(system.H)
    variances, pivots = (jnp.diagonal(A, axis1=1, axis2=2) for A in (system.H, L))
    inaccurate = few_digits(variances, jnp.square(pivots), L.shape[1], limit)
    jax.tree.map(jnp.add, issues, inaccurate).warn()
    return _moments(system.H, system.C, system.variance, values, L)


def weights(system: Systems) -> tuple[Float[Array, "b k"], Float[Array, " b"]]:
    """The weights H^-1 c of the conditioning values in the mean, and the conditional variances."""
    b = _solutions(system.H, system.C[..., None], _factor(system.H))[..., 0]
    return b, system.variance - jnp.sum(b * system.C, axis=1)


@custom_jvp_all_orders
def _moments(H: Array, C: Array, variance: Array, values: Array, L: Array) -> tuple[Array, Array]:
    white = _solve(L, jnp.concatenate([C[..., None], values], axis=2))
    mean = jnp.sum(white[..., :1] * white[..., 1:], axis=1)
    return mean, variance - jnp.sum(jnp.square(white[..., 0]), axis=1)


@_moments.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[tuple, tuple]:
    (H, C, variance, values, L), (dH, dC, dvariance, dvalues, _) = primals, tangents
    solutions = _solutions(H, jnp.concatenate([C[..., None], values], axis=2), L)
    solutions = checkpoint_name(solutions, SOLUTIONS)
    b, A = solutions[..., :1], solutions[..., 1:]
    change = dC[..., None] - _product(dH, b)
    dmean = jnp.sum(A * change + b * dvalues, axis=1)
    dremaining = dvariance - jnp.sum(b[..., 0] * (dC + change[..., 0]), axis=1)
    mean, remaining = jnp.sum(C[..., None] * A, axis=1), variance - jnp.sum(C * b[..., 0], axis=1)
    return (mean, remaining), (dmean, dremaining)


def _cholesky(H: Float[Array, "b k k"]) -> Float[Array, "b k k"]:
    factorize = functools.partial(jax.lax.linalg.cholesky, symmetrize_input=False)
    return _in_small_calls(factorize, H.shape[1] ** 3 // 3, H)


def _solve(L: Float[Array, "b k k"], B: Float[Array, "b k s"], trans: int = 0) -> Array:
    solve = functools.partial(solve_triangular, lower=True, trans=trans)
    return _in_small_calls(solve, B.shape[1] ** 2 * B.shape[2], L, B)


def _in_small_calls(function: Callable[..., Array], operations: int, *batches: Array) -> Array:
    """Apply a batched function; on CPUs, in several calls of fewer than `_MAX_OPERATIONS` each."""
    num = batches[0].shape[0]
    if is_symbolic_dim(num):  # a program for any number of rows, one of them at a time
        return jax.lax.map(lambda row: function(*(array[None] for array in row))[0], batches)
    size = num
    if jax.default_backend() == "cpu":
        size = max(1, (_MAX_OPERATIONS - 1) // max(1, operations))
    starts = range(0, num, size)
    parts = [function(*(batch[start : start + size] for batch in batches)) for start in starts]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _at(values: Float[Array, "b k *s"], places: Int[Array, "b o"]) -> Float[Array, "b o *s"]:
    return jax.vmap(lambda values, places: values[places])(values, places)


def _diagonals(H: Float[Array, "b k k"], places: Int[Array, "b o"]) -> Float[Array, "b o"]:
    return _at(jnp.diagonal(H, axis1=1, axis2=2), places)


def _is_before(size: int, places: Int[Array, "b o"]) -> Bool[Array, "b k o"]:
    return jnp.arange(size, dtype=places.dtype)[:, None] < places[:, None, :]


def _before(H: Float[Array, "b k k"], places: Int[Array, "b o"]) -> Float[Array, "b k o"]:
    """Covariances of the value at each place with the values before it; zero from there on."""
    return jnp.where(_is_before(H.shape[1], places), _at(H, places).mT, 0.0)


@custom_jvp_all_orders
def _errors(H: Array, values: Array, places: Array, L: Array) -> tuple[Array, Array]:
    white = _solve(L, values)
    scale = _diagonals(L, places)
    return scale[..., None] * _at(white, places), jnp.square(scale)


@_errors.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[tuple, tuple]:
    (H, values, places, L), (dH, dvalues, _, _) = primals, tangents
    solutions = checkpoint_name(_solutions_before(H, values, places, L), SOLUTIONS)
    b, A = solutions[..., 0], solutions[..., 1:]
    C, dC = _before(H, places), _before(dH, places)
    change = dC - _product(dH, b)
    variance, dvariance = _diagonals(H, places), _diagonals(dH, places)
    error = _at(values, places) - jnp.sum(C[..., None] * A, axis=1)
    dmean = jnp.sum(A * change[..., None], axis=1) + _product(b.mT, dvalues)
    derror = _at(dvalues, places) - dmean
    remaining = variance - jnp.sum(C * b, axis=1)
    return (error, remaining), (derror, dvariance - jnp.sum(b * (dC + change), axis=1))


@custom_jvp_all_orders
def _solutions_before(H: Array, values: Array, places: Array, L: Array) -> Array:
    """For each place, solve the system of the values before it.

    The right-hand sides are the covariances with the value at the place, whitened by a row of L,
    and the values before it.
    """
    before = _is_before(H.shape[1], places)[..., None]
    white = _solve(L, values)[:, :, None]
    sides = [
        _at(L, places).mT[..., None],
        jnp.broadcast_to(white, before.shape[:3] + white.shape[3:]),
    ]
    return _of_columns(
        lambda B: _solve(L, B, 1),
        jnp.where(before, jnp.concatenate(sides, axis=3), 0.0),
    )


@_solutions_before.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    (H, _, places, L), (dH, dvalues, _, _) = primals, tangents
    solutions = _solutions_before(*primals)
    before = _is_before(H.shape[1], places)[..., None]
    sides = [_before(dH, places)[..., None], jnp.where(before, dvalues[:, :, None], 0.0)]
    change = jnp.where(before, _of_columns(lambda B: _product(dH, B), solutions), 0.0)
    return solutions, _leading_solutions(H, jnp.concatenate(sides, axis=3) - change, places, L)


def _of_columns(function: Callable[[Array], Array], B: Float[Array, "b k o s"]) -> Array:
    return function(B.reshape(*B.shape[:2], -1)).reshape(B.shape)


def _leading_solutions(
    H: Float[Array, "b k k"],
    B: Float[Array, "b k o s"],
    places: Int[Array, "b o"],
    L: Float[Array, "b k k"],
) -> Float[Array, "b k o s"]:
    """Solutions with the leading block of H before each place, given the factor of H.

    The right-hand sides B are zero from the place on, and so are the solutions. Differentiable to
    every order in H and B.
    """
    before = _is_before(H.shape[1], places)[..., None]

    def solve(_: Any, B: Array) -> Array:
        white = _of_columns(lambda B: _solve(L, B), B)
        white = jnp.where(before, white, 0.0)
        return _of_columns(lambda B: _solve(L, B, 1), white)

    def product(B: Array) -> Array:
        leading = _of_columns(lambda B: _product(H, B), jnp.where(before, B, 0.0))
        return jnp.where(before, leading, B)

    return jax.lax.custom_linear_solve(product, B, solve, symmetric=True)


def _solutions(H: Array, B: Array, L: Array) -> Array:
    """H^-1 B, given the factor of H; differentiable to every order in H and B."""

    def solve(_: Any, B: Array) -> Array:
        white = _solve(L, B)
        return _solve(L, white, 1)

    return jax.lax.custom_linear_solve(lambda B: _product(H, B), B, solve, symmetric=True)


def _factor(H: Float[Array, "b k k"]) -> Float[Array, "b k k"]:
    """The Cholesky factors of `_factors`, with a warning if they needed jitter."""
    L, issues = _factors(H)
    issues.warn()
    return L


def _factors(H: Float[Array, "b k k"]) -> tuple[Float[Array, "b k k"], FactorizationIssues]:
    """Cholesky factors without derivatives, with jitter added to the matrices that need it."""
    # LAPACK reads column-major matrices, which the transpose is, without a copy.
    H = jax.lax.stop_gradient(H).mT
    identity = jnp.eye(H.shape[-1], dtype=H.dtype)
    unit = jnp.finfo(H.dtype).eps * jnp.mean(jnp.diagonal(H, axis1=1, axis2=2), axis=1)
    ladder = jnp.array(linalg.JITTER_LADDER, H.dtype)

    def fails(L: Array) -> Array:
        return ~jnp.all(jnp.isfinite(jnp.diagonal(L, axis1=1, axis2=2)), axis=1)

    def needs_jitter(state: tuple[Array, Array]) -> Array:
        step, L = state
        return largest_of_batch(jnp.any(fails(L)) & (step + 1 < ladder.size))

    def attempt(state: tuple[Array, Array]) -> tuple[Array, Array]:
        step, L = state[0] + 1, state[1]
        retried = _cholesky(H + (ladder[step] * unit)[:, None, None] * identity)
        return step, jnp.where(fails(L)[:, None, None], retried, L)

    def with_jitter(L: Array) -> Array:
        return jax.lax.while_loop(needs_jitter, attempt, (jnp.zeros((), jnp.int32), L))[1]

    L = first = _cholesky(H)
    # A loop of no iterations would still cost more than the factors.
    L = jax.lax.cond(largest_of_batch(jnp.any(fails(first))), with_jitter, lambda L: L, first)
    num_with_jitter, num_failed = (jnp.sum(fails(A).astype(L.dtype)) for A in (first, L))
    return L, FactorizationIssues(num_failed, num_with_jitter, jnp.zeros_like(num_with_jitter))
