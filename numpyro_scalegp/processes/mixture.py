"""The posterior over a function, averaged over draws of the hyperparameters."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import ndtr, ndtri
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics.derivatives import custom_jvp_all_orders
from numpyro_scalegp.processes.function_samples import (
    AbstractFunctionSamples,
    MixtureFunctionSamples,
)
from numpyro_scalegp.processes.posterior import (
    NEEDS_OBSERVATIONS,
    AbstractConditioned,
    AbstractPosterior,
    Inputs,
)
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import holds_row_values

# Warn where the effective number of draws for a row is below this fraction of all draws.
_FEW_DRAWS = 0.1


class MixturePosterior(AbstractPosterior):
    """The mixture of the posteriors given each of S draws of the hyperparameters.

    Its mean is the mean of the S means, its variance the mean of the S variances plus the variance
    of the S means. Each call conditions on the data once for each draw, one after the other, and
    stores no posterior: it takes S times as long as a single posterior, with the memory of one
    posterior and (S, m) moments. Each sampled function is given one draw of the hyperparameters; a
    draw is used twice only if there are more functions than draws.

    Args:
        posterior_given: a pure function from one draw to the posterior given it.
        draws: a pytree of arrays with a leading axis of S draws.

    References:
        Rasmussen and Williams (2006), section 5.2, for the hierarchy.
    """

    posterior_given: Callable[[Any], AbstractPosterior]
    draws: Any
    noise_variance: None = None  # each draw has its own

    @property
    def _takes_batches(self) -> bool:
        return True  # the posteriors check the inputs themselves

    @property
    def _row_axis(self) -> None:
        return None

    def _summary(self) -> list[str]:
        return [f"{self.num_draws} draws"] if jax.tree.leaves(self.draws) else []

    @property
    def num_draws(self) -> int:
        """The number S of draws."""
        return jax.tree.leaves(self.draws)[0].shape[0]

    def _each(self, function: Callable[[AbstractPosterior], Any]) -> Any:
        """Apply `function` to the posterior given each draw, and stack the results."""
        return jax.lax.map(lambda draw: function(self.posterior_given(draw)), self.draws)

    def _check(self, Xs: Any) -> Any:
        if checks.is_grid(Xs):
            X: Any = tuple(checks.inputs(f"Xs[{j}]", axis) for j, axis in enumerate(Xs))
        else:
            X = super()._check(Xs)

        has_row_values = []

        def check(draw: Any) -> None:
            posterior = self.posterior_given(draw)
            has_row_values.append(holds_row_values(posterior))
            posterior._check(X)

        # The posteriors given all draws take the same categories, input dimensions and axes.
        first = jax.tree.map(lambda leaf: leaf[0], self.draws)
        jax.eval_shape(check, first)
        if has_row_values[0]:  # which are compared outside of a trace
            self.posterior_given(first)._check(X)
        return X

    @compiled
    def _moments(self, Xs: Any, chunk_size: int | None) -> tuple[Array, Array]:
        def moments(posterior: AbstractPosterior) -> tuple[Array, Array]:
            return posterior._mean_and_variance(posterior._check(Xs), chunk_size)

        return self._each(moments)

    @compiled
    def _mean(self, Xs: Any, chunk_size: int | None) -> Array:
        means = self._each(lambda posterior: posterior.mean(Xs, chunk_size=chunk_size))
        return jnp.mean(means, axis=0)

    def _variance(self, Xs: Any, chunk_size: int | None) -> Array:
        means, variances = self._moments(Xs, chunk_size)
        return jnp.mean(variances, axis=0) + jnp.var(means, axis=0)

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        def moments(posterior: AbstractPosterior) -> tuple[Array, Array]:
            return posterior._mean(Xs, None), posterior._covariance(Xs)

        means, covariances = self._each(moments)
        within = jnp.mean(covariances, axis=0)
        # The last axis of the means, or the last two for several outputs, is jointly distributed.
        num_batch = 2 * (means.ndim - 1) - within.ndim
        shape = within.shape[:num_batch]
        deviations = (means - jnp.mean(means, axis=0)).reshape(self.num_draws, *shape, -1)
        between = jnp.einsum("s...i,s...j->...ij", deviations, deviations, precision="highest")
        return within + between.reshape(within.shape) / self.num_draws

    @compiled
    def _sample(self, key: Array, Xs: Any, num_samples: int) -> Array:
        def sample(posterior: AbstractPosterior, key: Array) -> Array:
            return posterior.sample(key, Xs, 1)[0]

        return self._each_sampled(sample, key, num_samples)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> MixtureFunctionSamples:
        def draw(posterior: AbstractPosterior, key: Array) -> AbstractFunctionSamples:
            return posterior._functions(key, 1, num_features)

        return MixtureFunctionSamples(self._each_sampled(draw, key, num_samples))

    def _each_sampled(
        self, function: Callable[[AbstractPosterior, Array], Any], key: Array, num: int
    ) -> Any:
        """Apply `function` to the posteriors given `num` random draws, and stack the results."""
        order_key, draw_key = jax.random.split(key)
        order = jax.random.permutation(order_key, self.num_draws)
        chosen = order[jnp.arange(num) % self.num_draws]
        draws = jax.tree.map(lambda leaf: leaf[chosen], self.draws)

        def apply(draw_and_key: tuple[Any, Array]) -> Any:
            draw, key = draw_and_key
            return function(self.posterior_given(draw), key)

        return jax.lax.map(apply, (draws, jax.random.split(draw_key, num)))

    def predictive(
        self,
        Xs: Inputs,
        noise_variance: Float[ArrayLike, "..."] | None = None,
        *,
        chunk_size: int | None = None,
    ) -> dist.MixtureSameFamily:
        """The predictive distribution of new observations; see `AbstractPosterior.predictive`.

        Returns:
            A mixture of S normal distributions for each row, of batch shape (*batch, m), with
            quantiles by `icdf`. If the observations are transformed, the mixture is of transformed
            normal distributions, and has no quantiles.
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
        self, Xs: Any, noise_variance: Any, chunk_size: int | None
    ) -> tuple[Array, Array, list[Any]]:
        def predictive(posterior: AbstractPosterior) -> tuple[Array, Array, list[Any]]:
            distribution = posterior.predictive(Xs, noise_variance, chunk_size=chunk_size)
            normal, transforms = _base_and_transforms(distribution)
            return normal.mean, jnp.sqrt(normal.variance), transforms

        return self._each(predictive)

    def leave_one_out(self) -> dist.MixtureSameFamily:
        """The predictive distribution of each y_i given all other observations.

        Importance weights turn draws of the hyperparameters given y into draws given all but y_i:
        the weights of the mixture for row i are proportional to 1 / p(y_i | y_-i, theta_s), with
        this density from `leave_one_out` under draw s. So the density of the mixture at y_i is the
        harmonic mean of these densities. The draws must be from the posterior given y, as from
        NUTS; the result is exact for many draws. `arviz.loo` of `sgp.to_arviz(mcmc, key=key)`
        smooths the largest weights, and its Pareto k says for which rows the weights are
        unreliable.

        Returns:
            A mixture of S normal distributions for each row, of batch shape (*batch, n). Warns if
            the weights of a row are concentrated on fewer than a tenth of the draws. Unobserved
            rows have equal weights. It takes S times as long as for a single posterior.

        Raises:
            ValueError: if the draws include values of f, so that the posteriors lack the noisy
                observations; if the posteriors have no `leave_one_out`.

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
                raise ValueError(NEEDS_OBSERVATIONS)
            left_out: Any = posterior.leave_one_out()
            y, observed = posterior.y, getattr(posterior, "observed", None)  # type: ignore[attr-defined]
            density = left_out.log_prob(y)
            if observed is not None:
                density = jnp.where(observed, density, 0.0)
            normal, transforms = _base_and_transforms(left_out)
            return -density, normal.loc, normal.scale, transforms

        logits, loc, scale, transforms = self._each(of_one)
        weights = jax.nn.softmax(logits, axis=0)
        num_effective = 1.0 / jnp.sum(jnp.square(weights), axis=0)
        call_where(jnp.min(num_effective) < _FEW_DRAWS * self.num_draws, _warn_of_weights)
        return logits, loc, scale, transforms

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "MixturePosterior":
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        return dataclasses.replace(self, posterior_given=Restricted(self.posterior_given, change))

    @property
    def diagnostics(self) -> dict[str, Array]:
        """The diagnostics given each draw, with a leading axis of draws."""
        return self._diagnostics()

    @compiled
    def _diagnostics(self) -> dict[str, Array]:
        return self._each(lambda posterior: posterior.diagnostics)


def _stacked(loc: Float[Array, "S ..."], scale: Float[Array, "S ..."]) -> dist.Normal:
    """Normal distributions with the draws along their last axis."""
    return dist.Normal(jnp.moveaxis(loc, 0, -1), jnp.moveaxis(scale, 0, -1))


def _base_and_transforms(predictive: Any) -> tuple[dist.Normal, list[Any]]:
    """The normal base distribution of a predictive distribution, and its transforms."""
    if isinstance(predictive, dist.TransformedDistribution):
        return predictive.base_dist, predictive.transforms
    return predictive, []


def _mixture(
    mixing: dist.Distribution, components: dist.Normal, transforms: list[Any]
) -> dist.MixtureSameFamily:
    """A mixture of normal distributions, each transformed by `transforms` of its draw."""
    if not transforms:
        return NormalMixture(mixing, components)
    return dist.MixtureSameFamily(mixing, dist.TransformedDistribution(components, transforms))


def _warn_of_weights() -> None:
    warnings.warn(
        "few draws carry the weight of an observation in `leave_one_out`: the posterior of the "
        "hyperparameters depends strongly on it. Check Pareto k of arviz.loo(sgp.to_arviz(...)), "
        "and refit without the rows for which it is above 0.7.",
        RuntimeWarning,
        stacklevel=1,
    )


class Restricted(eqx.Module):
    """The posterior of one component of f, given one draw or the values of one function."""

    posterior_given: Callable[[Any], AbstractPosterior]
    change: Callable[[AbstractKernel], AbstractKernel] = eqx.field(static=True)

    def __call__(self, draw: Any) -> AbstractPosterior:
        """The posterior of the component."""
        return self.posterior_given(draw).restrict(self.change)


class NormalMixture(dist.MixtureSameFamily):
    """A batch of mixtures of normal distributions: `MixtureSameFamily` with an `icdf`.

    Args:
        mixing_distribution: a `Categorical` of batch shape (*batch,).
        component_distribution: normal distributions of batch shape (*batch, S).
    """

    def icdf(self, q: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The quantiles, at which the cumulative distribution function is q.

        Bisection between the smallest and the largest quantile of a component, in the nearer tail,
        so that small probabilities stay accurate at both ends. It reaches rounding error in about
        30 steps in float32 and 60 in float64, each O(S) per entry. Differentiable with respect to q
        and the parameters of the components.

        Args:
            q: probabilities, of a shape that broadcasts with (*batch,).

        Returns:
            Quantiles; infinite for 0 and 1, and NaN where q is not a probability.
        """
        normal = self.component_distribution
        q = jnp.asarray(q, jnp.result_type(q, normal.loc))
        return _compiled_quantiles(q, self.mixing_distribution.probs, normal.loc, normal.scale)


