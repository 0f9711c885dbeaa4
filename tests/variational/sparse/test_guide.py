"""The guide for one sparse GP site: training, other sites, and errors."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from jaxtyping import Array
from numpyro import handlers
from numpyro.contrib.module import nnx_module
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoMultivariateNormal, AutoNormal
from numpyro.infer.initialization import init_to_value

import numpyro_scalegp as sgp
from numpyro_scalegp.guides import AutoSparseGP
from numpyro_scalegp.tracing.sites import find_gp_site

N, M = 40, 6
KEY = jax.random.key(0)


def data(n: int = N) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-2, 2, size=(n, 1)), axis=0)
    return jnp.array(X), jnp.array(np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=n))


def model(X: Array, y: Array | None = None, batch: int | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.5))
    rows = sgp.plate("rows", X.shape[0], batch)
    with rows as index:
        X = X[index]
        y = None if y is None else y[index]
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


class Trained(NamedTuple):
    params: dict[str, Array]
    losses: Array


def train(
    model: Callable,
    guide: Callable,
    *args: Any,
    loss: Any = None,
    steps: int = 3,
    rate: Any = 0.02,
) -> Trained:
    """`SVI.run` in one compiled program, with `init`."""
    svi = SVI(model, guide, optax.adam(rate), loss or sgp.infer.QuadratureELBO(2))

    @jax.jit
    def run(key: Array) -> Any:
        def step(state: Any, _: None) -> Any:
            return svi.update(state, *args)

        return jax.lax.scan(step, svi.init(key, *args), length=steps)

    state, losses = run(KEY)
    return Trained(svi.get_params(state), losses)


def draw(guide: Callable, *args: Any) -> Any:
    """Run a guide once without computing anything: errors come while it is traced."""
    return jax.eval_shape(lambda key: handlers.seed(guide, key)(*args), KEY)


# Training


@pytest.mark.parametrize("loss", ["quadrature", "stock"])
def test_reaches_the_exact_posterior(loss, x64):
    """With inducing points at the data and fixed hyperparameters the bound is tight."""
    X, y = data(20)
    Xs = jnp.linspace(-2.5, 2.5, 11)[:, None]
    kernel, noise = sgp.kernels.RBF(0.7, 1.2), 0.1

    def model(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(kernel, X))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise**0.5), obs=y)

    gp = sgp.GaussianProcess(kernel, X, noise)
    guide = AutoSparseGP(model, inducing_points=X, jitter=1e-8)
    quadrature = sgp.infer.QuadratureELBO(2)
    objective = quadrature if loss == "quadrature" else TraceMeanField_ELBO()
    schedule = optax.cosine_decay_schedule(0.1, 600)
    params = train(model, guide, X, y, loss=objective, steps=600, rate=schedule).params

    @jax.jit
    def compare(params: dict[str, Array]) -> Any:
        posterior, truth = guide.posterior(params, X, y), gp.condition(y)
        bound = -quadrature.loss(KEY, params, model, guide, X, y)
        moments = [(p.mean(Xs), jnp.sqrt(p.variance(Xs))) for p in (posterior, truth)]
        return bound, gp.log_prob(y), *moments

    bound, exact, (mean, sd), (true_mean, true_sd) = compare(params)
    assert bound <= exact + 1e-6
    rounding = 0.02 if loss == "quadrature" else 0.3
    np.testing.assert_allclose(bound, exact, atol=rounding)
    np.testing.assert_allclose(mean, true_mean, atol=0.5 * rounding)
    np.testing.assert_allclose(sd, true_sd, atol=0.5 * rounding)


def argument_model(X: Array, y: Array | None, size: int) -> None:
    """Mini-batches as arguments: the model gets their rows and the size of the data."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.5))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with handlers.scale(scale=size / X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise).to_event(1), obs=y)


NUM_STEPS = 1500
DECAY = optax.cosine_decay_schedule(0.05, NUM_STEPS)


