"""Scores of predictive distributions at held-out observations.

A prediction is a NumPyro distribution with one marginal for each observation, such as
`posterior.predictive(Xs)`, or an array of draws from the predictive distribution, such as
`sgp.infer.Predictive` returns. The scores are proper, smaller is better, and there is one value for
each observation: report their mean and its standard error. Most of them are computed by the package
scoringrules.
"""

import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import scoringrules
from jaxtyping import Array, ArrayLike, Float, Num

from numpyro_scalegp.core import checks

__all__ = ["coverage", "crps", "interval_score", "log_score"]

_PAIRS_AT_A_TIME = 2**22


def log_score(
    predictive: dist.Distribution | Num[ArrayLike, "S ..."], y: Num[ArrayLike, "..."]
) -> Float[Array, "..."]:
    """The negative log predictive density of each observation, -log p(y_i), in nats.

    Args:
        predictive: a distribution of batch shape (*batch, n); or draws of a continuous
            distribution, shape (S, *batch, n), whose density is then estimated by a Gaussian kernel
            with Silverman's bandwidth. This estimate is smoother than the distribution and
            unreliable in the tails: prefer a distribution.
        y: observations, shape (*batch, n).

    Returns:
        Scores, shape (*batch, n). The mean over observations is also called NLL or NLPD.

    Raises:
        ValueError: if shapes differ, there are fewer than two draws, or an observation is NaN or
            infinite.
        TypeError: if the draws are integers, whose distribution has no density.

    References:
        Gneiting and Raftery (2007), Strictly Proper Scoring Rules, Prediction, and Estimation,
        section 4.1; for draws Silverman (1986), Density Estimation, eq. 3.31.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> scores = sgp.scores.log_score(dist.Normal(jnp.zeros(2), 1.0), jnp.array([0.0, 2.0]))
        >>> [f"{score:.2f}" for score in scores]
        ['0.92', '2.92']
    """
    if isinstance(predictive, dist.Distribution):
        return -predictive.log_prob(_observations(predictive, y))
    if jnp.issubdtype(jnp.result_type(predictive), jnp.integer):
        raise TypeError(
            "`predictive` must hold draws of a continuous distribution for a log score, got "
            "integers: pass the distribution itself."
        )
    return _log_score_of_draws(*_draws_and_observations(predictive, y))


def crps(
    predictive: dist.Distribution | Num[ArrayLike, "S ..."],
    y: Num[ArrayLike, "..."],
    *,
    key: Array | None = None,
    num_samples: int = 1000,
) -> Float[Array, "..."]:
    """The continuous ranked probability score of each observation, in the units of y.

    CRPS(F, y) = E|Z - y| - E|Z - Z'| / 2 with Z and Z' independent draws from F. For a point
    prediction it is the absolute error; a prediction with the right spread has a lower score.

    Args:
        predictive: a distribution of batch shape (*batch, n), or draws of shape (S, *batch, n).
        y: observations, shape (*batch, n).
        key: a random key, required for a distribution that is neither normal nor a mixture of
            normals, whose score is estimated from draws.
        num_samples: number of these draws.

    Returns:
        Scores, shape (*batch, n): exact for a normal distribution, and for a mixture of S normals
        in time O(S^2) for each observation; otherwise an unbiased estimate from S draws in O(S log
        S), which may be negative for few draws.

    Raises:
        ValueError: if shapes differ, there are fewer than two draws, an observation is NaN or
            infinite, or `key` is missing.

    References:
        Gneiting and Raftery (2007), Strictly Proper Scoring Rules, Prediction, and Estimation,
        eqs. 20 and 21; Grimit et al. (2006) for mixtures; Zamo and Naveau (2018), eq. 3, for draws.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> scores = sgp.scores.crps(dist.Normal(jnp.zeros(2), 1.0), jnp.array([0.0, 2.0]))
        >>> [f"{score:.2f}" for score in scores]
        ['0.23', '1.45']
    """
    if isinstance(predictive, dist.Distribution):
        y = _observations(predictive, y)
        if isinstance(predictive, dist.Normal):
            return _crps_of_normal(predictive.loc, predictive.scale, y)
        components = getattr(predictive, "component_distribution", None)
        if isinstance(components, dist.Normal):
            weights = predictive.mixing_distribution.probs
            return _crps_of_mixture(weights, components.loc, components.scale, y)
        predictive = _draw(predictive, key, num_samples)
    return _crps_of_draws(*_draws_and_observations(predictive, y))


def interval_score(
    predictive: dist.Distribution | Num[ArrayLike, "S ..."],
    y: Num[ArrayLike, "..."],
    *,
    level: float = 0.9,
    key: Array | None = None,
    num_samples: int = 1000,
) -> Float[Array, "..."]:
    """The interval score of each observation, in the units of y.

    The width of the central interval, plus 2 / (1 - level) times the distance from y to the
    interval if y lies outside.

    Args:
        predictive: a distribution of batch shape (*batch, n), or draws of shape (S, *batch, n).
        y: observations, shape (*batch, n).
        level: probability of the central interval, between 0 and 1.
        key: a random key, required for a distribution without `icdf`, whose quantiles are estimated
            from draws.
        num_samples: number of these draws.

    Returns:
        Scores, shape (*batch, n).

    Raises:
        ValueError: if shapes differ, there are fewer than two draws, an observation is NaN or
            infinite, `level` is out of range, or `key` is missing.

    References:
        Gneiting and Raftery (2007), Strictly Proper Scoring Rules, Prediction, and Estimation,
        eq. 43.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> predictive = dist.Normal(jnp.zeros(2), 1.0)
        >>> scores = sgp.scores.interval_score(predictive, jnp.array([0.0, 2.0]), level=0.9)
        >>> [f"{score:.2f}" for score in scores]
        ['3.29', '10.39']
    """
    lower, upper, y = central_interval(predictive, y, level, key, num_samples)
    return scoringrules.interval_score(y, lower, upper, 1.0 - level, backend="jax")


