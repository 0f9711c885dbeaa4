"""Forecasts that are evaluated from rolling origins, and effects of interventions on a series."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.scores import central_interval, crps, interval_score, log_score

__all__ = ["Impact", "RollingScores", "impact", "placebo_impacts", "rolling_origin"]

Fit = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]


class RollingScores(NamedTuple):
    """Scores of forecasts by origin and lead, NaN where there is no observation.

    Attributes:
        origins: the number of rows before each forecast, shape (K,).
        scores: arrays of shape (K, horizon) by name: "squared_error", "log_score", "crps",
            "interval_score", and "coverage", which is 1 where the central interval covers the
            observation.
    """

    origins: np.ndarray
    scores: dict[str, np.ndarray]

    def by_lead(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The mean of each score over origins and its standard error, each of shape (horizon,).

        The standard error takes origins as independent. Forecasts of the same observation from
        several origins are not; it is then too small.
        """
        return {name: _mean_and_error(values) for name, values in self.scores.items()}

    def overall(self) -> dict[str, tuple[float, float]]:
        """The mean of each score over origins and leads, and the standard error over origins."""
        with np.errstate(invalid="ignore"):
            means = {name: np.nanmean(values, axis=1) for name, values in self.scores.items()}
        pairs = {name: _mean_and_error(values[:, None]) for name, values in means.items()}
        return {name: (float(mean[0]), float(error[0])) for name, (mean, error) in pairs.items()}


def rolling_origin(
    fit: Fit,
    X: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, " n"],
    *,
    first: int,
    horizon: int,
    step: int | None = None,
    level: float = 0.95,
) -> RollingScores:
    """Evaluate forecasts from several origins: fit to the rows before each, score the next ones.

    All arrays keep their shapes: `fit` is given all rows of X, the observations with zeros after
    the origin, and a mask of the rows before it. So a `fit` under `jax.jit` compiles once for all
    origins.

    Args:
        fit: a function of X (n, d), y (n,) and observed (n,), boolean, that returns a posterior: an
            object whose `predictive(X)` is a distribution of observations.
        X: inputs in the order of time, shape (n, d).
        y: observations, shape (n,); NaN where there is none.
        first: the number of rows before the first origin.
        horizon: the number of rows that are forecast from each origin.
        step: the number of rows between origins; None for `horizon`, so that no observation is
            forecast twice.
        level: the probability of the central interval, for its score and coverage.

    Returns:
        Scores by origin and lead.

    Raises:
        ValueError: if there is no origin with `horizon` rows after it.

    References:
        Tashman (2000), Out-of-sample tests of forecasting accuracy; Gneiting and Raftery (2007) for
        the scores. A fit and a prediction for each origin.

    Example:
        >>> import numpy as np
        >>> import numpyro_scalegp as sgp
        >>> X = np.arange(40.0)[:, None]
        >>> def fit(X, y, observed):
        ...     kernel = sgp.kernels.Periodic(1.0, period=10.0)
        ...     return sgp.GaussianProcess(kernel, X, 0.01, observed=observed).condition(y)
        >>> y = np.sin(2 * np.pi * X[:, 0] / 10.0)
        >>> scores = sgp.forecasts.rolling_origin(fit, X, y, first=20, horizon=5)
        >>> scores.origins.tolist(), scores.by_lead()["crps"][0].shape
        ([20, 25, 30, 35], (5,))
    """
    step = horizon if step is None else checks.count("step", step)
    origins, scores = [], []
    for origin, posterior, X_after, y_after in _fits(fit, X, y, first, horizon, step):
        predictive = posterior.predictive(X_after)
        # Scores refuse NaN; missing ones are left out below.
        is_missing = np.isnan(y_after)
        target = jnp.asarray(np.where(is_missing, as_numpy(predictive.mean), y_after))
        lower, upper, _ = central_interval(predictive, target, level)
        of_origin = {
            "squared_error": jnp.square(predictive.mean - target),
            "log_score": log_score(predictive, target),
            "crps": crps(predictive, target),
            "interval_score": interval_score(predictive, target, level=level),
            "coverage": (lower <= target) & (target <= upper),
        }
        origins.append(origin)
        scores.append(
            {
                name: np.where(is_missing, np.nan, as_numpy(values).astype(float))
                for name, values in of_origin.items()
            }
        )
    return RollingScores(
        np.array(origins), {name: np.stack([each[name] for each in scores]) for name in scores[0]}
    )


class Impact(NamedTuple):
    """The effect of an intervention: observations minus what was to be expected without it.

    Attributes:
        effect: by row, the median and the ends of the central interval, shape (3, m).
        cumulative: the same of the sum of effects up to each row, shape (3, m).
        average: the same of the mean effect, shape (3,).
        probability: that the mean effect is positive.
    """

    effect: np.ndarray
    cumulative: np.ndarray
    average: np.ndarray
    probability: float

    @property
    def is_covered(self) -> bool:
        """Whether the interval of the mean effect contains zero."""
        return bool(self.average[1] <= 0.0 <= self.average[2])


