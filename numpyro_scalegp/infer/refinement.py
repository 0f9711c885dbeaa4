"""Posteriors of hyperparameters by NUTS, from a fitted sparse guide."""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float, Key
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, init_to_value

from numpyro_scalegp.core import checks
from numpyro_scalegp.infer.conditioning import GuideAtDraw, parameters_of
from numpyro_scalegp.infer.quadrature import QuadratureELBO
from numpyro_scalegp.likelihoods.likelihood import log_density
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.mixture import MixturePosterior
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.mini_batches import is_subsampled
from numpyro_scalegp.tracing.fitted_runs import trace_of
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
from numpyro_scalegp.tracing.runs import drawn_values, is_latent, is_observed
from numpyro_scalegp.tracing.sites import WithoutSite
from numpyro_scalegp.variational.guide import AbstractGPGuide, set_up
from numpyro_scalegp.variational.natural_gradients import LOC, PRECISION, REFERENCE
from numpyro_scalegp.variational.sparse.guide import (
    AutoSparseGP,
    hyperparameters_of,
    inducing_mean,
)
from numpyro_scalegp.variational.sparse.natural import NaturalSparseGP
from numpyro_scalegp.variational.sparse.sparse import SparseGP

# Natural-gradient steps on all observations for likelihoods that are not normal: they end when the
# bound rises by less, in nats or in multiples of its rounding error.
_MAX_STEPS, _TOLERANCE, _ROUNDING = 30, 1e-3, 4.0
# By how many nats the log density may be lower than at the medians. It is constant below, since the
# kinetic energy of NUTS overflows to minus infinity in float32 after gradients of 1e19.
_MOST_BELOW = 1e4


class RefinedHyperparameters(NamedTuple):
    """The hyperparameters by NUTS, and the posterior of the function over their draws."""

    mcmc: MCMC  # of the hyperparameters alone, after its run
    posterior: MixturePosterior


@model_keywords_first(lambda key, model, *_: (model, 4))
def refine_hyperparameters(
    key: Key[Array, ""],
    model: Callable[..., Any],
    guide: AutoSparseGP,
    result: Any,
    /,
    *args: Any,
    num_warmup: int = 200,
    num_samples: int = 500,
    progress_bar: bool = True,
    **kwargs: Any,
) -> RefinedHyperparameters:
    """Sample the hyperparameters of a sparse GP by NUTS, from a guide fitted by SVI.

    The log density of hyperparameters is their log prior plus the bound of `QuadratureELBO` on the
    log likelihood with the function integrated out, at the best distribution of the inducing values
    for these hyperparameters. For normal observations this is the tight bound of Titsias (2025);
    for others the distribution takes natural-gradient steps from the best one at the guide's
    medians. The inducing points stay as fitted. Use it after any `AutoSparseGP`: without
    `natural=True`, draws of the guide itself vary too little.

    Args:
        key: a typed JAX key.
        model: the model.
        guide: an `AutoSparseGP`, whose `rest` guide has medians.
        result: what `SVI.run` returned, or a dict of parameters with mutable state.
        *args: the model's positional arguments, with which it sees all rows.
        num_warmup: warmup iterations of NUTS.
        num_samples: draws.
        progress_bar: whether NUTS shows its progress.
        **kwargs: the model's keyword arguments.

    Returns:
        The `MCMC` after its run, for `get_samples` and `arviz.from_numpyro`, and the posterior of
        the function, averaged over the draws, with the best distribution for each. Deterministic
        sites are not among the draws. The memory is O(num_samples M^2).

    Raises:
        TypeError: if `guide` is not an `AutoSparseGP`.
        ValueError: if its `rest` guide has another function or no medians, a parameter is
            missing, or the model takes mini-batches.

    References:
        Titsias (2025), New Bounds for Sparse Variational Gaussian Processes; Hensman, Matthews,
        Filippone and Ghahramani (2015), MCMC for Variationally Sparse Gaussian Processes, which
        samples the inducing values, too. Each leapfrog step costs O(n M^2 + M^3), several times
        for observations that are not normal.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import optax
        >>> from numpyro.infer import SVI
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y=None):
        ...     noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        ...     f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.3), X))
        ...     with numpyro.plate("rows", len(X)):
        ...         numpyro.sample("y", dist.Normal(f, noise), obs=y)
        >>> X = jnp.linspace(0.0, 1.0, 30)[:, None]
        >>> y = jnp.sin(6.0 * X[:, 0])
        >>> guide = sgp.guides.AutoSparseGP(model, num_inducing=5)
        >>> svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
        >>> result = svi.run(jax.random.key(0), 10, X, y, progress_bar=False)
        >>> options = dict(num_warmup=5, num_samples=5, progress_bar=False)
        >>> refined = sgp.infer.refine_hyperparameters(
        ...     jax.random.key(1), model, guide, result, X, y, **options
        ... )
        >>> refined.mcmc.get_samples()["noise"].shape, refined.posterior.mean(X).shape
        ((5,), (30,))
    """
    kwargs = of_model(kwargs)
    checks.function("model", model)
    checks.instance("guide", guide, AutoSparseGP, "an `AutoSparseGP`")
    if isinstance(guide.rest, AbstractGPGuide):
        raise ValueError("`guide` has a second function in `rest`: refine a model of one function.")
    if not hasattr(guide.rest, "median"):
        raise ValueError(
            "the `rest` guide of `guide` has no `median`, where the inducing values are fitted: "
            "give AutoMultivariateNormal, or another of NumPyro's autoguides, as `rest=`."
        )
    num_warmup = checks.count("num_warmup", num_warmup)
    num_samples = checks.count("num_samples", num_samples)
    params = parameters_of(result)
    set_up(guide, params, args, kwargs)
    medians = guide.median(params, *args, **kwargs)
    for name, site in trace_of(model, {**params, **medians}, args, kwargs).items():
        if is_subsampled(site):
            raise ValueError(
                f"the plate `{name}` takes a mini-batch, and each draw needs the bound on all rows:"
                " give arguments with which the model sees all of them."
            )
    nuts_key, posterior_key = jax.random.split(checks.as_key(key))
    marginal = _Marginal(model, guide, medians, params, args, kwargs)
    kernel = NUTS(marginal, init_strategy=init_to_value(values=medians), dense_mass=True)
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=progress_bar)
    mcmc.run(nuts_key, *args, **kwargs)
    samples = {name: mcmc.get_samples()[name] for name in medians}
    draws = jax.random.split(posterior_key, num_samples), samples, marginal.parameters_at(samples)
    at_draw = GuideAtDraw(model, marginal.guide, marginal.site, marginal.params, args, kwargs)
    return RefinedHyperparameters(mcmc, at_draw.over(draws))


