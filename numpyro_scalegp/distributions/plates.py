"""Mini-batches whose cost does not depend on the size of the data."""

import jax.numpy as jnp
import numpyro
from jaxtyping import Array, Int, Key
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.index_sampling import stratified_indices


class _StratifiedDraw(Messenger):
    """Replaces how a plate of the given name draws its indices."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "plate" and msg["name"] == self.name:
            msg["fn"] = _draw


def _draw(
    size: int, subsample_size: int | None, rng_key: Key[Array, ""] | None = None
) -> Int[Array, " subsample_size"]:
    if subsample_size is None or subsample_size == size:
        return jnp.arange(size, dtype=jnp.int32)
    if rng_key is None:
        raise ValueError("a plate with a `subsample_size` needs a random key: use handlers.seed.")
    return stratified_indices(rng_key, size, subsample_size)


def plate(
    name: str, size: int, subsample_size: int | None = None, dim: int | None = None
) -> numpyro.plate:
    """A `numpyro.plate` that draws its indices in O(subsample_size).

    NumPyro's own permutes all `size` rows for each mini-batch. Handlers, guides and scaling treat
    both alike.

    Args:
        name: name of the plate.
        size: number of rows of the data.
        subsample_size: rows of a mini-batch; None for all.
        dim: the batch dimension it takes, negative; None for the rightmost free one.

    Returns:
        The plate; entering it gives the indices.

    Raises:
        ValueError: if `subsample_size` is not between 1 and `size`.

    References:
        Draws: systematic stratified sampling, see `stratified_indices`.

    Example:
        >>> import jax
        >>> import numpyro
        >>> import numpyro_scalegp as sgp
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     with sgp.plate("rows", 1_000_000, subsample_size=4) as index:
        ...         print(index.shape)
        (4,)
    """
    checks.instance("name", name, str, "a string")
    checks.count("size", size)
    if subsample_size is not None and checks.count("subsample_size", subsample_size) > size:
        raise ValueError(f"`subsample_size` must be in 1..{size}, got {subsample_size}.")
    with _StratifiedDraw(name):
        return numpyro.plate(name, size, subsample_size, dim)
