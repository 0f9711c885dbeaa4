"""Posteriors over functions: moments and samples, in chunks of inputs."""

from numpyro_scalegp.predict.base import AbstractPosterior
from numpyro_scalegp.predict.exact import ExactPosterior
from numpyro_scalegp.predict.feature import FeaturePosterior
from numpyro_scalegp.predict.pathwise import PathwisePosterior
from numpyro_scalegp.predict.sparse import SparsePosterior

__all__ = [
    "AbstractPosterior",
    "ExactPosterior",
    "FeaturePosterior",
    "PathwisePosterior",
    "SparsePosterior",
]