class _Marginal:
    """A model of the hyperparameters alone, with the function integrated out by the bound.

    Args:
        model: the model with the function.
        guide: its sparse guide.
        medians: values of the hyperparameters at which the sites are fitted first.
        params: the guide's parameters.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoSparseGP,
        medians: dict[str, Array],
        params: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.model, self.guide, self.objective = model, copy.copy(guide), QuadratureELBO()
        self.guide.natural = self.guide.follows_hyperparameters = True
        trace = trace_of(model, {**params, **medians}, args, kwargs)
        # By name: terms of NumPyro's, such as log determinants of transformations, are observed.
        # Deterministic sites may be of the function.
        hidden = [
            name
            for name, site in trace.items()
            if is_observed(site) or site["type"] == "deterministic"
        ]
        without_function = WithoutSite(model, guide.site, guide.prior)
        self.without_function = handlers.block(without_function, hide=hidden)
        gp_site = guide._site(params, medians, None, args, kwargs)
        self.site, self.is_normal = gp_site.name, gp_site.is_normal
        self.names = [guide.param_name(gp_site, name) for name in (LOC, PRECISION)]
        with guide._parameters(params, None):
            family = guide.family(gp_site, training=False)
        start = _sites_of(family, inducing_mean(gp_site, family.inducing_points))
        # Of a guide without sites, they are on values whitened at the medians.
        reference = guide.param_name(gp_site, REFERENCE)
        params = {reference: hyperparameters_of(gp_site.kernel), **params}
        self.run = args, kwargs
        self.sites = compiled(self._best_sites)(start, medians, params, args, kwargs)
        self.params = {**params, **dict(zip(self.names, self.sites, strict=True))}
        self.least = -self._loss(self.sites, medians, self.params, args, kwargs) - _MOST_BELOW

    def parameters_at(self, draws: dict[str, Array]) -> dict[str, Array]:
        """The sites' parameters at each draw of the hyperparameters."""

        @compiled
        def at_each(draws: Any, start: Any, *run: Any) -> Any:
            return jax.lax.map(lambda values: self._best_sites(start, values, *run), draws)

        sites = at_each(draws, self.sites, self.params, *self.run)
        return dict(zip(self.names, sites, strict=True))

    def _loss(
        self, sites: Any, values: Any, params: Any, args: Any, kwargs: Any
    ) -> Float[Array, ""]:
        """The negative of the log prior of the hyperparameters plus the bound."""
        at_values = copy.copy(self.guide)
        at_values.rest = functools.partial(_sample_values, values)
        params = {**params, **dict(zip(self.names, sites, strict=True))}
        with handlers.block():
            key = jax.random.key(0)  # for the points of likelihoods of three functions or more
            return self.objective.loss(key, params, self.model, at_values, *args, **kwargs)

    def _best_sites(self, start: Any, *run: Any) -> Any:
        """The sites at the optimum for given hyperparameters, by natural-gradient steps.

        For normal observations a step of size one reaches it. For others a step that does not lower
        the loss is taken again at half its size.
        """
        gradient = jax.value_and_grad(self._loss)

        def stepped(sites: Any, size: Any, slopes: Any) -> Any:
            return jax.tree.map(lambda site, slope: site - size * slope, sites, slopes)

        if self.is_normal:
            return stepped(start, 1.0, gradient(start, *run)[1])

        def is_rising(state: tuple[Any, ...]) -> Array:
            _, loss, _, _, gain, count = state
            least = jnp.maximum(_TOLERANCE, _ROUNDING * jnp.finfo(loss.dtype).eps * jnp.abs(loss))
            return (count < _MAX_STEPS) & (gain > least)

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            sites, loss, slopes, size, gain, count = state
            candidate = stepped(sites, size, slopes)
            loss_there, slopes_there = gradient(candidate, *run)
            is_lower = loss_there < loss  # False for NaN
            there, here = (candidate, loss_there, slopes_there), (sites, loss, slopes)
            best = jax.tree.map(lambda a, b: jnp.where(is_lower, a, b), there, here)
            size = jnp.where(is_lower, jnp.minimum(2.0 * size, 1.0), 0.5 * size)
            return *best, size, jnp.where(is_lower, loss - loss_there, gain), count + 1

        loss, slopes = gradient(start, *run)
        state = start, loss, slopes, jnp.ones_like(loss), jnp.full_like(loss, jnp.inf), 0
        return jax.lax.while_loop(is_rising, step, state)[0]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Sample the hyperparameters, and weight them by the bound."""
        with handlers.trace() as trace:
            self.without_function(*args, **kwargs)
        prior = {name: site for name, site in trace.items() if is_latent(site)}
        values = drawn_values(prior)
        fixed, run = jax.lax.stop_gradient(values), (self.params, args, kwargs)
        sites = jax.lax.stop_gradient(self._best_sites(self.sites, fixed, *run))
        log_prior = sum((log_density(site) for site in prior.values()), start=jnp.zeros(()))
        joint = jnp.maximum(-self._loss(sites, values, *run), self.least)
        numpyro.factor("bound", joint - log_prior)


def _sample_values(values: dict[str, Array], *_: Any, **__: Any) -> None:
    """A guide for the hyperparameters that has all its mass at these values."""
    for name, value in values.items():
        numpyro.sample(name, dist.Delta(value, event_dim=jnp.ndim(value)))


def _sites_of(
    family: SparseGP, mean: Float[Array, "*batch M"] | None
) -> tuple[Float[Array, "*batch M"], Float[Array, "*batch M M"]]:
    """The sites of a sparse family; of one without, those on its whitened values."""
    if isinstance(family, NaturalSparseGP):
        return family.natural_loc, family.natural_precision
    inverse = jnp.linalg.inv(family.scale_tril)
    # The likelihood may have added precision only; noise of training makes some of it negative.
    precision = matmul(jnp.swapaxes(inverse, -1, -2), inverse) - jnp.eye(inverse.shape[-1])
    eigenvalues, vectors = jnp.linalg.eigh(precision)
    root = jnp.sqrt(jnp.maximum(eigenvalues, 0.0))[..., None] * jnp.swapaxes(vectors, -1, -2)
    added = matmul(jnp.swapaxes(root, -1, -2), root)
    values = family.loc
    if mean is not None:
        values += matmul(family.posterior().whitening.inverse, mean[..., None])[..., 0]
    return family.loc + matmul(added, values[..., None])[..., 0], added
