"""Points that are taken from one mini-batch after the other, in arrays of a fixed size."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from numpyro.primitives import mutable

from numpyro_scalegp.core.index_sampling import stratified_indices


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

    A NumPyro mutable site holds the points and their number, so that nothing is compiled anew.

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