@functools.cache
def by_mini_batches() -> tuple[AutoSparseGP, dict[str, Array]]:
    """A guide trained on mini-batches that the model draws, and its parameters."""
    X, y = data(200)
    guide = AutoSparseGP(model, inducing_points=sgp.features.kmeans_points(KEY, X, 12))
    return guide, train(model, guide, X, y, 40, steps=NUM_STEPS, rate=DECAY).params


@pytest.mark.parametrize("by", ["plate", "arguments"])
def test_learns_from_mini_batches(by):
    X, y = data(200)
    if by == "plate":
        guide, params = by_mini_batches()
        posterior = guide.posterior(params, X, y, 40)
    else:
        start = sgp.features.kmeans_points(KEY, X, 12)
        guide = AutoSparseGP(argument_model, inducing_points=start)
        svi = SVI(argument_model, guide, optax.adam(DECAY), sgp.infer.QuadratureELBO(2))

        @jax.jit
        def run(X: Array, y: Array) -> Any:
            def step(state: Any, key: Array) -> Any:
                index = jax.random.choice(key, 200, (40,), replace=False)
                return svi.update(state, X[index], y[index], 200)

            state = svi.init(KEY, X[:40], y[:40], 200)
            return jax.lax.scan(step, state, jax.random.split(KEY, NUM_STEPS))

        params = svi.get_params(run(X, y)[0])
        posterior = guide.posterior(params, X[:1], None, 200)
    noise = guide.median(params)["noise"]
    assert 0.15 < noise < 0.27
    Xs = jnp.linspace(-1.8, 1.8, 9)[:, None]

    @jax.jit
    def moments(posterior: Any) -> Any:
        truth = sgp.GaussianProcess(posterior.kernel, X, noise**2).condition(y)
        return [(p.mean(Xs), p.variance(Xs)) for p in (posterior, truth)]

    (mean, variance), (true_mean, true_variance) = moments(posterior)
    np.testing.assert_allclose(mean, true_mean, atol=0.15)
    assert np.all((variance > true_variance / 3) & (variance < 3 * true_variance))


# Other sites


def hand_written(X: Array, y: Array | None = None, batch: int | None = None) -> None:
    for name in ("lengthscale", "noise"):
        loc = numpyro.param(f"{name}_loc", jnp.array(-1.0))
        numpyro.sample(name, dist.LogNormal(loc, 0.1))


RESTS: dict[str, tuple[Any, set[str]]] = {
    "delta": (AutoDelta, {"lengthscale_auto_loc", "noise_auto_loc"}),
    "multivariate": (AutoMultivariateNormal, {"auto_loc", "auto_scale_tril"}),
    "partial": (functools.partial(AutoNormal, prefix="rest"), {"lengthscale_rest_loc"}),
    "hand_written": (hand_written, {"lengthscale_loc", "noise_loc"}),
    "flow": (AutoIAFNormal, set()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESTS)
def test_rest(name):
    X, y = data()
    guide_class, expected = RESTS[name]
    guide = AutoSparseGP(model, rest=guide_class, num_inducing=M)
    result = train(model, guide, X, y, 10)
    assert np.isfinite(result.losses).all()
    expected_names = {"f_auto_inducing_points", "f_auto_loc", "f_auto_scale_tril"}
    assert expected_names | expected <= set(result.params)

    def inspect(params: dict[str, Array]) -> Any:
        draws = guide.sample_posterior(KEY, params, X[:7], sample_shape=(2, 3))
        return draws, guide.posterior(params, X, key=KEY).mean(X[:3])

    draws, mean = jax.eval_shape(inspect, result.params)
    shapes = {name: leaf.shape for name, leaf in draws.items() if not name.startswith("_")}
    assert shapes == {"lengthscale": (2, 3), "noise": (2, 3), "f": (2, 3, 7)}
    assert mean.shape == (3,)
    if name in ("hand_written", "flow"):
        with pytest.raises(ValueError, match=r"`rest` has no `median`: pass a `key`"):
            guide.posterior(result.params, X)
    else:
        assert set(guide.median(result.params)) == {"lengthscale", "noise"}
        by_medians = guide.posterior(result.params, X)
        assert by_medians.kernel.lengthscale == guide.median(result.params)["lengthscale"]


@pytest.mark.parametrize(
    ("kind", "loss"),
    [("constants", TraceMeanField_ELBO()), ("parameters", sgp.infer.QuadratureELBO(2))],
    ids=["constants", "parameters"],
)
def test_no_other_latent_sites(kind, loss):
    X, y = data()

    def model(X: Array, y: Array) -> None:
        if kind == "constants":
            lengthscale, noise = 0.5, 0.3
        else:
            lengthscale = numpyro.param("lengthscale", 0.5, constraint=constraints.positive)
            noise = numpyro.param("noise", 0.3, constraint=constraints.positive)
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    guide = AutoSparseGP(model, num_inducing=M)
    result = train(model, guide, X, y, loss=loss)
    assert np.isfinite(result.losses).all()
    posterior = guide.posterior(result.params, X, y)
    if kind == "parameters":
        assert result.params["lengthscale"] != 0.5
        assert result.params["noise"] != 0.3
        assert posterior.kernel.lengthscale == result.params["lengthscale"]
    assert guide.median(result.params) == {}
    assert guide.sample_posterior(KEY, result.params, X, y)["f"].shape == (N,)


def two_sites(X: Array, y: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.Matern32(2.0 * lengthscale), X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g - 1.0)), obs=y)


