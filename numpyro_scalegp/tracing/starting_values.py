"""Where a fit of hyperparameters starts: from distances and variances in the data."""

from collections.abc import Callable

import jax
import jax.flatten_util
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.distances import squared_distances

# Steps that are cut short where a parameter hardly moves what is wanted: at the end of a bounded
# parameter's range there would be no gradient to come back by.
_NUM_STEPS = 15
_DAMPING = 0.5


def median_distance(X: Float[ArrayLike, "n d"], *, max_rows: int = 1000) -> Float[Array, ""]:
    """The median Euclidean distance between rows: a lengthscale to start from.

    For inputs of like scales, such as standardized ones. On the first mini-batch of a stream it is
    a start where nothing else is known.

    Args:
        X: inputs, shape (n, d).
        max_rows: at most this many rows take part, from all over X.

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
    # Squares of large or small values would leave the range of the type.
    X = X - X[0]
    scale = jnp.max(jnp.abs(X))
    scale = jnp.where(scale > 0, scale, 1.0)
    squared = squared_distances(X / scale, X / scale)[jnp.triu_indices(X.shape[0], 1)]
    return scale * jnp.sqrt(jnp.median(squared))


def scaled_start(
    scales: Callable[[dict[str, Array]], list[tuple[Array, Array]]], params: dict[str, Array]
) -> dict[str, Array]:
    """Move parameters until what depends on them has the scales of the data.

    Steps of Gauss and Newton of least norm in the logarithms, so that parameters with no part in
    these stay.

    Args:
        scales: maps parameters, unconstrained, to pairs of what depends on them, positive, and what
            it is wanted to be; no way is gone where that is zero.
        params: where to start, by name.

    Returns:
        Parameters of the same shapes, where they are finite.
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


def _log_ratio(value: Array, wanted: Array) -> Array:
    """How far a value is from what is wanted: no way, where the data have no scale."""
    value, wanted = jnp.broadcast_arrays(value, jax.lax.stop_gradient(wanted))
    has_scale = (wanted > 0.0) & jnp.isfinite(wanted)
    return jnp.log(value / jnp.where(has_scale, wanted, jax.lax.stop_gradient(value)))


def deviation(values: Float[Array, "n *k"]) -> Float[Array, "*k"]:
    """The standard deviation, zero where it is rounding."""
    spread, largest = jnp.std(values, axis=0), jnp.max(jnp.abs(values), axis=0)
    return jnp.where(spread > 10.0 * jnp.finfo(values.dtype).eps * largest, spread, 0.0)


def lengthscale_pairs(
    kernel: AbstractKernel, X: Float[Array, "... n d"], share: float
) -> list[tuple[Array, Array]]:
    """Each lengthscale of a kernel, and what it is wanted to be, for `scaled_start`.

    That is a share of the median distance, in the inputs that it divides, each column by its own
    deviation.
    """
    pairs = kernel.scaled_inputs(X)
    return [(one, share * _distances(one, jax.lax.stop_gradient(seen))) for one, seen in pairs]


def _distances(lengthscale: Array, X: Float[Array, "... n k"]) -> Array:
    """The median distance: one, or one for each column; of a batch, within its members."""
    X = (X - jnp.mean(X, axis=-2, keepdims=True)).reshape(-1, X.shape[-1]) if X.ndim > 2 else X
    if lengthscale.shape[-1:] in ((), (1,)):
        return median_distance(X)
    scale = deviation(X)
    return scale * median_distance(X / jnp.where(scale > 0, scale, 1.0))
