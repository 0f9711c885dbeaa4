"""A second call compiles nothing, and uses the current values of variables that functions read.

Over the members of `registry.py`, outside of compiled code, as users call them.
"""

import contextlib
import copy
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

import numpyro_scalegp as sgp
from numpyro_scalegp.solvers import KernelOperator
from tests.compilation import assert_compiled_once, programs
from tests.conformance import inputs, of_columns, with_neighbors
from tests.registry import (
    DISTRIBUTIONS,
    ESTIMATORS,
    FEATURES,
    KERNELS,
    LATENT_FAMILIES,
    OPERATORS,
    POSTERIORS,
    PRECONDITIONERS,
    SOLVERS,
)

X = np.asarray(inputs())
Xs = X[:3] + 0.05
KEY = jax.random.key(0)


def kernel(lengthscale: float) -> sgp.kernels.Matern52:
    return sgp.kernels.Matern52(jnp.asarray(lengthscale, jnp.float32), 1.5)


def of_kernel(factory: Any) -> Callable[[float], Any]:
    def call(value: float) -> Any:
        k = factory(value)
        rows = inputs(kernel=k)
        return k(rows, rows), k.diag(rows), k.covariance(rows)

    return call


def of_operator(factory: Any) -> Callable[[float], Any]:
    def call(value: float) -> Any:
        H = factory(kernel(value), jnp.asarray(X))
        return H.matmul(X[:, :2]), H.bilinear_gradient(X[:, :1], X[:, 1:2])

    return call


def of_preconditioner(factory: Any) -> Callable[[float], Any]:
    def call(value: float) -> Any:
        factor = factory().factorize(KernelOperator(kernel(value), jnp.asarray(X), 0.5))
        return factor.solve(X), factor.log_determinant(), factor.sample(KEY, 2)

    return call


def of_solver(factory: Any) -> Callable[[float], Any]:
    def call(value: float) -> Any:
        operator = KernelOperator(kernel(value), jnp.asarray(X), 0.5)
        return factory().solve(operator, jnp.asarray(X[:, :2]), key=KEY)

    return call


def of_estimator(factory: Any) -> Callable[[float], Any]:
    estimator = with_neighbors(factory(), jnp.asarray(X))

    def call(value: float) -> Any:
        k = of_columns(kernel(value), estimator)
        gp = sgp.GaussianProcess(k, X, 0.1, estimator=estimator, key=KEY)
        y = value * np.sin(X[:, 0])
        return gp.log_prob(y), gp.sample(KEY, (2,)), gp.condition(y)

    return call


def of_features(factory: Any) -> Callable[[float], Any]:
    def call(value: float) -> Any:
        features = factory(kernel(value), jnp.asarray(X))
        prior = sgp.WeightSpaceGP(features, X)
        return features(X), prior.sample(KEY), prior.condition(X[:, 0]).mean(Xs)

    return call


def of_distribution(factory: Any) -> Callable[[float], Any]:
    def call(value: float) -> Any:
        d = factory(kernel(value), jnp.asarray(X))
        y = jnp.abs(d.sample(KEY))
        parts = [d.log_prob(y), d.mean, d.variance]
        if hasattr(d, "condition") and not isinstance(d, sgp.FeatureSpaceGP):
            posterior = d.condition(y)
            parts.append(posterior)
            if hasattr(d, "leave_one_out"):
                parts.append(d.leave_one_out(posterior).log_prob(y))
        return parts

    return call


def of_posterior(factory: Any) -> Callable[[float], Any]:
    def call(value: float) -> Any:
        p = factory(kernel(value), jnp.asarray(X))
        parts = [p.mean(Xs), p.variance(Xs), p.sample(KEY, Xs, 2), p.diagnostics]
        predictive = p.predictive(Xs, 0.1)
        parts += [predictive.mean, predictive.variance, p.sample_functions(KEY, 2)(Xs)]
        for method, arguments in ((p.leave_one_out, ()), (p.covariance, (Xs,))):
            with contextlib.suppress(ValueError):  # where a posterior has none
                parts.append(method(*arguments))
        return parts

    return call


MEMBERS = [
    pytest.param(of(factory), id=f"{kind}-{name}")
    for kind, of, registry in (
        ("kernel", of_kernel, KERNELS),
        ("operator", of_operator, OPERATORS),
        ("preconditioner", of_preconditioner, PRECONDITIONERS),
        ("solver", of_solver, SOLVERS),
        ("estimator", of_estimator, ESTIMATORS),
        ("features", of_features, FEATURES),
        ("family", of_distribution, LATENT_FAMILIES),
        ("distribution", of_distribution, DISTRIBUTIONS),
        ("posterior", of_posterior, POSTERIORS),
    )
    for name, factory in registry
]


