"""Random features of a covariance function, from its spectral density if it has one."""

import abc
import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.summary import OneLine
from numpyro_scalegp.numerics.trigonometry import cos_sin_of_turns, turns_of

Origin = Float[Array, " d"] | None


class Waves(NamedTuple):
    """Random waves of a stationary kernel: E[variance cos(w'(x - z))] = k(x, z)."""

    frequencies: Float[Array, "num d"]  # w, in radians per unit of the inputs
    variance: Float[Array, ""]  # k(x, x); for a component, of the kernel it was taken from
    active: Bool[Array, " num"]  # for a component, which waves belong to it


class AbstractSpectrum(OneLine):
    """The random features of a kernel, and the frequencies of a stationary one."""

    @abc.abstractmethod
    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i) for inputs that were checked, shape (n,), in O(n d)."""

    def sample_frequencies(self, key: Key[Array, ""], num: int, d: int) -> Float[Array, "num d"]:
        """Draw angular frequencies from the normalized spectral density.

        They satisfy E[cos(w'(x - z))] = k(x, z) / k(x, x).

        Args:
            key: a typed JAX key.
            num: number of frequencies.
            d: number of input dimensions.

        Returns:
            Frequencies in radians per unit of the inputs, shape (num, d).

        Raises:
            ValueError: if the kernel is not stationary, so that it has no spectral density.
        """
        raise ValueError(
            f"`{type(self).__name__}` has no spectral density: only stationary kernels, their sums "
            "and their products have one. Use inducing points or an exact estimator instead."
        )

    def spectral_density(self, frequencies: Float[Array, "num d"]) -> Float[Array, " num"]:
        """The spectral density S(w), with k(x, z) = (2 pi)^-d times the integral of S cos(w'(x-z)).

        Args:
            frequencies: angular frequencies w in radians per unit of the inputs, shape (num, d).

        Returns:
            Densities, shape (num,), in squared units of the function times units of the inputs.

        Raises:
            ValueError: if the kernel has none in closed form.
        """
        raise ValueError(
            f"`{type(self).__name__}` has no spectral density in closed form: RBF, Matern and "
            "rational quadratic kernels, their multiples and their sums have one."
        )

    @property
    def is_stationary(self) -> bool:
        """Whether k(x, z) depends on x - z alone, so that the kernel has a spectral density."""
        return False

    @property
    def has_smooth_features(self) -> bool:
        """Whether random features of a fixed key have a derivative in every hyperparameter.

        False if a hyperparameter selects among discrete frequencies, as do the lengthscale of
        `Periodic` and the variances in a sum within a product.
        """
        return self.has_smooth_frequencies

    @property
    def has_smooth_frequencies(self) -> bool:
        """Whether `sample_frequencies` of a fixed key has a derivative in every hyperparameter."""
        return True

    def sample_waves(self, key: Key[Array, ""], num: int, d: int) -> Waves:
        """Draw random waves; `sample_frequencies` returns their frequencies alone."""
        frequencies = self.sample_frequencies(key, num, d)
        variance = self.evaluate_diag(jnp.zeros((1, d), frequencies.dtype))[0]
        return Waves(frequencies, variance, jnp.ones(num, bool))

    def random_features(
        self,
        key: Key[Array, ""],
        X: Float[ArrayLike, "n d"],
        num_features: int,
        *,
        origin: Float[ArrayLike, " d"] | None = None,
    ) -> Float[Array, "n p"]:
        """Map inputs to random features that have the kernel as their expected inner product.

        E[phi(x)'phi(z)] = k(x, z) over keys. A stationary kernel has pairs of a cosine and a sine
        with frequencies from its spectral density; sums, products and mapped inputs combine the
        features of their parts, and a linear kernel has exact features. With the same key, the
        frequencies are a function of the hyperparameters (a step function if the spectrum is
        discrete, as for `Periodic`), and the features of a point depend on no other point.

        Args:
            key: a typed JAX key; use the same key for features of other inputs of the same
                function.
            X: inputs, shape (n, d).
            num_features: number of features, even and at least 2.
            origin: a point where every wave has phase zero, shape (d,), by default zero. It does
                not change the expectation. Far from it, rounding a frequency changes the function:
                pass a data point such as `X[0]` if different programs compute features of the same
                function, or if hyperparameters change.

        Returns:
            Features, shape (n, p); p is `num_features` unless a part of the kernel has exact
            features. Time O(n d p), memory O(n p).

        Raises:
            ValueError: if the kernel is neither stationary nor composed of parts with features.

        References:
            Rahimi and Recht (2007), Random Features for Large-Scale Kernel Machines; Sutherland and
            Schneider (2015), On the Error of Random Fourier Features: pairs beat random phases.
        """
        X, key = checks.inputs("X", X), checks.as_key(key)
        origin = None if origin is None else jnp.asarray(origin)
        return self.evaluate_features(key, X, checks.count("num_features", num_features), origin)

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """Random features of inputs that were checked, by default waves; see `random_features`."""
        num_pairs = max(1, num_features // 2)
        waves = self.sample_waves(key, num_pairs, X.shape[1])
        turns = turns_of(X, (waves.frequencies / (2.0 * math.pi)).astype(X.dtype), origin)
        amplitude = jnp.where(waves.active, jnp.sqrt(waves.variance) / math.sqrt(num_pairs), 0.0)
        return jnp.tile(amplitude, 2) * jnp.concatenate(cos_sin_of_turns(turns), axis=1)
