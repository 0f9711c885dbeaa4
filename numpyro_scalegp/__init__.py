"""Scalable Gaussian processes as NumPyro distributions and guides."""

from numpyro_scalegp import (
    datasets,
    distributions,
    estimators,
    features,
    guides,
    infer,
    kernels,
    predict,
)
from numpyro_scalegp.distributions import GaussianProcess, LatentGP, SparseGP, plate
from numpyro_scalegp.export import to_arviz

__all__ = [
    "GaussianProcess",
    "LatentGP",
    "SparseGP",
    "datasets",
    "distributions",
    "estimators",
    "features",
    "guides",
    "infer",
    "kernels",
    "plate",
    "predict",
    "to_arviz",
]
