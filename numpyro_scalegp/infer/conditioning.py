"""From a fit to the posterior over its function."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Key

from numpyro_scalegp.core import checks, programs
from numpyro_scalegp.distributions.mini_batches import takes_part
from numpyro_scalegp.distributions.rows import role_of, unwrapped
from numpyro_scalegp.families import AbstractVariationalGP
from numpyro_scalegp.guides.fitted import DrawingGuide, RequireParams, latent_normals, medians
from numpyro_scalegp.guides.guide import set_up
from numpyro_scalegp.infer.fitted_runs import is_gp, run_model, trace_of, white_name
from numpyro_scalegp.infer.initialization import Hyperparameters
from numpyro_scalegp.infer.known_neighbors import KnownNeighbors, known_neighbors
from numpyro_scalegp.infer.noise import with_noise
from numpyro_scalegp.posteriors.mixture import MixturePosterior
from numpyro_scalegp.posteriors.outputs import OutputsPosterior
from numpyro_scalegp.posteriors.posterior import AbstractPosterior
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
from numpyro_scalegp.tracing.runs import (
    Trace,
    is_latent,
    mutable_values,
    traced,
)
from numpyro_scalegp.tracing.sites import StandIn

# A model, values of its sites and parameters, and its arguments.
Run = tuple[Callable[..., Any], dict[str, Any], tuple[Any, ...], dict[str, Any]]


def _model_of(model: Any, fit: Any, *args: Any) -> tuple[Any, int]:
    return model, 2 if isinstance(fit, Mapping) else 3


@model_keywords_first(_model_of)
def posterior(
    model: Callable[..., Any],
    fit: Callable[..., Any] | Mapping[str, Any],
    /,
    *args: Any,
    site: str | None = None,
    key: Key[Array, ""] | None = None,
    num_samples: int | None = None,
    max_epochs: int | float | None = None,
    start: AbstractPosterior | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> AbstractPosterior:
    """The posterior over a function of a model that has been fitted.

    After SVI, `sgp.posterior(model, guide, result, X, y)`: under the guide's medians of all other
    sites, or one draw of them. After NUTS and its like, `sgp.posterior(model, samples, X, y)`: the
    mixture over all draws. Solver states, grown bases and networks come from the fit. Under values
    of hyperparameters alone, `sgp.posterior(model, values, X, y)` with a dict of values that have
    the shapes of their sites, as of `guide.median`, or `sgp.infer.Hyperparameters`, as
    `sgp.infer.initial_hyperparameters` returns them.

    Args:
        model: the model.
        fit: the guide, then what `SVI.run` returned or a dict of parameters with mutable state; or
            draws of the latent sites, as from `MCMC.get_samples`, leading axis the draws; or single
            values of them, or `Hyperparameters`.
        *args: after the result of SVI, the model's positional arguments as in the fit, observations
            included, without mini-batches where the model has a collapsed GP.
        site: the name of the GP site; None if the model has only one.
        key: after SVI, None for the guide's medians, or a typed JAX key for one draw. Under
            `Hyperparameters`, of the samples that an iterative estimator stores.
        num_samples: of a `GaussianProcess` with an iterative estimator, posterior samples to store.
        max_epochs: of such a one, the budget of the solve. After SVI with a `state`, a second call
            with the same result goes on where the first ended.
        start: of such a one, the posterior whose solution it starts from, as of
            `GaussianProcess.condition`; not after NUTS.
        progress_bar: whether a solve that takes longer than a few seconds shows how far it is; not
            after NUTS.
        **kwargs: the model's keyword arguments. A keyword for which the model has a parameter goes
            to the model, also where it is the name of an option above; where both are wanted, give
            the model's by position.

    Returns:
        The posterior, with moments, samples and predictions at any inputs: after NUTS a
        `MixturePosterior`, which conditions once for each draw in each call; otherwise that of the
        family, in the time that `condition` takes. It has the likelihood's noise variance where
        that is Gaussian around the function, with one scale.

    Raises:
        ValueError: if the model has no GP site, or several and no `site`; if this posterior has no
            use for an option; if the parameters lack some, or a guide has no medians and there is
            no `key`; if `Hyperparameters` lack some; if a collapsed site has no observations, or
            stands in a plate.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import optax
        >>> from numpyro.infer import SVI
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y=None):
        ...     f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.3), X))
        ...     with numpyro.plate("rows", len(X)):
        ...         numpyro.sample("y", numpyro.distributions.Normal(f, 0.1), obs=y)
        >>> X = jnp.linspace(0.0, 1.0, 30)[:, None]
        >>> guide = sgp.guides.AutoSparseGP(model, num_inducing=5)
        >>> svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
        >>> result = svi.run(jax.random.key(0), 10, X, jnp.sin(X[:, 0]), progress_bar=False)
        >>> posterior = sgp.posterior(model, guide, result, X, jnp.sin(X[:, 0]))
        >>> posterior.mean(X[:4]).shape, posterior.predictive(X[:4]).variance.shape
        ((4,), (4,))
    """
    kwargs = of_model(kwargs)
    checks.function("model", model)
    checks.instance("progress_bar", progress_bar, bool, "True or False")
    key = key if key is None else checks.as_key(key)
    given = {"num_samples": num_samples, "max_epochs": max_epochs, "start": start}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if isinstance(fit, Hyperparameters) or (
        isinstance(fit, Mapping) and _has_shapes_of_sites(model, fit, args, kwargs)
    ):
        values: dict[str, Any] = dict(fit)
        if key is not None:
            options["key"] = key
        name, role = _the_site(model, values, args, kwargs, site, options)
        _refuse_missing(run_model(model, values, args, kwargs), values, name, role)
        run = model, values, args, kwargs
        return _posterior_of(run, name, values, progress_bar=progress_bar, **options)
    if isinstance(fit, Mapping):
        if start is not None:
            raise ValueError(
                "`start` is for one posterior, and after NUTS there is one for each draw: leave "
                "`start` out."
            )
        return _of_draws(model, dict(fit), args, kwargs, site, key, options)
    if hasattr(fit, "get_samples"):
        raise TypeError(
            "give the draws of an MCMC, `mcmc.get_samples()`, then the model's arguments."
        )
    checks.function("fit", fit)
    if not args:
        raise TypeError(
            "after the guide, give what `SVI.run` returned, then the model's arguments."
        )
    params, args = parameters_of(args[0]), args[1:]
    name, role = _the_site(RequireParams(model, params), params, args, kwargs, site, options)
    if role == "prior" and (owner := _owner(fit, name)) is not None:
        found, values = owner.posterior_and_rest(params, args, kwargs, key)
        return with_noise(found, model, {**params, **values}, args, kwargs, name)
    values, families = _fitted_values(fit, params, key, args, kwargs)
    values = {**params, **values}
    if name in families:
        run_model(model, values, args, kwargs)  # raises where values are missing
        return with_noise(families[name].posterior(), model, values, args, kwargs, name)
    if role == "prior" and key is None:
        raise ValueError(
            f"the guide has draws of the function `{name}` at the rows of the fit, and no process: "
            "give draws in place of the guide, "
            "sgp.posterior(model, guide.sample_posterior(key, params, sample_shape=(1000,)), X, y),"
            " or a `key` for a single one."
        )
    run = model, values, args, kwargs
    return _posterior_of(run, name, params, progress_bar=progress_bar, **options)


def _has_shapes_of_sites(
    model: Callable[..., Any], fit: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether values are single ones, without an axis of draws before the shapes of the sites."""
    shapes: dict[str, tuple[int, ...]] = {}

    def run() -> None:
        trace = trace_of(model, {}, args, kwargs)
        sites = [one for one in trace.values() if is_latent(one) or one["type"] == "param"]
        shapes.update({one["name"]: jnp.shape(one["value"]) for one in sites if one["name"] in fit})

    jax.eval_shape(run)
    return bool(shapes) and all(np.shape(fit[name]) == shapes[name] for name in shapes)