@pytest.mark.one_interpreter
@pytest.mark.parametrize("call", MEMBERS)
def test_a_second_call_compiles_nothing(call):
    assert_compiled_once(call)


# What a function reads


class Setting:
    """A number that a user's function reads in one of several ways."""

    def __init__(self, way: str) -> None:
        self.way, self.value, self.table = way, 1.0, {"value": 1.0}
        self.module = types.ModuleType("settings")
        self.module.value = 1.0
        cell = 1.0

        def read() -> float:
            return cell

        def write(value: float) -> None:
            nonlocal cell
            cell = value

        self.read_cell, self.write_cell = read, write

    def read(self) -> float:
        if self.way == "closure":
            return self.read_cell()
        if self.way == "global":
            return a_global
        if self.way == "module":
            return self.module.value
        return self.value if self.way == "attribute" else self.table["value"]

    def write(self, value: float) -> None:
        global a_global
        a_global = self.value = self.table["value"] = self.module.value = value
        self.write_cell(value)


a_global = 1.0
WAYS = ("global", "attribute", "closure", "module", "mutable")
rows = np.linspace(0.0, 2.0, 6)[:, None]
targets = np.sin(3.0 * rows[:, 0])
counts = np.arange(6) % 4


class Tilted(sgp.kernels.AbstractKernel):
    """A kernel whose class reads a variable of its module."""

    def evaluate(self, X: Any, Z: Any) -> Any:
        return a_global + X @ Z.T

    def evaluate_diag(self, X: Any) -> Any:
        return a_global + jnp.sum(X * X, axis=1)


def of_mean(setting: Setting) -> Any:
    gp = sgp.GaussianProcess(kernel(0.5), rows, 0.1, mean=lambda X: setting.read() * X[:, 0])
    return lambda: (gp.condition(targets).mean(rows), gp.sample(KEY), gp.log_prob(targets))


def of_likelihood(setting: Setting) -> Any:
    gp = sgp.LaplaceGP(kernel(0.5), rows, lambda f: dist.Poisson(setting.read() * jnp.exp(f)))
    return lambda: (gp.log_prob(counts), gp.leave_one_out(gp.condition(counts)).log_prob(counts))


def of_gradient(setting: Setting) -> Any:
    def density(lengthscale: Any) -> Any:
        likelihood = lambda f: dist.Poisson(setting.read() * jnp.exp(f))  # noqa: E731
        return sgp.LaplaceGP(sgp.kernels.Matern52(lengthscale), rows, likelihood).log_prob(counts)

    return lambda: jax.value_and_grad(density)(0.5)


def of_derivative_rule(setting: Setting) -> Any:
    @jax.custom_jvp
    def link(level: Any) -> Any:
        return jnp.tanh(level)

    link.defjvp(lambda primals, tangents: (link(*primals), setting.read() * tangents[0]))
    gradient = jax.grad(lambda level: log_density_with(link, level))
    second = jax.custom_vjp(jnp.tanh)
    second.defvjp(lambda level: (jnp.tanh(level), None), lambda _, g: (setting.read() * g,))
    return lambda: (gradient(0.3), jax.grad(lambda level: log_density_with(second, level))(0.3))


def of_batching_rule(setting: Setting) -> Any:
    @jax.custom_batching.custom_vmap
    def link(level: Any) -> Any:
        return level

    link.def_vmap(lambda size, is_batched, level: (setting.read() * level, True))
    return lambda: jax.vmap(lambda level: log_density_with(link, level))(jnp.array([0.3, 0.4]))


def log_density_with(link: Callable[[Any], Any], level: Any) -> Any:
    likelihood = lambda f: dist.Poisson(jnp.exp(f + link(level)))  # noqa: E731
    return sgp.LaplaceGP(kernel(0.5), rows, likelihood).log_prob(counts)


def of_feature_map(setting: Setting) -> Any:
    mapped = sgp.kernels.FeatureMapped(kernel(0.5), lambda X: setting.read() * X)
    gp = sgp.GaussianProcess(mapped, rows, 0.1)
    return lambda: (gp.condition(targets).mean(rows), gp.condition(targets).variance(rows))


def of_learned(setting: Setting) -> Any:
    features = sgp.features.Learned(lambda X: jnp.concatenate([X, setting.read() * X**2], axis=1))
    prior = sgp.WeightSpaceGP(features, rows)
    return lambda: (features(rows), prior.sample(KEY))


