"""Cheap approximate inverses of an operator."""

from numpyro_scalegp.preconditioners.base import (
    AbstractPreconditioner,
    AbstractPreconditionerFactor,
)
from numpyro_scalegp.preconditioners.identity import Identity
from numpyro_scalegp.preconditioners.pivoted_cholesky import PivotedCholesky

__all__ = [
    "AbstractPreconditioner",
    "AbstractPreconditionerFactor",
    "Identity",
    "PivotedCholesky",
]
