"""Laplace's approximation with a nearest-neighbor prior.

With f = m + L v, v standard normal, W the negative second derivatives of the log likelihoods at the
mode, and A = I + L'W L:

    log p(y) ~ sum_i l_i(f_i) - v'v / 2 - log|A| / 2.

Newton's steps and the gradient solve systems in A by conjugate gradients; log|A| comes from
stochastic Lanczos quadrature. A preconditioner P close to A, and probes z ~ N(0, P), give
E[(A^-1 z)'dA (P^-1 z)] = tr(A^-1 dA), and the diagonal of L A^-1 L', the posterior variances.

References:
    Kuendig and Sigrist (2025), Iterative Methods for Vecchia-Laplace Approximations for Latent
    Gaussian Process Models; here with another preconditioner, in white coordinates.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.integrated.iterative.lanczos import log_determinant
from numpyro_scalegp.integrated.laplace import dense
from numpyro_scalegp.integrated.laplace.search import (
    Entries,
    Sites,
    Step,
    at_least_tiny,
    derivatives,
    search,
    warn_of_digits,
    warn_of_search,
)
from numpyro_scalegp.linear.conjugate_gradients import iterate_blocks
from numpyro_scalegp.linear.solver import Options, Probes, Solution, prepare, warn_unless_converged
from numpyro_scalegp.neighbors.latent_precision import (
    LatentPrecision,
    TwoLevelFactor,
    coarse_columns,
)
from numpyro_scalegp.neighbors.prior_factor import PriorFactor
from numpyro_scalegp.numerics.derivatives import refuse_derivatives, with_pullback
from numpyro_scalegp.programs.float64 import in_float64

# Up to this many rows, the covariance is dense and the approximation exact.
MAX_DENSE = 2_000
_TOLERANCE = 1e-3  # relative residual of the solves
_PROBE_TOLERANCE = 1e-2  # the same for probes, whose own errors are far larger
_FINE_TOLERANCE = 1e-6  # where the derivative is a difference, unless rounding errors are larger
_STEP_TOLERANCE = 0.1  # of Newton's steps, each of which solves for the error that remains
_MAX_ITERATIONS = 400
_MAX_JITTER = 0.01  # the jitter of the values in units of the observations' variances
_GROUP_SIZE = 16  # right-hand sides that share a Krylov space

REFUSAL = (
    "`LaplaceGP` with `Vecchia` has only first derivatives in reverse mode (`jax.grad`) for more "
    f"than {MAX_DENSE} rows, since its solutions are held fixed. For `jax.hessian` or `jax.jvp`, "
    "use `sgp.estimators.Cholesky()`."
)


class Mode(NamedTuple):
    """The mode of the density of f and y."""

    f: Float[Array, " n"]  # NaN if the search failed
    white: Float[Array, " slots"]  # v


def log_marginal(
    entries: Entries,
    factor: PriorFactor,
    mean: Float[Array, " n"],
    data: Any,
    key: Key[Array, ""],
    num_probes: int,
) -> Float[Array, ""]:
    """Laplace's approximation of log p(y), with probes for log|A| if there are many rows.

    Args:
        entries: log likelihoods, given f and `data`.
        factor: of the prior covariance.
        mean: of f.
        data: further argument of `entries`, with y; differentiable.
        key: a typed JAX key for the probes.
        num_probes: number of probes.

    Returns:
        The approximation. NaN, with a warning, if there is no mode, or the likelihood is not
        log-concave at it.
    """
    if len(mean) <= MAX_DENSE:
        return dense.log_marginal(entries, factor.covariance(), mean, data)
    fixed_factor, fixed_mean, fixed_data = jax.lax.stop_gradient((factor, mean, data))
    columns = coarse_columns(fixed_factor)
    mode = _find_mode(entries, fixed_factor, fixed_mean, fixed_data, columns)
    A = _precision(entries, fixed_factor, mode, fixed_data)
    P = TwoLevelFactor.of(A, columns)
    log_det = _log_determinant(A, P, key, num_probes)

    def log_joint(f: Array, data: Any, white: Array) -> Array:
        return jnp.sum(entries(f, data)) - 0.5 * jnp.sum(jnp.square(white))

    # In float64, since log likelihoods of large counts are differences of far larger terms.
    value = in_float64(log_joint, mode.f, fixed_data, mode.white) - 0.5 * log_det
    variables, constants = eqx.partition((factor, mean, data), eqx.is_inexact_array)
    arrays, static = eqx.partition(constants, eqx.is_array)

    def pull_back(variables: Any, fixed: Any, cotangent: Array) -> Any:
        arrays, mode, P, key = fixed
        variables = refuse_derivatives(REFUSAL, variables)
        factor, _, data = eqx.combine(variables, arrays, static)
        gradient = _gradient(entries, factor, data, mode, P, key, num_probes)
        gradient = jax.tree.map(lambda leaf: cotangent * leaf, gradient)
        return _as_cotangents(gradient, variables)

    fixed = arrays, mode, P, key
    return with_pullback(pull_back, REFUSAL, value.astype(mean.dtype), variables, fixed)


class _Gradient(NamedTuple):
    weights: Float[Array, "steps w m"]
    scale: Float[Array, "steps w"]
    mean: Float[Array, " n"]
    data: Any


def _as_cotangents(gradient: _Gradient, variables: Any) -> Any:
    factor = eqx.tree_at(lambda factor: (factor.weights, factor.scale), variables[0], gradient[:2])
    return factor, gradient.mean, gradient.data


def _gradient(
    entries: Entries,
    factor: PriorFactor,
    data: Any,
    mode: Mode,
    P: TwoLevelFactor,
    key: Key[Array, ""],
    num_probes: int,
) -> _Gradient:
    A, (f, v) = P.operator, mode
    scale = factor.scale.reshape(-1)
    is_row = scale > 0.0
    inverse_scale = jnp.where(is_row, 1.0 / jnp.where(is_row, scale, 1.0), 0.0)
    z = P.sample(_probe_key(key), num_probes)
    x, p = _solution(A, P, z, _PROBE_TOLERANCE), P.solve(z)
    fx, fp = factor.times(x), factor.times(p)
    of_x, of_p = A.informed(fx), A.informed(fp)
    variance = factor.at_rows(jnp.mean(fx * fp, axis=1))

    def curvature(f: Array) -> Array:
        return derivatives(entries, f, data).curvature

    # The derivative of -log|A| / 2 in f, and the change of the mode along it.
    c = -0.5 * variance * jax.jvp(curvature, (f,), (jnp.ones_like(f),))[1]
    # The derivative in the mean is c - W L w, where w is the change of the mode along c. Its terms
    # nearly cancel if the prior variance is large.
    w = _solution(A, P, factor.transposed_times(factor.at_slots(c)[:, None]), _FINE_TOLERANCE)
    u, beta = factor.times(v[:, None]), factor.times(w)
    w = w[:, 0]
    left = jnp.concatenate(
        [
            jnp.stack([v + w, v], axis=1),
            -0.5 / num_probes * of_x,
            -0.5 / num_probes * of_p,
        ],
        axis=1,
    )
    right = jnp.concatenate([u, beta, fp, fx], axis=1)
    of_weights = factor.weight_products(inverse_scale[:, None] * left, right)
    of_scale = jnp.square(v) + 2.0 * v * w - 0.5 * jnp.mean(of_x * p + of_p * x, axis=1)
    of_scale = (inverse_scale * of_scale).reshape(factor.scale.shape)

    beta_rows = factor.at_rows(beta[:, 0])
    g, W = derivatives(entries, f, data)
    of_mean = g + c - W * beta_rows
    variables, static = eqx.partition(data, eqx.is_inexact_array)

    def of_data(variables: Any) -> Array:
        data = eqx.combine(variables, static)
        g, W = derivatives(entries, f, data)
        return jnp.sum(entries(f, data) + beta_rows * g - 0.5 * variance * W)

    return _Gradient(of_weights, of_scale, of_mean, jax.grad(of_data)(variables))


def normal_sites(
    entries: Entries, factor: PriorFactor, mean: Float[Array, " n"], data: Any
) -> Sites:
    """The normal approximation around the mode; see `log_marginal` for arguments."""
    mode = _find_mode(entries, factor, mean, data, coarse_columns(factor))
    g, W = derivatives(entries, mode.f, data)
    variance = jnp.full_like(W, jnp.max(jnp.square(factor.scale)))
    return Sites(mode.f, g, at_least_tiny(W, variance))


class Draws(NamedTuple):
    """Draws from the posterior of f - m, less its mean, and of the pseudo-observations' weights."""

    values: Float[Array, "n s"]
    precision: Float[Array, " n"]  # the diagonal of (K + W^-1)^-1


