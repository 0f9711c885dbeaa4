"""Whether a sampler or line search evaluates the model repeatedly under one constant key."""

import traceback

from numpyro import handlers, primitives

# NumPyro's private handler around the model of a potential energy: it returns the same key for
# each request.
_CONSTANT_KEY = "_substitute_default_key"


def is_key_frozen() -> bool:
    """Whether a sampler such as NUTS or a minimizer with a line search evaluates the model.

    Keys and mini-batches are then the same at each evaluation. The initialization of NumPyro's
    autoguides does not count: it evaluates a potential energy once, inside a `block`.
    """
    return _is_potential_energy() or _is_line_search()


def _is_potential_energy() -> bool:
    for handler in primitives._PYRO_STACK:
        if isinstance(handler, handlers.block):
            return False
        if type(handler).__name__ == _CONSTANT_KEY:
            return True
    return False


def _is_line_search() -> bool:
    """Whether `scipy.optimize` or `jax.scipy.optimize` (`numpyro.optim.Minimize`) is calling."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None))
    return any("scipy.optimize" in module for module in modules)
