"""Solutions of H V = B for blocks of right-hand sides, and of penalized least squares."""

from numpyro_scalegp.solvers.adasap import ADASAP
from numpyro_scalegp.solvers.alternating_projections import AlternatingProjections
from numpyro_scalegp.solvers.auto_solver import AutoSolver
from numpyro_scalegp.solvers.cholesky import Cholesky
from numpyro_scalegp.solvers.conjugate_gradients import ConjugateGradients
from numpyro_scalegp.solvers.iteration import descend
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.russian_roulette import RussianRouletteCG
from numpyro_scalegp.solvers.solver import AbstractSolver, Solution, StopReason
from numpyro_scalegp.solvers.stochastic_dual_descent import StochasticDualDescent
from numpyro_scalegp.solvers.stochastic_gradient_descent import StochasticGradientDescent

__all__ = [
    "ADASAP",
    "AbstractSolver",
    "AlternatingProjections",
    "AutoSolver",
    "Cholesky",
    "ConjugateGradients",
    "KernelOperator",
    "RussianRouletteCG",
    "Solution",
    "StochasticDualDescent",
    "StochasticGradientDescent",
    "StopReason",
    "descend",
]
