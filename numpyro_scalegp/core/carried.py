"""What a model carries from one step of SVI to the next."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_pytree_with_keys_class
class Carried:
    """A pytree of arrays that a step reads, and its successor, which the step writes.

    As the value of a NumPyro mutable site it flattens to what was written, or else to what it was
    given: so a model can be traced any number of times with one and the same state.

    Args:
        begin: what the step reads; None until the first step gives it its start.
    """

    def __init__(self, begin: Any = None) -> None:
        self.begin = begin
        self._written: Any = None

    @property
    def newest(self) -> Any:
        """What the step wrote, or else what it was given."""
        return self.begin if self._written is None else self._written

    def write(self, new: Any) -> None:
        """Set what the next step reads; a successor that is not finite counts as none.

        Raises:
            ValueError: if the step runs under `jax.vmap`, as with `num_particles > 1`.
        """
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(new)]
        good = jnp.all(jnp.stack(finite))
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, self.begin)
        self._written = refuse_batches(jax.lax.stop_gradient(kept))

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Flatten to the newest."""
        return ((jax.tree_util.GetAttrKey("newest"), self.newest),), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "Carried":
        """The inverse of flattening."""
        return cls(*children)


@jax.custom_batching.custom_vmap
def refuse_batches(written: Any) -> Any:
    """Pass a state through, and raise under `jax.vmap`."""
    return written


@refuse_batches.def_vmap
def _(axis_size: int, in_batched: Any, written: Any) -> Any:
    raise ValueError(
        f"a state is written by {axis_size} computations at once: it serves one only. Use an ELBO "
        "with `num_particles=1`, or, for a `GaussianProcess`, drop `state=` to start each solve "
        "cold."
    )
