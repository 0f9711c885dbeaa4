"""Unbiased log marginal likelihoods from a random number of random Fourier features."""

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
from numpyro_scalegp.features.linear_model import Statistics, log_densities, statistics
from numpyro_scalegp.integrated.cholesky import Cholesky
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.integrated.truncated.stopping import StoppingTime
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.numerics.derivatives import refuse_derivatives, with_pullback
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.numerics.trigonometry import cos_sin_of_turns
from numpyro_scalegp.processes.exact import ExactPosterior
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction

_REFUSAL = (
    "`SingleSampleRFF` has only first derivatives in reverse mode (`jax.grad`): second derivatives "
    "of a single draw are far from the second derivatives of its mean. For `jax.hessian`, "
    "`jax.jvp` or a Laplace approximation use `sgp.estimators.Cholesky()`."
)


class SingleSampleRFF(AbstractEstimator):
    """An unbiased log marginal likelihood and gradient from random Fourier features.

    Let L(m) be the log density from the first m of a nested set of features, and L(inf) the exact
    log density: L(inf) = L(m_0) + sum_J (L(m_J) - L(m_{J-1})). One difference is drawn and divided
    by its probability: log p(y) ~ L(m_0) + (L(m_J) - L(m_{J-1})) / P(J) with P(J) ~ 1 / m_J. The
    sizes are m_0 = `min_features`, m_J = m_0 + J `step` while that is below n, and the last
    difference is to the exact L(inf).

    The variance is high, since a small difference is divided by a small probability: this is a
    research tool. To train a model, use `RussianRouletteCG`. `GaussianProcess.condition` is exact,
    as with `Cholesky`.

    Args:
        min_features: number of features in every evaluation, even.
        step: number of features added by each term, even. A larger step has less variance and a
            higher cost.

    Raises:
        ValueError: if `min_features` or `step` is not even and positive.

    References:
        Potapczynski et al. (2021), section 4.2, eq. 20. Time O(n m^2 + m^3) and memory O(n d + m^2)
        with the number m of features drawn, rounded up by at most a factor of two; O(n^3) and
        O(n^2) if the last term is drawn. In float32, if the noise variance is below a thousandth of
        the variance of y, the unweighted terms have rounding errors of the order of one, with a
        warning. Under `jax.vmap` every size is computed for every draw: map over keys with
        `jax.lax.map`.

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
        """The numbers m_0, .., m_{T-1} of features for n observations; the T-th term is exact."""
        return tuple(range(self.min_features, max(n, self.min_features + 1), self.step))

    def distribution(self, n: int) -> StoppingTime:
        """The distribution of J in 1..T for n observations."""
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
            TypeError: for forward-mode or second derivatives.
        """
        kernel = operator.kernel
        if not kernel.is_stationary:
            raise ValueError(
                f"`kernel` must be stationary for `SingleSampleRFF`, got `{type(kernel).__name__}`"
                ". With `observed`, it is stationary only if the mask is a NumPy array that all "
                "members share, so that the other rows can be removed."
            )
        frequency_key, stop_key = jax.random.split(self.required_key(key))
        rows = residual.reshape(-1, residual.shape[-1]).astype(operator.dtype)
        stop = self.distribution(operator.size).sample(stop_key)
        differentiable, static = eqx.partition(operator, eqx.is_inexact_array)
        inputs, fixed = (differentiable, rows), (static, frequency_key, stop)
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
        """The exact posterior, as with `Cholesky`."""
        return Cholesky().condition(operator, y, mean_function)

    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, H) exactly, as with `Cholesky`."""
        return Cholesky().sample_prior(operator, key, num_samples)

    def _widths(self, n: int) -> tuple[int, ...]:
        """The numbers of features to compile for: `sizes`, thinned to at least double each time."""
        widths: list[int] = []
        for size in reversed(self.sizes(n)[1:]):
            if not widths or 2 * size <= widths[-1]:
                widths.append(size)
        return tuple(reversed(widths))

    def _branches(self, n: int) -> list[Callable[..., Float[Array, " m"]]]:
        """The estimate as a function for each width, and for the exact last term."""
        return [functools.partial(self._estimate, width) for width in (*self._widths(n), None)]

    def _branch(self, n: int, stop: Int[Array, ""]) -> Int[Array, ""]:
        """The index of the first branch with enough features for the J-th term."""
        size = jnp.append(jnp.array(self.sizes(n)), n)[stop]
        index = jnp.searchsorted(jnp.array(self._widths(n), int), size)
        return jnp.where(stop == len(self.sizes(n)), len(self._widths(n)), index)

    def _estimate(
        self,
        width: int | None,
        differentiable: KernelOperator,
        rows: Float[Array, "m n"],
        fixed: tuple,
    ) -> Float[Array, " m"]:
        static, key, stop = fixed
        operator = eqx.combine(differentiable, static)
        sizes = self.sizes(operator.size)
        nested = _nested(operator, rows, key, sizes[-1], sizes[-1] if width is None else width)
        size = jnp.array(sizes)
        # `map` compiles `log_densities` once for all sizes.
        if width is None:
            first, before = jax.lax.map(nested.log_densities, jnp.stack([size[0], size[-1]]))
            last = Cholesky().log_prob(operator, rows)
        else:
            needed = jnp.stack([size[0], size[stop - 1], size[stop]])
            first, before, last = jax.lax.map(nested.log_densities, needed)
        weight = self.distribution(operator.size).single_sample_weight(stop).astype(operator.dtype)
        return first + weight * (last - before)


class _Nested(NamedTuple):
    """Statistics of features of unit amplitude, which contain the statistics of each subset."""

    statistics: Statistics
    variance: Float[Array, ""]
    noise: Float[Array, " n"]

    def log_densities(self, size: Int[Array, ""]) -> Float[Array, " m"]:
        """Log N(y; 0, Phi Phi' + D) with the first `size` features only."""
        num_pairs = self.statistics.gram.shape[0] // 2
        scale = self.variance / (size // 2).astype(self.variance.dtype)
        pair = jnp.arange(num_pairs) < size // 2
        is_used = jnp.concatenate([pair, pair])
        gram, moments, squares = self.statistics
        # Features of zeros do not affect the density.
        gram = jnp.where(is_used[:, None] & is_used, scale * gram, 0.0)
        moments = jnp.where(is_used[:, None], jnp.sqrt(scale) * moments, 0.0)
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
    # Draw all frequencies, so that the first ones do not depend on `width`.
    frequencies = kernel.sample_frequencies(key, total // 2, X.shape[1])[: width // 2]
    turns = frequencies.T.astype(operator.dtype) / (2.0 * math.pi)

    def features(rows: Array) -> Array:
        return jnp.concatenate(cos_sin_of_turns(matmul(rows, turns)), axis=1)

    noise = operator.noise()
    # Translation preserves the inner products of features; near zero, inputs lose fewer digits.
    centered = (X - jax.lax.stop_gradient(X[:1])).astype(operator.dtype)
    feature_statistics = statistics(features, width, centered, noise, rows.T)
    variance = kernel.evaluate_diag(X[:1])[0].astype(operator.dtype)
    return _Nested(feature_statistics, variance, noise)


def _pull_back(
    inputs: tuple[KernelOperator, Array], fixed: tuple, cotangent: Float[Array, " m"]
) -> tuple[KernelOperator, Array]:
    """The gradient of the selected branch, evaluated again.

    Differentiating the switch itself would store the residuals of every branch.
    """
    estimator, *branch_arguments = fixed
    inputs = refuse_derivatives(_REFUSAL, inputs)
    n = inputs[1].shape[1]

    def pull_back(branch: Callable, operator: KernelOperator, rows: Array, fixed: tuple) -> Any:
        return jax.vjp(lambda *primals: branch(*primals, fixed), operator, rows)[1](cotangent)

    branches = [functools.partial(pull_back, branch) for branch in estimator._branches(n)]
    branch = estimator._branch(n, branch_arguments[2])
    return jax.lax.switch(branch, branches, *inputs, tuple(branch_arguments))
