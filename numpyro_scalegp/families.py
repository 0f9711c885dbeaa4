"""Priors of function values, and variational families that approximate their posteriors."""

from numpyro_scalegp.neighbors.family import VariationalNearestNeighborGP
from numpyro_scalegp.neighbors.prior import NearestNeighborGP
from numpyro_scalegp.sites.family import AbstractVariationalGP
from numpyro_scalegp.variational.decoupled.decoupled import DecoupledGP
from numpyro_scalegp.variational.hybrid.hybrid import HybridGP
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.quadruply.chevron import ChevronGP, ChevronPosterior
from numpyro_scalegp.variational.quadruply.weight_space import WeightSpaceGP
from numpyro_scalegp.variational.sparse.sparse import SparseGP

__all__ = [
    "AbstractVariationalGP",
    "ChevronGP",
    "ChevronPosterior",
    "DecoupledGP",
    "HybridGP",
    "LatentGP",
    "NearestNeighborGP",
    "SparseGP",
    "VariationalNearestNeighborGP",
    "WeightSpaceGP",
]
