"""Laplace's approximation for any log-concave likelihood."""