def _refuse_missing(trace: Trace, values: dict[str, Any], name: str, role: str) -> None:
    """Raise where zeros or initial values would stand for values that a fit has not."""
    if role == "prior" and not {name, white_name(name)} & values.keys():
        raise ValueError(
            f"`fit` has values of {sorted(values)}, and none of the function `{name}`: a latent GP "
            "is fitted with a guide."
        )
    missing = sorted(
        key for key, one in trace.items() if one["type"] == "param" and key not in values
    )
    if missing:
        raise ValueError(
            f"`fit` has values of {sorted(values)}, and none of the parameters {missing}: the "
            "model's initial values would be taken."
        )


def parameters_of(result: Any) -> dict[str, Any]:
    """Parameters and mutable state of what `SVI.run` returned, or of a dict.

    Raises:
        TypeError: if the result is something else.
    """
    if isinstance(result, Mapping):
        return dict(result)
    if not hasattr(result, "params"):
        raise TypeError(
            "after the guide, give what `SVI.run` returned or a dict of parameters, such as "
            "{**svi.get_params(state), **(state.mutable_state or {})}, got "
            f"{checks.described(result)}."
        )
    mutable = getattr(getattr(result, "state", None), "mutable_state", None) or {}
    return {**result.params, **mutable}


def _of_draws(
    model: Callable[..., Any],
    samples: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    site: str | None,
    key: Key[Array, ""] | None,
    options: dict[str, Any],
) -> MixturePosterior:
    if key is not None:
        raise ValueError("`key` is for one draw of a guide: draws of NUTS are all used.")
    samples, _ = as_draws(samples, "`fit`", ", or single values of the shapes of the sites")
    draws = jax.tree.map(jnp.asarray, samples)
    first = jax.tree.map(lambda leaf: leaf[0], draws)
    name, role = _the_site(model, first, args, kwargs, site, options)
    if role == "prior" and not {name, white_name(name)} & samples.keys():
        raise ValueError(
            f"`fit` has draws of {sorted(samples)}, and none of the function `{name}`."
        )
    last = jax.tree.map(lambda leaf: leaf[-1], draws)
    neighbors = known_neighbors(lambda one: trace_of(model, one, args, kwargs), first, last)
    given = model, name, args, kwargs, tuple(options.items()), neighbors
    return MixturePosterior(_ConditionedModel(*given).traced(first), draws)


