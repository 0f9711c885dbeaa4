"""Solvers of linear systems H V = B for blocks of right-hand sides, and of least squares."""

from numpyro_scalegp.integrated.truncated.russian_roulette import RussianRouletteCG
from numpyro_scalegp.linear.adasap import ADASAP
from numpyro_scalegp.linear.alternating_projections import AlternatingProjections
from numpyro_scalegp.linear.auto_solver import AutoSolver
from numpyro_scalegp.linear.cholesky import Cholesky
from numpyro_scalegp.linear.conjugate_gradients import ConjugateGradients
from numpyro_scalegp.linear.iteration import descend
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.solver import AbstractSolver, Solution, StopReason
from numpyro_scalegp.linear.stochastic_dual_descent import StochasticDualDescent
from numpyro_scalegp.linear.stochastic_gradient_descent import StochasticGradientDescent

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