def nested() -> AutoSparseGP:
    inner = functools.partial(AutoSparseGP, site="g", num_inducing=M - 1)
    return AutoSparseGP(two_sites, "f", rest=inner, num_inducing=M)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [sgp.infer.QuadratureELBO(3), TraceMeanField_ELBO()])
def test_two_sites(loss, monkeypatch):
    X, y = data()
    refuse_the_prior(monkeypatch)
    guide = nested()
    result = train(two_sites, guide, X, y, loss=loss)
    assert np.isfinite(result.losses).all()
    params = result.params
    assert params["f_auto_inducing_points"].shape == (M, 1)
    assert params["g_auto_inducing_points"].shape == (M - 1, 1)
    draws = jax.eval_shape(
        lambda params: guide.sample_posterior(KEY, params, X[:7], sample_shape=(2,)), params
    )
    shapes = {name: leaf.shape for name, leaf in draws.items()}
    assert shapes == {"lengthscale": (2,), "f": (2, 7), "g": (2, 7)}

    outer = guide.posterior(params, X, y)
    assert isinstance(outer.kernel, sgp.kernels.RBF)
    median = guide.median(params)["lengthscale"]
    np.testing.assert_allclose(outer.kernel.lengthscale, median, rtol=1e-6)
    assert isinstance(guide.rest, AutoSparseGP)
    inner = guide.rest.posterior(params, X, y)
    assert isinstance(inner.kernel, sgp.kernels.Matern32)
    np.testing.assert_allclose(inner.kernel.lengthscale, 2.0 * median, rtol=1e-6)
    np.testing.assert_array_equal(inner.values.loc, params["g_auto_loc"])


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(1, 2, rngs=rngs)

    def __call__(self, X: Array) -> Array:
        return jnp.tanh(self.linear(X))


def test_a_function_of_a_function(x64):
    """The outer function is taken at the values of the inner one."""

    def deep(X: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
        numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(1.0 + f[0] ** 2), f[:, None]))

    Z = jnp.array([[-1.0], [1.0]])
    inner = functools.partial(AutoSparseGP, site="f", inducing_points=Z)
    guide = AutoSparseGP(deep, "g", rest=inner, inducing_points=Z)
    X = jnp.array([[-1.0], [0.5], [2.0]])
    with handlers.seed(rng_seed=0):
        sites = handlers.trace(guide).get_trace(X)
    np.testing.assert_array_equal(sites["g"]["fn"].X[:, 0], sites["f"]["value"])

    params = {name: site["value"] for name, site in sites.items() if site["type"] == "param"}
    params["f_auto_loc"] = jnp.array([1.0, -1.0])
    inner_mean = guide.rest.posterior(params, X).mean(X)
    kernel = guide.posterior(params, X).kernel
    np.testing.assert_allclose(kernel.lengthscale, 1.0 + inner_mean[0] ** 2)


