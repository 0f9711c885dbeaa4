"""Guides for a GP site of a model."""

from numpyro_scalegp.neighbors.guide import AutoNearestNeighborGP
from numpyro_scalegp.variational.decoupled.guide import AutoDecoupledGP
from numpyro_scalegp.variational.guide import AbstractGPGuide
from numpyro_scalegp.variational.hybrid.guide import AutoHybridGP
from numpyro_scalegp.variational.quadruply.guide import AutoChevronGP
from numpyro_scalegp.variational.sparse.guide import AutoSparseGP
from numpyro_scalegp.variational.state_space.guide import AutoStateSpaceGP

__all__ = [
    "AbstractGPGuide",
    "AutoChevronGP",
    "AutoDecoupledGP",
    "AutoHybridGP",
    "AutoNearestNeighborGP",
    "AutoSparseGP",
    "AutoStateSpaceGP",
]
