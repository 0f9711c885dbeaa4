"""State-space forms of damped motion: the Matern processes and the stochastic oscillator."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.kernels.state_space import Blocks, FirstEntry, Transition, matrix
from numpyro_scalegp.numerics.rounding import at_most

# exp(-x) is zero at this x, in float32 and float64.
_LONG = 1000.0
# Below these arguments, functions are evaluated by their power series.
_SMALL_GAMMA = 2.0
_SMALL_SQUARE = 0.5


class Exponential(FirstEntry):
    """The Ornstein-Uhlenbeck process, which is Matern of order 1/2."""

    rate: Float[Array, ""]
    variance: Float[Array, ""]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The function alone."""
        return (1,)

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """The variance."""
        return (matrix([[self.variance]]),)

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """Exponential decay."""
        x = _elapsed(self.rate, elapsed)[0]
        noise = -self.variance * jnp.expm1(-2.0 * x)
        return Transition((matrix([[jnp.exp(-x)]]),), (matrix([[noise]]),))


class CriticallyDamped(FirstEntry):
    """The function and its derivative, Matern of order 3/2."""

    rate: Float[Array, ""]
    variance: Float[Array, ""]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The function and its derivative."""
        return (2,)

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """The two are independent at one time."""
        return (matrix([[self.variance, 0.0], [0.0, self.variance * self.rate**2]]),)

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """Sarkka and Solin (2019), example 12.7."""
        rate = self.rate
        x, elapsed = _elapsed(rate, elapsed)
        decay = jnp.exp(-x)
        A = matrix(
            [
                [decay * (1.0 + x), decay * elapsed],
                [-decay * rate * x, decay * (1.0 - x)],
            ]
        )
        z, decays = 2.0 * x, decay * decay
        third = lower_gamma(3, z, decays)
        both = self.variance * rate * 0.5 * z * z * decays
        Q = matrix(
            [
                [self.variance * third, both],
                [both, self.variance * rate**2 * (third + 2.0 * z * decays)],
            ]
        )
        return Transition((A,), (Q,))


class TwiceSmooth(FirstEntry):
    """The function and two derivatives, Matern of order 5/2."""

    rate: Float[Array, ""]
    variance: Float[Array, ""]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The function and two derivatives."""
        return (3,)

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """The function and its second derivative are correlated."""
        v, square = self.variance, self.rate**2
        cross = -v * square / 3.0
        rows = [[v, 0.0, cross], [0.0, -cross, 0.0], [cross, 0.0, v * square**2]]
        return (matrix(rows),)

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """exp(F t) = exp(-x) (I + G t + G^2 t^2 / 2) with x = rate t and G = F + rate I."""
        rate = self.rate
        x, t = _elapsed(rate, elapsed)
        decay, half = jnp.exp(-x), 0.5 * x * x
        rows = [
            [1.0 + x + half, t * (1.0 + x), 0.5 * t * t],
            [-rate * half, 1.0 + x - 2.0 * half, t * (1.0 - 0.5 * x)],
            [rate**2 * (half - x), rate * (2.0 * half - 3.0 * x), 1.0 - 2.0 * x + half],
        ]
        A = matrix([[decay * entry for entry in row] for row in rows])
        # Integrals of u^k exp(-2 u) from 0 to x, for k = 4, ..., 0.
        z, decays = 2.0 * x, decay * decay
        gamma, integrals = lower_gamma(5, z, decays), []
        for k in range(4, -1, -1):
            integrals.append(math.factorial(k) / 2.0 ** (k + 1) * gamma)
            gamma = gamma + z**k * decays / math.factorial(k)
        I4, I3, I2, I1, I0 = integrals
        step = x - half
        Q11 = 0.25 * I4
        Q12 = 0.125 * x**4 * decays
        Q13 = 0.5 * I2 - I3 + 0.25 * I4
        Q22 = I2 - I3 + 0.25 * I4
        Q23 = 0.5 * step * step * decays
        Q33 = I0 - 4.0 * I1 + 5.0 * I2 - 2.0 * I3 + 0.25 * I4
        entries = [[Q11, Q12, Q13], [Q12, Q22, Q23], [Q13, Q23, Q33]]
        scales = [16.0 / 3.0 * self.variance * rate**k for k in range(5)]
        Q = [[scales[i + j] * entries[i][j] for j in range(3)] for i in range(3)]
        return Transition((A,), (matrix(Q),))


