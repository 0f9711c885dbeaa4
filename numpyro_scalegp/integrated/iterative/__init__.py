"""Log marginal likelihoods by iterative solvers, with standard or pathwise gradients."""