def of_kernel_class(setting: Setting) -> Any:
    operator = KernelOperator(Tilted(), jnp.asarray(rows), 0.1)
    gp = sgp.GaussianProcess(Tilted(), rows, 0.1)
    return lambda: (
        gp.log_prob(targets),
        gp.condition(targets).mean(rows),
        operator.matmul(rows),
        sgp.solvers.ConjugateGradients().solve(operator, jnp.asarray(rows)).value,
    )


def draws_of(setting: Setting) -> tuple[Any, dict[str, Any]]:
    def model(X: Any, y: Any = None) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
        noise = 0.1 * setting.read()
        gp = sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale), X, noise)
        numpyro.sample("y", gp, obs=y)

    return model, {"lengthscale": jnp.array([0.5, 0.7])}


def of_model(setting: Setting) -> Any:
    model, draws = draws_of(setting)
    return lambda: sgp.posterior(model, draws, rows, targets).mean(rows[:2])


def of_predictive(setting: Setting) -> Any:
    model, draws = draws_of(setting)
    predictive = sgp.infer.Predictive(model, posterior_samples=draws)
    return lambda: predictive.draws(KEY, rows, targets).log_likelihood["y"]


def of_guide(setting: Setting) -> Any:
    def model(X: Any, y: Any) -> None:
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
        f = numpyro.sample("f", sgp.LatentGP(kernel(0.5), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(setting.read() * f, scale), obs=y)

    guide = sgp.guides.AutoDecoupledGP(model, mean_points=rows, cov_points=rows[:2])
    svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
    params = svi.get_params(svi.init(KEY, rows, targets))
    return lambda: guide.solve_mean(params, rows, targets).params["f_auto_mean_weights"]


READERS = [
    of_mean,
    of_likelihood,
    of_gradient,
    of_derivative_rule,
    of_batching_rule,
    of_feature_map,
    of_learned,
    of_kernel_class,
    of_model,
    of_predictive,
    of_guide,
]


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("make", READERS)
def test_what_a_function_reads_is_what_it_computes_with(make):
    ways = WAYS if make in (of_mean, of_derivative_rule) else ("global", "attribute")
    for way in ways[:1] if make is of_kernel_class else ways:
        setting = Setting(way)
        setting.write(2.0)
        expected = leaves(make(setting)())
        jax.clear_caches()
        setting.write(1.0)
        evaluate = make(setting)
        first = leaves(evaluate())
        setting.write(2.0)
        for again in (evaluate, make(setting)):
            for leaf, right, before in zip(leaves(again()), expected, first, strict=True):
                np.testing.assert_allclose(leaf, right, rtol=1e-4, atol=1e-5)
                assert not np.allclose(leaf, before, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "estimator"),
    [(way, None) for way in WAYS] + [("attribute", sgp.estimators.Pathwise())],
)
def test_a_posterior_refuses_functions_that_have_changed(way, estimator):
    """Weights from earlier function values are not combined with current function values."""
    setting = Setting(way)
    mapped = sgp.kernels.FeatureMapped(kernel(0.5), lambda X: setting.read() * X)
    tilted = lambda X: setting.read() * X[:, 0]  # noqa: E731
    for k, mean in ((kernel(0.5), tilted), (mapped, None)):
        setting.write(1.0)
        gp = sgp.GaussianProcess(k, rows, 0.1, mean=mean, estimator=estimator, key=KEY)
        posterior = gp.condition(targets)
        calls = [posterior.mean, posterior.predictive, posterior.sample_functions(KEY)]
        before = [leaves(call(rows[:3])) for call in calls]
        setting.write(2.0)
        for call in calls:
            with pytest.raises(ValueError, match="computes something else than when this"):
                call(rows[:3])
        setting.write(1.0)
        for call, values in zip(calls, before, strict=True):
            np.testing.assert_array_equal(leaves(call(rows[:3])), values)


calls: list[int] = []


def counted(X: Any) -> Any:
    calls.append(len(X))
    return 2.0 * X[:, 0]


def called_back(X: Any) -> Any:
    shape = jax.ShapeDtypeStruct(X.shape[:1], X.dtype)
    return jax.pure_callback(lambda X: 2.0 * X[:, 0], shape, X, vmap_method="sequential")


