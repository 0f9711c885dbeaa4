"""A kernel of one input as a linear stochastic differential equation: linear time, exactly."""
