"""Estimators of log marginal likelihoods and their gradients, exact or with a known error."""

from numpyro_scalegp.integrated.audit import Audit, audit
from numpyro_scalegp.integrated.cholesky import Cholesky
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.integrated.iterative.hutchinson import Hutchinson
from numpyro_scalegp.integrated.iterative.pathwise import Pathwise
from numpyro_scalegp.integrated.iterative.solver_state import SolverState
from numpyro_scalegp.integrated.random_fourier import RandomFourier
from numpyro_scalegp.integrated.sgpr.sgpr import SGPR
from numpyro_scalegp.integrated.state_space.state_space import StateSpace
from numpyro_scalegp.integrated.truncated.single_sample_rff import SingleSampleRFF
from numpyro_scalegp.neighbors.full_scale import FullScale
from numpyro_scalegp.neighbors.vecchia import Vecchia

__all__ = [
    "SGPR",
    "AbstractEstimator",
    "Audit",
    "Cholesky",
    "FullScale",
    "Hutchinson",
    "Pathwise",
    "RandomFourier",
    "SingleSampleRFF",
    "SolverState",
    "StateSpace",
    "Vecchia",
    "audit",
]
