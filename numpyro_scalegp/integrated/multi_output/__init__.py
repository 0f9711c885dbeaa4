"""Several outputs at the same inputs, with a Kronecker product as covariance."""
