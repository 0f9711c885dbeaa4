"""Save a fitted object to one file: its arrays in NumPy's format, its structure as JSON."""

from numpyro_scalegp.saving.api import load, save

__all__ = ["load", "save"]