class _ConditionedModel(eqx.Module):
    """The posterior at a GP site of a model, given values of its latent sites and parameters.

    The model is traced once: what it reads later does not change the posterior.
    """

    model: Callable[..., Any] = eqx.field(static=True)
    site: str = eqx.field(static=True)
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: tuple[tuple[str, Any], ...] = eqx.field(static=True)
    neighbors: dict[str, Any]
    program: programs.Traced | None = None

    def traced(self, values: dict[str, Any]) -> "_ConditionedModel":
        """The same with its program, traced with values of the shapes of a draw."""
        return dataclasses.replace(self, program=programs.trace(self._posterior, values))

    def __call__(self, values: dict[str, Any]) -> AbstractPosterior:
        return self._posterior(values) if self.program is None else self.program(values)

    def _posterior(self, values: dict[str, Any]) -> AbstractPosterior:
        run = self.model, values, self.args, self.kwargs
        with KnownNeighbors(self.neighbors):
            return _posterior_of(run, self.site, **dict(self.options))


def _posterior_of(
    run: Run, name: str, params: Mapping[str, Any] | None = None, **options: Any
) -> AbstractPosterior:
    """The posterior at a GP site given values of all sites, with the likelihood's noise.

    Args:
        run: the model, values of its sites and parameters, and its arguments.
        name: of the site.
        params: as of `conditioned`.
        options: likewise.
    """
    trace = run_model(*run)
    found = conditioned(trace, name, params, **options)
    return found if role_of(trace[name]["fn"]) == "collapsed" else with_noise(found, *run, name)


def conditioned(
    trace: Trace, name: str, params: Mapping[str, Any] | None = None, **options: Any
) -> AbstractPosterior:
    """The posterior at a GP site of a model's trace, given the site's value.

    Args:
        trace: of the model.
        name: of the site.
        params: the fit's own parameters and mutable state; the trace has copies of it.
        options: of the family's `condition`.

    Raises:
        ValueError: if a collapsed site has no observations, or a wrapper around it.
    """
    site = trace[name]
    fn, wrapper, _ = inside = unwrapped(site["fn"])
    inside.refuse_transform(name)
    if fn.role == "prior":
        return _of_functions(fn, jnp.asarray(site["value"]))
    if wrapper == "`mask`":
        raise ValueError(
            f"the collapsed GP site `{name}` has a mask around it, and is conditioned on all of "
            "its observations: give the model without the mask, or, if it hides the site, another "
            "`site`."
        )
    if wrapper or site["fn"].batch_shape != fn.batch_shape:
        raise ValueError(
            f"the collapsed GP site `{name}` stands inside a plate, or has a `to_event` "
            "around it: give its hyperparameters, or its inputs, the axes of the plate, or write a "
            "site for each function."
        )
    for own, value in mutable_values(trace).items():
        base = getattr(fn, "base_dist", fn)  # of a warped process
        if value is getattr(base, "state", None) and params is not None:
            base.state = params.get(own, value)
    return fn.condition(site["value"], **options)


def _of_functions(prior: Any, values: Array) -> AbstractPosterior:
    """The posterior given values of one function, or of each of a plate's."""
    if jnp.ndim(values) == 1 + len(prior.batch_shape):
        return prior.condition(values)
    if prior.batch_shape:
        raise ValueError(
            f"the function has values of shape {jnp.shape(values)}, and its prior is a batch of "
            f"shape {prior.batch_shape}: give hyperparameters the shape of all plates around it."
        )
    return OutputsPosterior(jax.tree_util.Partial(type(prior).condition, prior), values)


