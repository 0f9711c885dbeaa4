"""What objects answer that hold code of users, of which a file has the name alone.

A function may be edited between `save` and `load`. A file keeps what it gave at a few rows, and
`load` compares: values, which do not depend on how the code is written.
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

from numpyro_scalegp.core.functions import MAX_COLUMNS, RowsFunction
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.features import AbstractFeatures
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.mixture import MixturePosterior
from numpyro_scalegp.posteriors.posterior import AbstractPosterior

# Fields with the inputs of all functions in an object.
_INPUTS = ("X", "inducing_points", "mean_points", "points")
_NUM_DRAWS = 2


class Answers(NamedTuple):
    """What an object gave when it was saved."""

    rows: np.ndarray
    values: list[np.ndarray]


def can_answer(value: Any) -> bool:
    """Whether an object can be computed at rows of inputs."""
    return isinstance(value, RowsFunction | AbstractKernel | AbstractFeatures | MixturePosterior)


def check_moments(posterior: AbstractPosterior) -> None:
    """Raise where fields do not fit together, by tracing the moments at a row of its inputs.

    Nothing is computed or compiled, and of a mixture, which holds a model, nothing traced.
    """
    X = inputs_of(posterior)
    if X is not None and not isinstance(posterior, MixturePosterior):
        jax.eval_shape(lambda: posterior._mean_and_variance(jnp.asarray(X)[..., :1, :], None))


def recorded(value: Any, inputs: Any) -> Answers | None:
    """What an object gives at a few rows, the first ones that it takes; None if it takes none.

    Args:
        value: one that `can_answer`.
        inputs: the matrix of inputs that it is used with, or None.
    """
    for rows in _candidates(value, inputs):
        try:
            return Answers(rows, _values(value, rows))
        except Exception:
            # A user's function may take other arguments, and raise what it likes.
            continue
    return None


def differs(value: Any, answers: Answers) -> bool:
    """Whether an object gives something else than it did, beyond the rounding of a device."""
    values = _values(value, answers.rows)
    pairs = zip(values, answers.values, strict=False)
    return len(values) != len(answers.values) or not all(_is_close(*pair) for pair in pairs)


def inputs_of(value: Any) -> Any:
    """The matrix of inputs that an object holds, the nearest to its top; None without one."""
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
    """Matrices of rows that an object may take, the most telling ones first."""
    if isinstance(value, MixturePosterior):
        inputs, _ = _rows_and_noise(_with_few_draws(value))
        inputs = None if inputs is None else inputs[0]
    elif inputs is not None:
        inputs = _rows_near(jnp.asarray(inputs))
    if inputs is not None:
        rows = as_numpy(inputs)
        yield rows
        yield rows[:2]  # of the data: a column of categories has nothing between them
    for num_columns in range(1, MAX_COLUMNS + 1):
        yield np.linspace(-1.0, 1.0, 3 * num_columns, dtype=np.float32).reshape(3, num_columns)


def _rows_near(X: Float[Array, "... n d"]) -> Float[Array, "5 d"]:
    """Two rows of the inputs, two between rows and one beyond all of them."""
    X = X.reshape(-1, X.shape[-1])
    first, second, middle, last = X[0], X[min(1, len(X) - 1)], X[len(X) // 2], X[-1]
    low, high = jnp.min(X, axis=0), jnp.max(X, axis=0)
    beyond = high + jnp.where(high > low, (high - low) / 2, 1.0)
    return jnp.stack([first, last, (first + second) / 2, (middle + last) / 2, beyond])


def _with_few_draws(mixture: MixturePosterior) -> MixturePosterior:
    draws = jax.tree.map(lambda leaf: leaf[:_NUM_DRAWS], mixture.draws)
    return dataclasses.replace(mixture, draws=draws)


@compiled
def _rows_and_noise(mixture: MixturePosterior) -> tuple[Any, Any]:
    """Rows near the data of the posterior given each draw, and its noise variance."""

    def of_one(posterior: AbstractPosterior) -> tuple[Any, Any]:
        X, noise = inputs_of(posterior), posterior.noise_variance
        return None if X is None else _rows_near(X), None if noise is None else jnp.ravel(noise)[:3]

    return mixture._each(of_one)


def _values(value: Any, rows: np.ndarray) -> list[np.ndarray]:
    """The arrays that an object gives at rows."""
    if isinstance(value, MixturePosterior):
        few = _with_few_draws(value)
        found: Any = few._moments(few._check(rows), None), _rows_and_noise(few)[1]
    elif isinstance(value, AbstractKernel):
        found = value(rows, rows)
    else:
        found = value(jnp.asarray(rows))
    if isinstance(found, Distribution):
        # The parameters of those that have no moments, whose names other releases may change.
        moments = [as_numpy(moment) for moment in (found.mean, found.variance)]
        found = moments if np.isfinite(moments).any() else jax.tree.leaves(found)
    return [as_numpy(leaf) for leaf in jax.tree.leaves(found)]


def _is_close(now: np.ndarray, before: np.ndarray) -> bool:
    """Whether arrays agree to a third of the digits, and have NaN at the same places."""
    if now.shape != before.shape:
        return False
    eps = max(np.finfo(one.dtype).eps for one in (now, before) if one.dtype.kind == "f")
    scale = np.abs(before[np.isfinite(before)]).max(initial=0.0)
    allowed = scale * float(eps) ** (1 / 3)
    return np.allclose(now, before, rtol=0.0, atol=allowed, equal_nan=True)
