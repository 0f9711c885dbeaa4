"""Draws of a model's sites under a posterior, a few at a time and kept on the host."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.distributions import FeatureSpaceGP, GaussianProcess
from numpyro_scalegp.distributions.rows import unwrapped
from numpyro_scalegp.families.family import AbstractPriorGP
from numpyro_scalegp.guides.guide import Given, set_up
from numpyro_scalegp.infer.joint import JointDraws
from numpyro_scalegp.quadruply_stochastic.problem import Stopped
from numpyro_scalegp.tracing.additivity import combining_rows
from numpyro_scalegp.tracing.elbo import Trace
from numpyro_scalegp.tracing.likelihood import check_value, log_terms
from numpyro_scalegp.tracing.substitution import substituted


class Draws(NamedTuple):
    """What a model gives for draws of its latent sites; arrays with a leading axis of draws."""

    sites: dict[str, Any]  # latent and deterministic sites
    predictive: dict[str, Any]  # replicates of the observed sites
    log_likelihood: dict[str, Any]  # pointwise, for the observed sites
    observed: dict[str, Any]  # values of the observed sites, the same in each draw
    diagnostics: dict[str, dict[str, Any]]  # of the solves, for collapsed sites

    def log_predictive_density(self) -> dict[str, np.ndarray]:
        """The log of the likelihood averaged over draws, pointwise, for each observed site.

        At test rows this is the log predictive density, shape (rows,). (For a `GaussianProcess` or
        `FeatureSpaceGP` it averages leave-one-out densities at its own rows.)
        """
        return {
            name: np.asarray(jax.nn.logsumexp(values, axis=0)) - np.log(len(values))
            for name, values in self.log_likelihood.items()
        }


class Predictive:
    """Posterior predictive draws of a model, like `numpyro.infer.Predictive`, for large models.

    Draws are made one after another, `chunk_size` in a compiled call, and moved to the host:
    memory follows the chunk, and the guide's parameters are never repeated for each draw.

    An observed `GaussianProcess` or `FeatureSpaceGP` site is replicated from its *posterior* given
    the observations, at their inputs, where NumPyro's own would draw from the prior.

    Args:
        model: the model.
        guide: a guide, with its `params`.
        params: the guide's and the model's parameters, as from `SVI.get_params`; with a solver
            state in the model, together with `SVIState.mutable_state`, so that solves start there.
        posterior_samples: instead of a guide, draws of the latent sites, as from
            `MCMC.get_samples`, leading axis the draws.
        num_samples: number of draws, where a guide makes them.
        chunk_size: draws in one compiled call.
        joint: whether a guide's functions are drawn jointly at all n rows, in O(n^3) a draw. If
            not, each row is drawn by itself, in linear time: enough for all that depends on one row
            of a function. Of sites that combine rows, such as a sum, there is a warning.

    Raises:
        ValueError: if there is neither a guide nor draws, or both; if draws have unequal numbers,
            or other shapes than the model's sites; in a call, if `params` lacks a parameter.

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
        num_samples: int = 1000,
        chunk_size: int = 100,
        joint: bool = False,
    ) -> None:
        if (guide is None) == (posterior_samples is None):
            raise ValueError("give either a `guide` with its `params`, or `posterior_samples`.")
        self.model = checks.function("model", model)
        self.guide = guide
        self.params = {} if params is None else params
        self.posterior_samples = posterior_samples
        if posterior_samples is not None:
            num_samples = _number_of_draws(posterior_samples)
        self.num_samples = checks.count("num_samples", num_samples)
        self.chunk_size = checks.count("chunk_size", chunk_size)
        self.joint = joint

    def __call__(self, key: Key[Array, ""], *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Draw.

        Args:
            key: a typed JAX key.
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            Draws of all latent and deterministic sites and replicates of the observed ones, as
            NumPy arrays of shape (num_samples, *site_shape).
        """
        draws = self.draws(key, *args, **kwargs)
        return {**draws.sites, **draws.predictive}

    def draws(self, key: Key[Array, ""], *args: Any, **kwargs: Any) -> Draws:
        """Draw, with pointwise log-likelihoods and observations as well; see `Draws`."""
        if self.guide is not None:
            set_up(self.guide, self.params, args, kwargs)
            if not self.joint:
                self._warn_of_rows(args, kwargs)

        # All that may be large is an argument: a constant would be compiled into the program.
        @eqx.filter_jit
        def chunk(keys: Array, samples: dict, params: dict, args: tuple, kwargs: dict) -> Draws:
            def one(item: tuple[Array, dict]) -> Draws:
                return self._one(*item, params, args, kwargs)

            return jax.lax.map(one, (keys, samples))

        samples = jax.tree.map(jnp.asarray, self.posterior_samples or {})
        keys = jax.random.split(checks.as_key(key), self.num_samples)
        chunks = []
        for start in range(0, self.num_samples, self.chunk_size):
            part = slice(start, start + self.chunk_size)
            some = jax.tree.map(lambda leaf, part=part: leaf[part], samples)
            chunks.append(jax.device_get(chunk(keys[part], some, self.params, args, kwargs)))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *chunks)

    def _warn_of_rows(self, args: tuple, kwargs: dict) -> None:
        """Warn of sites that combine rows of the guide's functions, which are drawn one by one."""
        assert self.guide is not None

        def run(values: dict[str, Array]) -> tuple[dict[str, Array], Trace]:
            params = jax.tree.map(lambda leaf: leaf, self.params)  # mutable state is written to
            guide, model = (handlers.seed(one, 0) for one in (self.guide, self.model))
            with Stopped() as stopped:
                guide = substituted(Given(guide, params), params)
                drawn = handlers.trace(guide).get_trace(*args, **kwargs)
            zeros = {name: drawn[name]["value"] for name in stopped.found}
            drawn.update({name: {**drawn[name], "value": f} for name, f in values.items()})
            if not values:
                return zeros, {}
            replayed = handlers.replay(model, drawn)
            trace = handlers.trace(substituted(replayed, params)).get_trace(*args, **kwargs)
            return zeros, {name: site for name, site in trace.items() if name not in drawn}

        for name, f in jax.eval_shape(lambda: run({})[0]).items():

            def parts(f: Array, name: str = name) -> dict[str, list[Array]]:
                return {other: _parts(site) for other, site in run({name: f})[1].items()}

            if combining := combining_rows(parts, jnp.zeros(f.shape, f.dtype)):
                sites = ", ".join(f"`{one}`" for one in combining)
                warnings.warn(
                    f"{sites} combine rows of the function `{name}`, and each row of it is drawn "
                    "by itself: what is drawn of them has the wrong spread. Give "
                    "`sgp.infer.Predictive(..., joint=True)`, which draws all rows jointly.",
                    UserWarning,
                    stacklevel=4,
                )

    def _one(self, key: Array, sample: dict, params: dict, args: tuple, kwargs: dict) -> Draws:
        guide_key, model_key, replicate_key = jax.random.split(key, 3)
        model: Any = handlers.seed(self.model, model_key)
        given = set(sample)
        if self.guide is not None:
            guide = Given(handlers.seed(self.guide, guide_key), params)
            with JointDraws() if self.joint else contextlib.nullcontext():
                draw = handlers.trace(substituted(guide, params)).get_trace(*args, **kwargs)
            model = Given(handlers.replay(model, draw), params)
            given |= set(draw)
        # Draws may hold parameters that vary from one to the next.
        substitute = _Checked(substituted(model, {**params, **sample}, sample), sample)
        trace = handlers.trace(substitute).get_trace(*args, **kwargs)
        if self.guide is None:
            _check_names(trace, sample)
        draws = Draws({}, {}, {}, {}, {})
        for number, (name, site) in enumerate(trace.items()):
            if name not in given and site["type"] == "sample" and not site["is_observed"]:
                _warn_of_prior(name, site["fn"])
            if site["type"] == "deterministic" or (
                site["type"] == "sample" and not site["is_observed"]
            ):
                draws.sites[name] = site["value"]
            elif site["type"] == "sample":
                _replicate(draws, jax.random.fold_in(replicate_key, number), name, site)
        return draws


def _parts(site: dict[str, Any]) -> list[Array]:
    """What draws of a site depend on: its value, or its distribution, and its likelihood."""
    if site["type"] == "deterministic":
        return jax.tree.leaves(site["value"])
    if site["type"] != "sample":
        return []
    parts = [
        leaf
        for leaf in map(jnp.asarray, jax.tree.leaves(site["fn"]))
        if jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    is_collapsed = isinstance(unwrapped(site["fn"])[0], GaussianProcess | FeatureSpaceGP)
    return [*parts, log_terms(site)] if site["is_observed"] and not is_collapsed else parts


def _number_of_draws(samples: dict[str, Any]) -> int:
    """The leading axis that all draws share."""
    shapes = {
        name: np.shape(leaf) for name, value in samples.items() for leaf in jax.tree.leaves(value)
    }
    if not shapes or not all(shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
        raise ValueError(
            "`posterior_samples` must be a dict of arrays with a leading axis of draws, the same "
            f"for all, got the shapes {shapes}."
        )
    return next(iter(shapes.values()))[0]


def _check_names(trace: dict[str, Any], sample: dict[str, Any]) -> None:
    """Raise if a draw has values of none of the model's sites."""
    latent = {n for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    if latent and not set(sample) & set(trace):
        raise ValueError(
            f"`posterior_samples` has {sorted(sample)}, and the model none of these: its latent "
            f"sites are {sorted(latent)}."
        )


class _Checked(Messenger):
    """Raises where a draw has another shape than its site, before the model goes on with it."""

    def __init__(self, fn: Callable, sample: dict[str, Any]) -> None:
        super().__init__(fn)
        self.sample = sample

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        is_latent = msg["type"] == "sample" and not msg["is_observed"]
        if not is_latent or msg["name"] not in self.sample:
            return
        found, wanted = jnp.shape(msg["value"]), msg["fn"].shape()
        if found != wanted:
            raise ValueError(
                f"a draw of the site `{msg['name']}` in `posterior_samples` has shape {found}, and "
                f"the model's site {wanted}: give draws with one leading axis (of "
                "`MCMC.get_samples`, those that are not grouped by chain), and the rows that a "
                "function was drawn at."
            )


def _warn_of_prior(name: str, fn: Any) -> None:
    if isinstance(unwrapped(fn)[0], GaussianProcess | FeatureSpaceGP | AbstractPriorGP):
        warnings.warn(
            f"the GP site `{name}` has neither observations nor draws: it is drawn from its prior, "
            "which knows nothing of the data. At new inputs take `condition(y)` of a collapsed GP "
            "and `condition(f)` of a `LatentGP`, under each draw of the other sites.",
            UserWarning,
            stacklevel=2,
        )


def _replicate(draws: Draws, key: Array, name: str, site: dict[str, Any]) -> None:
    """Add a replicate of an observed site and its pointwise log-likelihood to `draws`."""
    fn, value = site["fn"], site["value"]
    if isinstance(unwrapped(fn)[0], GaussianProcess | FeatureSpaceGP) and not isinstance(
        fn, GaussianProcess | FeatureSpaceGP
    ):
        raise ValueError(
            f"the collapsed GP site `{name}` stands inside a plate, or has a `to_event` or `mask` "
            "around it, where replicates would come from the prior: write a site for each function."
        )
    if isinstance(fn, GaussianProcess | FeatureSpaceGP):
        posterior = fn.condition(value)
        draws.predictive[name] = posterior.at_data().sample(key)
        draws.log_likelihood[name] = posterior.leave_one_out().log_prob(value)
        draws.diagnostics[name] = posterior.diagnostics
    else:
        check_value(site)
        draws.predictive[name] = fn.sample(key)
        draws.log_likelihood[name] = fn.log_prob(value)
    draws.observed[name] = value
