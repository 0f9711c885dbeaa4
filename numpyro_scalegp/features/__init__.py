"""Finite feature maps, and the selection of inducing points."""

from numpyro_scalegp.features.feature_map import AbstractFeatures
from numpyro_scalegp.features.hilbert_space import HilbertSpace
from numpyro_scalegp.features.inducing_points import InducingPoints
from numpyro_scalegp.features.learned import Learned
from numpyro_scalegp.features.random_fourier import RandomFourier
from numpyro_scalegp.features.selection import greedy_points, kmeans_points

__all__ = [
    "AbstractFeatures",
    "HilbertSpace",
    "InducingPoints",
    "Learned",
    "RandomFourier",
    "greedy_points",
    "kmeans_points",
]
