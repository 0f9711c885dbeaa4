"""The quadrature bound against closed forms, Monte Carlo and finite differences."""

import functools
from collections.abc import Callable
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
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.primitives import mutable

import numpyro_scalegp as sgp
from numpyro_scalegp.guides import AutoSparseGP
from numpyro_scalegp.infer import QuadratureELBO

N, M = 8, 4
KEY = jax.random.key(0)


# JAX caches the dtype that a NumPy array was converted to, even if the default dtype changes: so
# each use makes a new array.
def inputs() -> Array:
    return jnp.linspace(-1.5, 1.5, N)[:, None]


def inducing_points() -> Array:
    return jnp.linspace(-1.2, 1.2, M)[:, None]


def location() -> Array:
    return jnp.array([0.8, -0.5, 0.3, 1.0])


def scale() -> Array:
    return jnp.tril(jnp.full((M, M), 0.2)) + 0.4 * jnp.eye(M)


def observations(kind: str) -> Array:
    return jnp.array(Y[kind].tolist())


def kernel() -> sgp.kernels.RBF:
    return sgp.kernels.RBF(0.9, 1.4)


def prior() -> sgp.LatentGP:
    return sgp.LatentGP(kernel(), inputs())


def family(rows: Array | None = None, shift: float = 0.0) -> sgp.SparseGP:
    rows = inputs() if rows is None else rows
    return sgp.SparseGP(kernel(), rows, inducing_points(), location() + shift, scale())


def model(likelihood: Callable[[Array], Any], y: Array) -> Callable[[], None]:
    def run() -> None:
        f = numpyro.sample("f", prior())
        with numpyro.plate("rows", N):
            numpyro.sample("y", likelihood(f), obs=y)

    return run


def guide() -> None:
    numpyro.sample("f", family())


def expected_log_likelihood(num_nodes: int, likelihood: Any, y: Array) -> Array:
    """The bound without the divergence."""

    @jax.jit
    def value() -> Array:
        loss = QuadratureELBO(num_nodes, tight=False).loss(KEY, {}, model(likelihood, y), guide)
        return -loss + kl_divergence(family(), prior())

    return value()


Y = {
    "real": np.random.default_rng(0).normal(size=N),
    "binary": np.arange(N) % 2,
    "count": np.array([0, 1, 3, 0, 5, 2, 8, 1]),
}


