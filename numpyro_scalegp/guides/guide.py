"""A guide that owns one GP site of a model and wraps a guide for everything else."""

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

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.mesh import mesh_of, whole
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.restoring import unchanged_on_failure
from numpyro_scalegp.distributions.rows import counted
from numpyro_scalegp.families import AbstractVariationalGP, LatentGP
from numpyro_scalegp.guides.fitted import (
    Guide,
    RequireParams,
    components,
    laplace_approximations,
    medians,
)
from numpyro_scalegp.guides.starting import MEDIAN, starting_values
from numpyro_scalegp.posteriors.posterior import AbstractPosterior
from numpyro_scalegp.tracing.first_run import emit, only_watched, run_as_program
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
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

Rest = type | functools.partial | Guide

# NumPyro's guides that keep nothing traced which could not be replaced, and starts that draw
# nothing.
_PLAIN = (
    AutoNormal,
    AutoDelta,
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoLowRankMultivariateNormal,
)
_GIVEN = (init_to_value, init_to_median, init_to_mean)

_NO_MEDIAN = "the guide given as `rest` has no `median`: pass a `key` for a draw."


class AbstractGPGuide(abc.ABC):
    """Guides that own one GP site; see `AutoSparseGP` for what they have in common.

    A call runs the rest's guide, then the model at those values to read kernel and rows off its GP
    site, and samples the variational family there. So the family has the model's kernel under the
    guide's hyperparameters, and the model's mini-batch.
    """

    prior: ClassVar[Prior] = LatentGP  # what the model has at the site

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

    @abc.abstractmethod
    def family(self, site: GPSite, *, training: bool = True) -> AbstractVariationalGP:
        """Declare the parameters and return the variational family at the site's rows.

        The one method that a guide of one's own implements: take `site.kernel`, `site.X` and
        `site.batch_shape`, and declare parameters with `param`.

        Args:
            site: the GP site, as the model made it under the guide's hyperparameters.
            training: whether what the guide keeps besides parameters may change.
        """

    def param(self, site: GPSite, name: str, *args: Any, **kwargs: Any) -> Any:
        """Declare the parameter `{site}_{prefix}_{name}`, with `numpyro.param`'s arguments."""
        value = numpyro.param(self.param_name(site, name), *args, **kwargs)
        is_start = bool(args) and value is args[0]
        return value if is_start or kwargs.get("rows") else whole(value, mesh_of(site.X))

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
        if not _is_fresh(self):
            return self._run(args, kwargs)
        _refuse_modes(self.rest)  # of a list of guides, which may have grown
        with unchanged_on_failure(*components(self)):
            done = _first_run(self, args, kwargs)
            return self._run(args, kwargs) if done is None else done

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Array]:
        _set_start(self, args, kwargs)
        with handlers.trace() as rest_trace:
            self.rest(*args, **kwargs)
        latent, indices = drawn_values(rest_trace), indices_of(rest_trace)
        site = find_gp_site(self.model, self.site, self.prior, latent, args, kwargs, indices)
        with ExitStack() as stack:
            for plate in site.plates:
                stack.enter_context(numpyro.plate(plate.name, plate.size, dim=plate.dim))
            return {**latent, site.name: numpyro.sample(site.name, self.family(site))}

    @model_keywords_first(lambda guide, *_: (guide.model, 2))
    def median(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Array]:
        """The median of each site that the rest's guide owns.

        Args:
            params: the guide's parameters, as from `SVI.get_params`.
            *args: the model's positional arguments; needed only by a guide that has not run yet,
                such as one in a new process that takes up loaded parameters.
            **kwargs: the model's keyword arguments.

        Raises:
            ValueError: if the rest's guide has no medians, or has not run and gets no arguments, or
                other ones than it was fitted with, or `params` lacks a parameter.
        """
        kwargs = of_model(kwargs)
        if args or kwargs:
            set_up(self, params, args, kwargs)
        elif _is_fresh(self):
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
            return {}  # nothing is left for the rest's guide, and NumPyro's own would raise
        # NumPyro's own have deterministic sites as well, at a function of zeros.
        try:
            values = medians(self.rest, params)
        except NotImplementedError as error:  # guides made of flows
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
        """Draw from the guide, the function at the model's rows included.

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
        """The posterior over the function, as an object with moments and samples at any inputs.

        Args:
            params: the guide's parameters, as from `SVI.get_params`, with mutable state if any.
            *args: the model's positional arguments; of the inputs only the shape matters.
            key: None for hyperparameters at the rest's medians, or a typed JAX key for one draw.
            **kwargs: the model's keyword arguments.

        Returns:
            The posterior under those hyperparameters.

        Raises:
            ValueError: if `key` is None and the rest's guide has no medians, or `params` lacks a
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
        """What `posterior` returns, and the values of the rest's sites under which it is."""
        key = key if key is None else checks.as_key(key)
        values = self._rest_values(params, args, kwargs, key)
        site = self._site(params, values, key, args, kwargs)
        with self._parameters(params, key):
            return self.family(site, training=False).posterior(), values

    def _parameters(self, params: dict[str, Any], key: Key[Array, ""] | None) -> ExitStack:
        """A context in which the guide's own parameters have their fitted values."""
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
        """The values of the rest's sites under which `posterior` is, with the same arguments.

        Medians and the means of functions, or one draw.
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
        """The model's GP site under values of the rest's sites."""
        seed = None if key is None else jax.random.split(key)[0]
        with self._parameters(params, seed):
            return find_gp_site(self.model, self.site, self.prior, values, args, kwargs)

    @model_keywords_first(lambda guide, *_: (guide.model, 2))
    def function_means(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Array]:
        """The means of the functions that this guide and its rest own, at the model's rows.

        Args:
            params: the guide's parameters, as from `SVI.get_params`, with mutable state if any.
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            The mean of each function under the rest's medians, by the name of its site.
        """
        kwargs = of_model(kwargs)
        means = getattr(self.rest, "function_means", _no_functions)(params, *args, **kwargs)
        values = self._rest_values(params, args, kwargs, None)
        site = self._site(params, values, None, args, kwargs)
        with self._parameters(params, None):
            posterior = self.family(site, training=False).posterior()
        return {**means, site.name: posterior.mean(site.X)}


def _no_functions(params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Array]:
    """What a guide without functions answers in place of `function_means`."""
    return {}


def set_up(
    guide: Guide, params: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Set a guide up for the model's sites, if it has not run yet, as in a new process.

    NumPyro's guides find the sites when they first run, and keep them. Here that happens
    outside of compiled code, where nothing traced is kept.

    Args:
        guide: one of this package's guides, whose rest is set up, or NumPyro's; others need none.
        params: what was fitted.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: if the guide would have other parameters than there are, or of other shapes.
    """
    guide = _innermost(guide)
    if not _is_fresh(guide):
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
    """The trace of a guide that is set up by it."""
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


