"""Initial hyperparameters: prior medians, with lengthscales and noise scaled to the data."""

from collections.abc import Callable
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.initialization import init_to_median
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.kernels.distances import squared_distances
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.rows import role_of, unwrapped
from numpyro_scalegp.tracing.runs import (
    Trace,
    TracedProgram,
    indices_of,
    is_latent,
    is_observed,
    substituted,
    trace_of_call,
)
from numpyro_scalegp.tracing.sites import Model

# Damping shortens the steps of parameters with little effect on the targets: a long step could end
# at a bound of the parameter's range, where the gradient vanishes.
_NUM_STEPS = 15
_DAMPING = 0.5

# The initial noise, as a fraction of the observations' standard deviation, and within this factor
# of the prior median. The initial function is zero: with less noise, the first gradients are so
# large that Adam, which accumulates their squares, takes short steps from then on.
_NOISE_SHARE = 0.8
_NOISE_FACTOR = 4.0

# Initial lengthscales, as a fraction of the median distance between inputs. From longer ones, with
# which the function is nearly constant, training misses input dimensions that matter only in
# interaction with another one.
_DISTANCE_SHARE = 0.5


def median_distance(X: Float[ArrayLike, "n d"], *, max_rows: int = 1000) -> Float[Array, ""]:
    """The median Euclidean distance between inputs: an initial lengthscale.

    Use it for inputs with similar scales in all dimensions, such as standardized ones; for a
    stream, apply it to the first mini-batch.

    Args:
        X: inputs, shape (n, d).
        max_rows: at most this many rows, from all over X, enter the median.

    Returns:
        The median over all pairs of different rows, shape (), in units of the inputs. Time and
        memory O(max_rows^2).

    Raises:
        ValueError: if there are fewer than two rows, `max_rows` is less than 2, or `X` holds NaN or
            infinity.

    References:
        Cheng and Boots (2017), section 5 (the median trick).

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> float(sgp.infer.median_distance(jnp.array([[0.0], [1.0], [3.0]])))
        2.0
    """
    checks.count("max_rows", max_rows, 2)
    X = checks.inputs("X", X)
    if X.shape[0] < 2:
        raise ValueError(f"`X` must have two rows or more, got {X.shape[0]}.")
    if X.shape[0] > max_rows:
        X = X[stratified_indices(jax.random.key(0), X.shape[0], max_rows)]
    # So that squares of large or small values do not overflow or underflow.
    X = X - X[0]
    scale = jnp.max(jnp.abs(X))
    scale = jnp.where(scale > 0, scale, 1.0)
    squared = squared_distances(X / scale, X / scale)[jnp.triu_indices(X.shape[0], 1)]
    return scale * jnp.sqrt(jnp.median(squared))


def scaled_start(
    scales: Callable[[dict[str, Array]], list[tuple[Array, Array]]], params: dict[str, Array]
) -> dict[str, Array]:
    """Move parameters until quantities that depend on them match targets from the data.

    Damped Gauss-Newton steps of minimum norm on the log scale, so that parameters that do not
    affect the quantities stay.

    Args:
        scales: maps unconstrained parameters to pairs of a positive quantity and its target; a
            target of zero is ignored.
        params: initial parameters, by name.

    Returns:
        Parameters of the same shapes. A step that is not finite is skipped.
    """

    def excess(params: dict[str, Array]) -> Array:
        return jnp.concatenate([jnp.ravel(_log_ratio(*pair)) for pair in scales(params)])

    def step(params: dict[str, Array], _: None) -> tuple[dict[str, Array], None]:
        flat, unravel = jax.flatten_util.ravel_pytree(params)
        error = excess(params)
        jacobian = jax.jacrev(lambda flat: excess(unravel(flat)))(flat)
        gram = jnp.matmul(jacobian, jacobian.T, precision="highest")
        damped = gram + _DAMPING * jnp.eye(len(gram), dtype=gram.dtype)
        change = jnp.clip(jacobian.T @ jnp.linalg.solve(damped, error), -1.0, 1.0)
        new = jnp.where(jnp.all(jnp.isfinite(change)), flat - change, flat)
        return unravel(new), None

    return jax.lax.scan(step, params, length=_NUM_STEPS)[0]


def _log_ratio(value: Array, target: Array) -> Array:
    """log(value / target), or zero if the target is not positive and finite."""
    value, target = jnp.broadcast_arrays(value, jax.lax.stop_gradient(target))
    has_scale = (target > 0.0) & jnp.isfinite(target)
    return jnp.log(value / jnp.where(has_scale, target, jax.lax.stop_gradient(value)))


def deviation(values: Float[Array, "n *k"]) -> Float[Array, "*k"]:
    """The standard deviation, or zero if it is only rounding error."""
    spread, largest = jnp.std(values, axis=0), jnp.max(jnp.abs(values), axis=0)
    return jnp.where(spread > 10.0 * jnp.finfo(values.dtype).eps * largest, spread, 0.0)