@pytest.mark.slow
def test_network_in_the_model_is_trained():
    X, y = data()

    def model(X: Array, y: Array | None = None) -> None:
        network = nnx_module("network", Network(nnx.Rngs(0)))
        kernel = sgp.kernels.FeatureMapped(sgp.kernels.RBF(1.0), network)
        f = numpyro.sample("f", sgp.LatentGP(kernel, X))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = AutoSparseGP(model, num_inducing=M)
    svi = SVI(model, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(2))
    state = jax.jit(svi.init)(KEY, X, y)
    before = svi.get_params(state)
    state, _ = jax.jit(svi.update)(state, X, y)
    after = svi.get_params(state)
    names = [name for name in before if name.startswith("network")]
    assert names
    changed = jax.tree.map(
        lambda a, b: bool(np.any(a != b)),
        {name: before[name] for name in names},
        {name: after[name] for name in names},
    )
    assert jax.tree.leaves(changed)
    assert all(jax.tree.leaves(changed))
    # The posterior has the trained network.
    posteriors = [
        guide.posterior({**after, **net}, X, y)
        for net in ({}, {name: before[name] for name in names})
    ]
    weights = [jax.tree.leaves(posterior.kernel) for posterior in posteriors]
    assert any(np.any(a != b) for a, b in zip(*weights, strict=True))


# Runs


def refuse_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the prior's covariance was formed")

    for method in ("sample", "log_prob", "covariance"):
        monkeypatch.setattr(sgp.LatentGP, method, refuse)


@pytest.mark.slow
def test_setting_up_never_factorizes_the_prior(monkeypatch):
    X, y = data()
    refuse_the_prior(monkeypatch)
    for guide_class in (AutoNormal, AutoMultivariateNormal):
        guide = AutoSparseGP(model, rest=guide_class, num_inducing=M)
        svi = SVI(model, guide, optax.adam(0.02), TraceMeanField_ELBO())
        state = jax.eval_shape(lambda svi=svi: svi.init(KEY, X, y, 10))
        jax.eval_shape(lambda state, svi=svi: svi.update(state, X, y, 10), state)


def test_guide_and_model_see_the_same_rows():
    X, y = data()
    guide = AutoSparseGP(model, inducing_points=X[::8])

    @jax.jit
    def rows(key: Array) -> Any:
        guide_key, model_key = jax.random.split(key)
        guide_trace = handlers.trace(handlers.seed(guide, guide_key)).get_trace(X, y, 8)
        replayed = handlers.replay(handlers.seed(model, model_key), guide_trace)
        model_trace = handlers.trace(replayed).get_trace(X, y, 8)
        return (
            guide_trace["f"]["fn"].X,
            model_trace["f"]["fn"].X,
            model_trace["y"]["value"],
            y[model_trace["rows"]["value"]],
        )

    drawn = [rows(key) for key in jax.random.split(KEY, 3)]
    for of_guide, of_model, observed, expected in drawn:
        assert of_guide.shape == (8, 1)
        np.testing.assert_array_equal(of_guide, of_model)
        np.testing.assert_array_equal(observed, expected)
    assert not np.array_equal(drawn[0][0], drawn[1][0])


