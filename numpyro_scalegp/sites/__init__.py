"""NumPyro distributions over the rows of an input matrix, and plates over rows."""
