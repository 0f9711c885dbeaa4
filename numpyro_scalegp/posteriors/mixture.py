"""The posterior over a function with the hyperparameters integrated out by draws of them."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.row_values import holds_row_values
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.function_samples import (
    AbstractFunctionSamples,
    MixtureFunctionSamples,
)
from numpyro_scalegp.posteriors.normal_mixture import NormalMixture
from numpyro_scalegp.posteriors.posterior import OF_VALUES, AbstractConditioned, AbstractPosterior

# The share of the draws below which those that carry the weight of a row are few.
_FEW_DRAWS = 0.1


class MixturePosterior(AbstractPosterior):
    """The mixture of the posteriors given each of S draws of the hyperparameters.

    Its mean is the mean of the S means, its variance the mean of the S variances plus the variance
    of the S means. Each call conditions on the data once for each draw, one after the other, and
    keeps none of it: time is S times that of one posterior, memory that of one besides (S, m)
    moments. Functions are drawn each under a draw of the hyperparameters, none of which is used
    twice as far as there are as many.

    Args:
        given: the posterior given one draw, a pure function.
        draws: a pytree of arrays with a leading axis of S draws.

    References:
        Rasmussen and Williams (2006), section 5.2, for the hierarchy.
    """

    given: Callable[[Any], AbstractPosterior]
    draws: Any
    noise_variance: None = None  # each draw has its own

    @property
    def _takes_batches(self) -> bool:
        return True  # as far as the posteriors do

    @property
    def num_draws(self) -> int:
        """The number S of draws."""
        return jax.tree.leaves(self.draws)[0].shape[0]

    def _each(self, function: Callable[[AbstractPosterior], Any], draws: Any = None) -> Any:
        """What a function gives for the posterior given each draw, stacked."""
        chosen = self.draws if draws is None else draws
        return jax.lax.map(lambda draw: function(self.given(draw)), chosen)

    def _check(self, Xs: ArrayLike) -> Float[Array, "... m d"]:
        X = super()._check(Xs)

        has_row_values = []

        def check(draw: Any) -> None:
            posterior = self.given(draw)
            has_row_values.append(holds_row_values(posterior))
            posterior._check(X)

        # Categories, columns and axes are those of the posterior given any of the draws.
        first = jax.tree.map(lambda leaf: leaf[0], self.draws)
        jax.eval_shape(check, first)
        if has_row_values[0]:  # whose rows have to be known
            self.given(first)._check(X)
        return X

    @compiled
    def _moments(self, Xs: Array, chunk_size: int | None) -> tuple[Array, Array]:
        def moments(posterior: AbstractPosterior) -> tuple[Array, Array]:
            return posterior._mean_and_variance(posterior._check(Xs), chunk_size)

        return self._each(moments)

    @compiled
    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        means = self._each(lambda posterior: posterior.mean(Xs, chunk_size=chunk_size))
        return jnp.mean(means, axis=0)

    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        means, variances = self._moments(Xs, chunk_size)
        return jnp.mean(variances, axis=0) + jnp.var(means, axis=0)

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        def moments(posterior: AbstractPosterior) -> tuple[Array, Array]:
            return posterior._mean(Xs, None), posterior._covariance(Xs)

        means, covariances = self._each(moments)
        within = jnp.mean(covariances, axis=0)
        # One axis of the means, or two of several outputs, are of one joint distribution.
        num_batch = 2 * (means.ndim - 1) - within.ndim
        shape = within.shape[:num_batch]
        gaps = (means - jnp.mean(means, axis=0)).reshape(self.num_draws, *shape, -1)
        between = jnp.einsum("s...i,s...j->...ij", gaps, gaps, precision="highest")
        return within + between.reshape(within.shape) / self.num_draws

    @compiled
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        def sample(posterior: AbstractPosterior, key: Array) -> Array:
            return posterior.sample(key, Xs, 1)[0]

        return self._each_chosen(sample, key, num_samples)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> MixtureFunctionSamples:
        def draw(posterior: AbstractPosterior, key: Array) -> AbstractFunctionSamples:
            return posterior._functions(key, 1, num_features)

        return MixtureFunctionSamples(self._each_chosen(draw, key, num_samples))

    def _each_chosen(
        self, function: Callable[[AbstractPosterior, Array], Any], key: Array, num: int
    ) -> Any:
        """What a function draws from posteriors of `num` draws, stacked."""
        order_key, draw_key = jax.random.split(key)
        order = jax.random.permutation(order_key, self.num_draws)
        chosen = order[jnp.arange(num) % self.num_draws]
        draws = jax.tree.map(lambda leaf: leaf[chosen], self.draws)

        def one(item: tuple[Any, Array]) -> Any:
            return function(self.given(item[0]), item[1])

        return jax.lax.map(one, (draws, jax.random.split(draw_key, num)))

    def predictive(
        self,
        Xs: Float[ArrayLike, "... m d"],
        noise_variance: Float[ArrayLike, "..."] | None = None,
        *,
        chunk_size: int | None = None,
    ) -> dist.MixtureSameFamily:
        """The predictive distribution of new observations; see `AbstractPosterior.predictive`.

        Returns:
            A mixture of S normal distributions for each row, of batch shape (*batch, m), with
            quantiles by `icdf`; of transformed ones, without quantiles, where the observations are.
        """
        if noise_variance is not None:
            noise_variance = checks.as_positive(noise_variance, "noise_variance", or_zero=True)
            checks.positive("noise_variance", noise_variance, or_zero=True)
        *normal, transforms = self._predictive(self._check(Xs), noise_variance, chunk_size)
        components = _stacked(*normal)
        weights = jnp.full(components.batch_shape, 1.0 / self.num_draws, normal[0].dtype)
        return _mixture(dist.Categorical(probs=weights), components, transforms)

    @compiled
    def _predictive(
        self, Xs: Array, noise_variance: Any, chunk_size: int | None
    ) -> tuple[Array, Array, list[Any]]:
        def predictive(posterior: AbstractPosterior) -> tuple[Array, Array, list[Any]]:
            found = posterior.predictive(Xs, noise_variance, chunk_size=chunk_size)
            normal, transforms = _normal_of(found)
            return normal.mean, jnp.sqrt(normal.variance), transforms

        return self._each(predictive)

    def leave_one_out(self) -> dist.MixtureSameFamily:
        """The predictive distribution of each y_i given all other observations.

        Draws of the hyperparameters given all of y become draws given all but y_i by importance
        weights: those of the mixture for row i are proportional to 1 / p(y_i | y_-i, theta_s), with
        the posterior's own `leave_one_out` under draw s. So its density at y_i is the harmonic mean
        of theirs. The draws must be of the posterior given y, as those of NUTS are; then this is
        exact for many of them. `arviz.loo` of `sgp.to_arviz(mcmc, key=key)` smooths the largest
        weights, and its Pareto k says for which rows draws given all do not serve.

        Returns:
            A mixture of S normal distributions for each row, of batch shape (*batch, n), with a
            warning where fewer than a tenth of the draws carry the weight of a row. Of a row that
            is not observed, weights are equal. Time is S times that of one posterior.

        Raises:
            ValueError: if the draws hold the function's values, and the posteriors given a draw do
                not know the observations; if these have no `leave_one_out`.

        References:
            Gelfand, Dey and Chang (1992), Model Determination Using Predictive Distributions;
            Vehtari, Gelman and Gabry (2017), Practical Bayesian Model Evaluation Using
            Leave-One-Out Cross-Validation and WAIC, eq. 8.
        """
        logits, *normal, transforms = self._left_out()
        mixing = dist.Categorical(logits=jnp.moveaxis(logits, 0, -1))
        return _mixture(mixing, _stacked(*normal), transforms)

    @compiled
    def _left_out(self) -> tuple[Array, Array, Array, list[Any]]:
        def of_one(posterior: AbstractPosterior) -> tuple[Array, Array, Array, list[Any]]:
            if isinstance(posterior, AbstractConditioned) and posterior._is_of_values:
                raise ValueError(OF_VALUES)
            left_out: Any = posterior.leave_one_out()
            y, observed = posterior.y, getattr(posterior, "observed", None)  # type: ignore[attr-defined]
            density = left_out.log_prob(y)
            if observed is not None:
                density = jnp.where(observed, density, 0.0)
            normal, transforms = _normal_of(left_out)
            return -density, normal.loc, normal.scale, transforms

        logits, loc, scale, transforms = self._each(of_one)
        shares = jax.nn.softmax(logits, axis=0)
        num_effective = 1.0 / jnp.sum(jnp.square(shares), axis=0)
        call_where(jnp.min(num_effective) < _FEW_DRAWS * self.num_draws, _warn_of_weights)
        return logits, loc, scale, transforms

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "MixturePosterior":
        """The posterior of a part of f; see `AbstractPosterior.restrict`."""
        return dataclasses.replace(self, given=Restricted(self.given, change))

    @property
    def diagnostics(self) -> dict[str, Array]:
        """Those given each draw, with a leading axis of draws."""
        return self._diagnostics()

    @compiled
    def _diagnostics(self) -> dict[str, Array]:
        return self._each(lambda posterior: posterior.diagnostics)


def _stacked(loc: Float[Array, "S ..."], scale: Float[Array, "S ..."]) -> dist.Normal:
    """Normal distributions with the draws as their last axis."""
    return dist.Normal(jnp.moveaxis(loc, 0, -1), jnp.moveaxis(scale, 0, -1))


def _normal_of(predictive: Any) -> tuple[dist.Normal, list[Any]]:
    """The normal distribution inside of that of a warped process, and the transforms around it."""
    if isinstance(predictive, dist.TransformedDistribution):
        return predictive.base_dist, predictive.transforms
    return predictive, []


def _mixture(
    mixing: dist.Distribution, components: dist.Normal, transforms: list[Any]
) -> dist.MixtureSameFamily:
    """A mixture of normal distributions, transformed by what may depend on the draw."""
    if not transforms:
        return NormalMixture(mixing, components)
    return dist.MixtureSameFamily(mixing, dist.TransformedDistribution(components, transforms))


def _warn_of_weights() -> None:
    warnings.warn(
        "few draws carry the weight of an observation in `leave_one_out`: without it the posterior "
        "of the hyperparameters is another. Look at Pareto k of arviz.loo(sgp.to_arviz(...)), and "
        "fit again without the rows for which it is above 0.7.",
        RuntimeWarning,
        stacklevel=1,
    )


class Restricted(eqx.Module):
    """The posterior of a part of f given one draw, or the values of one function."""

    given: Callable[[Any], AbstractPosterior]
    change: Callable[[AbstractKernel], AbstractKernel] = eqx.field(static=True)

    def __call__(self, draw: Any) -> AbstractPosterior:
        """That of the part."""
        return self.given(draw).restrict(self.change)
