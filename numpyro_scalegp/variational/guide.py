"""The base class of guides for one GP site, which wrap a guide for all other sites."""

import abc
import contextlib
import functools
from contextlib import ExitStack
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro
from jaxtyping import Array, Key
from numpyro import handlers
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.initialization import init_to_mean, init_to_median, init_to_value
from numpyro.infer.util import log_density

from numpyro_scalegp.core import checks, summary
from numpyro_scalegp.core.mesh import mesh_of, replicated
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.family import AbstractVariationalGP
from numpyro_scalegp.sites.rows import counted
from numpyro_scalegp.tracing.first_run import emit, only_watched, run_as_program
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
from numpyro_scalegp.tracing.restoring import unchanged_on_failure
from numpyro_scalegp.tracing.runs import (
    Trace,
    drawn_values,
    indices_of,
    is_latent,
    is_observed,
    substituted,
    trace_of_call,
    traced,
)
from numpyro_scalegp.tracing.sites import GPSite, Model, Prior, StandIn, WithoutSite, find_gp_site
from numpyro_scalegp.tracing.starting_values import MEDIAN, starting_values
from numpyro_scalegp.variational.fitted import (
    Guide,
    RequireParams,
    components,
    laplace_approximations,
    medians,
)
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.shifted import around_mean

Rest = type | functools.partial | Guide

# NumPyro's guides that can be set up under a trace: the traced values that they store can be
# replaced.
_TRACEABLE_GUIDES = (
    AutoNormal,
    AutoDelta,
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoLowRankMultivariateNormal,
)
_DETERMINISTIC_STARTS = (init_to_value, init_to_median, init_to_mean)

_NO_MEDIAN = "the guide given as `rest` has no `median`: pass a `key` for a draw."


