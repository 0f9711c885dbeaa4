"""The posterior of a function in a fitted model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.infer.initialization import Hyperparameters
from numpyro_scalegp.infer.noise import with_noise
from numpyro_scalegp.neighbors.precomputed import PrecomputedNeighbors, precompute_neighbors
from numpyro_scalegp.processes.mixture import MixturePosterior
from numpyro_scalegp.processes.outputs import OutputsPosterior
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs import compiled
from numpyro_scalegp.sites.family import AbstractVariationalGP
from numpyro_scalegp.sites.mini_batches import is_subsampled
from numpyro_scalegp.sites.rows import role_of, unwrapped
from numpyro_scalegp.tracing.fitted_runs import is_gp, run_model, trace_of, white_name
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
from numpyro_scalegp.tracing.runs import Trace, is_latent, mutable_values, substituted, traced
from numpyro_scalegp.tracing.sites import StandIn
from numpyro_scalegp.variational.fitted import DrawingGuide, RequireParams, latent_normals, medians
from numpyro_scalegp.variational.guide import set_up

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
    num_draws: int | None = None,
    num_samples: int | None = None,
    max_epochs: int | float | None = None,
    start: AbstractPosterior | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> AbstractPosterior:
    """The posterior of a function in a fitted model.

    - After SVI, `sgp.posterior(model, guide, result, X, y)` conditions on the guide's medians of
      all other sites, or on one draw of them; with `num_draws` it is the mixture over that many.
    - After MCMC, `sgp.posterior(model, samples, X, y)` is the mixture over all draws.
    - Given hyperparameters alone, `sgp.posterior(model, values, X, y)` conditions on a dict of
      values with the shapes of their sites, as from `guide.median` or
      `sgp.infer.initial_hyperparameters`.

    Solver states, inputs that a growing guide has collected, and networks come from the fit.

    Args:
        model: the model.
        fit: the guide, followed by the result of `SVI.run` or a dict of parameters with mutable
            state; or draws of the latent sites, as from `MCMC.get_samples`, with a leading axis of
            draws; or one value for each latent site, such as `Hyperparameters`.
        *args: after the result of SVI, the model's positional arguments as in the fit, observations
            included, without mini-batches if the model has a collapsed GP.
        site: the name of the GP site; None if the model has only one.
        key: after SVI, None for the guide's medians, or a typed JAX key for one draw. With
            `Hyperparameters`, the key of the samples that an iterative estimator stores.
        num_draws: after SVI, with a `key`: the number of draws of the other sites over which the
            posterior is averaged, so that it includes the uncertainty about them.
        num_samples: the number of posterior samples that a `GaussianProcess` with an iterative
            estimator stores.
        max_epochs: the budget of that estimator's solve. After SVI with a `state`, a second call
            with the same result resumes the solve.
        start: a posterior whose solution is the initial guess of that solve, as in
            `GaussianProcess.condition`; not after MCMC.
        progress_bar: whether a solve that takes longer than a few seconds shows its progress; not
            after MCMC.
        **kwargs: the model's keyword arguments. A keyword that names both an argument of the model
            and an option above goes to the model; to set both, pass the model's argument by
            position.

    Returns:
        The posterior, with moments, samples and predictions at any inputs. After MCMC, or with
        `num_draws`, it is a `MixturePosterior`, each call of which conditions once for each draw;
        otherwise it is the posterior of the site's distribution or of the guide, in the time that
        `condition` takes. If the likelihood is normal with the function as its mean and one scale,
        the posterior includes the noise variance.

    Raises:
        ValueError: if the model has no GP site, or several and no `site`; if an option is given
            that this posterior does not use; if a parameter is missing; if a guide has no medians
            and there is no `key`; if a collapsed site has no observations, or is in a plate.

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
    if num_draws is not None:
        checks.count("num_draws", num_draws)
        if isinstance(fit, Mapping) or key is None:
            raise ValueError("`num_draws` is for draws from a guide, and needs a `key`.")
    options: dict[str, Any] = {"num_samples": num_samples, "max_epochs": max_epochs, "start": start}
    options = {name: value for name, value in options.items() if value is not None}
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
                "`start` is for one posterior, and after NUTS there is one for each draw: omit "
                "`start`."
            )
        return _of_draws(model, dict(fit), args, kwargs, site, key, options)
    if hasattr(fit, "get_samples"):
        raise TypeError(
            "give the draws of the MCMC, `mcmc.get_samples()`, then the model's arguments."
        )
    checks.function("fit", fit)
    if not args:
        raise TypeError(
            "after the guide, give what `SVI.run` returned, then the model's arguments."
        )
    params, args = parameters_of(args[0]), args[1:]
    name, role = _the_site(RequireParams(model, params), params, args, kwargs, site, options)
    if num_draws is not None:
        return _over_draws(model, fit, params, args, kwargs, name, key, num_draws, options)
    if role == "prior" and (owner := _owner(fit, name)) is not None:
        process, values = owner.posterior_and_rest(params, args, kwargs, key)
        return with_noise(process, model, {**params, **values}, args, kwargs, name)
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
            " or a `key` for a single draw."
        )
    run = model, values, args, kwargs
    return _posterior_of(run, name, params, progress_bar=progress_bar, **options)


