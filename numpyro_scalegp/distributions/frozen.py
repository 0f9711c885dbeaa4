"""Whether a model is evaluated again and again with one key, so that nothing random is new."""

import traceback

from numpyro import handlers, primitives

# NumPyro's private handler around the model of a potential energy: it answers each request for a
# key with the same one.
_CONSTANT_KEY = "_substitute_default_key"


def is_key_frozen() -> bool:
    """Whether a sampler such as NUTS or a minimizer with a line search evaluates the model.

    Keys and mini-batches are then the same at each evaluation. The set-up of NumPyro's autoguides,
    which evaluates a potential energy once behind a `block`, does not count.
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
    """Whether `scipy.optimize`, JAX's or its own, is calling: `numpyro.optim.Minimize` is JAX's."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None))
    return any("scipy.optimize" in module for module in modules)