class AbstractGPGuide(abc.ABC):
    """A guide for one GP site, combined with the `rest` guide for all other sites.

    A call runs the `rest` guide, runs the model with the values that it samples to get the kernel
    and the inputs of the GP site, and samples the variational family there. So the family has the
    model's kernel at the guide's hyperparameters, and the inputs of the model's mini-batch. See
    `AutoSparseGP` for the arguments.
    """

    prior: ClassVar[Prior] = LatentGP  # the class of the model's distribution at the site
    # Whether the family's distribution of the function depends on the values of the other sites as
    # the posterior does. If not, training makes the distribution of the other sites too narrow,
    # since the function fits only near their means.
    follows_hyperparameters: bool = False

    def __init__(
        self,
        model: Model,
        site: str | None = None,
        *,
        rest: Rest = AutoNormal,
        prefix: str = "auto",
    ) -> None:
        self.model = checks.function("model", model)
        self.site = site if site is None else checks.instance("site", site, str, "a string")
        self.prefix = checks.instance("prefix", prefix, str, "a string")
        self.rest = _build_rest(rest, WithoutSite(model, site, self.prior))

    def __repr__(self) -> str:
        site = "" if self.site is None else f"site={self.site!r}"
        return summary.one_line(self, [getattr(self.model, "__name__", "model"), site])

    @abc.abstractmethod
    def family(self, site: GPSite, *, training: bool = True) -> AbstractVariationalGP:
        """Declare the parameters and return the variational family at the site's inputs.

        This is the only method that a custom guide implements: use `site.kernel`, `site.X` and
        `site.batch_shape`, and declare parameters with `param`.

        Args:
            site: the model's GP site, at the guide's hyperparameters.
            training: whether the guide may update its mutable state.
        """

    def _process(self, site: GPSite, *, training: bool = True) -> AbstractVariationalGP:
        """The family, shifted by the mean function of the prior."""
        return around_mean(self.family(site, training=training), site.prior)

    def param(self, site: GPSite, name: str, *args: Any, **kwargs: Any) -> Any:
        """Declare the parameter `{site}_{prefix}_{name}`, with `numpyro.param`'s arguments."""
        value = numpyro.param(self.param_name(site, name), *args, **kwargs)
        is_start = bool(args) and value is args[0]
        return value if is_start or kwargs.get("rows") else replicated(value, mesh_of(site.X))

    def param_name(self, site: GPSite, name: str) -> str:
        """The full name of a parameter of this guide."""
        return f"{site.name}_{self.prefix}_{name}"

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Run the guide.

        Args:
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            The value of each latent site, by name.
        """
        if not is_fresh(self):
            return self._run(args, kwargs)
        _refuse_modes(self.rest)  # again, since an `AutoGuideList` may have grown
        with unchanged_on_failure(*components(self)):
            values = _first_run(self, args, kwargs)
            return self._run(args, kwargs) if values is None else values

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Array]:
        _set_start(self, args, kwargs)
        with handlers.trace() as rest_trace:
            self.rest(*args, **kwargs)
        latent, indices = drawn_values(rest_trace), indices_of(rest_trace)
        site = find_gp_site(self.model, self.site, self.prior, latent, args, kwargs, indices)
        with ExitStack() as stack:
            for plate in site.plates:
                stack.enter_context(numpyro.plate(plate.name, plate.size, dim=plate.dim))
            return {**latent, site.name: numpyro.sample(site.name, self._process(site))}

    @model_keywords_first(lambda guide, *_: (guide.model, 2))
    def median(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Array]:
        """The median of each site of the `rest` guide.

        Args:
            params: the guide's parameters, as from `SVI.get_params`.
            *args: the model's positional arguments; needed only by a guide that has not run yet,
                as in a new process with loaded parameters.
            **kwargs: the model's keyword arguments.

        Raises:
            ValueError: if the `rest` guide has no medians; if this guide has not run and gets no
                arguments, or arguments that do not fit `params`; if `params` lacks a parameter.
        """
        kwargs = of_model(kwargs)
        if args or kwargs:
            set_up(self, params, args, kwargs)
        elif is_fresh(self):
            raise ValueError(
                "the guide has not run yet in this process: give the model's arguments, as in "
                "`guide.median(params, X[:10], y[:10])`, with observations."
            )
        if not hasattr(self.rest, "median"):
            raise ValueError(_NO_MEDIAN)
        trace = getattr(self.rest, "prototype_trace", None)
        if trace is None:
            return medians(self.rest, params)
        latent = {name for name, site in trace.items() if is_latent(site)}
        if not latent:
            return {}  # where NumPyro's autoguides would raise
        # NumPyro's medians include deterministic sites, which it computes at a function of zeros.
        try:
            values = medians(self.rest, params)
        except NotImplementedError as error:  # of guides with normalizing flows
            raise ValueError(_NO_MEDIAN) from error
        return {name: value for name, value in values.items() if name in latent}

    @model_keywords_first(lambda guide, *_: (guide.model, 3))
    def sample_posterior(
        self,
        rng_key: Key[Array, ""],
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Draw all latent sites from the guide, with the function at the model's inputs.

        Unless `follows_hyperparameters`, draws of the other sites vary too little, often by a
        factor of several: see `infer.refine_hyperparameters`.

        Args:
            rng_key: a typed JAX key.
            params: the guide's parameters, as from `SVI.get_params`.
            *args: the model's positional arguments.
            sample_shape: shape of the draws.
            **kwargs: the model's keyword arguments.

        Returns:
            Draws of each latent site, shape (*sample_shape, *site_shape).

        Raises:
            ValueError: if `params` lacks a parameter.
        """
        kwargs, rng_key = of_model(kwargs), checks.as_key(rng_key, "rng_key")
        set_up(self, params, args, kwargs)
        guide = RequireParams(self, params)

        def draw(key: Array) -> dict[str, Array]:
            return substituted(handlers.seed(guide, key), params)(*args, **kwargs)

        if sample_shape == ():
            return draw(rng_key)
        keys = jax.random.split(rng_key, sample_shape)
        draws = compiled(lambda keys: jax.lax.map(draw, keys))(keys.reshape(-1))
        return jax.tree.map(lambda leaf: leaf.reshape(*sample_shape, *leaf.shape[1:]), draws)

    @model_keywords_first(lambda guide, *_: (guide.model, 2))
    def posterior(
        self,
        params: dict[str, Any],
        *args: Any,
        key: Key[Array, ""] | None = None,
        **kwargs: Any,
    ) -> AbstractPosterior:
        """The approximate posterior of the function, with moments and samples at any inputs.

        Args:
            params: the guide's parameters, as from `SVI.get_params`, with mutable state if any.
            *args: the model's positional arguments; only the shape of the inputs matters.
            key: None for the medians of the hyperparameters, or a typed JAX key for one draw.
            **kwargs: the model's keyword arguments.

        Returns:
            The posterior at these hyperparameters.

        Raises:
            ValueError: if `key` is None and the `rest` guide has no medians, or `params` lacks a
                parameter.
        """
        return self.posterior_and_rest(params, args, of_model(kwargs), key)[0]

    def posterior_and_rest(
        self,
        params: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Key[Array, ""] | None = None,
    ) -> tuple[AbstractPosterior, dict[str, Array]]:
        """The posterior as from `posterior`, and the values of the other sites that it uses."""
        key = key if key is None else checks.as_key(key)
        values = self._rest_values(params, args, kwargs, key)
        return self.posterior_at(values, params, args, kwargs, key), values

    def posterior_at(
        self,
        values: dict[str, Array],
        params: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Key[Array, ""] | None = None,
    ) -> AbstractPosterior:
        """The posterior at given values of the other sites; the key is for what a family draws."""
        site = self._site(params, values, key, args, kwargs)
        with self._parameters(params, key):
            return self._process(site, training=False).posterior()

    def _parameters(self, params: dict[str, Any], key: Key[Array, ""] | None) -> ExitStack:
        """A context in which the guide's parameters have their fitted values."""
        stack = ExitStack()
        stack.enter_context(handlers.block())
        stack.enter_context(handlers.seed(rng_seed=jax.random.key(0) if key is None else key))
        stack.enter_context(substituted(None, params))
        stack.enter_context(RequireParams(None, params))
        return stack

    @model_keywords_first(lambda guide, *_: (guide.model, 2))
    def rest_values(
        self,
        params: dict[str, Any],
        *args: Any,
        key: Key[Array, ""] | None = None,
        **kwargs: Any,
    ) -> dict[str, Array]:
        """The values of the other sites that `posterior` uses, with the same arguments.

        They are medians, and means for functions; with a `key`, one draw.
        """
        return self._rest_values(params, args, of_model(kwargs), key)

    def _rest_values(
        self,
        params: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Key[Array, ""] | None,
    ) -> dict[str, Array]:
        set_up(self, params, args, kwargs)
        if key is None:
            means = getattr(self.rest, "function_means", _no_functions)
            return {**self.median(params), **means(params, *args, **kwargs)}
        guide = RequireParams(self.rest, params)
        return drawn_values(traced(guide, jax.random.split(key)[1], params, args, kwargs))

    def _site(
        self,
        params: dict[str, Any],
        values: dict[str, Array],
        key: Key[Array, ""] | None,
        args: Any,
        kwargs: Any,
    ) -> GPSite:
        """The model's GP site, at values of the other sites."""
        seed = None if key is None else jax.random.split(key)[0]
        with self._parameters(params, seed):
            return find_gp_site(self.model, self.site, self.prior, values, args, kwargs)

    @model_keywords_first(lambda guide, *_: (guide.model, 2))
    def function_means(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Array]:
        """The means of all functions of this guide and its `rest` guide, at the model's inputs.

        Args:
            params: the guide's parameters, as from `SVI.get_params`, with mutable state if any.
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            The mean of each function at the medians of the other sites, by site name.
        """
        kwargs = of_model(kwargs)
        means = getattr(self.rest, "function_means", _no_functions)(params, *args, **kwargs)
        values = self._rest_values(params, args, kwargs, None)
        site = self._site(params, values, None, args, kwargs)
        with self._parameters(params, None):
            posterior = self._process(site, training=False).posterior()
        return {**means, site.name: posterior.mean(site.X)}


