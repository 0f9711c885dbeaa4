"""Priors over a function's values and the variational families that stand in for them."""

from numpyro_scalegp.families.chevron import ChevronGP, ChevronPosterior
from numpyro_scalegp.families.decoupled import DecoupledGP
from numpyro_scalegp.families.family import AbstractVariationalGP
from numpyro_scalegp.families.hybrid import HybridGP
from numpyro_scalegp.families.latent import LatentGP
from numpyro_scalegp.families.nearest_neighbors import NearestNeighborGP
from numpyro_scalegp.families.sparse import SparseGP
from numpyro_scalegp.families.variational_neighbors import VariationalNearestNeighborGP
from numpyro_scalegp.families.weight_space import WeightSpaceGP

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
