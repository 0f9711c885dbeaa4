"""What every preconditioner offers: work on the operator apart from work on right-hand sides."""

import abc

import equinox as eqx
from jaxtyping import Array, Float, Key

from numpyro_scalegp.operators import KernelOperator


class AbstractPreconditionerFactor(eqx.Module):
    """A symmetric positive definite P close to H, in a form that is quick to solve with."""

    @abc.abstractmethod
    def solve(self, R: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """P^-1 R, shape (n, k)."""

    @abc.abstractmethod
    def log_determinant(self) -> Float[Array, ""]:
        """log|P|."""

    @abc.abstractmethod
    def sample(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "n num_samples"]:
        """Draw columns from N(0, P), shape (n, num_samples)."""


class AbstractPreconditioner(eqx.Module):
    """A recipe that approximates an operator."""

    @abc.abstractmethod
    def factorise(self, operator: KernelOperator) -> AbstractPreconditionerFactor:
        """Do the work that depends on the operator only."""
