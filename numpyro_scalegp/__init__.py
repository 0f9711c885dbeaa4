"""Scalable Gaussian processes as NumPyro distributions and guides."""

from numpyro_scalegp import (
    datasets,
    distributions,
    estimators,
    features,
    guides,
    infer,
    kernels,
    operators,
    preconditioners,
    predict,
    solvers,
)
from numpyro_scalegp.distributions import (
    ChevronGP,
    ChevronNormal,
    DecoupledGP,
    FeatureSpaceGP,
    GaussianProcess,
    HybridGP,
    LatentGP,
    SparseGP,
    WeightSpaceGP,
    plate,
    solver_state,
)
from numpyro_scalegp.export import to_arviz
from numpyro_scalegp.infer import relevance_vectors
from numpyro_scalegp.saving import load, save

__all__ = [
    "ChevronGP",
    "ChevronNormal",
    "DecoupledGP",
    "FeatureSpaceGP",
    "GaussianProcess",
    "HybridGP",
    "LatentGP",
    "SparseGP",
    "WeightSpaceGP",
    "datasets",
    "distributions",
    "estimators",
    "features",
    "guides",
    "infer",
    "kernels",
    "load",
    "operators",
    "plate",
    "preconditioners",
    "predict",
    "relevance_vectors",
    "save",
    "solver_state",
    "solvers",
    "to_arviz",
]
