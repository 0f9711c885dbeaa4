"""Scalable Gaussian processes as NumPyro distributions and guides."""

import importlib
from typing import Any

from numpyro_scalegp import (
    datasets,
    estimators,
    families,
    features,
    forecasts,
    guides,
    infer,
    kernels,
    log_determinants,
    posteriors,
    preconditioners,
    scores,
    solvers,
    streams,
    terms,
)
from numpyro_scalegp.core.host import warn_in_jit
from numpyro_scalegp.core.mesh import shard_rows
from numpyro_scalegp.core.padding import pad_rows
from numpyro_scalegp.export import to_arviz
from numpyro_scalegp.infer.conditioning import posterior
from numpyro_scalegp.integrated.finite_rkhs.feature_space import FeatureSpaceGP
from numpyro_scalegp.integrated.gaussian_process import GaussianProcess
from numpyro_scalegp.integrated.grid.grid_gp import GridGP
from numpyro_scalegp.integrated.laplace.laplace import LaplaceGP
from numpyro_scalegp.integrated.multi_output.multi_output import MultiOutputGP
from numpyro_scalegp.neighbors.family import VariationalNearestNeighborGP
from numpyro_scalegp.neighbors.prior import NearestNeighborGP
from numpyro_scalegp.saving.api import load, save
from numpyro_scalegp.sites.plates import plate
from numpyro_scalegp.variational.decoupled.decoupled import DecoupledGP
from numpyro_scalegp.variational.hybrid.hybrid import HybridGP
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.quadruply.chevron import ChevronGP
from numpyro_scalegp.variational.quadruply.chevron_normal import ChevronNormal
from numpyro_scalegp.variational.quadruply.relevance import relevance_vectors
from numpyro_scalegp.variational.quadruply.weight_space import WeightSpaceGP
from numpyro_scalegp.variational.sparse.sparse import SparseGP

__all__ = [
    "ChevronGP",
    "ChevronNormal",
    "DecoupledGP",
    "FeatureSpaceGP",
    "GaussianProcess",
    "GridGP",
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
    "forecasts",
    "guides",
    "infer",
    "kernels",
    "load",
    "log_determinants",
    "pad_rows",
    "plate",
    "posterior",
    "posteriors",
    "preconditioners",
    "relevance_vectors",
    "save",
    "scores",
    "shard_rows",
    "solvers",
    "streams",
    "terms",
    "to_arviz",
    "warn_in_jit",
]

# Modules that need a package of an extra; they are imported when they are first used.
_OF_EXTRAS = {"botorch": "BoTorch", "sklearn": "scikit-learn"}


def __getattr__(name: str) -> Any:
    if name not in _OF_EXTRAS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"`sgp.{name}` needs {_OF_EXTRAS[name]}: pip install 'numpyro_scalegp[{name}]'"
        ) from error
