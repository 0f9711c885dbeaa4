"""NumPyro distributions of observations, and plates for mini-batches."""

from numpyro_scalegp.integrated.finite_rkhs.feature_space import FeatureSpaceGP
from numpyro_scalegp.integrated.gaussian_process import GaussianProcess
from numpyro_scalegp.integrated.grid.grid_gp import GridGP
from numpyro_scalegp.integrated.laplace.laplace import LaplaceGP
from numpyro_scalegp.integrated.multi_output.multi_output import MultiOutputGP
from numpyro_scalegp.sites.plates import plate
from numpyro_scalegp.variational.quadruply.chevron_normal import ChevronNormal

__all__ = [
    "ChevronNormal",
    "FeatureSpaceGP",
    "GaussianProcess",
    "GridGP",
    "LaplaceGP",
    "MultiOutputGP",
    "plate",
]
