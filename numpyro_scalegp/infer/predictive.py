"""Posterior and prior predictive draws, computed in chunks and stored on the host."""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Key
from numpyro import handlers

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.infer.conditioning import as_draws, conditioned
from numpyro_scalegp.infer.new_inputs import (
    FromPosteriors,
    check_functions,
    data_of_first_run,
    draw,
    with_mean_of,
)
from numpyro_scalegp.likelihoods.dependence import table_of
from numpyro_scalegp.likelihoods.likelihood import check_value, log_terms
from numpyro_scalegp.neighbors.precomputed import PrecomputedNeighbors, precompute_neighbors
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.compiled import CompiledForLoop
from numpyro_scalegp.programs.float64 import in_float64
from numpyro_scalegp.sites.rows import role_of, unwrapped
from numpyro_scalegp.tracing.fitted_runs import (
    CheckShapes,
    EveryName,
    FunctionSites,
    WithoutDraws,
    is_gp,
    run_model,
    white_name,
)
from numpyro_scalegp.tracing.keywords import Arguments, handlers_around
from numpyro_scalegp.tracing.runs import (
    Trace,
    is_data,
    is_latent,
    substituted,
    trace_of_call,
    traced,
)
from numpyro_scalegp.tracing.sites import StandIn, joint_draw
from numpyro_scalegp.variational.fitted import DrawingGuide, RequireParams, latent_normals
from numpyro_scalegp.variational.guide import set_up


class Draws(NamedTuple):
    """Draws of all sites of a model, with log-likelihoods; arrays with a leading axis of draws."""

    sites: dict[str, Any]  # latent and deterministic sites
    predictive: dict[str, Any]  # replicates of the observed sites
    log_likelihood: dict[str, Any]  # pointwise, for the observed sites
    observed: dict[str, Any]  # values of the observed sites, the same in each draw
    diagnostics: dict[str, dict[str, Any]]  # of the solves at collapsed sites

    def log_predictive_density(self) -> dict[str, np.ndarray]:
        """The log of the likelihood averaged over draws, pointwise, for each observed site.

        For test data this is the log predictive density, shape (n,). (At the training data of a
        `GaussianProcess` or `FeatureSpaceGP` it averages leave-one-out densities.)
        """
        return {
            name: np.asarray(jax.nn.logsumexp(values, axis=0) - np.log(len(values)))
            for name, values in self.log_likelihood.items()
        }


