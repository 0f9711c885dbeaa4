"""The first run of a guide as one program leaves the same state as NumPyro's setup."""

import functools
import logging
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
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.initialization import init_to_uniform, init_to_value

import numpyro_scalegp as sgp
from numpyro_scalegp.variational import guide as guides

N, BATCH = 60, 20
KEY = jax.random.key(0)
X = jnp.array(np.random.default_rng(0).normal(size=(N, 2)))
Y = jnp.sin(X[:, 0])
Z = X[::10] + 0.1
LOSS = sgp.infer.QuadratureELBO()


def model(X: Any, y: Any = None, batch: int | None = BATCH) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.Uniform(jnp.exp(level), jnp.exp(level) + 2.0))
    noise = numpyro.deterministic("noise", 0.1 * variance)
    rows = sgp.plate("rows", len(X), batch)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale, variance), X))
    with rows:
        numpyro.sample("y", dist.Normal(f + level, noise), obs=y)


def one_by_one(*_: Any) -> None:
    """Set the guide up by separate operations, not in one program."""


def started(guide: Any, *args: Any, init_params: Any = None) -> tuple[SVI, Any]:
    svi = SVI(guide.model, guide, optax.adam(0.01), LOSS)
    return svi, svi.init(KEY, *args, init_params=init_params)


START = {"level": 0.3, "lengthscale": jnp.array([0.5, 2.0]), "variance": 1.5}
RESTS = (
    AutoNormal,
    AutoDelta,
    AutoLowRankMultivariateNormal,
    functools.partial(AutoNormal, init_loc_fn=init_to_value(values=START)),
)


@pytest.mark.slow
@pytest.mark.parametrize("rest", RESTS)
def test_leaves_what_numpyro_leaves(rest, monkeypatch):
    """Parameters, medians, draws and the prototype trace; one support depends on another site."""

    def outcome() -> tuple[Any, ...]:
        guide = sgp.guides.AutoSparseGP(model, rest=rest, inducing_points=Z)
        svi, state = started(guide, X, Y)
        params = svi.get_params(state)
        drawn = guide.rest.sample_posterior(KEY, params, X, Y)
        # NumPyro's methods, which run the model again with the stored trace.
        with_noise = guide.rest.median(params)
        return params, guide.median(params), drawn, with_noise, guide.rest.prototype_trace

    at_once = outcome()
    assert rest is AutoDelta or "noise" in at_once[3]
    monkeypatch.setattr(guides, "_first_run", one_by_one)
    by_steps = outcome()
    for left, right in zip(at_once[:4], by_steps[:4], strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), left, right)
    assert list(at_once[4]) == list(by_steps[4])
    for name, site in by_steps[4].items():
        compiled_site = at_once[4][name]
        assert site["type"] == compiled_site["type"]
        assert site.get("cond_indep_stack") == compiled_site.get("cond_indep_stack")
        if site["type"] == "sample":
            assert type(site["fn"].support) is type(compiled_site["fn"].support)


@pytest.mark.slow
@pytest.mark.parametrize("rest", (AutoNormal, AutoMultivariateNormal))
def test_keeps_nothing_traced(rest):
    guide = sgp.guides.AutoSparseGP(model, rest=rest, num_inducing=5)
    started(guide, X, Y)
    assert guide.rest.prototype_trace is not None

    def look(attribute: Any) -> None:
        for leaf in jax.tree.leaves(attribute):
            assert not isinstance(leaf, jax.core.Tracer)
            if isinstance(leaf, functools.partial):
                look((leaf.args, leaf.keywords, leaf.func))
            elif isinstance(leaf, numpyro.primitives.Messenger):
                look(vars(leaf))
            elif closure := getattr(leaf, "__closure__", None):
                look([cell.cell_contents for cell in closure])

    look(vars(guide.rest))


def compilations(caplog: Any) -> int:
    return sum("Finished XLA compilation" in record.message for record in caplog.records)