def lengthscale_pairs(
    kernel: AbstractKernel, X: Float[Array, "... n d"], share: float
) -> list[tuple[Array, Array]]:
    """Each lengthscale of a kernel and its target, for `scaled_start`.

    The target is a fraction `share` of the median distance between the inputs that the lengthscale
    divides; if there is a lengthscale for each column, the columns are first standardized.
    """
    pairs = kernel.scaled_inputs(X)
    return [
        (lengthscale, share * _distances(lengthscale, jax.lax.stop_gradient(inputs)))
        for lengthscale, inputs in pairs
    ]


def _distances(lengthscale: Array, X: Float[Array, "... n k"]) -> Array:
    """The median distance, for all columns or for each; in a batch, centered within members."""
    X = (X - jnp.mean(X, axis=-2, keepdims=True)).reshape(-1, X.shape[-1]) if X.ndim > 2 else X
    if lengthscale.shape[-1:] in ((), (1,)):
        return median_distance(X)
    scale = deviation(X)
    return scale * median_distance(X / jnp.where(scale > 0, scale, 1.0))


def _prior_median(site: dict[str, Any] | None = None) -> Any:
    return init_to_median(site)


# The default `init_loc_fn` of guides, recognized by identity. Not a `functools.partial`, whose
# copies and pickles are different objects.
MEDIAN = _prior_median


class _Priors(Messenger):
    """Replaces a model's functions by zeros, and records their priors."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.priors: list[Any] = []

    def process_message(self, msg: dict[str, Any]) -> None:
        """Replace a function, and hide it from the handlers outside."""
        if msg["type"] != "sample" or role_of(msg["fn"]) != "prior" or msg["is_observed"]:
            return
        prior, _, _ = unwrapped(msg["fn"])
        self.priors.append(prior)
        msg["value"] = jnp.zeros(msg["fn"].shape(), jnp.result_type(prior.X, float))
        msg["stop"] = True


@compiled
def starting_values(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Initial values of a model's latent sites, except functions: prior medians, rescaled.

    `scaled_start` moves the medians to lengthscales near the distances between inputs, since the
    likelihood may be flat far from these, and to scales of observed distributions, such as a normal
    or Student t, that are compatible with a function of zero.

    Args:
        model: a model with functions, which may subsample the rows.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        Values by name.
    """
    key = jax.random.key(0)

    def run(handled: Callable[[_Priors], Any]) -> tuple[Trace, list[Any]]:
        priors = _Priors(model)
        with handlers.block():
            return trace_of_call(handled(priors), args, kwargs), priors.priors

    def at_medians(priors: _Priors) -> Any:
        return handlers.substitute(handlers.seed(priors, key), substitute_fn=MEDIAN)

    medians, _ = run(at_medians)
    indices = indices_of(medians)
    sites = {name: site for name, site in medians.items() if is_latent(site)}
    sites = {name: site for name, site in sites.items() if not site["fn"].support.is_discrete}
    maps = {name: biject_to(site["fn"].support) for name, site in sites.items()}

    def values(params: dict[str, Array]) -> dict[str, Array]:
        return {name: maps[name](value) for name, value in params.items()}

    def scales(params: dict[str, Array]) -> list[tuple[Array, Array]]:
        def at_values(priors: _Priors) -> Any:
            return handlers.seed(substituted(priors, {}, values(params), indices), key)

        trace, priors = run(at_values)
        kernels = [(getattr(prior, "kernel", None), prior.X) for prior in priors]
        pairs = _noise_pairs(trace, medians)
        for kernel, X in kernels:
            if kernel and X.shape[-2] > 1:
                pairs += lengthscale_pairs(kernel, X, _DISTANCE_SHARE)
        return pairs

    params = {name: maps[name].inv(site["value"]) for name, site in sites.items()}
    if not params:
        return {}
    traced_scales = TracedProgram(scales, params)
    return values(scaled_start(traced_scales, params) if traced_scales(params) else params)


def _noise_pairs(trace: Trace, at_medians: Trace) -> list[tuple[Array, Array]]:
    """The mean scale of each observed site that has a scale, and its target."""
    pairs = []
    for name, site in trace.items():
        if not (is_observed(site) and _has_scale(fn := unwrapped(site["fn"]).distribution)):
            continue
        median = jnp.mean(unwrapped(at_medians[name]["fn"]).distribution.scale)
        spread = deviation(jnp.ravel(site["value"] - fn.loc))
        target = jnp.clip(_NOISE_SHARE * spread, median / _NOISE_FACTOR, median * _NOISE_FACTOR)
        pairs.append((jnp.mean(fn.scale), jnp.where(spread > 0.0, target, 0.0)))
    return pairs


def _has_scale(fn: Any) -> bool:
    """Whether a distribution on the real line has a location and a scale."""
    return fn.support is constraints.real and hasattr(fn, "loc") and hasattr(fn, "scale")