def impact(
    draws: Float[ArrayLike, "S m"], y: Float[ArrayLike, " m"], *, level: float = 0.95
) -> Impact:
    """The effect of an intervention from joint draws of what would have been observed without it.

    Args:
        draws: of the observations after the intervention, noise included, from a fit to the rows
            before it, shape (S, m): such as the replicates of `sgp.infer.Predictive`. Jointly
            drawn: the cumulative effect needs their correlation.
        y: observations after the intervention, shape (m,), NaN where there is none: these rows are
            left out of sums and means.
        level: the probability of the intervals.

    Returns:
        Effects by row, cumulative and on average.

    Raises:
        ValueError: if shapes do not fit, there are fewer than two draws, or all of `y` is NaN.

    References:
        Brodersen et al. (2015), Inferring causal impact using Bayesian structural time-series
        models. What it assumes: nothing else changed at the time, and the covariates of the model
        were not affected.

    Example:
        >>> import numpy as np
        >>> import numpyro_scalegp as sgp
        >>> draws = np.random.default_rng(0).normal(size=(4000, 10))
        >>> effect = sgp.forecasts.impact(draws, np.full(10, 2.0))
        >>> [round(float(value), 1) for value in effect.average], effect.is_covered
        ([2.0, 1.4, 2.6], False)
    """
    draws, y = np.asarray(draws, float), np.asarray(y, float)
    checks.number("level", level, "(0, 1)")
    if draws.ndim != 2 or y.shape != draws.shape[1:] or len(draws) < 2:
        raise ValueError(
            f"`draws` must have shape (S, {y.size}) with S at least 2, for `y` of shape {y.shape}, "
            f"got {draws.shape}."
        )
    is_observed = ~np.isnan(y)
    if not is_observed.any():
        raise ValueError("`y` must have an observation, got NaN in all rows.")
    levels = 0.5, 0.5 - level / 2.0, 0.5 + level / 2.0
    effects = y - draws
    counted = np.where(is_observed, effects, 0.0)
    averages = counted.sum(axis=1) / is_observed.sum()
    return Impact(
        np.quantile(effects, levels, axis=0),
        np.quantile(np.cumsum(counted, axis=1), levels, axis=0),
        np.quantile(averages, levels),
        float(np.mean(averages > 0.0)),
    )


def placebo_impacts(
    key: Key[ArrayLike, ""],
    fit: Fit,
    X: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, " n"],
    *,
    first: int,
    horizon: int,
    step: int | None = None,
    level: float = 0.95,
    num_samples: int = 1000,
) -> list[Impact]:
    """Effects at times without an intervention, which about a share `level` of intervals covers.

    Pass the rows before the intervention. If intervals miss zero more often than they should, the
    model's forecasts are too certain for this horizon, and so is the effect of the intervention.

    Args:
        key: a typed JAX key.
        fit: as for `rolling_origin`; the posterior must have Gaussian noise.
        X: inputs before the intervention, in the order of time, shape (n, d).
        y: observations before the intervention, shape (n,), NaN where there is none.
        first: the number of rows before the first placebo.
        horizon: the number of rows after each placebo, such as after the intervention.
        step: the number of rows between placebos; None for `horizon`.
        level: the probability of the intervals.
        num_samples: the number of joint draws.

    Returns:
        An effect for each placebo.

    Raises:
        ValueError: if there is no placebo with `horizon` rows after it, or no noise variance.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_scalegp as sgp
        >>> X = np.arange(60.0)[:, None]
        >>> y = np.random.default_rng(0).normal(size=60)
        >>> def fit(X, y, observed):
        ...     kernel = sgp.kernels.Matern12(5.0, 0.01)
        ...     return sgp.GaussianProcess(kernel, X, 1.0, observed=observed).condition(y)
        >>> placebos = sgp.forecasts.placebo_impacts(
        ...     jax.random.key(0), fit, X, y, first=20, horizon=10
        ... )
        >>> len(placebos)
        4
    """
    step = horizon if step is None else checks.count("step", step)
    key, effects = checks.as_key(key), []
    for origin, posterior, X_after, y_after in _fits(fit, X, y, first, horizon, step):
        function_key, noise_key = jax.random.split(jax.random.fold_in(key, origin))
        functions = posterior.sample(function_key, X_after, num_samples)
        # The predictive distribution has the noise that a mixture of posteriors has by draw.
        noise = posterior.predictive(X_after).variance - posterior.variance(X_after)
        deviation = jnp.sqrt(jnp.maximum(noise, 0.0))
        draws = functions + deviation * jax.random.normal(noise_key, functions.shape)
        effects.append(impact(draws, y_after, level=level))
    return effects


def _fits(
    fit: Fit, X: Any, y: Any, first: int, horizon: int, step: int
) -> Iterator[tuple[int, Any, np.ndarray, np.ndarray]]:
    """For each origin: the posterior before it, and the inputs and observations after it."""
    checks.function("fit", fit)
    X, y = as_numpy(checks.inputs("X", X)), np.asarray(y, float)
    n = len(X)
    if y.shape != (n,):
        raise ValueError(f"`y` must have shape ({n},), one value for each row, got {y.shape}.")
    first, horizon = checks.count("first", first), checks.count("horizon", horizon)
    if first + horizon > n:
        raise ValueError(
            f"`first` + `horizon` must be at most {n}, the number of rows, got {first + horizon}."
        )
    for origin in range(first, n - horizon + 1, step):
        observed = (np.arange(n) < origin) & ~np.isnan(y)
        values = np.where(observed, y, 0.0).astype(X.dtype)
        after = slice(origin, origin + horizon)
        yield origin, fit(X, values, observed), X[after], y[after]


def _mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean over the first axis and its standard error, without NaN."""
    number = np.sum(~np.isnan(values), axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, axis=0) / number
        variance = np.nansum(np.square(values - mean), axis=0) / (number - 1)
    return mean, np.sqrt(variance / number)
