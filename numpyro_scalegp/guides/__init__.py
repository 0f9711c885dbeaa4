"""Guides for one GP site of a model."""

from numpyro_scalegp.guides.chevron import AutoChevronGP
from numpyro_scalegp.guides.decoupled import AutoDecoupledGP
from numpyro_scalegp.guides.guide import AbstractGPGuide
from numpyro_scalegp.guides.hybrid import AutoHybridGP
from numpyro_scalegp.guides.nearest_neighbors import AutoNearestNeighborGP
from numpyro_scalegp.guides.sparse import AutoSparseGP

__all__ = [
    "AbstractGPGuide",
    "AutoChevronGP",
    "AutoDecoupledGP",
    "AutoHybridGP",
    "AutoNearestNeighborGP",
    "AutoSparseGP",
]
