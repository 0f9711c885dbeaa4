"""Log marginal likelihoods and their gradients, exact or with known error."""

from numpyro_scalegp.estimators.audit import Audit, audit
from numpyro_scalegp.estimators.base import AbstractEstimator
from numpyro_scalegp.estimators.cholesky import Cholesky
from numpyro_scalegp.estimators.compositional import Compositional
from numpyro_scalegp.estimators.hutchinson import Hutchinson
from numpyro_scalegp.estimators.iterative import AbstractIterative, Estimate
from numpyro_scalegp.estimators.log_determinant import AbstractLogDeterminant
from numpyro_scalegp.estimators.mini_batch import MiniBatch
from numpyro_scalegp.estimators.minimax import Minimax
from numpyro_scalegp.estimators.pathwise import Pathwise
from numpyro_scalegp.estimators.random_fourier import RandomFourier
from numpyro_scalegp.estimators.single_sample_rff import SingleSampleRFF
from numpyro_scalegp.estimators.state import SolverState
from numpyro_scalegp.estimators.variational import Variational

__all__ = [
    "AbstractEstimator",
    "AbstractIterative",
    "AbstractLogDeterminant",
    "Audit",
    "Cholesky",
    "Compositional",
    "Estimate",
    "Hutchinson",
    "MiniBatch",
    "Minimax",
    "Pathwise",
    "RandomFourier",
    "SingleSampleRFF",
    "SolverState",
    "Variational",
    "audit",
]
