"""Inducing points with additional points for the mean."""