@pytest.mark.slow
def test_parameters_start_as_the_whitened_prior(x64):
    X, y = data()
    points = X[::8]
    guide = AutoSparseGP(model, inducing_points=points, prefix="q")
    svi = SVI(model, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(2))
    params = svi.get_params(jax.jit(svi.init)(KEY, X, y))
    np.testing.assert_array_equal(params["f_q_inducing_points"], points)
    np.testing.assert_array_equal(params["f_q_loc"], np.zeros(5))
    np.testing.assert_allclose(params["f_q_scale_tril"], np.eye(5), atol=1e-6)
    assert {leaf.dtype for leaf in params.values()} == {jnp.dtype("float64")}
    # Other sites start near prior medians, estimated from a few draws, and lengthscales at
    # distances between inputs.
    medians = guide.median(params)
    distance = sgp.infer.median_distance(X) / 2.0
    np.testing.assert_allclose(medians["lengthscale"], distance, rtol=0.01)
    np.testing.assert_allclose(medians["noise"], 0.8 * np.std(y), rtol=0.01)


def test_inducing_points_start_among_the_data():
    X, y = data()
    guide = AutoSparseGP(model, num_inducing=M)
    trace = jax.jit(
        lambda key: handlers.seed(handlers.trace(guide).get_trace, key)(X, y)[
            "f_auto_inducing_points"
        ]["value"]
    )(KEY)
    assert trace.shape == (M, 1)
    assert X.min() <= trace.min() < trace.max() <= X.max()
    assert len(np.unique(trace)) == M


