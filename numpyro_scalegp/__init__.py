"""Scalable Gaussian processes as NumPyro distributions and guides."""

from numpyro_scalegp import (
    datasets,
    estimators,
    families,
    features,
    guides,
    infer,
    kernels,
    log_determinants,
    posteriors,
    solvers,
    streams,
)
from numpyro_scalegp.core.mesh import shard_rows
from numpyro_scalegp.distributions import (
    ChevronNormal,
    FeatureSpaceGP,
    GaussianProcess,
    LaplaceGP,
    MultiOutputGP,
    plate,
)
from numpyro_scalegp.export import to_arviz
from numpyro_scalegp.families import (
    ChevronGP,
    DecoupledGP,
    HybridGP,
    LatentGP,
    NearestNeighborGP,
    SparseGP,
    VariationalNearestNeighborGP,
    WeightSpaceGP,
)
from numpyro_scalegp.families.relevance import relevance_vectors
from numpyro_scalegp.infer.conditioning import posterior
from numpyro_scalegp.saving import load, save
from numpyro_scalegp.solvers import preconditioners

__all__ = [
    "ChevronGP",
    "ChevronNormal",
    "DecoupledGP",
    "FeatureSpaceGP",
    "GaussianProcess",
    "HybridGP",
    "LaplaceGP",
    "LatentGP",
    "MultiOutputGP",
    "NearestNeighborGP",
    "SparseGP",
    "VariationalNearestNeighborGP",
    "WeightSpaceGP",
    "datasets",
    "estimators",
    "families",
    "features",
    "guides",
    "infer",
    "kernels",
    "load",
    "log_determinants",
    "plate",
    "posterior",
    "posteriors",
    "preconditioners",
    "relevance_vectors",
    "save",
    "shard_rows",
    "solvers",
    "streams",
    "to_arviz",
]
