"""Log marginal likelihoods and their gradients, exact or with known error."""

from numpyro_scalegp.estimators.audit import Audit, audit
from numpyro_scalegp.estimators.cholesky import Cholesky
from numpyro_scalegp.estimators.estimator import AbstractEstimator
from numpyro_scalegp.estimators.full_scale import FullScale
from numpyro_scalegp.estimators.hutchinson import Hutchinson
from numpyro_scalegp.estimators.pathwise import Pathwise
from numpyro_scalegp.estimators.random_fourier import RandomFourier
from numpyro_scalegp.estimators.sgpr import SGPR
from numpyro_scalegp.estimators.single_sample_rff import SingleSampleRFF
from numpyro_scalegp.estimators.solver_state import SolverState
from numpyro_scalegp.estimators.vecchia import Vecchia

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
    "Vecchia",
    "audit",
]