def _has_shapes_of_sites(
    model: Callable[..., Any], fit: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the values have the shapes of their sites, without a leading axis of draws."""
    shapes: dict[str, tuple[int, ...]] = {}

    def run() -> None:
        trace = trace_of(model, {}, args, kwargs)
        for name, site in trace.items():
            if name in fit and (is_latent(site) or site["type"] == "param"):
                shapes[name] = jnp.shape(site["value"])

    jax.eval_shape(run)
    return bool(shapes) and all(np.shape(fit[name]) == shapes[name] for name in shapes)


def _refuse_missing(trace: Trace, values: dict[str, Any], name: str, role: str) -> None:
    """Raise if the model would use zeros or initial values where the fit has no value."""
    if role == "prior" and not {name, white_name(name)} & values.keys():
        raise ValueError(
            f"`fit` has values of {sorted(values)}, and none of the function `{name}`: a latent GP "
            "is fitted with a guide."
        )
    missing = sorted(
        key for key, site in trace.items() if site["type"] == "param" and key not in values
    )
    if missing:
        raise ValueError(
            f"`fit` has values of {sorted(values)}, and none of the parameters {missing}: the "
            "model would use its initial values of these."
        )


def parameters_of(result: Any) -> dict[str, Any]:
    """Parameters and mutable state from the result of `SVI.run`, or from a dict.

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
    neighbors = precompute_neighbors(lambda draw: trace_of(model, draw, args, kwargs), first, last)
    conditioned_model = _ConditionedModel(
        model, name, args, kwargs, tuple(options.items()), neighbors
    )
    return MixturePosterior(conditioned_model.traced(first), draws)


def _over_draws(
    model: Callable[..., Any],
    guide: Any,
    params: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    key: Any,
    num_draws: int,
    options: dict[str, Any],
) -> MixturePosterior:
    """The mixture over draws of a guide's other sites."""
    owner = _owner(guide, name)
    keys = jax.random.split(key, num_draws)
    if owner is not None:
        set_up(owner, params, args, kwargs)

        def draw(key: Array) -> Draw:
            return key, owner._rest_values(params, args, kwargs, key), {}

        draws = compiled.compiled(lambda keys: jax.lax.map(draw, keys))(keys)
        return GuideAtDraw(model, owner, name, params, args, kwargs).over(draws)
    set_up(guide, params, args, kwargs)
    drawing = DrawingGuide(guide, params, latent_normals(guide, params))

    def latent(key: Array) -> dict[str, Any]:
        trace = traced(drawing, key, params, args, kwargs)
        return {name: site["value"] for name, site in trace.items() if is_latent(site)}

    draws = compiled.compiled(lambda keys: jax.lax.map(latent, keys))(keys)
    return _of_draws(substituted(model, params), draws, args, kwargs, name, None, options)


# A key, values of the sites besides the function, and parameters that differ between draws.
Draw = tuple[Array, dict[str, Any], dict[str, Any]]


class GuideAtDraw(eqx.Module):
    """The posterior of a guide's function, given a key, values of the other sites and parameters.

    The model is traced once; later changes of values that it reads from outside have no effect.
    """

    model: Callable[..., Any] = eqx.field(static=True)
    guide: Any = eqx.field(static=True)
    site: str = eqx.field(static=True)
    params: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    program: compiled.Traced | None = None

    def over(self, draws: Draw) -> MixturePosterior:
        """The mixture over keys, values and parameters with a leading axis of draws."""
        first = jax.tree.map(lambda leaf: leaf[0], draws)
        program = compiled.trace(self._posterior, first)
        return MixturePosterior(dataclasses.replace(self, program=program), draws)

    def __call__(self, draw: Draw) -> AbstractPosterior:
        """The posterior given a draw."""
        return self._posterior(draw) if self.program is None else self.program(draw)

    def _posterior(self, draw: Draw) -> AbstractPosterior:
        key, values, params = draw
        params, run = {**self.params, **params}, (self.args, self.kwargs)
        process = self.guide.posterior_at(values, params, *run, key)
        return with_noise(process, self.model, {**params, **values}, *run, self.site)


class _ConditionedModel(eqx.Module):
    """The posterior at a GP site of a model, given values of its latent sites and parameters.

    The model is traced once; later changes of values that it reads from outside have no effect.
    """

    model: Callable[..., Any] = eqx.field(static=True)
    site: str = eqx.field(static=True)
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: tuple[tuple[str, Any], ...] = eqx.field(static=True)
    neighbors: dict[str, Any]
    program: compiled.Traced | None = None

    def traced(self, values: dict[str, Any]) -> "_ConditionedModel":
        """This object with its compiled program, for values that have the shapes of a draw."""
        return dataclasses.replace(self, program=compiled.trace(self._posterior, values))

    def __call__(self, values: dict[str, Any]) -> AbstractPosterior:
        return self._posterior(values) if self.program is None else self.program(values)

    def _posterior(self, values: dict[str, Any]) -> AbstractPosterior:
        run = self.model, values, self.args, self.kwargs
        with PrecomputedNeighbors(self.neighbors):
            return _posterior_of(run, self.site, **dict(self.options))


def _posterior_of(
    run: Run, name: str, params: Mapping[str, Any] | None = None, **options: Any
) -> AbstractPosterior:
    """The posterior at the GP site `name` of a run, with the likelihood's noise variance."""
    trace = run_model(*run)
    process = conditioned(trace, name, params, **options)
    return process if role_of(trace[name]["fn"]) == "collapsed" else with_noise(process, *run, name)


def conditioned(
    trace: Trace, name: str, params: Mapping[str, Any] | None = None, **options: Any
) -> AbstractPosterior:
    """The posterior at a GP site of a model's trace, given the site's value.

    Args:
        trace: the trace of the model.
        name: the name of the site.
        params: parameters and mutable state of the fit; a solve writes its state here, since the
            trace has copies.
        options: options of the family's `condition`.

    Raises:
        ValueError: if a collapsed site is masked, in a plate, or in a `to_event`.
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
            "separate site for each function."
        )
    for mutable_name, value in mutable_values(trace).items():
        base = getattr(fn, "base_dist", fn)  # a warped process has one
        if value is getattr(base, "state", None) and params is not None:
            base.state = params.get(mutable_name, value)
    return fn.condition(site["value"], **options)


def _of_functions(prior: Any, values: Array) -> AbstractPosterior:
    """The posterior given values of one function, or of each function of a plate."""
    if jnp.ndim(values) == 1 + len(prior.batch_shape):
        return prior.condition(values)
    if prior.batch_shape:
        raise ValueError(
            f"the function has values of shape {jnp.shape(values)}, and its prior is a batch of "
            f"shape {prior.batch_shape}: give its hyperparameters the shape of the plates around "
            "the site."
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
    """The name of the GP site and its role; raises if its posterior does not use an option."""
    roles: dict[str, str] = {}
    accepted_options: dict[str, frozenset[str]] = {}
    is_observed: dict[str, bool] = {}
    subsampled_plates: list[str] = []

    def run() -> None:
        for name, traced_site in trace_of(model, values, args, kwargs).items():
            if is_subsampled(traced_site):
                subsampled_plates.append(name)
            if not is_gp(traced_site):
                continue
            roles[name] = role_of(traced_site["fn"])
            (gp, *_) = inside = unwrapped(traced_site["fn"])
            if site in (None, name):
                inside.refuse_transform(name)
            accepted_options[name] = getattr(gp, "condition_options", frozenset())
            is_observed[name] = traced_site["is_observed"]
            if is_observed[name]:
                value, mask = traced_site["value"], getattr(gp, "observed", None)
                if mask is not None and checks.is_concrete((mask, value)):
                    value = np.where(mask, value, 0.0)
                checks.finite(name, value)

    jax.eval_shape(run)
    if site is not None and site not in roles:
        raise ValueError(f"`site` is {site!r}, and the model's GP sites are {sorted(roles)}.")
    if not roles:
        raise ValueError("the model has no GP site: see `sgp.GaussianProcess` and `sgp.LatentGP`.")
    if site is None and len(roles) > 1:
        raise ValueError(f"the model has the GP sites {sorted(roles)}: name one with `site=`.")
    name = next(iter(roles)) if site is None else site
    checks.used(options, accepted_options[name], f"the GP site `{name}`")
    if not is_observed[name] and roles[name] == "collapsed":
        raise ValueError(
            f"the GP site `{name}` has no observations: give the model's arguments as in the fit."
        )
    if subsampled_plates and roles[name] == "collapsed":
        plates = ", ".join(f"`{plate}`" for plate in subsampled_plates)
        raise ValueError(
            f"the plate {plates} takes a mini-batch, and the GP site `{name}` is conditioned on "
            "all rows: give arguments with which the model sees all of them."
        )
    return name, roles[name]


def _owner(guide: Any, name: str) -> Any:
    """The guide of this package that owns a GP site: `guide`, or a guide that it holds, or None."""
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
    """Values of a guide's latent sites: medians, with means of the functions, or a draw.

    Returns:
        The values by name, and the variational processes of its GP sites.

    Raises:
        ValueError: if there is no key, and the guide has no median of a site.
    """
    set_up(guide, params, args, kwargs)
    values = _medians(guide, params, args, kwargs) if key is None else {}
    seed = jax.random.key(0) if key is None else key
    normals = {} if key is None else latent_normals(guide, params)
    # As in the guide, a draw of a function has independent rows.
    with StandIn(_mean if key is None else _draw) as functions:
        drawing = DrawingGuide(guide, params, normals)
        trace = traced(drawing, seed, params, args, kwargs, values=values)
    latent = {name: site for name, site in trace.items() if is_latent(site)}
    if key is None:
        random = [
            name
            for name, site in latent.items()
            if name not in values
            and name not in functions.families
            and not isinstance(unwrapped(site["fn"])[0], dist.Delta)
        ]
        # An autoguide's other sites are functions of its auxiliary site.
        if random and not (values and all(latent[n]["infer"].get("is_auxiliary") for n in random)):
            raise ValueError(
                f"the guide has no medians of {random}: give a `key` for one draw of them."
            )
    return {name: site["value"] for name, site in latent.items()}, functions.families


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
    """The draws as arrays, and their number, the length of the leading axis of each.

    Args:
        samples: draws, arrays or lists, by name.
        argument: the name of the argument that holds them, for the error.
        alternative: what else the argument may hold, for the error.

    Raises:
        ValueError: if the draws do not share a leading axis.
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
