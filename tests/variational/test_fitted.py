"""Draws from guides have the guide's spread, and errors name the parameters that are missing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoBatchedLowRankMultivariateNormal,
    AutoBatchedMultivariateNormal,
    AutoBNAFNormal,
    AutoDAIS,
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoSurrogateLikelihoodDAIS,
)
from numpyro.infer.initialization import init_to_median

import numpyro_scalegp as sgp

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 8)[:, None]
Y = jnp.sin(2.0 * X[:, 0])
NUM_DRAWS = 200


def model(X: Array, y: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, noise), obs=y)


def listed(model: Any, **options: Any) -> AutoGuideList:
    guide = AutoGuideList(model)
    rows = functools.partial(handlers.block, handlers.seed(model, 0))
    guide.append(AutoLaplaceApproximation(rows(hide=["noise"]), prefix="curved", **options))
    guide.append(AutoNormal(rows(hide=["lengthscale"]), **options))
    return guide


def batched(of: Any, model: Any, **options: Any) -> Any:
    return of(model, batch_ndim=0, **options)


GUIDES = {
    "normal": AutoNormal,
    "delta": AutoDelta,
    "diagonal": AutoDiagonalNormal,
    "multivariate": AutoMultivariateNormal,
    "low_rank": AutoLowRankMultivariateNormal,
    "laplace": AutoLaplaceApproximation,
    "list": listed,
    "batched": functools.partial(batched, AutoBatchedMultivariateNormal),
    "batched_low_rank": functools.partial(batched, AutoBatchedLowRankMultivariateNormal),
    "iaf": functools.partial(AutoIAFNormal, hidden_dims=[4, 4]),
    "bnaf": functools.partial(AutoBNAFNormal, hidden_factors=[2, 2]),
    "dais": functools.partial(AutoDAIS, K=2),
    "surrogate": functools.partial(
        AutoSurrogateLikelihoodDAIS, surrogate_model=lambda: model(X, Y), K=2
    ),
}
QUICK = ("normal", "delta", "multivariate", "laplace", "list")


def fitted(guide: Any, model: Any = model, loss: Any = None, steps: int = 40) -> dict[str, Any]:
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO() if loss is None else loss)
    return svi.run(KEY, steps, X, Y, progress_bar=False).params


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in GUIDES],
)
def test_draws_have_the_spread_of_the_guide(name):
    """Each function that draws has the spread of NumPyro's `sample_posterior`."""
    guide = GUIDES[name](model, init_loc_fn=init_to_median)
    params = fitted(guide)
    drawn = guide.sample_posterior(KEY, params, X, Y, sample_shape=(NUM_DRAWS,))["lengthscale"]
    options: dict[str, Any] = {"guide": guide, "params": params, "num_samples": NUM_DRAWS}
    predicted = sgp.infer.Predictive(model, **options)(KEY, X, Y)["lengthscale"]
    # Draws are conditioned once for all only if they are equal.
    at_new = sgp.infer.Predictive(model, data=(X, Y), **options)(KEY, X[:2])["y"]

    def of_posterior(key: Array) -> Array:
        return sgp.posterior(model, guide, params, X, Y, key=key).kernel.lengthscale

    conditioned = jax.lax.map(of_posterior, jax.random.split(KEY, NUM_DRAWS))
    spread = np.std(np.log(drawn))
    assert (np.ptp(drawn) == 0) == (name == "delta")
    for draws in (predicted, conditioned):
        # Standard errors of the two standard deviations, with tails heavier than normal.
        assert np.std(np.log(draws)) == pytest.approx(spread, rel=0.3, abs=1e-6)
    assert np.isfinite(at_new).all()


@pytest.mark.slow
def test_export_has_the_spread_of_a_laplace_approximation():
    pytest.importorskip("arviz")
    guide = AutoLaplaceApproximation(model, init_loc_fn=init_to_median)
    params = fitted(guide)
    data = sgp.to_arviz(params, model, guide, key=KEY, model_args=(X, Y), num_samples=NUM_DRAWS)
    exported = np.log(data["posterior"]["lengthscale"].values)
    drawn = guide.sample_posterior(KEY, params, sample_shape=(NUM_DRAWS,))["lengthscale"]
    assert np.std(exported) == pytest.approx(np.std(np.log(drawn)), rel=0.3)


@pytest.mark.slow
def test_a_laplace_approximation_without_a_spread_warns():
    """At a point that is not a mode, where NumPyro sets the factor to zero."""
    guide = AutoLaplaceApproximation(
        model, hessian_fn=lambda f, x: -jnp.eye(x.size), init_loc_fn=init_to_median
    )
    params = fitted(guide, steps=1)
    predictive = sgp.infer.Predictive(model, guide=guide, params=params, num_samples=2)
    with pytest.warns(RuntimeWarning, match="Hessian .* `_auto_latent` is not positive definite"):
        predictive(KEY, X, Y)


def latent(X: Array, y: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def in_list(model: Any) -> AutoGuideList:
    guide = AutoGuideList(model)
    guide.append(AutoLaplaceApproximation(model))
    return guide


@pytest.mark.parametrize(
    "inner",
    (
        AutoLaplaceApproximation,
        functools.partial(AutoLaplaceApproximation, prefix="mode"),
        AutoLaplaceApproximation(handlers.block(latent, hide=["f"])),
        in_list,
        functools.partial(sgp.guides.AutoSparseGP, site="g", rest=AutoLaplaceApproximation),
    ),
)
def test_a_laplace_approximation_is_refused_as_rest(inner):
    inner = inner(latent) if inner is in_list else inner
    with pytest.raises(
        ValueError, match=r"`rest` must not be an `AutoLaplaceApproximation`.*Multi"
    ):
        sgp.guides.AutoSparseGP(latent, "f", rest=inner)


def test_a_laplace_approximation_that_joins_a_list_later_is_refused_as_rest():
    guides = AutoGuideList(latent)
    guide = sgp.guides.AutoSparseGP(latent, rest=guides, num_inducing=3)
    guides.append(AutoLaplaceApproximation(latent))
    with pytest.raises(ValueError, match="`rest` must not be an `AutoLaplaceApproximation`"):
        handlers.seed(guide, 0)(X, Y)


def test_a_rest_that_samples_the_function_is_named():
    def rest(X: Array, y: Array | None = None) -> None:
        numpyro.sample("f", dist.Normal(jnp.zeros(len(X)), 1.0).to_event(1))
        numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))

    for site in ("f", None):
        guide = sgp.guides.AutoSparseGP(latent, site, rest=rest, num_inducing=3)
        with pytest.raises(ValueError, match="`rest` samples `f`, the function that this guide"):
            handlers.seed(guide, 0)(X, Y)


@pytest.mark.parametrize("kind", (AutoNormal, AutoMultivariateNormal, AutoLaplaceApproximation))
def test_missing_parameters_of_numpyros_guides_are_named(kind):
    guide = kind(model, init_loc_fn=init_to_median)
    params = fitted(guide, steps=1)
    for name in params:
        less = {key: value for key, value in params.items() if key != name}
        entries: dict[str, Any] = {
            "draw": lambda less=less: sgp.posterior(model, guide, less, X, Y, key=KEY),
            "Predictive": lambda less=less: sgp.infer.Predictive(
                model, guide=guide, params=less, num_samples=2
            )(KEY, X, Y),
        }
        if "scale" not in name:  # medians need no scales
            entries["median"] = lambda less=less: sgp.posterior(model, guide, less, X, Y)
        for entry in entries.values():
            with pytest.raises(ValueError, match=f"`params` lacks `{name}`: give all parameters"):
                entry()
