"""Replacement of the parameters of a running SVI."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from numpyro.infer.util import transform_fn

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.mesh import placed_like
from numpyro_scalegp.variational.quadruply.control_variate import ControlVariate


def replace_params(svi: SVI, state: SVIState, params: dict[str, Any]) -> SVIState:
    """Replace parameters in the state of an SVI, and keep the optimizer's moments.

    Args:
        svi: an SVI with an optax optimizer, set up by `init`.
        state: the state of `svi`.
        params: new values by name, with the shapes that they have in the state; other parameters
            stay. Names that are not parameters of the SVI are ignored, so that the `params` of
            `solve_mean` can be passed unchanged.

    Returns:
        The new state, from which `svi.update` resumes. A `RowSVI` with a control variate needs a
        `refresh` before `update`, but not before `run`.

    Raises:
        ValueError: if the optimizer is not an optax optimizer.

    Example:
        >>> import jax
        >>> import numpyro
        >>> import optax
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> import numpyro_scalegp as sgp
        >>> def guide():
        ...     numpyro.param("a", 1.0)
        >>> svi = SVI(lambda: None, guide, optax.adam(0.1), Trace_ELBO())
        >>> state = sgp.infer.replace_params(svi, svi.init(jax.random.key(0)), {"a": 3.0})
        >>> float(svi.get_params(state)["a"])
        3.0
    """
    checks.instance("svi", svi, SVI, "a numpyro.infer.SVI")
    checks.instance("params", params, Mapping, "a dict of values by name")
    count, inner = state.optim_state
    if not (isinstance(inner, tuple) and len(inner) == 2 and isinstance(inner[0], dict)):
        raise ValueError(
            "`svi` must have an optax optimizer for its parameters to be replaced, got "
            f"{type(svi.optim).__name__}."
        )
    old, moments = inner
    transforms = svi.constrain_fn.args[0]
    replacements = {name: value for name, value in params.items() if name in old}
    new: Any = {**old, **transform_fn(transforms, replacements, invert=True)}
    new = {
        name: placed_like(jnp.asarray(value, old[name].dtype), old[name])
        for name, value in new.items()
    }
    mutable = state.mutable_state
    if mutable:
        # A control variate fitted at the old weights is invalid: NaN until `RowSVI` refits it.
        mutable = {
            name: _invalidated(value) if isinstance(value, ControlVariate) else value
            for name, value in mutable.items()
        }
    return state._replace(optim_state=(count, (new, moments)), mutable_state=mutable)


def _invalidated(control: ControlVariate) -> ControlVariate:
    projected = jnp.full_like(control.projected, jnp.nan)
    return dataclasses.replace(control, projected=projected)