def draw(
    factor: PriorFactor, W: Float[Array, " n"], key: Key[Array, ""], num_samples: int
) -> Draws:
    """Draw from N(0, (K^-1 + W)^-1), by a solve for each draw."""
    A = LatentPrecision(factor, factor.at_slots(jnp.maximum(W, 0.0)))
    P = TwoLevelFactor.of(A, coarse_columns(factor))
    keys = jax.random.split(key)
    white = jax.random.normal(keys[0], (A.size, num_samples), A.dtype)
    errors = jax.random.normal(keys[1], (A.size, num_samples), A.dtype)
    root = jnp.sqrt(A.precision)[:, None]
    target = white + factor.transposed_times(root * errors)
    values = factor.times(_solution(A, P, target))
    # The weights are draws of N(0, (K + W^-1)^-1).
    weights = A.precision[:, None] * values - root * errors
    explained = A.precision * jnp.mean(jnp.square(values), axis=1)
    # Each form has a small relative error where the other has not.
    remaining = A.precision * (1.0 - explained)
    precision = jnp.where(explained < 0.5, remaining, jnp.mean(jnp.square(weights), axis=1))
    return Draws(factor.at_rows(values), factor.at_rows(precision))


def _find_mode(
    entries: Entries, factor: PriorFactor, mean: Array, data: Any, columns: Array
) -> Mode:
    """The mode of p(f, y), by Newton's method with a line search, without a derivative."""
    deviation = jnp.sqrt(jnp.maximum(_marginal_variance(factor, columns), 0.0))

    def newton_step(W: Array, g: Array, white: Array) -> Step:
        A = LatentPrecision(factor, factor.at_slots(jnp.maximum(W, 0.0)))
        P = TwoLevelFactor.of(A, columns)
        target = factor.transposed_times(factor.at_slots(g)[:, None]) - white[:, None]
        change = _solution(A, P, target, _STEP_TOLERANCE)
        return Step(factor.at_rows(factor.times(change)[:, 0]), change[:, 0])

    zeros = jnp.zeros(factor.num_slots, mean.dtype)
    state = search(entries, mean, data, deviation, newton_step, zeros)
    W = derivatives(entries, state.f, data).curvature
    is_finite = jnp.all(jnp.isfinite(state.f)) & jnp.all(jnp.isfinite(state.weights))
    works = warn_of_search(state, W, deviation, is_finite)
    # The jitter of the values, which the prior does not have, takes part in the fit.
    warn_of_digits(jnp.mean(jnp.maximum(W, 0.0)) * factor.jitter > _MAX_JITTER)
    # Computed from v, so that rounding errors of the steps do not add up.
    f = mean + factor.at_rows(factor.times(state.weights[:, None])[:, 0])
    return Mode(jnp.where(works, f, jnp.nan), state.weights)


