"""NumPyro distributions over observations, and mini-batches of them."""

from numpyro_scalegp.distributions.chevron_normal import ChevronNormal
from numpyro_scalegp.distributions.feature_space import FeatureSpaceGP
from numpyro_scalegp.distributions.gaussian_process import GaussianProcess
from numpyro_scalegp.distributions.laplace import LaplaceGP
from numpyro_scalegp.distributions.multi_output import MultiOutputGP
from numpyro_scalegp.distributions.plates import plate

__all__ = [
    "ChevronNormal",
    "FeatureSpaceGP",
    "GaussianProcess",
    "LaplaceGP",
    "MultiOutputGP",
    "plate",
]
