"""Whether a model is evaluated as a potential energy, where nothing random is drawn anew."""

from numpyro import handlers, primitives

# NumPyro's private handler around the model of a potential energy: it answers each request for a
# key with the same one.
_CONSTANT_KEY = "_substitute_default_key"


def is_potential_energy() -> bool:
    """Whether a sampler such as NUTS evaluates the model that is running.

    Keys, parameters and mutable sites are then the same at each evaluation. The set-up of NumPyro's
    autoguides, which evaluates a potential energy once behind a `block`, does not count.
    """
    for handler in primitives._PYRO_STACK:
        if isinstance(handler, handlers.block):
            return False
        if type(handler).__name__ == _CONSTANT_KEY:
            return True
    return False
