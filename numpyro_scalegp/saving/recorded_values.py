"""Values of objects that hold users' code, to notice that the code was edited.

A file stores the names of functions and classes, not their code, which may be edited between `save`
and `load`. So `save` records the values of the object at a few inputs, and `load` compares them
with the values that it computes there: rewriting the code without changing its values is no error.
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution

from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.features.feature_map import AbstractFeatures
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.processes.mixture import MixturePosterior
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import MAX_COLUMNS, RowsFunction

# Fields that hold the inputs at which all functions in an object are evaluated.
_INPUTS = ("X", "inducing_points", "mean_points", "points")
_NUM_DRAWS = 2


class RecordedValues(NamedTuple):
    """The values of an object at a few inputs when it was saved."""

    inputs: np.ndarray
    values: list[np.ndarray]


def can_be_evaluated(value: Any) -> bool:
    """Whether an object can be evaluated at a matrix of inputs."""
    return isinstance(value, RowsFunction | AbstractKernel | AbstractFeatures | MixturePosterior)


def check_moments(posterior: AbstractPosterior) -> None:
    """Trace the moments at one data point, which raises if the fields do not fit together.

    Nothing is computed or compiled. A mixture, which holds a model, is not traced.
    """
    X = inputs_of(posterior)
    if X is not None and not isinstance(posterior, MixturePosterior):
        jax.eval_shape(lambda: posterior._mean_and_variance(jnp.asarray(X)[..., :1, :], None))


def record(value: Any, inputs: Any) -> RecordedValues | None:
    """Evaluate an object at the first candidate inputs that it accepts; None if it accepts none.

    Args:
        value: an object that `can_be_evaluated`.
        inputs: the matrix of inputs with which it is used, or None.
    """
    for X in _candidates(value, inputs):
        try:
            return RecordedValues(X, _values(value, X))
        except Exception:
            # A user's function may expect other arguments and raise any error.
            continue
    return None


def differs(value: Any, recorded: RecordedValues) -> bool:
    """Whether an object's values differ from the recorded ones by more than rounding errors."""
    values = _values(value, recorded.inputs)
    pairs = zip(values, recorded.values, strict=False)
    return len(values) != len(recorded.values) or not all(_is_close(*pair) for pair in pairs)


def inputs_of(value: Any) -> Any:
    """The least deeply nested matrix of inputs in an object; None if it holds none."""
    queue = collections.deque([value])
    while queue:
        node = queue.popleft()
        if isinstance(node, eqx.Module | Distribution):
            fields = vars(node)
            for name in _INPUTS:
                X: Any = fields.get(name)
                if hasattr(X, "shape") and X.ndim >= 2 and jnp.issubdtype(X.dtype, jnp.floating):
                    return X
            queue.extend(fields.values())
        elif isinstance(node, jax.tree_util.Partial):
            queue.extend(node.args)
    return None


def _candidates(value: Any, inputs: Any) -> Iterator[np.ndarray]:
    """Matrices of inputs that an object may accept, the most informative ones first."""
    if isinstance(value, MixturePosterior):
        inputs, _ = _inputs_and_noise(_with_few_draws(value))
        inputs = None if inputs is None else inputs[0]
    elif inputs is not None:
        inputs = _inputs_near(jnp.asarray(inputs))
    if inputs is not None:
        X = as_numpy(inputs)
        yield X
        yield X[:2]  # data points: between two categories there is no valid input
    for num_columns in range(1, MAX_COLUMNS + 1):
        yield np.linspace(-1.0, 1.0, 3 * num_columns, dtype=np.float32).reshape(3, num_columns)


def _inputs_near(X: Float[Array, "... n d"]) -> Float[Array, "5 d"]:
    """Two data points, two points between data points, and one beyond all of them."""
    X = X.reshape(-1, X.shape[-1])
    first, second, middle, last = X[0], X[min(1, len(X) - 1)], X[len(X) // 2], X[-1]
    low, high = jnp.min(X, axis=0), jnp.max(X, axis=0)
    beyond = high + jnp.where(high > low, (high - low) / 2, 1.0)
    return jnp.stack([first, last, (first + second) / 2, (middle + last) / 2, beyond])


def _with_few_draws(mixture: MixturePosterior) -> MixturePosterior:
    draws = jax.tree.map(lambda leaf: leaf[:_NUM_DRAWS], mixture.draws)
    return dataclasses.replace(mixture, draws=draws)


@compiled
def _inputs_and_noise(mixture: MixturePosterior) -> tuple[Any, Any]:
    """Inputs near the data of the posterior given each draw, and its noise variance."""

    def of_draw(posterior: AbstractPosterior) -> tuple[Any, Any]:
        X, noise = inputs_of(posterior), posterior.noise_variance
        return (
            None if X is None else _inputs_near(X),
            None if noise is None else jnp.ravel(noise)[:3],
        )

    return mixture._each(of_draw)


def _values(value: Any, X: np.ndarray) -> list[np.ndarray]:
    """The arrays that an object returns for a matrix of inputs."""
    if isinstance(value, MixturePosterior):
        mixture = _with_few_draws(value)
        result: Any = mixture._moments(mixture._check(X), None), _inputs_and_noise(mixture)[1]
    elif isinstance(value, AbstractKernel):
        result = value(X, X)
    else:
        result = value(jnp.asarray(X))
    if isinstance(result, Distribution):
        # Moments where there are any: other releases may rename a distribution's parameters.
        moments = [as_numpy(moment) for moment in (result.mean, result.variance)]
        result = moments if np.isfinite(moments).any() else jax.tree.leaves(result)
    return [as_numpy(leaf) for leaf in jax.tree.leaves(result)]


def _is_close(now: np.ndarray, before: np.ndarray) -> bool:
    """Whether arrays agree to a third of the digits, with NaN at the same entries."""
    if now.shape != before.shape:
        return False
    eps = max(np.finfo(array.dtype).eps for array in (now, before) if array.dtype.kind == "f")
    scale = np.abs(before[np.isfinite(before)]).max(initial=0.0)
    allowed = scale * float(eps) ** (1 / 3)
    return np.allclose(now, before, rtol=0.0, atol=allowed, equal_nan=True)
