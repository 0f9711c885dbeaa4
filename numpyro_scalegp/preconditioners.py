"""Preconditioners for conjugate gradients: approximations of H that are easy to invert."""

from numpyro_scalegp.linear.preconditioners import (
    AbstractPreconditioner,
    Identity,
    Nystrom,
    PivotedCholesky,
    PreconditionerFactor,
    RandomlyPivotedCholesky,
    nystrom_factor,
)

__all__ = [
    "AbstractPreconditioner",
    "Identity",
    "Nystrom",
    "PivotedCholesky",
    "PreconditionerFactor",
    "RandomlyPivotedCholesky",
    "nystrom_factor",
]