class Oscillator(FirstEntry):
    """A stochastically driven damped oscillator: the function and its derivative."""

    frequency: Float[Array, ""]  # angular, without damping
    quality: Float[Array, ""]
    variance: Float[Array, ""]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The function and its derivative."""
        return (2,)

    @property
    def has_costly_transitions(self) -> bool:
        """True: they take many transcendental functions."""
        return True

    def covariance(self, time: Float[Array, ""]) -> Blocks:
        """The two are independent at one time."""
        return (matrix([[self.variance, 0.0], [0.0, self.variance * self.frequency**2]]),)

    def transition(self, start: Float[Array, ""], elapsed: Float[Array, ""]) -> Transition:
        """Damped rotation or, below a quality of 1/2, decay."""
        frequency, v = self.frequency, self.variance
        rate = 0.5 * frequency / self.quality
        elapsed = _elapsed(_slowest_rate(frequency, self.quality), elapsed)[1]
        C, S = damped_motion(frequency, self.quality, elapsed)
        A = matrix([[C + rate * S, S], [-(frequency**2) * S, C - rate * S]])
        # P - A P A' over long times, and over short ones terms of one sign.
        x = rate * elapsed
        decays = jnp.exp(-2.0 * x)
        square = (frequency * elapsed) ** 2 * (1.0 - 0.25 / self.quality**2)
        is_short = (2.0 * x < 1.0) & (jnp.abs(square) < 1.0)
        x, square = jnp.where(is_short, x, 0.0), jnp.where(is_short, square, 0.0)
        once, twice = one_minus_sinc(square), one_minus_sinc(4.0 * square)
        third = lower_gamma(3, 2.0 * x, jnp.exp(-2.0 * x))
        curved = 2.0 * x * x * once * (2.0 - once)
        cross, both = 2.0 * rate * C * S, 2.0 * (rate * S) ** 2
        of_value = jnp.where(
            is_short, third + decays * (2.0 * x * twice + curved), 1.0 - (decays + cross + both)
        )
        of_slope = jnp.where(
            is_short,
            third + decays * (2.0 * x * (2.0 - twice) + curved),
            1.0 - (decays - cross + both),
        )
        mixed = 2.0 * rate * v * (frequency * S) ** 2
        Q = matrix([[v * of_value, mixed], [mixed, v * frequency**2 * of_slope]])
        return Transition((A,), (Q,))


def _elapsed(
    rate: Float[Array, "..."], elapsed: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The product rate t and t, for a time t that is cut off where exp(-rate t) is zero.

    Beyond, powers of t would overflow.
    """
    x = at_most(rate * elapsed, _LONG)
    return x, x / rate


def _slowest_rate(
    frequency: Float[Array, "..."], quality: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The rate at which an oscillator forgets: half its bandwidth, or less if overdamped."""
    a = 0.5 / quality
    root = jnp.sqrt(jnp.where(a > 1.0, a * a - 1.0, 1.0))
    return frequency * jnp.where(a > 1.0, 1.0 / (a + root), a)


def damped_motion(
    frequency: Float[Array, "..."], quality: Float[Array, "..."], elapsed: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """exp(-a t) cos(b t) and exp(-a t) sin(b t) / b, a = frequency / (2 quality), t >= 0.

    b^2 = frequency^2 - a^2 may be negative, with cosh and sinh in their place.
    """
    elapsed = _elapsed(_slowest_rate(frequency, quality), elapsed)[1]
    a = 0.5 * frequency / quality
    relative = 1.0 - 0.25 / quality**2
    square = (frequency * elapsed) ** 2 * relative  # (b t)^2
    is_small = jnp.abs(square) < _SMALL_SQUARE
    small = jnp.where(is_small, square, 0.0)
    decay = jnp.exp(-a * elapsed)
    # Far from critical damping.
    is_rotation = square > 0.0
    angle = jnp.sqrt(jnp.where(is_small, 1.0, jnp.abs(square)))
    rotation = decay * jnp.cos(angle), decay * elapsed * jnp.sin(angle) / angle
    # a - |b| without cancellation; where the motion rotates, the root is not used.
    root = jnp.sqrt(jnp.where(relative < 0.0, -relative, 0.25))
    slow = frequency / (0.5 / quality + root) * elapsed
    slowly = jnp.exp(-jnp.where(is_rotation | is_small, 0.0, slow))
    quickly = jnp.exp(-2.0 * jnp.where(is_rotation | is_small, 0.0, angle))
    decaying = 0.5 * slowly * (1.0 + quickly), elapsed * slowly * (1.0 - quickly) / (2.0 * angle)
    near = decay * _cosine(small), decay * elapsed * (1.0 - one_minus_sinc(small))
    far = [jnp.where(is_rotation, *pair) for pair in zip(rotation, decaying, strict=True)]
    C, S = (jnp.where(is_small, *pair) for pair in zip(near, far, strict=True))
    return C, S


def lower_gamma(
    order: int, z: Float[Array, "..."], decay: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The regularized lower incomplete gamma function, 1 - exp(-z) sum_(k < order) z^k / k!.

    Accurate relative to its value, which for small z is about z^order / order!. `decay` is exp(-z).
    """
    is_small = z < _SMALL_GAMMA
    small = jnp.where(is_small, z, 0.0)
    series = jnp.zeros_like(small)
    for k in range(24, 0, -1):
        series = small / (order + k) * (1.0 + series)
    below = decay * small**order / math.factorial(order) * (1.0 + series)
    total = jnp.zeros_like(z)
    for k in range(order - 1, -1, -1):
        total = total * z / (k + 1) + 1.0
    return jnp.where(is_small, below, 1.0 - decay * total)


def _cosine(square: Float[Array, "..."]) -> Float[Array, "..."]:
    """cos(sqrt(square)) for an argument of either sign, at most 1 in size, by its series."""
    total = jnp.ones_like(square)
    for k in range(9, 0, -1):
        total = 1.0 - square / ((2 * k - 1) * (2 * k)) * total
    return total


def one_minus_sinc(square: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 - sin(x) / x for x^2 = `square` of either sign, at most 4 in size, by its series."""
    total = jnp.ones_like(square)
    for k in range(12, 1, -1):
        total = 1.0 - square / ((2 * k) * (2 * k + 1)) * total
    return square / 6.0 * total