def _marginal_variance(factor: PriorFactor, columns: Array) -> Float[Array, " n"]:
    """A lower bound of the prior variances, from coarse values and each row's independent part."""
    coarse = factor.coarse[: columns.shape[1]]
    independent = jnp.square(factor.scale.reshape(-1)).at[coarse].set(0.0)
    return factor.at_rows(jnp.sum(jnp.square(columns), axis=1) + independent)


def _precision(entries: Entries, factor: PriorFactor, mode: Mode, data: Any) -> LatentPrecision:
    W = derivatives(entries, mode.f, data).curvature
    return LatentPrecision(factor, factor.at_slots(jnp.maximum(W, 0.0)))


def _log_determinant(
    A: LatentPrecision, P: TwoLevelFactor, key: Key[Array, ""], num_probes: int
) -> Float[Array, ""]:
    probes = Probes(_probe_key(key), num_probes)
    none = jnp.zeros((A.size, 0), A.dtype)
    system = prepare(A, none, None, Options(probes=probes))
    solution, _ = iterate_blocks(P, system, _GROUP_SIZE, _PROBE_TOLERANCE, _MAX_ITERATIONS)
    assert solution.coefficients is not None
    return log_determinant(solution.coefficients, A.size, num_probes).value


def _solution(
    A: LatentPrecision, P: TwoLevelFactor, B: Array, tolerance: float = _TOLERANCE
) -> Float[Array, "slots k"]:
    system = prepare(A, B, None, Options())
    tolerance = max(tolerance, 100.0 * float(jnp.finfo(A.dtype).eps))
    solution: Solution = iterate_blocks(P, system, _GROUP_SIZE, tolerance, _MAX_ITERATIONS)[0]
    suffices = jnp.all(solution.residual <= _TOLERANCE)
    warn_unless_converged(solution._replace(converged=solution.converged | suffices))
    return solution.value


def _probe_key(key: Key[Array, ""]) -> Key[Array, ""]:
    return jax.random.fold_in(key, 0)
