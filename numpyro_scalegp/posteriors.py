"""Posterior distributions of functions: moments and samples."""

from numpyro_scalegp.integrated.grid.iterative import IterativeGridPosterior
from numpyro_scalegp.integrated.grid.posterior import (
    GridPosterior,
    GridRowsPosterior,
    SpaceTimePosterior,
)
from numpyro_scalegp.integrated.laplace.posterior import LaplacePosterior
from numpyro_scalegp.integrated.multi_output.posterior import MultiOutputPosterior
from numpyro_scalegp.integrated.state_space.filtered import FilteredPosterior
from numpyro_scalegp.integrated.state_space.posterior import StateSpacePosterior
from numpyro_scalegp.processes.batch import BatchPosterior
from numpyro_scalegp.processes.exact import ExactPosterior

__all__ = [
    "BatchPosterior",
    "ExactPosterior",
    "FilteredPosterior",
    "GridPosterior",
    "GridRowsPosterior",
    "IterativeGridPosterior",
    "LaplacePosterior",
    "MultiOutputPosterior",
    "SpaceTimePosterior",
    "StateSpacePosterior",
]
