"""Objectives for variational inference, and draws from its result."""

from numpyro_scalegp.infer.initialization import Hyperparameters, initial_hyperparameters
from numpyro_scalegp.infer.joint import JointELBO
from numpyro_scalegp.infer.log_determinants import (
    LogDeterminantDiagnostics,
    initial_pass,
    log_determinant_diagnostics,
)
from numpyro_scalegp.infer.natural_gradients import natural_gradients
from numpyro_scalegp.infer.parameters import replace_params
from numpyro_scalegp.infer.predictive import Draws, Predictive
from numpyro_scalegp.infer.priors import lengthscale_prior, variance_prior
from numpyro_scalegp.infer.quadrature import QuadratureELBO
from numpyro_scalegp.infer.whitening import WhitenReparam
from numpyro_scalegp.quadruply_stochastic.elbo import QuadruplyStochasticELBO
from numpyro_scalegp.quadruply_stochastic.row_optimizers import RowOptimizer, row_adagrad, row_adam
from numpyro_scalegp.quadruply_stochastic.row_svi import RowSVI
from numpyro_scalegp.tracing.starting_values import median_distance

__all__ = [
    "Draws",
    "Hyperparameters",
    "JointELBO",
    "LogDeterminantDiagnostics",
    "Predictive",
    "QuadratureELBO",
    "QuadruplyStochasticELBO",
    "RowOptimizer",
    "RowSVI",
    "WhitenReparam",
    "initial_hyperparameters",
    "initial_pass",
    "lengthscale_prior",
    "log_determinant_diagnostics",
    "median_distance",
    "natural_gradients",
    "replace_params",
    "row_adagrad",
    "row_adam",
    "variance_prior",
]