@pytest.mark.parametrize("num_nodes", [2, 3, 20])
def test_normal_is_exact_from_two_nodes(num_nodes, x64):
    y, sd = observations("real"), 0.4
    value = expected_log_likelihood(num_nodes, lambda f: dist.Normal(f, sd), y)
    mean, variance = (np.asarray(a) for a in family().marginals())
    expected = np.sum(
        -0.5 * np.log(2 * np.pi * sd**2) - ((Y["real"] - mean) ** 2 + variance) / (2 * sd**2)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    one_node = expected_log_likelihood(1, lambda f: dist.Normal(f, sd), y)
    np.testing.assert_allclose(one_node - value, variance.sum() / (2 * sd**2), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("likelihood", "num_nodes"), [(dist.Normal, 2), (dist.Laplace, 20)])
def test_a_step_without_a_number_is_that_with_its_number(likelihood, num_nodes):
    """Both compile to the same program, with the same cost."""

    def made(y: Array) -> None:
        noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", prior())
        with numpyro.plate("rows", N):
            numpyro.sample("y", likelihood(f, noise), obs=y)

    auto = AutoSparseGP(made, inducing_points=inducing_points())

    def program(*args: int) -> str:
        svi = SVI(made, auto, optax.adam(0.01), QuadratureELBO(*args))
        state = svi.init(KEY, observations("real"))
        return jax.jit(svi.update).lower(state, observations("real")).as_text()

    assert program() == program(num_nodes)
    assert program() != program(3)


LIKELIHOODS: dict[str, tuple[Callable[[Array], Any], str]] = {
    "student_t": (lambda f: dist.StudentT(4.0, f, 0.3), "real"),
    "laplace": (lambda f: dist.Laplace(f, 0.5), "real"),
    "bernoulli": (lambda f: dist.Bernoulli(logits=f), "binary"),
    "poisson": (lambda f: dist.Poisson(jnp.exp(f)), "count"),
    "negative_binomial": (lambda f: dist.NegativeBinomial2(jnp.exp(f), 2.0), "count"),
    "normal": (lambda f: dist.Normal(f, 0.4), "real"),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods_against_monte_carlo(name):
    likelihood, kind = LIKELIHOODS[name]
    y = observations(kind)
    # A kink, as in the Laplace density, needs more nodes.
    value = expected_log_likelihood(80 if name == "laplace" else 20, likelihood, y)
    assert value.dtype == jnp.float32

    @jax.jit
    def draws() -> Array:
        mean, variance = family().marginals()
        f = mean + jnp.sqrt(variance) * jax.random.normal(KEY, (100_000, N))
        return likelihood(f).log_prob(y).sum(axis=1)

    values = np.asarray(draws(), np.float64)
    assert abs(value - values.mean()) < 4 * values.std() / np.sqrt(len(values))


def test_two_sites_against_monte_carlo(x64):
    y = observations("real")

    def model() -> None:
        f = numpyro.sample("f", prior())
        g = numpyro.sample("g", prior())
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(f, jnp.exp(0.5 * g)), obs=y)

    def guide() -> None:
        numpyro.sample("f", family())
        numpyro.sample("g", family(shift=-0.6))

    @jax.jit
    def both() -> Any:
        f, g = (
            mean + jnp.sqrt(variance) * jax.random.normal(key, (100_000, N))
            for key, (mean, variance) in zip(
                jax.random.split(KEY),
                (family().marginals(), family(shift=-0.6).marginals()),
                strict=True,
            )
        )
        values = dist.Normal(f, jnp.exp(0.5 * g)).log_prob(y).sum(axis=1)
        divergence = sum(kl_divergence(q, prior()) for q in (family(), family(shift=-0.6)))
        return -QuadratureELBO(16).loss(KEY, {}, model, guide) + divergence, values

    value, values = both()
    assert abs(value - values.mean()) < 4 * values.std() / np.sqrt(len(values))


# Functions that one likelihood combines


def classes(X: Array, y: Any = None, batch: int | None = None) -> None:
    rows = sgp.plate("rows", N, batch)
    X, y = rows.take(X, y)
    with numpyro.plate("functions", 3):
        f = numpyro.sample("f", sgp.LatentGP(kernel(), X))
    with rows:
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


@pytest.mark.slow
def test_functions_of_a_plate_train_and_predict():
    X, y = inputs(), jnp.arange(N) // 3
    guide = AutoSparseGP(classes, inducing_points=inducing_points())
    svi = SVI(classes, guide, optax.adam(0.05), QuadratureELBO(8))
    result = svi.run(KEY, 100, X, y, 4, progress_bar=False)
    assert result.losses[-30:].mean() < result.losses[:10].mean() - 0.5
    assert sgp.posterior(classes, guide, result, X, y).mean(X[:5]).shape == (3, 5)
    predictive = sgp.infer.Predictive(classes, guide=guide, params=result.params, num_samples=4)
    assert predictive(KEY, X)["y"].shape == (4, N)


@pytest.mark.slow
def test_natural_gradients_of_a_softmax_come_to_the_optimum(x64):
    """To the same optimum as Adam: reflected points leave little noise in the gradients."""
    X, y = inputs(), jnp.arange(N) // 3

    def optimum(natural: bool, optimizer: Any, steps: int) -> float:
        guide = AutoSparseGP(classes, inducing_points=inducing_points(), natural=natural)
        loss = QuadratureELBO(tight=False)
        svi = SVI(classes, guide, optimizer, loss)

        @jax.jit
        def run(state: Any) -> Any:
            update = lambda state, _: svi.update(state, X, y)  # noqa: E731
            return jax.lax.scan(update, state, length=steps)[0]

        params = svi.get_params(run(svi.init(KEY, X, y)))
        return float(
            QuadratureELBO(num_points=1024, tight=False).loss(KEY, params, classes, guide, X, y)
        )

    def labels(params: dict) -> dict:
        return {name: "no" if "points" in name else "yes" for name in params}

    adam = optax.multi_transform({"no": optax.set_to_zero(), "yes": optax.adam(0.04)}, labels)
    natural = sgp.infer.natural_gradients(optax.set_to_zero(), 0.1)
    loss = optimum(True, natural, 100)
    assert loss == pytest.approx(optimum(False, adam, 800), abs=0.03)


# Mini-batches


def subsampled(scaled: bool, batch: int | None) -> Callable[..., None]:
    """A model with subsampled rows; if not `scaled`, without the scale of the plate."""

    def model(y: Array) -> None:
        rows = sgp.plate("rows", N, batch)
        with rows as index:
            x, y = inputs()[index], y[index]
        f = numpyro.sample("f", sgp.LatentGP(kernel(), x))
        if scaled:
            with rows:
                numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
        else:
            numpyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)

    return model


