"""Gaussian processes: moments at any inputs, joint draws, draws as functions."""
