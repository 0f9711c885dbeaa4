"""Densities, priors and variational families that look at nearest neighbors alone."""
