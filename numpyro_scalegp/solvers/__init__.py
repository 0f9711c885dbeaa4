"""Solutions of H V = B for blocks of right-hand sides, and of penalized least squares."""

from numpyro_scalegp.solvers.alternating_projections import AlternatingProjections
from numpyro_scalegp.solvers.cholesky import Cholesky
from numpyro_scalegp.solvers.conjugate_gradients import ConjugateGradients
from numpyro_scalegp.solvers.iteration import descend
from numpyro_scalegp.solvers.operator import KernelOperator, kernel_matmul
from numpyro_scalegp.solvers.representer_weights import RepresenterWeights, representer_weights
from numpyro_scalegp.solvers.russian_roulette import RussianRouletteCG
from numpyro_scalegp.solvers.solver import AbstractSolver, Coefficients, Solution, StopReason
from numpyro_scalegp.solvers.stochastic_gradient_descent import StochasticGradientDescent

__all__ = [
    "AbstractSolver",
    "AlternatingProjections",
    "Cholesky",
    "Coefficients",
    "ConjugateGradients",
    "KernelOperator",
    "RepresenterWeights",
    "RussianRouletteCG",
    "Solution",
    "StochasticGradientDescent",
    "StopReason",
    "descend",
    "kernel_matmul",
    "representer_weights",
]
