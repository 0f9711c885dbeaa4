"""Inference: variational objectives, starting values and priors, predictive draws."""

from numpyro_scalegp.infer.initialization import Hyperparameters, initial_hyperparameters
from numpyro_scalegp.infer.joint import JointELBO
from numpyro_scalegp.infer.parameters import replace_params
from numpyro_scalegp.infer.predictive import Draws, Predictive
from numpyro_scalegp.infer.priors import lengthscale_prior, variance_prior
from numpyro_scalegp.infer.quadrature import QuadratureELBO
from numpyro_scalegp.infer.refinement import RefinedHyperparameters, refine_hyperparameters
from numpyro_scalegp.infer.shares import variance_shares
from numpyro_scalegp.infer.whitening import WhitenReparam
from numpyro_scalegp.integrated.finite_rkhs.diagnostics import (
    LogDeterminantDiagnostics,
    initial_pass,
    log_determinant_diagnostics,
)
from numpyro_scalegp.tracing.starting_values import median_distance
from numpyro_scalegp.variational.natural_gradients import natural_gradients
from numpyro_scalegp.variational.quadruply.elbo import QuadruplyStochasticELBO
from numpyro_scalegp.variational.quadruply.row_optimizers import RowOptimizer, row_adagrad, row_adam
from numpyro_scalegp.variational.quadruply.row_svi import RowSVI

__all__ = [
    "Draws",
    "Hyperparameters",
    "JointELBO",
    "LogDeterminantDiagnostics",
    "Predictive",
    "QuadratureELBO",
    "QuadruplyStochasticELBO",
    "RefinedHyperparameters",
    "RowOptimizer",
    "RowSVI",
    "WhitenReparam",
    "initial_hyperparameters",
    "initial_pass",
    "lengthscale_prior",
    "log_determinant_diagnostics",
    "median_distance",
    "natural_gradients",
    "refine_hyperparameters",
    "replace_params",
    "row_adagrad",
    "row_adam",
    "variance_prior",
    "variance_shares",
]
