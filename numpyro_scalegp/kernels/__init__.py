"""Covariance functions and their spectral densities."""

from numpyro_scalegp.kernels.coregion import Coregion
from numpyro_scalegp.kernels.derivatives import WithDerivatives
from numpyro_scalegp.kernels.gneiting import Gneiting
from numpyro_scalegp.kernels.harmonic import Cosine, Harmonic
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.matern import Matern, Matern12, Matern32, Matern52
from numpyro_scalegp.kernels.multiscale import MultiscaleRBF
from numpyro_scalegp.kernels.nonstationary import FeatureMapped, Linear
from numpyro_scalegp.kernels.orthogonal import OrthogonalAdditive
from numpyro_scalegp.kernels.periodic import Periodic
from numpyro_scalegp.kernels.sphere import OnSphere
from numpyro_scalegp.kernels.state_space import AbstractStateSpace, LinearSDE
from numpyro_scalegp.kernels.stationary import RBF, AbstractStationary, Constant, RationalQuadratic
from numpyro_scalegp.kernels.wendland import Wendland
from numpyro_scalegp.kernels.wiener import IntegratedWiener, Wiener

__all__ = [
    "RBF",
    "AbstractKernel",
    "AbstractStateSpace",
    "AbstractStationary",
    "Constant",
    "Coregion",
    "Cosine",
    "FeatureMapped",
    "Gneiting",
    "Harmonic",
    "IntegratedWiener",
    "Linear",
    "LinearSDE",
    "Matern",
    "Matern12",
    "Matern32",
    "Matern52",
    "MultiscaleRBF",
    "OnSphere",
    "OrthogonalAdditive",
    "Periodic",
    "RationalQuadratic",
    "Wendland",
    "Wiener",
    "WithDerivatives",
]
