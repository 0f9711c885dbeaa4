"""GP sites of a model at new inputs, drawn from their posteriors, never from their priors."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.gaussian_process import GaussianProcess
from numpyro_scalegp.integrated.laplace.posterior import LaplacePosterior
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.processes.warped import WarpedPosterior
from numpyro_scalegp.sites.rows import role_of, unwrapped
from numpyro_scalegp.tracing.fitted_runs import FunctionSites, is_gp, white_name
from numpyro_scalegp.tracing.runs import Trace, is_data, is_latent
from numpyro_scalegp.variational.quadruply.weight_space import WeightSpaceGP


def check_functions(trace: Trace, draws: dict, posteriors: dict[str, AbstractPosterior]) -> None:
    """Raise if a function is drawn from its prior, or may have values at other inputs than these.

    Args:
        trace: the trace of the model.
        draws: draws or guide sites, by name.
        posteriors: posteriors of GP sites, by name.
    """
    sampled = {name: site for name, site in trace.items() if site["type"] == "sample"}
    in_fit = any(map(is_data, sampled.values()))
    for name, site in sampled.items():
        if site["is_observed"] or name in posteriors or not is_gp(site):
            continue
        is_of_weights = isinstance(unwrapped(site["fn"]).distribution, WeightSpaceGP)
        if is_of_weights and white_name(name) in draws:
            continue  # the weights are the same at any inputs
        drawn = draws.get(name, draws.get(white_name(name)))
        if isinstance(drawn, dict) and role_of(drawn["fn"]) == "variational":
            continue
        if drawn is None or not in_fit:
            raise ValueError(
                f"the GP site `{name}` has neither observations nor draws at these inputs, and its "
                "prior does not depend on the data: give `sgp.infer.Predictive(..., data=(X, y))`, "
                "the model's arguments in the fit."
            )


def data_of_first_run(guide: Any) -> dict[str, tuple[Array, Array, Array | None]]:
    """Inputs, observations and their masks, of the observed GPs in an autoguide's prototype run."""
    trace = getattr(guide, "prototype_trace", None) or {}
    return {
        name: (site["fn"].X, jnp.asarray(site["value"]), site["fn"].observed)
        for name, site in trace.items()
        if isinstance(site.get("fn"), GaussianProcess)
        and site["is_observed"]
        and checks.is_concrete((site["fn"].X, site["value"]))
    }


class FromPosteriors(FunctionSites):
    """Draws GP sites without observations from their posteriors.

    Args:
        fn: the seeded model.
        key: a JAX key; the model's own seed would repeat for each draw.
        posteriors: posteriors by the names of the sites.
        first_run: data by name, from `data_of_first_run`, for sites without a posterior.
        joint: whether function values are drawn jointly.
    """

    def __init__(
        self,
        fn: Callable,
        key: Array,
        posteriors: dict[str, AbstractPosterior],
        first_run: dict[str, tuple[Array, Array, Array | None]],
        *,
        joint: bool,
    ) -> None:
        super().__init__(fn, without_white=posteriors)
        self.key = key
        self.posteriors = posteriors
        self.first_run = first_run
        self.joint = joint

    def process_message(self, msg: dict[str, Any]) -> None:
        """Draw at a site."""
        super().process_message(msg)
        if not (is_gp(msg) and is_latent(msg)):
            return
        name = msg["name"]
        if name not in self.posteriors and name not in self.first_run:
            return
        fn = unwrapped(msg["fn"])[0]
        self.key, draw_key, condition_key = jax.random.split(self.key, 3)
        if name not in self.posteriors:
            self.posteriors[name] = _as_in_first_run(name, fn, *self.first_run[name], condition_key)
        posterior = with_mean_of(fn, self.posteriors[name])
        msg["value"] = draw(draw_key, posterior, fn, joint=self.joint)


def with_mean_of(fn: Any, posterior: Any) -> Any:
    """The posterior with the prior mean function of a run of the model at new inputs.

    A mean function may hold covariates of the inputs, and the run at the data has the data's.

    Args:
        fn: the distribution of the GP site at the new inputs.
        posterior: the posterior over the function, with the prior mean function of the data.
    """
    mean_function = getattr(fn, "mean_function", None)
    if isinstance(posterior, WarpedPosterior):
        fn = fn.base_dist
    if isinstance(posterior, LaplacePosterior | WarpedPosterior):
        return dataclasses.replace(posterior, process=with_mean_of(fn, posterior.process))
    if mean_function is None or not hasattr(posterior, "mean_function"):
        return posterior
    return dataclasses.replace(posterior, mean_function=mean_function)


def draw(key: Array, posterior: AbstractPosterior, fn: Any, *, joint: bool) -> Array:
    """Draw the value of a GP site at its inputs: a function, or observations with their noise.

    Args:
        key: a JAX key.
        posterior: the posterior over the function.
        fn: the site's distribution.
        joint: whether function values are drawn jointly or independently.
    """
    draw_key, noise_key = jax.random.split(key)
    inputs = fn.posterior_inputs
    if joint:
        value = posterior.sample(draw_key, inputs)[0]
    else:
        mean = posterior.mean(inputs)
        normal = jax.random.normal(draw_key, mean.shape, mean.dtype)
        value = mean + jnp.sqrt(posterior.variance(inputs)) * normal
    if fn.role == "prior":
        return value
    return fn.given(value).sample(noise_key)


def _as_in_first_run(
    name: str, fn: GaussianProcess, X: Array, y: Array, observed: Array | None, key: Array
) -> AbstractPosterior:
    """The posterior given the data of a guide's prototype run, with the hyperparameters of `fn`."""
    warnings.warn(
        f"the GP site `{name}` is conditioned on the {X.shape[-2]} rows that the guide was first "
        "run with: give `sgp.infer.Predictive(..., data=(X, y))` to say what the data are.",
        UserWarning,
        stacklevel=2,
    )
    options: dict[str, Any] = {"mean": fn.mean_function, "estimator": fn.estimator, "key": key}
    gp = GaussianProcess(fn.kernel, X, fn.noise_variance, observed=observed, **options)
    return gp.condition(y)
