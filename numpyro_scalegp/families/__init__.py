"""Priors over a function's values and the variational families that stand in for them."""

from numpyro_scalegp.families.chevron import ChevronGP, ChevronPosterior
from numpyro_scalegp.families.decoupled import DecoupledGP, DecoupledPosterior
from numpyro_scalegp.families.family import AbstractVariationalGP
from numpyro_scalegp.families.hybrid import HybridGP, HybridPosterior
from numpyro_scalegp.families.latent import LatentGP
from numpyro_scalegp.families.sparse import SparseGP, SparsePosterior
from numpyro_scalegp.families.weight_space import WeightSpaceGP

__all__ = [
    "AbstractVariationalGP",
    "ChevronGP",
    "ChevronPosterior",
    "DecoupledGP",
    "DecoupledPosterior",
    "HybridGP",
    "HybridPosterior",
    "LatentGP",
    "SparseGP",
    "SparsePosterior",
    "WeightSpaceGP",
]
