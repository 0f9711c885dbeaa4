"""Finite descriptions of a function space, and where to put their points."""

from numpyro_scalegp.features.selection import greedy_points, kmeans_points

__all__ = ["greedy_points", "kmeans_points"]