@pytest.mark.parametrize(
    "mean",
    [
        counted,
        called_back,
        lambda X: jnp.linalg.norm(X, axis=1) + X @ jnp.ones(1),
        jax.tree_util.Partial(lambda slope, X: slope * X[:, 0], jnp.asarray(2.0)),
        eqx.nn.MLP(1, "scalar", 2, 1, key=KEY),
    ],
)
def test_what_is_no_change_of_a_function(mean):
    posterior = sgp.GaussianProcess(kernel(0.5), rows, 0.1, mean=mean).condition(targets)
    expected = posterior.mean(rows)
    for same in (posterior, copy.deepcopy(posterior), jax.device_get(posterior)):
        np.testing.assert_array_equal(same.mean(rows), expected)
    settings = [
        jax.enable_x64(True), jax.disable_jit(), jax.default_matmul_precision("float32"),
        jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
    ]  # fmt: skip
    for setting in settings:
        with setting:
            np.testing.assert_allclose(posterior.mean(rows), expected, rtol=1e-5)


def test_a_change_is_seen_in_another_precision():
    setting = Setting("global")
    mean = lambda X: setting.read() * X[:, 0]  # noqa: E731
    setting.write(1.0)
    posterior = sgp.GaussianProcess(kernel(0.5), rows, 0.1, mean=mean).condition(targets)
    setting.write(2.0)
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match="computes something else than when this"),
    ):
        posterior.mean(rows)


def test_a_posterior_after_nuts_keeps_what_its_model_read():
    setting = Setting("attribute")
    model, draws = draws_of(setting)
    before = sgp.posterior(model, draws, rows, targets)
    setting.write(50.0)
    after = sgp.posterior(model, draws, rows, targets)
    setting.write(1.0)
    np.testing.assert_array_equal(
        before.mean(rows), sgp.posterior(model, draws, rows, targets).mean(rows)
    )
    assert not np.allclose(before.mean(rows), after.mean(rows), atol=0.01)


# What stays alive


class Owned:
    """An object that a user's function holds."""


def fit(held: Owned) -> None:
    def model(X: Any, y: Any = None) -> None:
        assert held
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
        f = numpyro.sample("f", sgp.LatentGP(kernel(0.5), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, scale), obs=y)

    guide = sgp.guides.AutoSparseGP(model, num_inducing=3)
    svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
    state, _ = svi.update(svi.init(KEY, rows, targets), rows, targets)
    posterior = sgp.posterior(model, guide, svi.get_params(state), rows, targets)
    posterior.mean(rows)
    predictive = sgp.infer.Predictive(
        model, guide=guide, params=svi.get_params(state), num_samples=2
    )
    predictive(KEY, rows)


def condition(held: Owned) -> None:
    gp = sgp.GaussianProcess(kernel(0.5), rows, 0.1, mean=lambda X: X[:, 0] * bool(held))
    gp.condition(targets).mean(rows)
    gp.log_prob(targets)


def approximate(held: Owned) -> None:
    gp = sgp.LaplaceGP(kernel(0.5), rows, lambda f: dist.Poisson(jnp.exp(f) * bool(held)))
    gp.log_prob(counts)
    gp.condition(counts).mean(rows)


def average(held: Owned) -> None:
    def model(X: Any, y: Any = None) -> None:
        assert held
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
        gp = sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale), X, 0.1)
        numpyro.sample("y", gp, obs=y)

    draws = {"lengthscale": jnp.array([0.5, 0.7])}
    sgp.posterior(model, draws, rows, targets).mean(rows)
    sgp.infer.Predictive(model, posterior_samples=draws)(KEY, rows, targets)


@pytest.mark.slow
@pytest.mark.parametrize("use", [fit, condition, approximate, average])
def test_nothing_that_a_function_holds_stays_alive(use):
    held = Owned()
    reference = weakref.ref(held)
    use(held)
    del held
    gc.collect()
    assert reference() is None


# Loops


@pytest.mark.slow
def test_folds_of_a_cross_validation_compile_nothing():
    draws = {"lengthscale": jnp.array([0.5, 0.7])}
    for fold in range(8):
        shown = np.arange(6) != fold % 6

        def model(X: Any, y: Any = None, shown: Any = shown) -> None:
            lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
            k = sgp.kernels.Matern52(lengthscale)
            numpyro.sample("y", sgp.GaussianProcess(k, X, 0.1, observed=shown), obs=y)

        if fold == 2:
            before = programs.number
        posterior = sgp.posterior(model, draws, rows, targets)
        posterior.predictive(rows[~shown]).log_prob(targets[~shown])
        likelihood = sgp.GaussianProcess(kernel(0.5), rows, 0.1, observed=shown)
        likelihood.condition(targets).mean(rows[~shown])
    assert programs.number == before
