"""The state-space form of periodic functions."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.kernels.state_space import AbstractStateSpace, Blocks, Transition, matrix


class Rotations(AbstractStateSpace):
    """A Fourier series: a constant, and a rotation at each multiple of the base frequency.

    References:
        Solin and Sarkka (2014), Explicit Link Between Periodic Covariance Functions and State Space
        Models.
    """

    weights: Float[Array, " terms"]  # variances of the constant and of each multiple
    period: Float[Array, ""]
    num_harmonics: int = eqx.field(static=True)
    has_constant: bool = eqx.field(static=True)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The constant, and sine and cosine of each multiple."""
        return (1,) * self.has_constant + (2,) * self.num_harmonics

    @property
    def has_costly_transitions(self) -> bool:
        """True: they take sines and cosines."""
        return True

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """Independent entries."""
        constant = (matrix([[self.weights[0]]]),) if self.has_constant else ()
        harmonics = tuple(
            matrix([[self.weights[j], 0.0], [0.0, self.weights[j]]])
            for j in range(1, self.num_harmonics + 1)
        )
        return constant + harmonics

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """Rotations without noise."""
        one, zero = jnp.ones_like(elapsed), jnp.zeros_like(elapsed)
        # The remainder is exact; elapsed / period would lose digits over many periods.
        angle = 2.0 * jnp.pi * jnp.fmod(elapsed, self.period) / self.period
        constant = (matrix([[one]]),) if self.has_constant else ()
        rotations = []
        for j in range(1, self.num_harmonics + 1):
            cosine, sine = jnp.cos(j * angle), jnp.sin(j * angle)
            rotations.append(matrix([[cosine, sine], [-sine, cosine]]))
        sizes = self.block_sizes
        noise = tuple(matrix([[zero] * size for _ in range(size)]) for size in sizes)
        return Transition((*constant, *rotations), noise)

    def observation(self, X: Float[Array, "n d"]) -> Float[Array, "n s"]:
        """The constant and the first entry of each pair."""
        entries = [1.0] * self.has_constant + [1.0, 0.0] * self.num_harmonics
        return jnp.broadcast_to(jnp.array(entries, X.dtype), (X.shape[0], self.size))
