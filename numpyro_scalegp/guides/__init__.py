"""Guides that own a GP site."""

from numpyro_scalegp.guides.base import AbstractGPGuide
from numpyro_scalegp.guides.sparse import AutoSparseGP

__all__ = ["AbstractGPGuide", "AutoSparseGP"]
