"""Posteriors over functions: moments and samples, in chunks of inputs."""

from numpyro_scalegp.posteriors.exact import ExactPosterior
from numpyro_scalegp.posteriors.feature import FeaturePosterior
from numpyro_scalegp.posteriors.mixture import MixturePosterior
from numpyro_scalegp.posteriors.outputs import OutputsPosterior
from numpyro_scalegp.posteriors.pathwise import PathwisePosterior
from numpyro_scalegp.posteriors.posterior import AbstractPosterior, Component
from numpyro_scalegp.posteriors.variational import AbstractVariationalPosterior

__all__ = [
    "AbstractPosterior",
    "AbstractVariationalPosterior",
    "Component",
    "ExactPosterior",
    "FeaturePosterior",
    "MixturePosterior",
    "OutputsPosterior",
    "PathwisePosterior",
]
