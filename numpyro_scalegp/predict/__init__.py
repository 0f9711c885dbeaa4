"""Posteriors over functions: moments and samples, in chunks of inputs."""

from numpyro_scalegp.predict.base import AbstractPosterior
from numpyro_scalegp.predict.chevron import ChevronPosterior
from numpyro_scalegp.predict.decoupled import DecoupledPosterior
from numpyro_scalegp.predict.exact import ExactPosterior
from numpyro_scalegp.predict.feature import FeaturePosterior, feature_posterior
from numpyro_scalegp.predict.hybrid import HybridPosterior
from numpyro_scalegp.predict.pathwise import PathwisePosterior
from numpyro_scalegp.predict.sparse import SparsePosterior
from numpyro_scalegp.predict.variational import AbstractVariationalPosterior

__all__ = [
    "AbstractPosterior",
    "AbstractVariationalPosterior",
    "ChevronPosterior",
    "DecoupledPosterior",
    "ExactPosterior",
    "FeaturePosterior",
    "HybridPosterior",
    "PathwisePosterior",
    "SparsePosterior",
    "feature_posterior",
]
