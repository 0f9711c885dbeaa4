"""Fitted objects in one file: arrays in NumPy's format, their structure beside them as JSON."""

from numpyro_scalegp.saving.api import load, save

__all__ = ["load", "save"]
