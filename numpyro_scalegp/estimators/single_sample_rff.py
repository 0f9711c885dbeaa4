"""The log marginal likelihood without bias from a random number of random Fourier features."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.derivatives import refuse_derivatives, with_pullback
from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.trigonometry import cos_sin_of_turns
from numpyro_scalegp.estimators.cholesky import Cholesky
from numpyro_scalegp.estimators.estimator import AbstractEstimator
from numpyro_scalegp.features.linear_model import Statistics, log_densities, statistics
from numpyro_scalegp.posteriors import ExactPosterior
from numpyro_scalegp.solvers import KernelOperator
from numpyro_scalegp.solvers.stopping import StoppingTime

_REFUSAL = (
    "`SingleSampleRFF` has first derivatives in reverse mode alone (`jax.grad`): second ones of a "
    "single draw have next to nothing to do with those of its mean. For `jax.hessian`, `jax.jvp` "
    "or a Laplace approximation take `sgp.estimators.Cholesky()`."
)


class SingleSampleRFF(AbstractEstimator):
    """An unbiased log marginal likelihood and gradient from random Fourier features.

    With nested sets of features, L(m) the log density from the first m of them and L(inf) the exact
    one, L(inf) = L(m_0) + sum_J (L(m_J) - L(m_{J-1})). One difference is drawn and divided by its
    probability: log p(y) ~ L(m_0) + (L(m_J) - L(m_{J-1})) / P(J). The sizes are
    m_0 = `min_features` and `step` more each time, as long as they are below n, and the last
    difference closes the gap to the exact matrix; P(J) ~ 1 / m_J.

    The variance is high, since a small difference is divided by a small probability: this is a
    research tool. To train a model, take `RussianRouletteCG`. `GaussianProcess.condition` with it
    is exact, as with `Cholesky`.

    Args:
        min_features: the features that every evaluation has, even.
        step: features from one term to the next, even. More of it means less variance and more
            cost.

    Raises:
        ValueError: if a number is not even and positive.

    References:
        Potapczynski et al. (2021), section 4.2, eq. 20. Time O(n m^2 + m^3) and memory O(n d + m^2)
        with the number m of features drawn, rounded up by at most a factor of two; O(n^3) and
        O(n^2) where the last term is drawn. In float32, noise variances below a thousandth of the
        data's leave rounding errors of the order of one, before the weights, with a warning. Under
        `jax.vmap` every size is computed for every draw: map over keys with `jax.lax.map`.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> estimator = sgp.estimators.SingleSampleRFF(min_features=500, step=100)
    """

    is_stochastic: ClassVar[bool] = True
    takes_turns: ClassVar[bool] = True

    min_features: int = eqx.field(static=True, converter=checks.plain, default=500)
    step: int = eqx.field(static=True, converter=checks.plain, default=100)

    def __check_init__(self) -> None:
        for name in ("min_features", "step"):
            checks.count(name, getattr(self, name), 2, even=True)

    def sizes(self, n: int) -> tuple[int, ...]:
        """The numbers m_0, .., m_{T-1} of features for n rows; the T-th term is the exact one."""
        return tuple(range(self.min_features, max(n, self.min_features + 1), self.step))

    def distribution(self, n: int) -> StoppingTime:
        """The distribution of J in 1..T for n rows."""
        return StoppingTime(1.0 / (np.array(self.sizes(n)) + self.step))

    @compiled
    def log_prob(
        self,
        operator: KernelOperator,
        residual: Float[Array, "*batch n"],
        *,
        key: Key[Array, ""] | None = None,
        **options: Any,
    ) -> Float[Array, "*batch"]:
        """An unbiased estimate of the log density of `residual` under N(0, H).

        Raises:
            ValueError: if there is no key, or the kernel is not stationary.
            TypeError: in forward-mode differentiation, and in second derivatives.
        """
        kernel = operator.kernel
        if not kernel.is_stationary:
            raise ValueError(
                f"`kernel` must be stationary for `SingleSampleRFF`, got `{type(kernel).__name__}`"
                ". With `observed` it is only where that is an array of NumPy, the same for all "
                "members: rows that stay, and are hidden, have another covariance."
            )
        frequency_key, stop_key = jax.random.split(self.required_key(key))
        rows = residual.reshape(-1, residual.shape[-1]).astype(operator.dtype)
        stop = self.distribution(operator.size).sample(stop_key)
        differentiable, rest = eqx.partition(operator, eqx.is_inexact_array)
        inputs, fixed = (differentiable, rows), (rest, frequency_key, stop)
        branch = self._branch(operator.size, stop)
        branches = self._branches(operator.size)
        values = jax.lax.switch(branch, branches, *jax.lax.stop_gradient(inputs), fixed)
        values = with_pullback(_pull_back, _REFUSAL, values, inputs, (self, *fixed))
        return values.reshape(residual.shape[:-1])

    def condition(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        **options: Any,
    ) -> ExactPosterior:
        """The exact posterior, as with `Cholesky`: that of the density's mean."""
        return Cholesky().condition(operator, y, mean_function)

    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, H) exactly, as with `Cholesky`."""
        return Cholesky().sample_prior(operator, key, num_samples)

    def _widths(self, n: int) -> tuple[int, ...]:
        """The numbers of features that are compiled for: sizes thinned out to doublings."""
        widths: list[int] = []
        for size in reversed(self.sizes(n)[1:]):
            if not widths or 2 * size <= widths[-1]:
                widths.append(size)
        return tuple(reversed(widths))

    def _branches(self, n: int) -> list[Callable[..., Float[Array, " m"]]]:
        """The estimate from as many features as each width, and the one with the last term."""
        return [functools.partial(self._estimate, width) for width in (*self._widths(n), None)]

    def _branch(self, n: int, stop: Int[Array, ""]) -> Int[Array, ""]:
        """Which branch has all features of the J-th term."""
        size = jnp.append(jnp.array(self.sizes(n)), n)[stop]
        inside = jnp.searchsorted(jnp.array(self._widths(n), int), size)
        return jnp.where(stop == len(self.sizes(n)), len(self._widths(n)), inside)

    def _estimate(
        self,
        width: int | None,
        differentiable: KernelOperator,
        rows: Float[Array, "m n"],
        fixed: tuple,
    ) -> Float[Array, " m"]:
        rest, key, stop = fixed
        operator = eqx.combine(differentiable, rest)
        sizes = self.sizes(operator.size)
        nested = _nested(operator, rows, key, sizes[-1], sizes[-1] if width is None else width)
        size = jnp.array(sizes)
        # One after another, in one compiled body.
        if width is None:
            first, before = jax.lax.map(nested.log_densities, jnp.stack([size[0], size[-1]]))
            last = Cholesky().log_prob(operator, rows)
        else:
            needed = jnp.stack([size[0], size[stop - 1], size[stop]])
            first, before, last = jax.lax.map(nested.log_densities, needed)
        weight = self.distribution(operator.size).single_sample_weight(stop).astype(operator.dtype)
        return first + weight * (last - before)


class _Nested(NamedTuple):
    """Statistics of unscaled features of unit amplitude, from which those of fewer are read off."""

    statistics: Statistics
    variance: Float[Array, ""]
    noise: Float[Array, " n"]

    def log_densities(self, size: Int[Array, ""]) -> Float[Array, " m"]:
        """Log N(y; 0, Phi Phi' + D) with the first `size` features only."""
        num_pairs = self.statistics.gram.shape[0] // 2
        scale = self.variance / (size // 2).astype(self.variance.dtype)
        pair = jnp.arange(num_pairs) < size // 2
        kept = jnp.concatenate([pair, pair])
        gram, moments, squares = self.statistics
        # A feature that is zero everywhere changes nothing.
        gram = jnp.where(kept[:, None] & kept, scale * gram, 0.0)
        moments = jnp.where(kept[:, None], jnp.sqrt(scale) * moments, 0.0)
        return log_densities(Statistics(gram, moments, squares), self.noise)


def _nested(
    operator: KernelOperator,
    rows: Float[Array, "m n"],
    key: Key[Array, ""],
    total: int,
    width: int,
) -> _Nested:
    """Statistics of the first `width` of `total` features."""
    kernel, X = operator.kernel, operator.X
    # All frequencies are drawn, so that the first ones do not depend on how many are used.
    frequencies = kernel.sample_frequencies(key, total // 2, X.shape[1])[: width // 2]
    turns = frequencies.T.astype(operator.dtype) / (2.0 * math.pi)

    def features(rows: Array) -> Array:
        return jnp.concatenate(cos_sin_of_turns(matmul(rows, turns)), axis=1)

    noise = operator.noise()
    # Translated, they have the same inner products, and keep their digits far from zero.
    near = (X - jax.lax.stop_gradient(X[:1])).astype(operator.dtype)
    found = statistics(features, width, near, noise, rows.T)
    return _Nested(found, kernel.diag(X[:1])[0].astype(operator.dtype), noise)


def _pull_back(
    inputs: tuple[KernelOperator, Array], fixed: tuple, cotangent: Float[Array, " m"]
) -> tuple[KernelOperator, Array]:
    """The gradient of the branch that ran, run again.

    A switch that is differentiated keeps what every branch needs, the largest included.
    """
    estimator, *others = fixed
    inputs = refuse_derivatives(_REFUSAL, inputs)
    n = inputs[1].shape[1]

    def pull_back(branch: Callable, operator: KernelOperator, rows: Array, fixed: tuple) -> Any:
        return jax.vjp(lambda *primals: branch(*primals, fixed), operator, rows)[1](cotangent)

    branches = [functools.partial(pull_back, branch) for branch in estimator._branches(n)]
    branch = estimator._branch(n, others[2])
    return jax.lax.switch(branch, branches, *inputs, tuple(others))