@jax.jit
def _compiled_quantiles(*arguments: Array) -> Array:
    """Compile once outside of `jit`: a `while_loop` by itself is compiled in each call."""
    return _quantiles(*arguments)


def _distances(
    x: Float[Array, "..."], loc: Float[Array, "... S"], scale: Float[Array, "... S"]
) -> Float[Array, "... S"]:
    """Distances of values above the means of the components, in standard deviations."""
    difference = x[..., None] - loc
    is_spread = scale > 0
    at_atom = jnp.where(difference < 0, -jnp.inf, jnp.inf)
    return jnp.where(is_spread, difference / jnp.where(is_spread, scale, 1.0), at_atom)


@custom_jvp_all_orders
def _quantiles(
    q: Float[Array, "..."],
    weights: Float[Array, "... S"],
    loc: Float[Array, "... S"],
    scale: Float[Array, "... S"],
) -> Float[Array, "..."]:
    # The upper tail is the lower one of the mirrored mixture, and 1 - q is exact there.
    sign = jnp.where(q > 0.5, -1.0, 1.0).astype(loc.dtype)
    p = jnp.where(q > 0.5, 1.0 - q, q)
    loc = sign[..., None] * loc
    ends = loc + jnp.where(scale > 0, scale * ndtri(p)[..., None], 0.0)
    least = jnp.min(scale, axis=-1)
    eps = jnp.finfo(ends.dtype).eps

    def is_open(bracket: tuple[Array, Array]) -> Array:
        low, high = bracket
        size = jnp.maximum(jnp.maximum(jnp.abs(low), jnp.abs(high)), least)
        middle = 0.5 * (low + high)
        return jnp.any((high - low > eps * size) & (low < middle) & (middle < high))

    def halve(bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        is_above = jnp.sum(weights * ndtr(_distances(middle, loc, scale)), axis=-1) >= p
        return jnp.where(is_above, low, middle), jnp.where(is_above, middle, high)

    bracket = jnp.min(ends, axis=-1), jnp.max(ends, axis=-1)
    return sign * jax.lax.while_loop(is_open, halve, bracket)[1]


@_quantiles.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    """From F(x) = q: dx = (dq - dF) / F', with dF at a fixed x."""
    (q, weights, loc, scale), (dq, *d_mixture) = primals, tangents
    x = _quantiles(q, weights, loc, scale)

    def lower_tail(weights: Array, loc: Array, scale: Array) -> Array:
        return jnp.sum(weights * ndtr(_distances(x, loc, scale)), axis=-1)

    change = jax.jvp(lower_tail, (weights, loc, scale), tuple(d_mixture))[1]
    densities = jnp.exp(-0.5 * jnp.square(_distances(x, loc, scale))) / (2.0 * jnp.pi) ** 0.5
    return x, (dq - change) / jnp.sum(weights * densities / scale, axis=-1)
