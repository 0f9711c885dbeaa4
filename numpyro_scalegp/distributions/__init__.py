"""NumPyro distributions over observations and over functions."""

from numpyro_scalegp.distributions.decoupled import DecoupledGP
from numpyro_scalegp.distributions.gaussian_process import GaussianProcess
from numpyro_scalegp.distributions.hybrid import HybridGP
from numpyro_scalegp.distributions.latent import LatentGP
from numpyro_scalegp.distributions.plates import plate
from numpyro_scalegp.distributions.sparse import SparseGP
from numpyro_scalegp.distributions.state import solver_state
from numpyro_scalegp.distributions.variational import AbstractVariationalGP

__all__ = [
    "AbstractVariationalGP",
    "DecoupledGP",
    "GaussianProcess",
    "HybridGP",
    "LatentGP",
    "SparseGP",
    "plate",
    "solver_state",
]