class Predictive:
    """Predictive draws of a model, like `numpyro.infer.Predictive`, for large models.

    With a guide or posterior samples, the draws are posterior predictive; with neither, prior
    predictive. At new inputs, GP sites are drawn from their posteriors. A function is drawn from
    its variational process, or given its values at the inputs of the fit. Observations of a
    `GaussianProcess`, `MultiOutputGP` or `FeatureSpaceGP` are drawn from their predictive
    distribution given the data of the fit; without `data`, a call that passes observations of such
    a site draws replicates of these at their inputs, given these observations.

    Each compiled call computes `chunk_size` draws in sequence, which then move to the host: device
    memory holds one chunk, and the guide's parameters are not copied for each draw. A second call
    with arguments of the same shapes does not recompile. So make a new `Predictive` if a variable
    that model or guide close over has changed.

    Args:
        model: the model.
        guide: a guide, with its `params`.
        params: parameters of the guide and the model, as from `SVI.get_params`; if the model has a
            solver state (`state=` of a `GaussianProcess`), add the items of
            `SVIState.mutable_state`, so that solves start from that state.
        posterior_samples: instead of a guide, draws of the latent sites, as from
            `MCMC.get_samples`, with a leading axis of draws.
        data: the model's arguments in the fit, observations included, on which GP sites are
            conditioned when a call has other inputs: positional arguments as a tuple, such as
            `(X, y)`, keywords as a dict, or both, such as `((X, y), {"exposure": 5.0})`. Calls do
            not use the keywords in `data`, nor does conditioning use the keywords of a call. A
            function that a guide of this package samples needs no `data`. Without `data`, the
            arguments of an autoguide's first run take its place, with a warning.
        num_samples: number of draws, if there are no `posterior_samples`.
        chunk_size: draws in one compiled call.
        joint: whether functions are drawn jointly at all n inputs, in O(n^3) time for each draw.
            Otherwise the values of a function are drawn independently, in linear time, which is
            enough for sites that each depend on one value. Sites that combine values, such as a
            sum, cause a warning.

    Raises:
        ValueError: if there are both a guide and posterior samples; if sites have different numbers
            of samples, or other shapes than in the model; in a call, if a parameter is missing in
            `params`, a GP site has neither observations nor draws nor `data`, or a keyword has no
            value in `data`.
        TypeError: if the model does not accept the arguments in `data` or in a call.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> def model():
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal()), 1.0))
        >>> draws = sgp.infer.Predictive(model, posterior_samples={"mu": jnp.zeros(7)})
        >>> draws(jax.random.key(0))["y"].shape
        (7,)
    """

    def __init__(
        self,
        model: Callable,
        *,
        guide: Callable | None = None,
        params: dict[str, Any] | None = None,
        posterior_samples: dict[str, Any] | None = None,
        data: tuple[Any, ...] | Mapping[str, Any] | None = None,
        num_samples: int = 1000,
        chunk_size: int = 100,
        joint: bool = False,
    ) -> None:
        if guide is not None and posterior_samples is not None:
            raise ValueError("give either a `guide` with its `params`, or `posterior_samples`.")
        self.is_prior = guide is None and posterior_samples is None
        self.model = checks.function("model", model)
        if any(isinstance(handler, handlers.seed) for handler in handlers_around(model)):
            raise ValueError(
                "`model` has a fixed seed, with which all draws would be equal: give the model "
                "without `numpyro.handlers.seed`."
            )
        self.data = None if data is None else Arguments.of("data", data)
        if self.data is not None:
            if self.is_prior:
                raise ValueError("`data` needs a `guide` or `posterior_samples` to go with it.")
            self.data.check(model, "`data`")
        self.guide = guide
        self.params = {} if params is None else params
        self.posterior_samples = posterior_samples
        if posterior_samples is not None:
            self.posterior_samples, num_samples = as_draws(posterior_samples, "`posterior_samples`")
        self.num_samples = checks.count("num_samples", num_samples)
        self.chunk_size = checks.count("chunk_size", chunk_size)
        self.joint = joint
        self._checked: set[Any] = set()  # shapes of arguments
        self._without_neighbors: set[Any] = set()  # shapes with which no site uses neighbors
        # Set by `to_arviz`: calls are for the inputs of the fit, even if no site is observed.
        self._is_at_fit = False

    def __call__(self, key: Key[Array, ""], /, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Draw all sites.

        Args:
            key: a typed JAX key.
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            Draws of all latent and deterministic sites and replicates of the observed sites, as
            NumPy arrays of shape (num_samples, *site_shape).
        """
        draws = self.draws(key, *args, **kwargs)
        return {**draws.sites, **draws.predictive}

    def draws(self, key: Key[Array, ""], /, *args: Any, **kwargs: Any) -> Draws:
        """Draw all sites, with pointwise log-likelihoods and observations; see `Draws`."""
        call = Arguments(args, kwargs)
        call.check(self.model, "the call")
        if self.data is not None:
            self._check_keywords(self.data, call)
        if self.guide is not None:
            set_up(self.guide, self.params, *(call if self.data is None else self.data))
            leaves, structure = jax.tree.flatten((args, kwargs))
            shapes = structure, tuple(map(np.shape, leaves))
            if not self.joint and shapes not in self._checked:
                self._warn_of_combined_rows(args, kwargs)
                self._checked.add(shapes)
        # Large arrays are arguments: constants would be compiled into the program.
        samples = jax.tree.map(jnp.asarray, self.posterior_samples or {})
        first_run = {} if self.guide is None else data_of_first_run(self.guide)
        normals = {} if self.guide is None else latent_normals(self.guide, self.params)
        neighbors = self._neighbors(samples, call)
        shared = normals, self.params, self.data, first_run, neighbors, args, kwargs
        keys = jax.random.split(checks.as_key(key), self.num_samples)
        run_chunk, chunks = CompiledForLoop(self._chunk), []
        for start in range(0, self.num_samples, self.chunk_size):
            index = slice(start, start + self.chunk_size)
            chunk = jax.tree.map(lambda leaf, index=index: leaf[index], samples)
            chunks.append(jax.tree.map(as_numpy, run_chunk(keys[index], chunk, *shared)))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *chunks)

    def _check_keywords(self, data: Arguments, call: Arguments) -> None:
        """Raise if the call has a keyword for which the run at the data would use the default."""
        if missing := sorted(call.kwargs.keys() - data.names(self.model)):
            keywords = ", ".join(f'"{name}": ...' for name in missing)
            raise ValueError(
                f"the call has the keywords {missing}, and `data` has no values of them: a keyword "
                "of the call is not passed to the run at the data. Give its value in the fit, as "
                f"in `sgp.infer.Predictive(..., data=((X, y), {{{keywords}}}))`."
            )

    def _neighbors(self, samples: dict, call: Arguments) -> tuple[dict, dict]:
        """Neighbors of the inputs of GP sites, in the run at the data and in the run of a call."""
        leaves, structure = jax.tree.flatten((self.data, call))
        shapes = structure, tuple(map(np.shape, leaves))
        if shapes in self._without_neighbors:
            return {}, {}
        draws = [
            (jax.tree.map(lambda leaf, i=i: leaf[i], samples), jax.random.key(i + 1))
            for i in (0, -1)
        ]

        def at(arguments: Arguments) -> dict:
            def run(draw: tuple[dict, Array]) -> Trace:
                values, key = draw

                def value(site: dict[str, Any]) -> Any:
                    # Draws of a function are at the inputs of the fit, which may not be these.
                    is_hyperparameter = is_latent(site) and not is_gp(site)
                    return values.get(site["name"]) if is_hyperparameter else None

                model = handlers.substitute(self.model, substitute_fn=value)
                functions = FunctionSites(without_white=EveryName())
                with CheckShapes(values), WithoutDraws(), functions:
                    return traced(model, key, {**self.params, **values}, *arguments)

            return precompute_neighbors(run, *draws)

        at_data, at_call = {} if self.data is None else at(self.data), at(call)
        if not (at_data or at_call):
            self._without_neighbors.add(shapes)
        return at_data, at_call

    def _chunk(
        self,
        keys: Array,
        samples: dict,
        normals: dict,
        params: dict,
        data: Arguments | None,
        first_run: dict,
        neighbors: tuple[dict, dict],
        args: tuple,
        kwargs: dict,
    ) -> Draws:
        guide = None
        if self.guide is not None:
            guide = DrawingGuide(self.guide, params, normals)
        fixed = None
        if data is not None and self._is_fixed(guide, params, data):
            with PrecomputedNeighbors(neighbors[0]):
                fixed = self._posteriors(keys[0], {}, guide, params, data)

        def draw(item: tuple[Array, dict]) -> Draws:
            return self._draw(*item, guide, params, data, fixed, first_run, neighbors, args, kwargs)

        return jax.lax.map(draw, (keys, samples))

    def _is_fixed(self, guide: Callable | None, params: dict, data: Arguments) -> bool:
        """Whether the guide draws only its functions, so that all draws share one posterior."""
        if guide is None:
            return False
        trace = self._guide_trace(guide, jax.random.key(0), params, *data)
        sites = [site["fn"] for site in trace.values() if site["type"] == "sample"]
        return all(
            role_of(fn) == "variational" or isinstance(unwrapped(fn).distribution, dist.Delta)
            for fn in sites
        )

    def _warn_of_combined_rows(self, args: tuple, kwargs: dict) -> None:
        """Warn of sites that combine values of a function, which are drawn independently."""
        assert self.guide is not None

        def run(values: dict[str, Array]) -> tuple[dict[str, Array], Trace]:
            guide = RequireParams(self.guide, self.params)
            params, key = self.params, jax.random.key(0)
            with StandIn() as sites:
                drawn = traced(guide, key, params, args, kwargs)
            zeros = {name: drawn[name]["value"] for name in sites.families}
            drawn.update({name: {**drawn[name], "value": f} for name, f in values.items()})
            if not values:
                return zeros, {}
            trace = traced(self.model, key, params, args, kwargs, replayed=drawn)
            return zeros, {name: site for name, site in trace.items() if name not in drawn}

        for name, f in jax.eval_shape(lambda: run({})[0]).items():

            def terms(f: Array, name: str = name) -> dict[str, list[Array]]:
                return {key: _determinants(site) for key, site in run({name: f})[1].items()}

            if combining := table_of(terms, jnp.zeros(f.shape, f.dtype)).combining_rows():
                sites = ", ".join(f"`{site}`" for site in combining)
                warnings.warn(
                    f"{sites} combine rows of the function `{name}`, and each row of it is drawn "
                    "by itself: draws of these sites have the wrong spread. Give "
                    "`sgp.infer.Predictive(..., joint=True)`, which draws all rows jointly.",
                    UserWarning,
                    stacklevel=4,
                )

    def _draw(
        self,
        key: Array,
        sample: dict,
        guide: Callable | None,
        params: dict,
        data: Arguments | None,
        fixed: dict[str, AbstractPosterior] | None,
        first_run: dict,
        neighbors: tuple[dict, dict],
        args: tuple,
        kwargs: dict,
    ) -> Draws:
        guide_key, model_key, replicate_key = jax.random.split(key, 3)
        posteriors = dict(fixed or {})
        if data is not None and fixed is None:
            with PrecomputedNeighbors(neighbors[0]):
                posteriors = self._posteriors(guide_key, sample, guide, params, data)
        sample = {name: value for name, value in sample.items() if name not in posteriors}
        model: Any = handlers.seed(self.model, model_key)
        if not self.is_prior:
            posterior_key = jax.random.fold_in(model_key, 1)
            model = FromPosteriors(model, posterior_key, posteriors, first_run, joint=self.joint)
        values = dict(sample)
        if guide is not None:
            drawn = self._guide_trace(guide, guide_key, params, args, kwargs)
            drawn = {name: site for name, site in drawn.items() if name not in posteriors}
            model = RequireParams(handlers.replay(model, drawn), params)
            values.update(drawn)
        # Posterior samples may hold parameters as well.
        substitute = substituted(model, {**params, **sample}, sample)
        with CheckShapes(sample), PrecomputedNeighbors(neighbors[1]):
            trace = trace_of_call(substitute, args, kwargs)
        if self.guide is None and not self.is_prior:
            _check_names(trace, {**sample, **posteriors})
        if not (self.is_prior or self._is_at_fit):
            check_functions(trace, values, posteriors)
        draws = Draws({}, {}, {}, {}, {})
        for number, (name, site) in enumerate(trace.items()):
            if site["type"] == "deterministic" or is_latent(site):
                draws.sites[name] = site["value"]
            elif is_data(site):
                key = jax.random.fold_in(replicate_key, number)
                _replicate(draws, key, name, trace, posteriors.get(name), joint=self.joint)
        return draws

    def _guide_trace(
        self, guide: Callable, key: Array, params: dict, args: tuple, kwargs: dict
    ) -> Trace:
        with StandIn(joint_draw) if self.joint else contextlib.nullcontext():
            return traced(guide, key, params, args, kwargs)

    def _posteriors(
        self, key: Array, sample: dict, guide: Callable | None, params: dict, data: Arguments
    ) -> dict[str, AbstractPosterior]:
        """The posteriors of GP sites given the data and a draw of all other sites."""
        values, owned = dict(sample), set()
        if guide is not None:
            # The run at other inputs has the same key, and so the same draw of hyperparameters.
            drawn = self._guide_trace(guide, key, params, *data)
            latent = {name: site for name, site in drawn.items() if site["type"] == "sample"}
            values = {name: site["value"] for name, site in latent.items()}
            owned = {n for n, s in latent.items() if role_of(s["fn"]) == "variational"}
        trace = run_model(self.model, {**params, **values}, *data)
        return {
            name: conditioned(trace, name)
            for name, site in trace.items()
            if is_gp(site)
            and name not in owned
            and (site["is_observed"] or name in values or white_name(name) in values)
        }


def _determinants(site: dict[str, Any]) -> list[Array]:
    """The arrays that determine draws of a site: its value, or its distribution and log density."""
    if site["type"] == "deterministic":
        return jax.tree.leaves(site["value"])
    if not (is_latent(site) or is_data(site)):
        return []
    parts = [
        leaf
        for leaf in map(jnp.asarray, jax.tree.leaves(site["fn"]))
        if jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    return [*parts, log_terms(site)] if site["is_observed"] and not is_gp(site) else parts


def _check_names(trace: dict[str, Any], sample: dict[str, Any]) -> None:
    """Raise if no name in a draw is a site of the model."""
    latent = {name for name, site in trace.items() if is_latent(site)}
    if latent and not set(sample) & set(trace):
        raise ValueError(
            f"`posterior_samples` has {sorted(sample)}, and the model none of these: its latent "
            f"sites are {sorted(latent)}."
        )


def _replicate(
    draws: Draws,
    key: Array,
    name: str,
    trace: Trace,
    posterior: AbstractPosterior | None,
    *,
    joint: bool,
) -> None:
    """Add a replicate of an observed site and its pointwise log-likelihood to `draws`."""
    site = trace[name]
    fn, value = site["fn"], site["value"]
    if is_gp(site):
        fn = unwrapped(fn).distribution
        is_new = posterior is not None
        process: Any = (
            conditioned(trace, name) if posterior is None else with_mean_of(fn, posterior)
        )
        # At the data, an iterative posterior has stored its moments.
        observed_rows = None if is_new else getattr(fn, "shown_rows", None)
        at_data = not is_new and observed_rows is None
        predictive = fn.predictive(process, at_data=at_data)
        draws.predictive[name] = (
            draw(key, process, fn, joint=True) if joint else predictive.sample(key)
        )
        pointwise = fn.leave_one_out(process) if at_data else predictive
        terms = pointwise.log_prob(value)
        if observed_rows is not None:
            leave_one_out = fn.leave_one_out(process).log_prob(value[..., observed_rows])
            terms = terms.at[..., observed_rows].set(leave_one_out)
        draws.log_likelihood[name] = terms
        draws.diagnostics[name] = process.diagnostics
    else:
        check_value(site)
        draws.predictive[name] = fn.sample(key)
        draws.log_likelihood[name] = _log_prob(fn, value)
    draws.observed[name] = value


def _log_prob(fn: dist.Distribution, value: Array) -> Array:
    """Log densities in float64: for large counts they are small differences of large terms."""
    single = fn.log_prob(value)
    try:
        double = in_float64(lambda fn, value: fn.log_prob(value), fn, value)
    except AttributeError:  # a distribution that does not declare all of its parameters
        return single
    # The float64 copy of a distribution does not check the support.
    return jnp.where(jnp.isfinite(single), double, single)