def test_more_inducing_points_than_rows():
    X, y = data()
    guide = AutoSparseGP(argument_model, num_inducing=20)
    with pytest.warns(
        UserWarning, match=r"`num_inducing` is 20, but .* only 10 rows.*kmeans_point"
    ):
        value = draw(guide, X[:10], y[:10], N)
    assert value["f"].shape == (10,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(AutoSparseGP(argument_model, num_inducing=20), X[:20], y[:20], N)
        draw(AutoSparseGP(model, num_inducing=20), X, y, 10)


def test_predictive_at_new_inputs():
    guide, params = by_mini_batches()
    Xs = jnp.linspace(-2.0, 2.0, 7)[:, None]
    draws = Predictive(guide, params=params, num_samples=400)(jax.random.key(1), Xs)
    assert draws["f"].shape == (400, 7)
    # The draws average over hyperparameters; the mean is at their medians.
    mean = guide.posterior(params, Xs).mean(Xs)
    error = np.asarray(draws["f"]).std(axis=0) / np.sqrt(400)
    np.testing.assert_array_less(np.abs(draws["f"].mean(axis=0) - mean), 4 * error + 0.05)
    replicates = Predictive(model, guide=guide, params=params, num_samples=5)(KEY, Xs)
    assert replicates["y"].shape == (5, 7)


def test_posterior_by_medians_and_by_draws():
    X, y = data()
    guide, params = by_mini_batches()
    by_medians = guide.posterior(params, X, y, 10)
    assert by_medians.kernel.lengthscale == guide.median(params)["lengthscale"]
    np.testing.assert_array_equal(by_medians.points, params["f_auto_inducing_points"])
    np.testing.assert_array_equal(by_medians.values.loc, params["f_auto_loc"])
    np.testing.assert_array_equal(by_medians.values.scale_tril, params["f_auto_scale_tril"])

    @jax.jit
    @jax.vmap
    def lengthscale(key: Array) -> Array:
        return guide.posterior(params, X[:2], key=key).kernel.lengthscale

    # The `rest` guide is lognormal: logarithms of its draws have the moments of its parameters.
    logs = np.log(np.asarray(lengthscale(jax.random.split(KEY, 500))))
    loc, scale = params["lengthscale_auto_loc"], params["lengthscale_auto_scale"]
    assert abs(logs.mean() - loc) < 4 * scale / np.sqrt(500)
    assert abs(logs.std() - scale) < 4 * scale / np.sqrt(1000)


@pytest.mark.slow
def test_draws_have_the_moments_of_the_family():
    guide, params = by_mini_batches()
    # Hyperparameters that hardly vary, so that draws and the posterior at the medians agree.
    params = {**params, "lengthscale_auto_scale": jnp.array(1e-6)}
    X = data()[0][::5]
    draws = guide.sample_posterior(KEY, params, X, sample_shape=(2000,))
    assert {name: leaf.shape for name, leaf in draws.items()} == {
        "lengthscale": (2000,),
        "noise": (2000,),
        "f": (2000, 8),
    }
    posterior = guide.posterior(params, X)
    mean, variance = posterior.mean(X), posterior.variance(X)
    error = np.asarray(draws["f"]) - mean
    np.testing.assert_array_less(np.abs(error.mean(axis=0)), 4 * np.sqrt(variance / 2000))
    np.testing.assert_array_less(
        np.abs(np.mean(error**2, axis=0) - variance), 4 * variance * np.sqrt(2 / 2000)
    )


@pytest.mark.slow
def test_later_updates_do_not_retrace_and_may_donate_the_state():
    X, y = data()
    runs = []

    def counted(*args: Any) -> None:
        runs.append(args)
        model(*args)

    # Not a NumPyro guide, since these return their starting values themselves.
    guide = AutoSparseGP(counted, rest=hand_written, inducing_points=X[::8])
    svi = SVI(counted, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(2))
    state = svi.init(KEY, X, y, 10)
    first = jax.tree.map(np.array, svi.get_params(state))
    update = jax.jit(svi.update, static_argnums=3, donate_argnums=0)
    state, _ = update(state, X, y, 10)
    runs.clear()
    for _ in range(3):
        state, loss = update(state, X + 0.01, y, 10)
    assert runs == []
    assert np.isfinite(loss)
    # The donated state shares no arrays with the guide.
    again = svi.get_params(svi.init(KEY, X, y, 10))
    for name, value in first.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


@pytest.mark.slow
def test_stable_update_keeps_the_state_on_nan():
    X, y = data()
    guide = AutoSparseGP(model, num_inducing=M)
    svi = SVI(model, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(2))
    state = jax.jit(svi.init)(KEY, X, y)
    update = jax.jit(svi.stable_update)
    moved, loss = update(state, X, y)
    assert np.isfinite(loss)
    stuck, loss = update(moved, X, y.at[0].set(jnp.nan))
    assert np.isnan(loss)
    for name, value in svi.get_params(stuck).items():
        np.testing.assert_array_equal(value, svi.get_params(moved)[name])
        assert np.any(value != svi.get_params(state)[name])


@pytest.mark.parametrize("kind", ("normal", "poisson"))
def test_other_than_normal_observations_learn_an_unexplained_scale(kind, x64):
    """The scale raises the bound."""
    X, y = data()

    def counts(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.3), X))
        with numpyro.plate("rows", len(X)):
            normal, poisson = dist.Normal(f, 0.2), dist.Poisson(jnp.exp(3.0 + f))
            numpyro.sample("y", normal if kind == "normal" else poisson, obs=y)

    if kind == "poisson":
        y = jnp.round(jnp.exp(3.0 + y))
    guide = AutoSparseGP(counts, inducing_points=X[::8])
    params, losses = train(counts, guide, X, y, steps=300, rate=0.05)
    if kind == "normal":
        assert "f_auto_unexplained_scale" not in params
        return
    assert 0.0 < params["f_auto_unexplained_scale"] < 0.5
    loss = sgp.infer.QuadratureELBO(20, tight=False)
    at_one = {**params, "f_auto_unexplained_scale": jnp.ones(())}
    bounds = [-loss.loss(KEY, values, counts, guide, X, y) for values in (params, at_one)]
    assert bounds[0] == bounds[1] < -losses[-1] - 1.0
    # Predictions are the same without it.
    del at_one["f_auto_unexplained_scale"]
    posteriors = [guide.posterior(values, X, y) for values in (params, at_one)]
    np.testing.assert_array_equal(posteriors[0].variance(X), posteriors[1].variance(X))


@pytest.mark.slow
def test_no_tracer_leaks():
    X, y = data()
    guide = AutoSparseGP(model, num_inducing=M)
    svi = SVI(model, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(2))
    state = svi.init(KEY, X[:10], y[:10])
    with jax.checking_leaks():
        jax.eval_shape(lambda state: svi.update(state, X, y, 10), state)


