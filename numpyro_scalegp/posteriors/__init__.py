"""Posteriors over functions: moments and samples, in chunks of inputs."""

from numpyro_scalegp.posteriors.batch import BatchPosterior
from numpyro_scalegp.posteriors.exact import ExactPosterior
from numpyro_scalegp.posteriors.laplace import LaplacePosterior
from numpyro_scalegp.posteriors.multi_output import MultiOutputPosterior

__all__ = ["BatchPosterior", "ExactPosterior", "LaplacePosterior", "MultiOutputPosterior"]
