"""The collapsed bound of a sparse Gaussian process."""
