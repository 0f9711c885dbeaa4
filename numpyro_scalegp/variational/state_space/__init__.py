"""A variational family for functions of time, with a Gaussian site for each row."""
