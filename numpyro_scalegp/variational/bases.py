"""Initial points of variational families, and bases that grow with the mini-batches."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int
from numpyro.primitives import mutable

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.kernels.kernel import AbstractKernel


class InitialPoints:
    """Initial points: the user's, or a choice from the data's inputs.

    Args:
        name: name of the argument for the points, for messages.
        num_name: name of the argument for the number of points.
        num: number of points to choose, or all inputs if these are fewer.
        points: the user's points, shape (M, d), or None.
        choose: maps a key, inputs, a number and the indices of categorical columns to points.
        advice: which points the warning of too few inputs suggests.
    """

    def __init__(
        self,
        name: str,
        num_name: str,
        num: int,
        points: Float[ArrayLike, "... M d"] | None,
        choose: Callable[[Array, Array, int, tuple[int, ...]], Array],
        advice: str,
    ) -> None:
        self.name, self.num_name, self.choose, self.advice = name, num_name, choose, advice
        self.num = checks.count(num_name, num)
        # On the host, so that an optimizer that donates its state cannot delete this copy.
        self.points = (
            None if points is None else np.array(checks.inputs(name, points, may_be_batch=True))
        )

    def __call__(
        self, key: Array, rows: Callable[[], Float[Array, "... n d"]], kernel: AbstractKernel
    ) -> Float[Array, "... M d"]:
        """The user's points, or points chosen from `rows()`, or from each matrix of a batch."""
        if self.points is not None:
            kernel.check_values(self.name, self.points)
            shape = jax.eval_shape(rows).shape
            is_batch, width = len(shape) > 2, shape[-1]
            return checks.inputs(self.name, self.points, width=width, may_be_batch=is_batch)
        X = rows()
        shape, num_rows = X.shape, X.shape[-2]
        if num_rows < self.num:
            warnings.warn(
                f"`{self.num_name}` is {self.num}, but there are only {num_rows} rows in the "
                f"first mini-batch, or in the data: these become the {self.name.replace('_', ' ')}."
                f" Give `{self.name}`, such as {self.advice}, to choose from all rows.",
                UserWarning,
                stacklevel=2,
            )
        matrices = batches.keys(key, shape[:-2]), batches.Batch(X, len(shape) - 2)
        num, categories = min(self.num, num_rows), tuple(kernel.categories(shape[-1]))
        return batches.each(lambda key, X: self.choose(key, X, num, categories), *matrices)


def spread_rows(
    key: Array, X: Float[Array, "n d"], num: int, categories: tuple[int, ...] = ()
) -> Float[Array, "num d"]:
    """Random rows from all over X; the first rows would be neighbors where X is sorted.

    Rows of the data have valid categories, so that `categories` is not needed.
    """
    return X[stratified_indices(key, X.shape[0], num)]


def hold_categories(
    points: Float[Array, "... M d"], kernel: AbstractKernel
) -> Float[Array, "... M d"]:
    """The points, without gradients in the categorical columns of the kernel."""
    columns = list(kernel.categories(points.shape[-1]))
    if not columns:
        return points
    is_held = np.isin(np.arange(points.shape[-1]), columns)
    return jnp.where(is_held, jax.lax.stop_gradient(points), points)


class Basis(NamedTuple):
    """The points of a basis that may still grow."""

    points: Float[Array, "M d"]
    active: Bool[Array, " M"]  # whether a point is in use


def growing_bases(
    name: str,
    X: Float[Array, "b d"],
    sizes: dict[str, int],
    growth: int,
    *,
    begins: bool,
    grows: bool,
) -> dict[str, Basis]:
    """Bases to which each mini-batch adds inputs until they are full.

    A NumPyro mutable site holds the points and their number, so that growth compiles nothing again.

    Args:
        name: the site's name.
        X: the inputs of the mini-batch.
        sizes: number of points of each full basis.
        growth: the largest number of points that a mini-batch adds.
        begins: whether this may be the first mini-batch.
        grows: whether this mini-batch adds points.

    Returns:
        The bases with the added points. A mini-batch that follows itself adds nothing again, as
        when SVI initializes with the batch of its first step. A mini-batch with NaN or infinity
        adds nothing.

    Raises:
        ValueError: if this cannot be the first mini-batch, and the site has no value.

    References:
        Cheng and Boots (2017), algorithm 1.
    """
    finite = jnp.isfinite(X).all(axis=1)
    # Points not yet in use are an input rather than zero, where some kernels have no derivative.
    placeholder = jnp.where(jnp.any(finite), X[jnp.argmax(finite)], 1.0)
    start = {key: jnp.tile(placeholder, (size, 1)) for key, size in sizes.items()}
    start["size"] = jnp.zeros((), int)
    state: Any = mutable(name, start)
    if state is start and not begins:
        raise ValueError(
            f"`params` lacks the mutable site `{name}`, which holds the points: give "
            "{**svi.get_params(state), **state.mutable_state}."
        )
    if grows:
        # The same positions in each mini-batch. The first rows would be neighbors in sorted data,
        # since `sgp.plate` sorts its indices.
        positions = stratified_indices(jax.random.key(0), len(X), min(growth, len(X)))
        new = X[positions[_evenly_spread_order(len(positions))]]
        size = state["size"]
        largest = max(sizes, key=lambda key: sizes[key])
        # Rows beyond the end of a basis are dropped.
        last = jnp.maximum(size - len(new) + jnp.arange(len(new)), 0)
        repeated = (size >= len(new)) & jnp.all(state[largest].at[last].get(mode="clip") == new)
        skipped = repeated | ~jnp.all(finite)
        slots = jnp.where(skipped, sizes[largest], size) + jnp.arange(len(new))
        for key in sizes:
            state[key] = state[key].at[slots].set(new, mode="drop")
        state["size"] = jnp.minimum(size + jnp.where(skipped, 0, len(new)), sizes[largest])
    return {key: Basis(state[key], jnp.arange(size) < state["size"]) for key, size in sizes.items()}


def _evenly_spread_order(size: int) -> Int[np.ndarray, " size"]:
    """A permutation whose first elements are spread over the range, however many are taken.

    A small basis has room only for the first few of the new points, which must not be from the
    beginning of sorted data.
    """
    fractions = np.arange(size) * (np.sqrt(5.0) - 1.0) / 2.0 % 1.0
    return np.argsort(np.argsort(fractions))
