"""Log marginal likelihoods, with the function integrated out: a folder for each method."""