def batch_guide(batch: int | None) -> Callable[..., None]:
    def guide(y: Array) -> None:
        with sgp.plate("rows", N, batch) as index:
            rows = inputs()[index]
        numpyro.sample("f", family(rows))

    return guide


@pytest.mark.parametrize("scaled", [True, False])
def test_mini_batches_are_unbiased(scaled, x64):
    y = observations("binary")

    def losses(keys: Array, batch: int | None) -> Array:
        def loss(key: Array) -> Array:
            guide = batch_guide(batch)
            return QuadratureELBO(8).loss(key, {}, subsampled(scaled, batch), guide, y)

        return jax.jit(lambda keys: jax.lax.map(loss, keys))(keys)

    full = losses(jax.random.split(KEY, 1), None)[0]
    values = losses(jax.random.split(KEY, 2000), 3)
    assert len(np.unique(values)) > 10
    deviation = abs(values.mean() - full) / (values.std() / np.sqrt(2000))
    assert (deviation < 4) == scaled


# Other sites


def hyper_model(y: Array) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), inputs()))
    with numpyro.plate("rows", N):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


@pytest.mark.slow
def test_agrees_with_the_stock_objective_in_law(x64):
    """Both estimate the same bound; without noise from f the variance is smaller."""
    y = observations("real")
    guide = sgp.guides.AutoSparseGP(hyper_model, inducing_points=inducing_points())
    svi = SVI(hyper_model, guide, optax.adam(0.01), QuadratureELBO())
    params = svi.get_params(jax.jit(svi.init)(KEY, y))

    @jax.jit
    def losses(keys: Array) -> Any:
        def each_loss(key: Array) -> Any:
            key, their_key = jax.random.split(key)
            return (
                QuadratureELBO().loss(key, params, hyper_model, guide, y),
                TraceMeanField_ELBO().loss(their_key, params, hyper_model, guide, y),
            )

        many = QuadratureELBO(num_particles=100)
        return jax.lax.map(each_loss, keys), many.loss(keys[0], params, hyper_model, guide, y)

    (ours, theirs), many = losses(jax.random.split(KEY, 1000))
    error = np.hypot(ours.std(), theirs.std()) / np.sqrt(1000)
    assert abs(ours.mean() - theirs.mean()) < 4 * error
    assert ours.var() < 0.5 * theirs.var()
    assert abs(ours.mean() - many) < 4 * ours.std() * np.sqrt(1 / 1000 + 1 / 100)


@pytest.mark.parametrize("vectorize", [True, False])
def test_particles_average(vectorize):
    y = observations("real")
    guide = sgp.guides.AutoSparseGP(hyper_model, inducing_points=inducing_points())
    loss = QuadratureELBO(num_particles=4, vectorize_particles=vectorize)
    svi = SVI(hyper_model, guide, optax.adam(0.01), loss)
    state = jax.jit(svi.init)(KEY, y)
    params = svi.get_params(state)

    @jax.jit
    def values(key: Array) -> Any:
        def one(key: Array) -> Array:
            return QuadratureELBO().loss(key, params, hyper_model, guide, y)

        single = jax.lax.map(one, jax.random.split(key, 4))
        return loss.loss(key, params, hyper_model, guide, y), single

    value, single = values(KEY)
    np.testing.assert_allclose(value, single.mean(), rtol=1e-5)
    assert len(np.unique(single)) == 4


