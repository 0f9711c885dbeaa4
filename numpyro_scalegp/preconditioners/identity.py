"""No preconditioning."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.operators import KernelOperator
from numpyro_scalegp.preconditioners.base import (
    AbstractPreconditioner,
    AbstractPreconditionerFactor,
)


class IdentityFactor(AbstractPreconditionerFactor):
    """P = I."""

    template: Float[Array, " n"]  # gives size and dtype

    def solve(self, R: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """R itself."""
        return R

    def log_determinant(self) -> Float[Array, ""]:
        """Zero."""
        return jnp.zeros((), self.template.dtype)

    def sample(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "n num_samples"]:
        """Standard normal columns."""
        return jax.random.normal(key, (self.template.size, num_samples), self.template.dtype)


class Identity(AbstractPreconditioner):
    """No preconditioning, P = I."""

    def factorise(self, operator: KernelOperator) -> IdentityFactor:
        """Return the identity of the operator's size."""
        return IdentityFactor(operator.noise())
