"""Where the points of variational families start, and how they grow."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float
from numpyro.primitives import mutable

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.kernels import AbstractKernel


class InitialPoints:
    """Where points start: as given, or on the rows of the data.

    Args:
        name: of the argument that gives the points, for messages.
        num_name: of the argument that gives their number.
        num: the number of points where none are given, at most that of the rows.
        points: the points, shape (M, d), or None.
        choose: from a key, rows, a number and columns of categories to points.
        advice: what to give in place of too few rows, for the warning.
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
        given = None if points is None else checks.inputs(name, points, may_be_batch=True)
        self.points = None if given is None else np.array(given)

    def __call__(
        self, key: Array, rows: Callable[[], Float[Array, "... n d"]], kernel: AbstractKernel
    ) -> Float[Array, "... M d"]:
        """The points for a kernel, as given or among rows that are made for it.

        Of a batch of matrices, for each of them.
        """
        if self.points is not None:
            kernel.check_categories(self.name, self.points)
            shape = jax.eval_shape(rows).shape
            is_batch, width = len(shape) > 2, shape[-1]
            return checks.inputs(self.name, self.points, width=width, may_be_batch=is_batch)
        X = rows()
        shape, num_rows = X.shape, X.shape[-2]
        if num_rows < self.num:
            warnings.warn(
                f"`{self.num_name}` is {self.num}, but there are only {num_rows} rows in the "
                f"first mini-batch, or in all: these are the {self.name.replace('_', ' ')}. Give "
                f"`{self.name}`, such as {self.advice}, to choose from all rows.",
                UserWarning,
                stacklevel=2,
            )
        matrices = batches.keys(key, shape[:-2]), batches.Batch(X, len(shape) - 2)
        num, categories = min(self.num, num_rows), tuple(kernel.categories(shape[-1]))
        return batches.each(lambda key, X: self.choose(key, X, num, categories), *matrices)


def spread_rows(
    key: Array, X: Float[Array, "n d"], num: int, categories: tuple[int, ...] = ()
) -> Float[Array, "num d"]:
    """Random rows from all over X: the first ones lie side by side where rows are sorted.

    These are in some category, whatever the columns of categories.
    """
    return X[stratified_indices(key, X.shape[0], num)]


def hold_categories(
    points: Float[Array, "... M d"], kernel: AbstractKernel
) -> Float[Array, "... M d"]:
    """The points, with no derivative in the columns where the kernel has categories."""
    columns = list(kernel.categories(points.shape[-1]))
    if not columns:
        return points
    is_held = np.isin(np.arange(points.shape[-1]), columns)
    return jnp.where(is_held, jax.lax.stop_gradient(points), points)


class Basis(NamedTuple):
    """Points, and which of them are there yet."""

    points: Float[Array, "M d"]
    active: Bool[Array, " M"]


def growing_bases(
    name: str,
    X: Float[Array, "b d"],
    sizes: dict[str, int],
    growth: int,
    *,
    begins: bool,
    grows: bool,
) -> dict[str, Basis]:
    """Bases that take up rows of each mini-batch until they are full.

    A NumPyro mutable site holds the points and their number, so that nothing is compiled again.

    Args:
        name: the site's name.
        X: the rows of the mini-batch.
        sizes: the number of points of each basis when it is full.
        growth: rows that a mini-batch adds at most, from all over it.
        begins: whether this may be the first mini-batch.
        grows: whether this mini-batch adds any.

    Returns:
        The bases, with X taken up. The same rows twice in a row are taken up once, as when SVI is
        set up with the batch of its first step. A mini-batch with a NaN or an infinity adds none.

    Raises:
        ValueError: if this is not the first mini-batch, and the site has no value.

    References:
        Cheng and Boots (2017), algorithm 1.
    """
    finite = jnp.isfinite(X).all(axis=1)
    # Any row will do for those that are not there yet: some kernels have no derivative at zero.
    anywhere = jnp.where(jnp.any(finite), X[jnp.argmax(finite)], 1.0)
    start = {key: jnp.tile(anywhere, (size, 1)) for key, size in sizes.items()}
    start["size"] = jnp.zeros((), int)
    state: Any = mutable(name, start)
    if state is start and not begins:
        raise ValueError(
            f"`params` lacks the mutable site `{name}`, which holds the points: give "
            "{**svi.get_params(state), **state.mutable_state}."
        )
    if grows:
        # The same places of each mini-batch. The first rows would lie side by side where rows are
        # sorted, as the indices of `sgp.plate` are.
        new = X[stratified_indices(jax.random.key(0), len(X), min(growth, len(X)))]
        size = state["size"]
        largest = max(sizes, key=lambda key: sizes[key])
        # Rows beyond the end of a basis are dropped.
        before = jnp.maximum(size - len(new) + jnp.arange(len(new)), 0)
        known = (size >= len(new)) & jnp.all(state[largest].at[before].get(mode="clip") == new)
        skipped = known | ~jnp.all(finite)
        place = jnp.where(skipped, sizes[largest], size) + jnp.arange(len(new))
        for key in sizes:
            state[key] = state[key].at[place].set(new, mode="drop")
        state["size"] = jnp.minimum(size + jnp.where(skipped, 0, len(new)), sizes[largest])
    return {key: Basis(state[key], jnp.arange(size) < state["size"]) for key, size in sizes.items()}
