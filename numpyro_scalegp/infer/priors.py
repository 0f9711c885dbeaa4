"""Priors on the hyperparameters of kernels, from what is known of a function's scales."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import ArrayLike, Float
from scipy import special

from numpyro_scalegp.core import checks

# Concentrations among which there is that of two bounds, and halvings of that range.
_LOG_CONCENTRATIONS = (np.log(1e-2), np.log(1e8))
_NUM_HALVINGS = 60

# Rows whose nearest neighbors, among all rows, tell the spacing.
_MAX_ROWS = 1000


def lengthscale_prior(
    lower: Float[ArrayLike, "..."] | None = None,
    upper: Float[ArrayLike, "..."] | None = None,
    mass: float = 0.98,
    *,
    X: Float[ArrayLike, "n d"] | None = None,
) -> dist.InverseGamma:
    """An inverse gamma distribution with most of its mass between two lengthscales.

    P(l < lower) = P(l > upper) = (1 - mass) / 2. Its density falls off faster than any power below,
    where functions would vary between one row and the next and data cannot tell them from noise,
    and as a power above, where functions are nearly straight over all data and nothing tells one
    lengthscale from a longer one: a likelihood that is flat there needs a prior that is not.

    Args:
        lower: in units of the inputs, positive; None for the distance from a row to its nearest
            neighbor (the median over rows that are not equal), as it is in each column.
        upper: above `lower`; None for the diagonal of the box around all rows. Both distances are
            Euclidean in columns scaled to unit deviation, and scaled back: with one column they
            are the spacing and the range of the data.
        mass: probability between the bounds, in (0, 1).
        X: inputs, shape (n, d); of use only where a bound is None. Then there is a lengthscale for
            each column: add `.to_event(1)`.

    Returns:
        A distribution of NumPyro of the bounds' common shape, such as (d,), which is its
        `batch_shape`. Concentration and rate are found by bisection on the host.

    Raises:
        ValueError: if bounds are not positive and finite, `upper` is not above `lower` by 0.1
            percent or more, `mass` is not in (0, 1), a bound is None without `X`, `X` has less than
            two different rows or a column that is constant, or one of them is traced by `jit`:
            make the prior where data are concrete.

    References:
        Betancourt (2020), Robust Gaussian Process Modeling, section 3 (inverse gamma priors by
        their tails).

    Example:
        >>> import numpy as np
        >>> import numpyro_scalegp as sgp
        >>> prior = sgp.infer.lengthscale_prior(0.1, 2.0)
        >>> round(float(prior.concentration), 2), round(float(prior.rate), 2)
        (2.94, 0.83)
        >>> X = np.linspace([0.0, -50.0], [1.0, 50.0], 11)
        >>> sgp.infer.lengthscale_prior(X=X).to_event(1).event_shape
        (2,)
    """
    checks.number("mass", mass, "(0, 1)")
    if lower is None or upper is None:
        if X is None:
            raise ValueError("`lower` and `upper` must both be given where `X` is not.")
        spacing, diagonal = _distances(X)
        lower = spacing if lower is None else lower
        upper = diagonal if upper is None else upper
    low, high = _concrete("lower", lower), _concrete("upper", upper)
    if not np.all(high > 1.001 * low):
        remedy = "" if X is None else " What was not given is from `X`: its range may be too short."
        raise ValueError(
            f"`upper` must be above `lower` by 0.1 percent or more, got {_brief(high)} and "
            f"{_brief(low)}.{remedy}"
        )
    tail = 0.5 * (1.0 - mass)
    concentration = _concentration(np.asarray(np.log(high / low)), tail)
    rate = low * special.gammainccinv(concentration, tail)
    return dist.InverseGamma(jnp.asarray(concentration, float), jnp.asarray(rate, float))


def variance_prior(upper: Float[ArrayLike, "..."], tail: float = 0.05) -> dist.Weibull:
    """The penalized-complexity prior of a variance: exponential on its root, the amplitude.

    P(amplitude > upper) = tail with an exponential density, the largest at zero, where the simpler
    model lies that has no such function. The variance, which kernels take, is the amplitude squared
    and has the Weibull distribution of concentration 1/2: P(variance > v) = tail^(sqrt(v) / upper).
    It suits the variance of noise as well.

    Args:
        upper: an amplitude, in units of the function, that is hardly exceeded; positive. For
            standardized observations two or three.
        tail: the probability that it is, in (0, 1).

    Returns:
        The distribution of the *variance*, of the shape of `upper`.

    Raises:
        ValueError: if `upper` is not positive and finite, or `tail` not in (0, 1).

    References:
        Simpson, Rue, Riebler, Martins and Sorbye (2017), Penalising Model Component Complexity,
        section 3.3; Fuglstad, Simpson, Lindgren and Rue (2019), Constructing Priors that Penalize
        the Complexity of Gaussian Random Fields, theorem 2.6.

    Example:
        >>> import jax
        >>> import numpyro_scalegp as sgp
        >>> prior = sgp.infer.variance_prior(3.0, tail=0.05)
        >>> float(prior.cdf(9.0).round(3))
        0.95
    """
    checks.number("tail", tail, "(0, 1)")
    amplitude = checks.as_positive(upper, "upper")
    checks.positive("upper", amplitude)
    return dist.Weibull(jnp.square(amplitude / math.log(1.0 / tail)), 0.5)


def _concrete(name: str, value: Float[ArrayLike, "..."]) -> np.ndarray:
    if not checks.is_concrete(value):
        raise ValueError(
            f"`{name}` must be known when the prior is made, got an array traced by `jit`: make "
            "the prior outside of the model, or from numbers."
        )
    with jax.ensure_compile_time_eval():  # a model may be running under `jit`
        array = checks.as_float(value, name)
    checks.positive(name, array)
    return np.asarray(array, np.float64)


def _brief(bounds: np.ndarray) -> str:
    return np.array2string(bounds, precision=4, threshold=8)


def _concentration(log_ratio: np.ndarray, tail: float) -> np.ndarray:
    """The concentration with which two quantiles have a ratio that falls as it grows."""
    low, high = (np.full(log_ratio.shape, end) for end in _LOG_CONCENTRATIONS)
    for _ in range(_NUM_HALVINGS):
        middle = 0.5 * (low + high)
        a = np.exp(middle)
        quantiles = special.gammainccinv(a, tail), special.gammaincinv(a, tail)
        is_below = np.log(quantiles[0]) - np.log(quantiles[1]) > log_ratio
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return np.asarray(np.exp(0.5 * (low + high)))


def _distances(X: Float[ArrayLike, "n d"]) -> tuple[np.ndarray, np.ndarray]:
    """The distance to the nearest other row, and that of two corners, in units of each column."""
    from scipy.spatial import cKDTree

    if not checks.is_concrete(X):
        _concrete("X", X)
    with jax.ensure_compile_time_eval():
        rows = np.asarray(checks.inputs("X", X), np.float64)
    is_constant = np.ptp(rows, axis=0) == 0.0
    if is_constant.any():
        raise ValueError(
            f"`X` must vary in each column, got column {int(np.argmax(is_constant))} with the same "
            "value in all rows: there is no scale in it. Leave it out, or give both bounds."
        )
    deviation = np.std(rows, axis=0)
    points = np.unique(rows / deviation, axis=0)  # equal rows say nothing of a spacing
    some = np.random.default_rng(0).permutation(len(points))[:_MAX_ROWS]
    nearest = cKDTree(points).query(points[some], k=2)[0][:, 1]
    diagonal = np.linalg.norm(np.ptp(points, axis=0))
    return deviation * np.median(nearest), deviation * diagonal