GUIDES = {
    "sparse": functools.partial(sgp.guides.AutoSparseGP, num_inducing=7),
    "hybrid": functools.partial(sgp.guides.AutoHybridGP, num_inducing=7, num_residual=9),
    "decoupled": functools.partial(sgp.guides.AutoDecoupledGP, mean_size=9, cov_size=7),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_is_few_programs(name, caplog):
    runs = 0

    def model(X: Array, y: Array, batch: int) -> None:
        nonlocal runs
        runs += 1
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        rows = sgp.plate("rows", len(X), batch)
        X, y = rows.take(X, y)
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
        with rows:
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    svi = SVI(model, GUIDES[name](model), optax.adam(0.01), LOSS)
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        svi.init(KEY, X, Y, BATCH)
    assert 0 < compilations(caplog) <= 30
    assert 0 < runs <= 9


@pytest.mark.slow
def test_is_a_draw_of_the_guide():
    """A draw from the prior for each key, since the guide is untrained."""
    values, num = [], 5
    for key in range(num):
        guide = sgp.guides.AutoSparseGP(model, rest=AutoDelta, inducing_points=Z)
        trace = handlers.trace(handlers.seed(guide, key)).get_trace(X, Y, None)
        deviation = float(jnp.sqrt(trace["variance"]["value"]))
        values.append(np.array(trace["f"]["value"]) / deviation)
    assert np.std(values) == pytest.approx(1.0, abs=4.0 / (2.0 * N * num) ** 0.5)
    assert abs(np.mean(values)) < 4.0 / (N * num) ** 0.5
    assert len({value[0] for value in values}) == num


@pytest.mark.slow
@pytest.mark.parametrize("by", ("init_params", "substitute", "condition"))
def test_given_values_are_the_ones_that_it_has(by):
    guide = sgp.guides.AutoSparseGP(model, rest=AutoDelta, inducing_points=Z)
    if by == "init_params":
        svi, state = started(guide, X, Y, init_params={"level_auto_loc": jnp.array(0.7)})
        assert svi.get_params(state)["level_auto_loc"] == jnp.array(0.7)
        return
    name = "level_auto_loc" if by == "substitute" else "level"
    handler = getattr(handlers, by)
    substituted = handler(handlers.seed(guide, KEY), data={name: jnp.array(0.7)})
    trace = handlers.trace(substituted).get_trace(X, Y)
    assert trace["level"]["value"] == jnp.array(0.7)


@pytest.mark.slow
def test_a_model_that_is_not_to_be_traced():
    def on_the_host(X: Array, y: Array) -> None:
        assert np.asarray(X).ndim == 2
        model(X, y)

    guide = sgp.guides.AutoSparseGP(on_the_host, rest=AutoNormal, inducing_points=Z)
    svi, state = started(guide, X, Y)
    assert jnp.isfinite(svi.evaluate(state, X, Y))


@pytest.mark.slow
def test_numpy_arrays_and_sites_without_a_plate():
    def plain(X: Any, y: Any) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
        numpyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)

    guide = sgp.guides.AutoSparseGP(plain, num_inducing=5)
    svi, state = started(guide, np.asarray(X), np.asarray(Y))
    assert jnp.isfinite(svi.evaluate(state, X, Y))


def of_events(X: Any, y: Any) -> None:
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.5), X))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.MultivariateNormal(jnp.stack([f, -f], -1), jnp.eye(2)), obs=y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Out-of-support values")
def test_what_is_wrong_is_said_as_before():
    guide = sgp.guides.AutoSparseGP(model, inducing_points=Z)
    with pytest.raises(ValueError, match="the observations of `y` hold NaN"):
        started(guide, X, Y.at[3].set(jnp.nan), None)
    guide = sgp.guides.AutoSparseGP(of_events, inducing_points=Z)
    with pytest.raises(ValueError, match="the observations of `y` hold NaN"):
        started(guide, X, jnp.stack([Y.at[3].set(jnp.nan), Y], axis=1))
    guide = sgp.guides.AutoSparseGP(model, inducing_points=Z)
    with pytest.raises(ValueError, match="`X` must be finite"):
        started(guide, X.at[3].set(jnp.nan), Y, None)
    guide = sgp.guides.AutoSparseGP(model, num_inducing=N)
    with pytest.warns(UserWarning, match=f"there are only {N - 1} rows"):
        started(guide, X[1:], Y[1:], None)


@pytest.mark.slow
def test_draws_of_a_start_are_searched_for():
    """NumPyro's uniform initialization may need several draws, and is not compiled."""
    rest = functools.partial(AutoNormal, init_loc_fn=init_to_uniform)
    guide = sgp.guides.AutoSparseGP(model, rest=rest, inducing_points=Z)
    with handlers.seed(rng_seed=KEY):
        assert guides._first_run(guide, (X, Y), {}) is None
    svi, state = started(guide, X, Y)
    assert jnp.isfinite(svi.evaluate(state, X, Y))


@pytest.mark.slow
def test_networks_and_nested_guides(caplog):
    linen = pytest.importorskip("flax.linen")

    def deep(X: Array, y: Array) -> None:
        network = flax_module("network", linen.Dense(2), input_shape=(2,))
        rows = sgp.plate("rows", len(X), BATCH)
        X, y = rows.take(X, y)
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), network(X)))
        g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(2.0), X))
        with rows:
            numpyro.sample("y", dist.Normal(f + g, noise), obs=y)

    inner = functools.partial(sgp.guides.AutoSparseGP, site="g", num_inducing=5)
    guide = sgp.guides.AutoSparseGP(deep, "f", rest=inner, num_inducing=4)
    svi, state = started(guide, X, Y)
    params = svi.get_params(state)
    assert params["f_auto_inducing_points"].shape == (4, 2)
    assert params["g_auto_inducing_points"].shape == (5, 2)
    assert jax.tree.leaves(params["network$params"])
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        state, loss = jax.jit(svi.update)(state, X, Y)
    assert jnp.isfinite(loss)
    # The step, and one check for each function that the likelihood does not combine its rows.
    assert 0 < compilations(caplog) <= 3
    assert guide.posterior(svi.get_params(state), X, Y).mean(X).shape == (N,)
