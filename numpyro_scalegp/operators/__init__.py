"""Covariance matrices as things that multiply blocks of vectors, never held whole."""

from numpyro_scalegp.operators.kernel_operator import KernelOperator, kernel_matmul

__all__ = ["KernelOperator", "kernel_matmul"]