def coverage(
    predictive: dist.Distribution | Num[ArrayLike, "S ..."],
    y: Num[ArrayLike, "..."],
    *,
    level: float = 0.9,
    key: Array | None = None,
    num_samples: int = 1000,
) -> Float[Array, ""]:
    """The fraction of observations within their central intervals, to compare with `level`.

    For n independent observations its standard error is sqrt(level (1 - level) / n). For counts it
    exceeds `level`, since an interval between integers has a higher probability than `level`.

    Args:
        predictive: a distribution of batch shape (*batch, n), or draws of shape (S, *batch, n).
        y: observations, shape (*batch, n).
        level: probability of the central interval, between 0 and 1.
        key: a random key, required for a distribution without `icdf`, whose quantiles are estimated
            from draws.
        num_samples: number of these draws.

    Returns:
        The fraction over all observations, shape ().

    Raises:
        ValueError: as for `interval_score`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> sgp.scores.coverage(dist.Normal(jnp.zeros(2), 1.0), jnp.array([0.0, 2.0]), level=0.9)
        Array(0.5, dtype=float32)
    """
    lower, upper, y = central_interval(predictive, y, level, key, num_samples)
    return jnp.mean(((lower <= y) & (y <= upper)).astype(lower.dtype))


def _observations(predictive: dist.Distribution, y: Num[ArrayLike, "..."]) -> Num[Array, "..."]:
    if predictive.event_shape:
        raise ValueError(
            f"`predictive` must have one marginal for each observation, got a distribution of "
            f"event shape {predictive.event_shape}: pass `posterior.predictive(Xs)`, or draws."
        )
    if not predictive.support.is_discrete:
        y = checks.as_float(y, "y")
    y = jnp.asarray(y)
    checks.shape("y", y, predictive.batch_shape, why="one for each marginal of `predictive`")
    checks.finite("y", y)
    return y


def _draws_and_observations(
    draws: Num[ArrayLike, "S ..."], y: Num[ArrayLike, "..."]
) -> tuple[Float[Array, "S ..."], Float[Array, "..."]]:
    draws, y = checks.as_float(draws, "predictive"), checks.as_float(y, "y")
    if draws.ndim == 0 or draws.shape[0] < 2:
        raise ValueError(
            f"`predictive` must hold at least two draws along its first axis, got shape "
            f"{draws.shape}."
        )
    checks.shape("y", y, draws.shape[1:], why="one for each entry of a draw")
    checks.finite("y", y)
    return draws, y


def _draw(predictive: dist.Distribution, key: Array | None, num_samples: int) -> Array:
    if key is None:
        raise ValueError(
            f"`key` must be given: this score of a `{type(predictive).__name__}` needs draws."
        )
    shape = (checks.count("num_samples", num_samples, 2),)
    return predictive.sample(checks.as_key(key), shape)


def central_interval(
    predictive: dist.Distribution | Num[ArrayLike, "S ..."],
    y: Num[ArrayLike, "..."],
    level: float,
    key: Array | None = None,
    num_samples: int = 1000,
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """The bounds of the intervals, and the observations."""
    tail = (1.0 - checks.number("level", level, "(0, 1)")) / 2
    if isinstance(predictive, dist.Distribution):
        y = _observations(predictive, y)
        try:
            lower, upper = predictive.icdf(tail), predictive.icdf(1.0 - tail)
        except NotImplementedError:
            predictive = _draw(predictive, key, num_samples)
        else:
            return lower, upper, y.astype(lower.dtype)
    draws, y = _draws_and_observations(predictive, y)
    lower, upper = jnp.quantile(draws, jnp.array([tail, 1.0 - tail], draws.dtype), axis=0)
    return lower, upper, y


@jax.jit
def _log_score_of_draws(
    draws: Float[Array, "S ..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    errors = draws - y  # which keep their digits far from zero
    return scoringrules.logs_ensemble(jnp.zeros_like(y), errors, m_axis=0, backend="jax")


@jax.jit
def _crps_of_normal(loc: Array, scale: Array, y: Array) -> Array:
    return scoringrules.crps_normal(y, loc, scale, backend="jax")


@jax.jit
def _crps_of_draws(draws: Float[Array, "S ..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    errors = draws - y
    return scoringrules.crps_ensemble(
        jnp.zeros_like(y), errors, m_axis=0, estimator="pwm", backend="jax"
    )


@jax.jit
def _crps_of_mixture(
    weights: Float[Array, "... S"],
    loc: Float[Array, "... S"],
    scale: Float[Array, "... S"],
    y: Float[Array, "..."],
) -> Float[Array, "..."]:
    shape = (*y.shape, loc.shape[-1])
    errors = jnp.broadcast_to(loc, shape) - y[..., None]
    parameters = (errors, jnp.broadcast_to(scale, shape), jnp.broadcast_to(weights, shape))

    def of_observation(parameters: tuple[Array, Array, Array]) -> Array:
        return scoringrules.crps_mixnorm(jnp.zeros((), y.dtype), *parameters, backend="jax")

    flat = [array.reshape(-1, shape[-1]) for array in parameters]
    batch_size = max(1, _PAIRS_AT_A_TIME // shape[-1] ** 2)
    values = jax.lax.map(
        of_observation, tuple(flat), batch_size=min(batch_size, math.prod(y.shape))
    )
    return values.reshape(y.shape)
