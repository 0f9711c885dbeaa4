"""Decoupled bases: many points for the mean, few for the covariance."""
