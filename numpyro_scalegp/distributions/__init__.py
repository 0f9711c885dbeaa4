"""NumPyro distributions over observations and over functions."""

from numpyro_scalegp.distributions.gaussian_process import GaussianProcess
from numpyro_scalegp.distributions.latent import LatentGP, SparseGP
from numpyro_scalegp.distributions.plates import plate

__all__ = ["GaussianProcess", "LatentGP", "SparseGP", "plate"]