def test_gradient_against_finite_differences(x64):
    y = observations("count")

    def model(y: Array) -> None:
        lengthscale = numpyro.param("lengthscale", 0.9)
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), inputs()))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    guide = sgp.guides.AutoSparseGP(model, inducing_points=inducing_points())
    rng = np.random.default_rng(4)
    params = {
        "lengthscale": jnp.array(0.9),
        "f_auto_inducing_points": inducing_points(),
        "f_auto_loc": location(),
        "f_auto_scale_tril": scale(),
    }
    direction = jax.tree.map(lambda leaf: jnp.array(rng.normal(size=leaf.shape)), params)
    direction["f_auto_scale_tril"] = jnp.tril(direction["f_auto_scale_tril"])

    @jax.jit
    def loss(params: dict[str, Array]) -> Array:
        return QuadratureELBO(10).loss(KEY, params, model, guide, y)

    gradient = jax.grad(loss)(params)
    for name in params:
        step = 1e-5 * direction[name]
        ends = [loss({**params, name: params[name] + sign * step}) for sign in (1, -1)]
        derivative = jnp.vdot(gradient[name], direction[name])
        np.testing.assert_allclose(derivative, (ends[0] - ends[1]) / 2e-5, rtol=1e-5, err_msg=name)
        assert abs(derivative) > 1e-3


# Mutable state


def counting(y: Array) -> None:
    count = mutable("count", {"value": jnp.array(0)})
    count["value"] += 1
    hyper_model(y)


def test_mutable_state_is_carried():
    y = observations("real")
    guide = sgp.guides.AutoSparseGP(hyper_model, inducing_points=inducing_points())
    svi = SVI(counting, guide, optax.adam(0.01), QuadratureELBO())
    state = jax.jit(svi.init)(KEY, y)
    start = int(state.mutable_state["count"]["value"])
    update = jax.jit(svi.update)
    for step in range(1, 3):
        state, _ = update(state, y)
        assert state.mutable_state["count"]["value"] == start + step


def test_mutable_state_needs_one_particle():
    y = observations("real")
    guide = sgp.guides.AutoSparseGP(hyper_model, inducing_points=inducing_points())
    svi = SVI(counting, guide, optax.adam(0.01), QuadratureELBO(num_particles=2))
    state = jax.jit(svi.init)(KEY, y)
    with pytest.raises(ValueError, match=r"mutable state \(count\) needs num_particles=1, got 2"):
        jax.eval_shape(svi.update, state, y)


# Refusals


def trace_loss(model: Callable, guide: Callable, *args: Any) -> Any:
    """Trace the loss: errors come before anything is computed."""
    return jax.eval_shape(lambda key: QuadratureELBO().loss(key, {}, model, guide, *args), KEY)


def test_likelihood_that_couples_rows():
    def model() -> None:
        f = numpyro.sample("f", prior())
        numpyro.sample("y", dist.MultivariateNormal(f, 0.5 + jnp.eye(N)), obs=jnp.zeros(N))

    with pytest.raises(ValueError, match="the site `y` combines rows of the function `f`"):
        trace_loss(model, guide)


def test_likelihood_without_the_function():
    def model() -> None:
        numpyro.sample("f", prior())
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.0)

    with pytest.raises(ValueError, match=r"no term of the model depends on .* \(`f`\): give what"):
        trace_loss(model, guide)


def test_forward_mode_is_refused():
    def model(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(kernel(), X))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    guide = sgp.guides.AutoSparseGP(model, inducing_points=inducing_points())
    args = inputs(), jnp.zeros(N)
    for loss in (QuadratureELBO(), TraceMeanField_ELBO()):
        svi = SVI(model, guide, optax.adam(0.1), loss)
        with pytest.raises(TypeError, match=r"reverse mode alone: leave out `forward_mode_diff"):
            svi.update(svi.init(KEY, *args), *args, forward_mode_differentiation=True)


def test_product_that_couples_rows():
    """Detected also at zero, the initial value of the other function."""

    def model() -> None:
        f, g = (numpyro.sample(name, prior()) for name in "fg")
        numpyro.sample("y", dist.Normal(jnp.cumsum(f) * g, 1.0), obs=jnp.zeros(N))

    def guide() -> None:
        for name in "fg":
            process = sgp.SparseGP(kernel(), inputs(), inducing_points(), jnp.zeros(M), scale())
            numpyro.sample(name, process)

    with pytest.raises(ValueError, match="the site `y` combines rows of the function `f`"):
        QuadratureELBO().loss(KEY, {}, model, guide)


