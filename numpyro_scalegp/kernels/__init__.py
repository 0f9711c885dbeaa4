"""Covariance functions and their spectral densities."""

from numpyro_scalegp.kernels.coregion import Coregion
from numpyro_scalegp.kernels.derivatives import WithDerivatives
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.matern import Matern12, Matern32, Matern52
from numpyro_scalegp.kernels.multiscale import MultiscaleRBF
from numpyro_scalegp.kernels.nonstationary import FeatureMapped, Linear
from numpyro_scalegp.kernels.periodic import Periodic
from numpyro_scalegp.kernels.stationary import RBF, AbstractStationary, Constant, RationalQuadratic

__all__ = [
    "RBF",
    "AbstractKernel",
    "AbstractStationary",
    "Constant",
    "Coregion",
    "FeatureMapped",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "MultiscaleRBF",
    "Periodic",
    "RationalQuadratic",
    "WithDerivatives",
]