def _the_site(
    model: Callable[..., Any],
    values: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    site: str | None,
    options: dict[str, Any],
) -> tuple[str, str]:
    """The name of the GP site and its role; raises if its posterior has no use for an option."""
    found: dict[str, str] = {}
    useful: dict[str, frozenset[str]] = {}
    observed: dict[str, bool] = {}
    partial: list[str] = []  # plates that take a part of their elements

    def run() -> None:
        for name, one in trace_of(model, values, args, kwargs).items():
            if takes_part(one):
                partial.append(name)
            if is_gp(one):
                found[name] = role_of(one["fn"])
                (gp, *_) = inside = unwrapped(one["fn"])
                if site in (None, name):
                    inside.refuse_transform(name)
                useful[name] = getattr(gp, "condition_options", frozenset())
                observed[name] = one["is_observed"]
                if one["is_observed"]:
                    shown = getattr(unwrapped(one["fn"])[0], "observed", None)
                    is_known = checks.is_concrete((shown, one["value"]))
                    if shown is None or not is_known:
                        checks.finite(name, one["value"])
                    else:
                        checks.finite(name, np.where(shown, one["value"], 0.0))

    jax.eval_shape(run)
    if site is not None and site not in found:
        raise ValueError(f"`site` is {site!r}, and the model's GP sites are {sorted(found)}.")
    if not found:
        raise ValueError("the model has no GP site: see `sgp.GaussianProcess` and `sgp.LatentGP`.")
    if site is None and len(found) > 1:
        raise ValueError(f"the model has the GP sites {sorted(found)}: name one with `site=`.")
    name = next(iter(found)) if site is None else site
    checks.used(options, useful[name], f"the GP site `{name}`")
    if not observed[name] and found[name] == "collapsed":
        raise ValueError(
            f"the GP site `{name}` has no observations: give the model's arguments as in the fit."
        )
    if partial and found[name] == "collapsed":
        raise ValueError(
            f"the plate {', '.join(f'`{one}`' for one in partial)} takes a mini-batch, and the GP "
            f"site `{name}` is conditioned on all rows: give arguments with which the model sees "
            "them all."
        )
    return name, found[name]


def _owner(guide: Any, name: str) -> Any:
    """The guide of this package that owns a GP site, if the guide is one or holds one."""
    while hasattr(guide, "posterior"):
        if guide.site in (None, name):
            return guide
        guide = guide.rest
    return None


def _fitted_values(
    guide: Callable[..., Any],
    params: dict[str, Any],
    key: Key[Array, ""] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, AbstractVariationalGP]]:
    """Values of a guide's latent sites: medians and means of functions, or a draw.

    Returns:
        The values by name, and the variational processes of its GP sites.

    Raises:
        ValueError: if there is no key, and the guide has no median of a site.
    """
    set_up(guide, params, args, kwargs)
    values = _medians(guide, params, args, kwargs) if key is None else {}
    seed = jax.random.key(0) if key is None else key
    normals = {} if key is None else latent_normals(guide, params)
    # A draw of each row by itself, as the guide makes it.
    with StandIn(_mean if key is None else _draw) as functions:
        drawing = DrawingGuide(guide, params, normals)
        trace = traced(drawing, seed, params, args, kwargs, values=values)
    latent = {name: one for name, one in trace.items() if is_latent(one)}
    if key is None:
        known = {**values, **functions.families}
        random = [
            name
            for name, one in latent.items()
            if name not in known and not isinstance(unwrapped(one["fn"])[0], dist.Delta)
        ]
        # An autoguide's other sites are functions of its auxiliary one.
        if random and not (values and all(latent[n]["infer"].get("is_auxiliary") for n in random)):
            raise ValueError(
                f"the guide has no medians of {random}: give a `key` for one draw of them."
            )
    return {name: one["value"] for name, one in latent.items()}, functions.families


def _medians(
    guide: Any, params: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    if hasattr(guide, "posterior"):
        return guide.median(params, *args, **kwargs)
    try:
        return medians(guide, params) if hasattr(guide, "median") else {}
    except NotImplementedError:
        return {}


def _mean(name: str, family: AbstractVariationalGP, key: Array) -> Array:
    return family.mean


def _draw(name: str, family: AbstractVariationalGP, key: Array) -> Array:
    return family.sample(key)


def as_draws(
    samples: Mapping[str, Any], argument: str, alternative: str = ""
) -> tuple[dict[str, Any], int]:
    """Draws, lists of them as arrays, and the length of the leading axis that all share.

    Args:
        samples: by name.
        argument: what holds them, for the error.
        alternative: what else would do, for the error.

    Raises:
        ValueError: if there is none.
    """
    samples = {
        name: np.asarray(value) if isinstance(value, list | tuple) else value
        for name, value in samples.items()
    }
    shapes = {
        name: np.shape(leaf) for name, value in samples.items() for leaf in jax.tree.leaves(value)
    }
    if not shapes or not all(shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
        raise ValueError(
            f"{argument} must be a dict of arrays with a leading axis of draws, the same for all"
            f"{alternative}, got the shapes {shapes}."
        )
    return samples, next(iter(shapes.values()))[0]
