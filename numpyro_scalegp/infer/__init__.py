"""Objectives for variational inference, and draws from its result."""

from numpyro_scalegp.infer.initialisation import initial_hyperparameters, median_distance
from numpyro_scalegp.infer.parameters import replace_params
from numpyro_scalegp.infer.predictive import Draws, Predictive
from numpyro_scalegp.infer.quadrature import QuadratureELBO

__all__ = [
    "Draws",
    "Predictive",
    "QuadratureELBO",
    "initial_hyperparameters",
    "median_distance",
    "replace_params",
]