def test_function_of_a_function():
    def model() -> None:
        f = numpyro.sample("f", prior())
        g = numpyro.sample("g", sgp.LatentGP(kernel(), f[:, None]))
        numpyro.sample("y", dist.Normal(g, 1.0), obs=jnp.zeros(N))

    inner = functools.partial(AutoSparseGP, site="f", inducing_points=inducing_points())
    auto = AutoSparseGP(model, "g", rest=inner, inducing_points=inducing_points())
    message = "distribution of the site `g` depends on the function `f`.*JointELBO"
    with pytest.raises(ValueError, match=message):
        trace_loss(model, auto)


@pytest.mark.slow
def test_scale_around_one_side():
    scaled = handlers.scale(model(lambda f: dist.Normal(f, 0.4), observations("real")), 0.1)
    with pytest.raises(ValueError, match=r"site `f` has the scale 0.1 in the model and 1.0 in the"):
        trace_loss(scaled, guide)
    in_both = QuadratureELBO().loss(KEY, {}, scaled, handlers.scale(guide, 0.1))
    alone = model(lambda f: dist.Normal(f, 0.4), observations("real"))
    np.testing.assert_allclose(
        in_both, 0.1 * QuadratureELBO().loss(KEY, {}, alone, guide), rtol=1e-5
    )

    def traced(scale: Array) -> Array:
        with_scale = handlers.scale(alone, scale)
        return QuadratureELBO().loss(KEY, {}, with_scale, guide)

    assert jnp.isnan(jax.jit(traced)(0.1))


def test_observations_that_are_a_column():
    """Broadcasting against a row of function values would make a matrix of terms."""
    column = model(lambda f: dist.Normal(f, 0.4), observations("real")[:, None])
    with pytest.raises(
        ValueError, match=r"site `y` has a value of shape \(8, 1\) and a dist.*\(8,\)"
    ):
        trace_loss(column, guide)
    one_value = model(lambda f: dist.Normal(f, 0.4), jnp.array(0.3))
    assert trace_loss(one_value, guide).shape == ()


@pytest.mark.slow
def test_likelihood_declared_as_one_event_is_fine(x64):
    y = observations("real")

    def model() -> None:
        f = numpyro.sample("f", prior())
        numpyro.sample("y", dist.Normal(f, 0.4).to_event(1), obs=y)

    plain = QuadratureELBO(tight=False).loss(KEY, {}, model, guide)
    expected = expected_log_likelihood(2, lambda f: dist.Normal(f, 0.4), y)
    np.testing.assert_allclose(-plain + kl_divergence(family(), prior()), expected, rtol=1e-12)


def test_guide_without_gp_site():
    y = observations("real")
    auto = AutoNormal(hyper_model)
    with pytest.raises(ValueError, match=r"found no GP site in the guide: use one of sgp.guides"):
        trace_loss(hyper_model, handlers.seed(auto, KEY), y)


def test_guide_that_misses_a_site():
    def partial_guide(y: Array) -> None:
        numpyro.sample("f", family())

    with pytest.raises(ValueError, match=r"the guide has no site `lengthscale`, which the model"):
        trace_loss(hyper_model, partial_guide, observations("real"))


@pytest.mark.slow
def test_a_step_runs_the_model_twice():
    """Once for the guide, which needs the kernel, and once for the likelihood."""
    runs: list[int] = []

    def counted(y: Array) -> None:
        runs.append(1)
        hyper_model(y)

    auto = sgp.guides.AutoSparseGP(counted, inducing_points=inducing_points())
    svi = SVI(counted, auto, optax.adam(0.01), QuadratureELBO(3))
    state = svi.init(KEY, observations("real"))
    runs.clear()
    jax.eval_shape(svi.update, state, observations("real"))
    assert len(runs) == 2


def test_another_model_is_checked_as_well():
    """The same objective checks it, although a model with the same shapes has passed."""
    loss, X = QuadratureELBO(), inputs()

    def made(combine: bool) -> Callable[[], None]:
        def model() -> None:
            f = numpyro.sample("f", prior())
            mean = jnp.cumsum(f) if combine else f
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=jnp.zeros(len(X)))

        return model

    assert np.isfinite(loss.loss(KEY, {}, made(False), guide))
    with pytest.raises(ValueError, match="the site `y` combines rows of the function `f`"):
        loss.loss(KEY, {}, made(True), guide)