def _no_functions(params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Array]:
    """The `function_means` of a guide without functions."""
    return {}


def set_up(
    guide: Guide, params: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Set a guide up for the model's sites, if it has not run yet, as in a new process.

    NumPyro's guides record the model's sites in their first run. This run is outside of compiled
    code, so that the guide stores no traced values.

    Args:
        guide: a guide of this package, whose `rest` guide is set up, or one of NumPyro; other
            guides need no setup.
        params: the fitted parameters.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: if `params` lacks a parameter of the guide, or has it with another shape.
    """
    guide = _innermost(guide)
    if not is_fresh(guide):
        return
    with unchanged_on_failure(*components(guide)):
        for name, site in _first_trace(guide, args, kwargs).items():
            if site["type"] != "param":
                continue
            shape = jnp.shape(params[name]) if name in params else "no value"
            if shape != jnp.shape(site["value"]):
                raise ValueError(
                    f"`{type(guide).__name__}` has not run yet in this process, and with these "
                    f"arguments its parameter `{name}` has shape {jnp.shape(site['value'])}, but "
                    f"{shape} in `params`. Set it up first with arguments as in its fit, with "
                    "observations: `guide.median(params, X, y)`, or for a guide of NumPyro's own "
                    "`numpyro.handlers.seed(guide, 0)(X, y)`."
                )


def _first_trace(guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """The trace of a guide's first run, which sets it up."""
    key = jax.random.key(0)
    if _may_be_traced(guide) and checks.is_concrete((key, args, kwargs)):
        with (
            contextlib.suppress(jax.errors.JAXTypeError),
            unchanged_on_failure(*components(guide)),
            guide.model.without_likelihood(),
        ):
            return run_as_program(guide, guide, key, args, kwargs)[1]
    with jax.ensure_compile_time_eval(), handlers.block(), handlers.seed(rng_seed=0):
        return handlers.trace(guide).get_trace(*args, **kwargs)


def _may_be_traced(guide: Any) -> bool:
    """Whether this is a NumPyro guide that can set itself up under a trace."""
    if type(guide) not in _TRACEABLE_GUIDES or not isinstance(guide.model, WithoutSite):
        return False
    start = guide.init_loc_fn
    return start is MEDIAN or getattr(start, "func", None) in _DETERMINISTIC_STARTS


def _first_run(
    guide: AbstractGPGuide, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Array] | None:
    """Set a guide up and run it in one compiled program; None if that is not possible.

    NumPyro's autoguides set themselves up one operation at a time and compile each. Under a trace
    they are set up in one program. Since their start is deterministic, their search for valid
    values needs no likelihood: the program checks once that the log density is finite.
    """
    inner: Any = _innermost(guide)
    if not _may_be_traced(inner):
        return None
    key = numpyro.prng_key()
    if key is None or not checks.is_concrete((key, args, kwargs)) or not only_watched():
        return None

    def run(*args: Any, **kwargs: Any) -> tuple[dict[str, Array], Array]:
        with handlers.trace() as trace, inner.model.without_likelihood(), StandIn(_draw_from_prior):
            values = guide._run(args, kwargs)
        conditioned = substituted(inner.model, {}, values, indices_of(trace))
        seeded = handlers.seed(conditioned, numpyro.prng_key())
        with handlers.block():
            return values, jnp.isfinite(log_density(seeded, args, kwargs, values)[0])

    try:
        with unchanged_on_failure(*components(inner)):
            (values, is_valid), trace = run_as_program(run, inner, key, args, kwargs)
            if not is_valid:
                raise _InvalidStart
    except jax.errors.JAXTypeError:
        return None  # the model cannot be traced
    except _InvalidStart:
        _refuse_missing(guide.model, values, args, kwargs)
        return None  # NumPyro searches for valid values, or raises
    emit(trace)
    return values


class _InvalidStart(Exception):
    """The log density is not finite at the initial values."""


def _refuse_missing(
    model: Model, values: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise if an observed site has NaN that is not masked."""
    with handlers.block():
        seeded = handlers.seed(substituted(model, {}, values), jax.random.key(0))
        trace = trace_of_call(seeded, args, kwargs)
    for name, site in trace.items():
        if not is_observed(site):
            continue
        missing, shown = jnp.isnan(site["value"]), counted(site["fn"])
        if jnp.any(missing & shown.reshape(*shown.shape, *(1,) * (missing.ndim - shown.ndim))):
            raise ValueError(
                f"the observations of `{name}` hold NaN: where these are rows without a target, "
                "mask them,\n"
                "    with numpyro.handlers.mask(mask=~jnp.isnan(y)):\n"
                f'        numpyro.sample("{name}", ..., obs=jnp.nan_to_num(y))\n'
                "or leave the rows out."
            )


def _draw_from_prior(_: str, family: Any, key: Array | None) -> Array:
    """Draw an untrained guide's function from the prior marginals if the family has a kernel.

    This avoids compiling a factorization.
    """
    key = numpyro.prng_key() if key is None else key
    if not hasattr(family, "kernel"):
        return family.sample(key)
    noise = jax.random.normal(key, family.shape(), family.X.dtype)
    variance = family.kernel.each(lambda kernel, X: kernel.evaluate_diag(X), family.X)
    return jnp.sqrt(variance) * noise


def _set_start(guide: AbstractGPGuide, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Start a NumPyro `rest` guide at lengthscales from the data, unless the user chose a start."""
    inner = _innermost(guide)
    if isinstance(inner, AutoGuide) and inner.init_loc_fn is MEDIAN and is_fresh(inner):
        with contextlib.suppress(jax.errors.JAXTypeError):  # the model cannot be traced
            inner.init_loc_fn = init_to_value(values=starting_values(guide.model, args, kwargs))


def is_fresh(guide: Guide) -> bool:
    """Whether a guide, or its `rest` guide, has not been set up for the model's sites."""
    return getattr(_innermost(guide), "prototype_trace", ()) is None


def _innermost(guide: Guide) -> Guide:
    """The guide of all sites that are not functions: the `rest` of the last nested guide."""
    while hasattr(guide, "rest"):
        guide = guide.rest
    return guide


def _build_rest(guide: Rest, model: Model) -> Guide:
    """Build the `rest` guide for the model without the GP site, unless it is a guide already."""
    if isinstance(guide, type | functools.partial):
        guide_class = guide.func if isinstance(guide, functools.partial) else guide
        options = guide.keywords if isinstance(guide, functools.partial) else {}
        # NumPyro's default start is uniform in (-2, 2). `_set_start` replaces the median.
        if isinstance(guide_class, type) and issubclass(guide_class, AutoGuide):
            options = {"init_loc_fn": MEDIAN, **options}
        guide = guide(model, **options)
    if not callable(guide):
        raise ValueError(
            f"`rest` must be a guide class, a functools.partial of one or a guide, got {guide!r}."
        )
    _refuse_modes(guide)
    return guide


def _refuse_modes(guide: Guide) -> None:
    """Raise for a `rest` guide whose covariance would come from the model without the function."""
    if laplace_approximations(guide):
        raise ValueError(
            "`rest` must not be an `AutoLaplaceApproximation`: its covariance comes from the "
            "curvature of the model's log density, and it sees the model without the function. "
            "Give AutoMultivariateNormal, which learns its covariance, as `rest=`."
        )
