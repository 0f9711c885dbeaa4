"""Marginal likelihoods of a finite number of features, from mini-batches."""
