"""NumPyro distributions over observations and over functions."""

from numpyro_scalegp.distributions.chevron import ChevronNormal
from numpyro_scalegp.distributions.decoupled import DecoupledGP
from numpyro_scalegp.distributions.feature_space import FeatureSpaceGP
from numpyro_scalegp.distributions.gaussian_process import GaussianProcess
from numpyro_scalegp.distributions.hybrid import HybridGP
from numpyro_scalegp.distributions.latent import LatentGP
from numpyro_scalegp.distributions.plates import plate
from numpyro_scalegp.distributions.sparse import SparseGP
from numpyro_scalegp.distributions.state import solver_state
from numpyro_scalegp.distributions.variational import AbstractVariationalGP
from numpyro_scalegp.distributions.weight_space import ChevronGP, WeightSpaceGP

__all__ = [
    "AbstractVariationalGP",
    "ChevronGP",
    "ChevronNormal",
    "DecoupledGP",
    "FeatureSpaceGP",
    "GaussianProcess",
    "HybridGP",
    "LatentGP",
    "SparseGP",
    "WeightSpaceGP",
    "plate",
    "solver_state",
]
