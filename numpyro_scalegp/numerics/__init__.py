"""Dense factorizations and their derivatives, rounding errors, sums, cosines of large angles."""
