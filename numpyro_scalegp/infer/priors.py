"""Priors on kernel hyperparameters, from prior knowledge of a function's scales."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import ArrayLike, Float
from scipy import special

from numpyro_scalegp.core import checks

# The range of the bisection for the concentration, and its number of steps.
_LOG_CONCENTRATIONS = (np.log(1e-2), np.log(1e8))
_NUM_HALVINGS = 60

# At most this many inputs enter the median distance to the nearest neighbor.
_MAX_ROWS = 1000


def lengthscale_prior(
    lower: Float[ArrayLike, "..."] | None = None,
    upper: Float[ArrayLike, "..."] | None = None,
    mass: float = 0.98,
    *,
    X: Float[ArrayLike, "n d"] | None = None,
) -> dist.InverseGamma:
    """An inverse gamma distribution with most of its mass between two lengthscales.

    P(l < lower) = P(l > upper) = (1 - mass) / 2. Below `lower` the density decays faster than any
    power: there the function would vary between neighboring inputs, and data cannot tell it from
    noise. Above `upper` it decays as a power: there the function is nearly linear over all data,
    the likelihood is flat in the lengthscale, and the prior must not be.

    Args:
        lower: in units of the inputs, positive; None for the distance from an input to its nearest
            neighbor (the median over distinct inputs), in each input dimension.
        upper: above `lower`; None for the diagonal of the box around all inputs. Both distances are
            Euclidean with each input dimension scaled to unit standard deviation, and scaled back:
            in one dimension they are the spacing and the range of the data.
        mass: probability between the bounds, in (0, 1).
        X: inputs, shape (n, d); used only if a bound is None. Then there is a lengthscale for each
            input dimension: add `.to_event(1)`.

    Returns:
        A NumPyro distribution whose `batch_shape` is the common shape of the bounds, such as (d,).
        Its concentration is found by bisection on the host.

    Raises:
        ValueError: if the bounds are not positive and finite, `upper` is not above `lower` by 0.1
            percent or more, `mass` is not in (0, 1), a bound is None without `X`, `X` has fewer
            than two distinct rows or a constant column, or a bound or `X` is traced by `jit`:
            construct the prior where the data are concrete.

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
            raise ValueError("`lower` and `upper` must both be given unless `X` is.")
        spacing, diagonal = _distances(X)
        lower = spacing if lower is None else lower
        upper = diagonal if upper is None else upper
    low, high = _concrete("lower", lower), _concrete("upper", upper)
    if not np.all(high > 1.001 * low):
        remedy = "" if X is None else " A bound that is None is from `X`: its range may be small."
        raise ValueError(
            f"`upper` must be above `lower` by 0.1 percent or more, got {_brief(high)} and "
            f"{_brief(low)}.{remedy}"
        )
    tail = 0.5 * (1.0 - mass)
    concentration = _concentration(np.asarray(np.log(high / low)), tail)
    rate = low * special.gammainccinv(concentration, tail)
    return dist.InverseGamma(jnp.asarray(concentration, float), jnp.asarray(rate, float))


def variance_prior(upper: Float[ArrayLike, "..."], tail: float = 0.05) -> dist.Weibull:
    """The penalized-complexity prior of a variance: exponential on the standard deviation.

    The amplitude, the square root of the variance, has an exponential density with
    P(amplitude > upper) = tail. The density is largest at zero, the simpler model without this
    function. The variance then has the Weibull distribution with concentration 1/2:
    P(variance > v) = tail^(sqrt(v) / upper). The prior suits noise variances as well.

    Args:
        upper: an amplitude, in units of the function, that is rarely exceeded; positive. For
            standardized observations, two or three.
        tail: the probability that the amplitude exceeds `upper`, in (0, 1).

    Returns:
        The distribution of the *variance*, with the shape of `upper`.

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
            "the prior outside the model, or from concrete values."
        )
    with jax.ensure_compile_time_eval():  # a model may be running under `jit`
        array = checks.as_float(value, name)
    checks.positive(name, array)
    return np.asarray(array, np.float64)


def _brief(bounds: np.ndarray) -> str:
    return np.array2string(bounds, precision=4, threshold=8)


def _concentration(log_ratio: np.ndarray, tail: float) -> np.ndarray:
    """The concentration at which the log ratio of the upper to the lower quantile is `log_ratio`.

    The ratio falls as the concentration grows.
    """
    low, high = (np.full(log_ratio.shape, end) for end in _LOG_CONCENTRATIONS)
    for _ in range(_NUM_HALVINGS):
        middle = 0.5 * (low + high)
        a = np.exp(middle)
        quantiles = special.gammainccinv(a, tail), special.gammaincinv(a, tail)
        is_below = np.log(quantiles[0]) - np.log(quantiles[1]) > log_ratio
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return np.asarray(np.exp(0.5 * (low + high)))


def _distances(X: Float[ArrayLike, "n d"]) -> tuple[np.ndarray, np.ndarray]:
    """The median distance to the nearest input, and the diagonal, in units of each dimension."""
    from scipy.spatial import cKDTree

    if not checks.is_concrete(X):
        _concrete("X", X)
    with jax.ensure_compile_time_eval():
        rows = np.asarray(checks.inputs("X", X), np.float64)
    is_constant = np.ptp(rows, axis=0) == 0.0
    if is_constant.any():
        raise ValueError(
            f"`X` must vary in each column, got column {int(np.argmax(is_constant))} with the same "
            "value in all rows: it has no scale. Drop the column, or give both bounds."
        )
    deviation = np.std(rows, axis=0)
    points = np.unique(rows / deviation, axis=0)  # equal inputs have no spacing
    subset = np.random.default_rng(0).permutation(len(points))[:_MAX_ROWS]
    nearest = cKDTree(points).query(points[subset], k=2)[0][:, 1]
    diagonal = np.linalg.norm(np.ptp(points, axis=0))
    return deviation * np.median(nearest), deviation * diagonal
