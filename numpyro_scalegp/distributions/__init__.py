"""NumPyro distributions over observations and over functions."""

from numpyro_scalegp.distributions.gaussian_process import GaussianProcess
from numpyro_scalegp.distributions.latent import LatentGP, SparseGP
from numpyro_scalegp.distributions.plates import plate
from numpyro_scalegp.distributions.state import solver_state

__all__ = ["GaussianProcess", "LatentGP", "SparseGP", "plate", "solver_state"]