def _may_be_traced(rest: Any) -> bool:
    """Whether a guide is one of NumPyro's that can set itself up under a trace."""
    if type(rest) not in _PLAIN or not isinstance(rest.model, WithoutSite):
        return False
    start = rest.init_loc_fn
    return start is MEDIAN or getattr(start, "func", None) in _GIVEN


def _first_run(
    guide: AbstractGPGuide, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Array] | None:
    """Set a guide up and run it in one program; None where that is not possible.

    NumPyro's autoguides set themselves up one operation at a time, each compiled by itself: here
    they do it under a trace. Their search for valid values has nothing to find where values are
    given, so that it needs no likelihood; whether that is finite is seen once.
    """
    rest: Any = _innermost(guide)
    if not _may_be_traced(rest):
        return None
    key = numpyro.prng_key()
    if key is None or not checks.is_concrete((key, args, kwargs)) or not only_watched():
        return None

    def run(*args: Any, **kwargs: Any) -> tuple[dict[str, Array], Array]:
        with handlers.trace() as trace, rest.model.without_likelihood(), StandIn(_draw_from_prior):
            values = guide._run(args, kwargs)
        given = substituted(rest.model, {}, values, indices_of(trace))
        seeded = handlers.seed(given, numpyro.prng_key())
        with handlers.block():
            return values, jnp.isfinite(log_density(seeded, args, kwargs, values)[0])

    try:
        with unchanged_on_failure(*components(rest)):
            (values, is_valid), trace = run_as_program(run, rest, key, args, kwargs)
            if not is_valid:
                raise _InvalidStart
    except jax.errors.JAXTypeError:
        return None  # the model is not to be traced
    except _InvalidStart:
        _refuse_missing(guide.model, values, args, kwargs)
        return None  # NumPyro's search, or its message
    emit(trace)
    return values


class _InvalidStart(Exception):
    """Of values at which the log density is not finite."""


def _refuse_missing(
    model: Model, values: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise where an observed site has NaN that no mask hides."""
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
    """A value for the site of a guide that has not been trained: at the prior, if it has a kernel.

    So that no factorization is compiled for it.
    """
    key = numpyro.prng_key() if key is None else key
    if not hasattr(family, "kernel"):
        return family.sample(key)
    noise = jax.random.normal(key, family.shape(), family.X.dtype)
    return jnp.sqrt(family.kernel.diag(family.X)) * noise


def _set_start(guide: AbstractGPGuide, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let NumPyro's guide of the rest start with lengthscales from the data, unless it is told."""
    rest = _innermost(guide)
    if isinstance(rest, AutoGuide) and rest.init_loc_fn is MEDIAN and _is_fresh(rest):
        with contextlib.suppress(jax.errors.JAXTypeError):  # of a model that is not to be traced
            rest.init_loc_fn = init_to_value(values=starting_values(guide.model, args, kwargs))


def _is_fresh(guide: Guide) -> bool:
    """Whether a guide, or the rest of one, has not been set up for the model's sites."""
    return getattr(_innermost(guide), "prototype_trace", ()) is None


def _innermost(guide: Guide) -> Guide:
    """The guide of all that is no function: the rest of a rest, and so on."""
    while hasattr(guide, "rest"):
        guide = guide.rest
    return guide


def _build_rest(rest: Rest, model: Model) -> Guide:
    """Build the rest's guide on the model without the GP site, unless it is a guide already."""
    if isinstance(rest, type | functools.partial):
        guide_class = rest.func if isinstance(rest, functools.partial) else rest
        given = rest.keywords if isinstance(rest, functools.partial) else {}
        # `_set_start` replaces it. NumPyro's own start is uniform in (-2, 2).
        if isinstance(guide_class, type) and issubclass(guide_class, AutoGuide):
            given = {"init_loc_fn": MEDIAN, **given}
        rest = rest(model, **given)
    if not callable(rest):
        raise ValueError(
            f"`rest` must be a guide class, a functools.partial of one or a guide, got {rest!r}."
        )
    _refuse_modes(rest)
    return rest


def _refuse_modes(rest: Guide) -> None:
    """Raise where the spread of a rest's guide would be that of a model without the function."""
    if laplace_approximations(rest):
        raise ValueError(
            "`rest` must not be an `AutoLaplaceApproximation`: its spread comes from the curvature "
            "of the model's log density, and the model of the rest lacks the function. Give "
            "AutoMultivariateNormal, which learns its covariance, as `rest=`."
        )
