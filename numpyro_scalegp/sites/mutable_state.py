"""Mutable state, which a model passes from one SVI step to the next."""

from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers, primitives


def state_site(name: str, start: Any) -> Any:
    """The contents of a mutable site, or `start` at first.

    Raises:
        ValueError: if the model has another site of that name before it.
    """
    for handler in primitives._PYRO_STACK:
        if isinstance(handler, handlers.trace) and name in handler.trace:
            kind = handler.trace[name]["type"]
            raise ValueError(
                f"the state `{name}` has the name of another site, of type {kind!r}: give it a "
                "name that no other site has."
            )
    return primitives.mutable(name, start)


def if_finite(new: Any, old: Any) -> Any:
    """Return `new`, or `old` if an entry of `new` is not finite; without derivatives.

    Raises:
        ValueError: if the step runs under `jax.vmap`, as with `num_particles > 1`.
    """
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(new)]
    all_finite = jnp.all(jnp.stack(finite))
    state = jax.tree.map(lambda a, b: jnp.where(all_finite, a, b), new, old)
    return refuse_batches(jax.lax.stop_gradient(state))


@jax.custom_batching.custom_vmap
def refuse_batches(written: Any) -> Any:
    """Pass a state through, and raise under `jax.vmap`."""
    return written


@refuse_batches.def_vmap
def _(axis_size: int, in_batched: Any, written: Any) -> Any:
    raise ValueError(
        f"a state is written by {axis_size} computations at once: it can serve only one. Use an "
        "ELBO with `num_particles=1`, and `jax.lax.map` in place of `jax.vmap`; or use no state: "
        "drop `state=` of a `GaussianProcess`, take `MiniBatch` for a `FeatureSpaceGP`."
    )