# Errors


def test_several_sites_must_be_told_apart():
    X, y = data()
    with pytest.raises(ValueError, match=r"GP sites \['f', 'g'\]: name the one.*`site=`"):
        draw(AutoSparseGP(two_sites, rest=AutoDelta, num_inducing=M), X, y)


def test_site_inside_the_plate_of_the_rows():
    def inside(X: Array, y: Array | None = None) -> None:
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))

    with pytest.raises(ValueError, match="take the site out of the plate over the rows"):
        draw(AutoSparseGP(inside, num_inducing=M), *data())


def test_no_site():
    def without(X: Array, y: Array | None = None) -> None:
        numpyro.sample("f", dist.Normal())

    with pytest.raises(ValueError, match=r"the model has no GP site: write numpyro.sample\(name"):
        draw(AutoSparseGP(without), *data())
    with pytest.raises(ValueError, match=r"the model has no GP site `h`: write"):
        draw(AutoSparseGP(model, "h", num_inducing=M), *data())


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda prior: prior.expand([3]).to_event(1), "to_event"),
        (lambda prior: prior.mask(jnp.array(False)), "mask"),
    ],
)
def test_wrapped_site(wrap, name):
    def wrapped(X: Array) -> None:
        numpyro.sample("f", wrap(sgp.LatentGP(sgp.kernels.RBF(1.0), X)))

    with pytest.raises(ValueError, match=f"the GP site `f` has a `{name}` around it: write"):
        handlers.seed(AutoSparseGP(wrapped), 0)(data()[0])


def test_bad_options(unchecked):
    X, y = data()
    with pytest.raises(ValueError, match=r"`inducing_points` must have shape \(n, 1\), got \(4, 2"):
        draw(AutoSparseGP(model, inducing_points=jnp.zeros((4, 2))), X, y)


def init_params(model: Callable, guide: Callable, *args: Any) -> dict[str, Array]:
    svi = SVI(model, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(2))
    return svi.get_params(jax.jit(lambda key: svi.init(key, *args))(KEY))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_lengthscales_start_from_the_distances_between_rows(scale):
    rng = np.random.default_rng(0)
    X, y = jnp.array(rng.normal(size=(200, 12)) * scale), jnp.array(rng.normal(size=200))

    def model(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample(
            "lengthscale", dist.LogNormal(0.0, 1.0).expand([12]).to_event()
        )
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    expected = sgp.infer.median_distance(X) / 2.0
    guide = AutoSparseGP(model, num_inducing=M)
    medians = guide.median(init_params(model, guide, X, y))
    np.testing.assert_allclose(medians["lengthscale"], expected, rtol=0.3)
    np.testing.assert_allclose(medians["noise"], 0.8 * np.std(y), rtol=0.01)
    values = {"lengthscale": jnp.full(12, 1.5)}
    guide = AutoSparseGP(
        model,
        rest=functools.partial(AutoNormal, init_loc_fn=init_to_value(values=values)),
        num_inducing=M,
    )
    medians = guide.median(init_params(model, guide, X, y))
    np.testing.assert_allclose(medians["lengthscale"], 1.5, rtol=1e-5)


def targets() -> Array:
    return 3.0 + 0.4 * jnp.abs(data()[1])


@pytest.mark.parametrize(
    ("likelihood", "share", "expected"),
    [
        (lambda f, bias, noise: dist.Normal(f + bias, noise), 0.8, None),
        (lambda f, bias, noise: dist.StudentT(4.0, f, 2.0 * noise), 0.4, None),
        (lambda f, bias, noise: dist.Normal(f, 0.01 * noise), 0.0, 0.4),  # four times the median
        (lambda f, bias, noise: dist.Normal(f, 100.0 * noise), 0.0, 0.025),
        (lambda f, bias, noise: dist.Normal(f, 0.3), 0.0, 0.1),
        (lambda f, bias, noise: dist.Gamma(jnp.exp(f), noise), 0.0, 0.1),
        (lambda f, bias, noise: dist.LogNormal(f, noise), 0.0, 0.1),  # not the scale of y
        (lambda f, bias, noise: dist.Normal(f + targets(), noise), 0.0, 0.1),  # nothing is left
    ],
)
def test_noise_starts_at_what_leaves_room_for_a_function_of_zeros(likelihood, share, expected):
    X, y = data()[0], targets()

    def model(X: Array, y: Array) -> None:
        bias = numpyro.sample("bias", dist.Normal(0.0, 0.01))
        noise = numpyro.sample("noise", dist.LogNormal(jnp.log(0.1), 0.01))
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", likelihood(f, bias, noise), obs=y)

    guide = AutoSparseGP(model, num_inducing=M)
    medians = guide.median(init_params(model, guide, X, y))
    expected = share * np.std(y) if expected is None else expected
    np.testing.assert_allclose(medians["noise"], expected, rtol=0.02)
    assert abs(medians["bias"]) < 0.02


def test_inducing_points_start_among_rows_that_are_not_in_the_first_batch():
    X, y = data(1000)  # sorted
    params = init_params(model, AutoSparseGP(model, num_inducing=100), X, y, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Z = np.sort(np.asarray(params["f_auto_inducing_points"])[:, 0])
    assert Z.shape == (100,)
    assert np.diff(Z).max() < 0.2
    assert np.diff(Z).min() > 0.0


def test_rows_from_all_over_the_data_are_distinct():
    X, y = jnp.arange(100.0)[:, None], jnp.zeros(100)
    values = {"lengthscale": 1.0, "noise": 0.1}
    with handlers.seed(rng_seed=0):
        site = find_gp_site(model, None, sgp.LatentGP, values, (X, y, 15), {})
        all_rows = find_gp_site(model, None, sgp.LatentGP, values, (X, y), {})
    inputs = np.sort(np.asarray(site.rows())[:, 0])
    assert len(np.unique(inputs)) == len(inputs) == 90
    assert np.diff(inputs).max() <= 3
    assert site.rows(40).shape == (30, 1)
    np.testing.assert_array_equal(all_rows.rows(), X)


@pytest.mark.slow
@pytest.mark.parametrize(
    "guide", [AutoSparseGP, functools.partial(sgp.guides.AutoHybridGP, num_residual=N)]
)
def test_optimizers_see_whitened_values_in_units_that_suit_them(guide):
    X, y = data()
    svi = SVI(model, guide(model, num_inducing=M), optax.adam(0.01), sgp.infer.QuadratureELBO())
    state, _ = svi.update(svi.init(KEY, X, y), X, y)
    params = svi.get_params(state)
    # Adam's first step is the learning rate, regardless of the gradient.
    assert np.abs(params["f_auto_loc"]) == pytest.approx(0.04, rel=1e-2)
    diagonal = np.diagonal(params["f_auto_scale_tril"])
    assert np.abs(np.log(diagonal)) == pytest.approx(0.02, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("natural", [False, True])
def test_rows_in_float32_with_hyperparameters_in_float64(natural: bool, x64: None) -> None:
    X, y = data()

    def trained(dtype: type) -> Array:
        start = init_to_value(values={"lengthscale": 0.5, "noise": 0.3})
        inner = functools.partial(AutoDelta, init_loc_fn=start)
        points = jnp.linspace(-2.0, 2.0, M, dtype=dtype)[:, None]
        guide = AutoSparseGP(model, rest=inner, inducing_points=points, natural=natural)
        optimizer = optax.adam(0.01)
        if natural:
            optimizer = sgp.infer.natural_gradients(optimizer)
        svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO(2))
        return svi.run(KEY, 5, X.astype(dtype), y, progress_bar=False).losses

    np.testing.assert_allclose(trained(jnp.float32), trained(jnp.float64), rtol=1e-4)
