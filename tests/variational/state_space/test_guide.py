"""The guide for functions of time: optima, likelihoods, several functions, new inputs, errors."""

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
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal

import numpyro_scalegp as sgp

N, SD = 40, 0.2
KEY = jax.random.key(0)
NEW = np.array([[-1.0], [1.03], [9.0]])
auto = sgp.guides.AutoStateSpaceGP


def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, size=(N, 1))
    return jnp.array(X), jnp.array(np.sin(2.0 * X[:, 0]) + SD * rng.normal(size=N))


def likelihood(kind: str, f: Array) -> Any:
    return {
        "normal": dist.Normal(f, SD),
        "poisson": dist.Poisson(jnp.exp(f)),
        "student": dist.StudentT(3.0, f, SD),
        "bernoulli": dist.Bernoulli(logits=3.0 * f),
    }[kind]


def fixed(X: Array, y: Array | None = None, kind: str = "normal") -> None:
    mean = lambda X: 0.5 + 0.1 * X[:, 0]  # noqa: E731
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(0.7), X, mean=mean))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", likelihood(kind, f), obs=y)


def run(model: Any, guide: Any, steps: int, *args: Any, step_size: float = 0.5, rate: float = 0.0):
    optimizer = sgp.infer.natural_gradients(optax.adam(rate), step_size)
    svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())
    return svi, svi.run(KEY, steps, *args, progress_bar=False)


@pytest.mark.parametrize(("far", "num_steps"), [(0.4, 1), (1.0, 3)])
def test_steps_of_size_one_are_exact_for_normal_observations(far, num_steps, x64):
    """One step for observations within a prior deviation of the mean, more for others."""
    X, y = data()
    y = 0.5 + far * y
    guide = auto(fixed)
    svi, result = run(fixed, guide, num_steps, X, y, step_size=1.0)
    gp = sgp.GaussianProcess(
        sgp.kernels.Matern32(0.7), X, SD**2, mean=lambda X: 0.5 + 0.1 * X[:, 0]
    )
    np.testing.assert_allclose(-svi.evaluate(result.state, X, y), gp.log_prob(y), rtol=1e-9)
    posterior, exact = guide.posterior(result.params, X), gp.condition(y)
    for new in (X, NEW):
        np.testing.assert_allclose(posterior.mean(new), exact.mean(new), rtol=1e-9)
        np.testing.assert_allclose(posterior.variance(new), exact.variance(new), rtol=1e-7)
    np.testing.assert_allclose(posterior.covariance(NEW), exact.covariance(NEW), atol=1e-9)


@pytest.mark.parametrize("kind", ("poisson", "student", "bernoulli"))
def test_other_likelihoods_reach_the_best_normal_distribution(kind, x64):
    """The distribution of `AutoSparseGP` with an inducing point in each row."""
    X, y = data()
    if kind == "poisson":
        y = jnp.round(jnp.exp(1.0 + y))
    y = (y > 0.0).astype(int) if kind == "bernoulli" else y.at[0].set(9.0)
    svi, result = run(fixed, guide := auto(fixed), 60, X, y, kind)
    dense = sgp.guides.AutoSparseGP(fixed, inducing_points=X, natural=True, jitter=1e-10)
    dense_svi, dense_result = run(fixed, dense, 60, X, y, kind)
    bound, best = (
        float(svi.evaluate(result.state, X, y, kind))
        for svi, result in ((svi, result), (dense_svi, dense_result))
    )
    np.testing.assert_allclose(bound, best, rtol=1e-6)
    posterior, reference = (
        guide.posterior(result.params, X),
        dense.posterior(dense_result.params, X),
    )
    np.testing.assert_allclose(posterior.mean(NEW), reference.mean(NEW), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(posterior.variance(NEW), reference.variance(NEW), rtol=1e-3)


def test_bound_is_below_the_evidence(x64):
    """By quadrature over two function values."""
    X, y = jnp.array([[0.0], [0.4]]), jnp.array([3, 1])
    svi, result = run(fixed, auto(fixed), 40, X, y, "poisson")
    K = sgp.kernels.Matern32(0.7)(X, X)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    white = np.stack(np.meshgrid(nodes, nodes), axis=-1)
    f = 0.5 + 0.1 * X[:, 0] + white @ np.linalg.cholesky(K).T
    values = np.exp(np.sum(dist.Poisson(jnp.exp(f)).log_prob(y), axis=-1))
    evidence = np.log(np.sum(values * np.outer(weights, weights)) / (2.0 * np.pi))
    bound = -float(svi.evaluate(result.state, X, y, "poisson"))
    assert evidence - 0.02 < bound < evidence


@pytest.mark.parametrize("scale", (200.0, 1e5))
def test_large_counts_from_a_rate_of_one(scale):
    """In float32: full steps would end at infinity."""
    X, y = data()
    y = jnp.round(scale * jnp.exp(y))
    guide = auto(fixed)
    _, result = run(fixed, guide, 60, X, y, "poisson")
    posterior = guide.posterior(result.params, X)
    with jax.enable_x64(True):
        # At large counts Laplace's approximation is exact.
        X, y = (np.asarray(array, np.float64) for array in (X, y))
        options = {"mean": lambda X: 0.5 + 0.1 * X[:, 0], "estimator": sgp.estimators.StateSpace()}
        rate = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731
        exact = sgp.LaplaceGP(sgp.kernels.Matern32(0.7), X, rate, **options).condition(y)
        expected, deviation = exact.mean(X), jnp.sqrt(exact.variance(X))
        assert np.all(np.abs(posterior.mean(X) - expected) < 0.2 * deviation + 1e-3)


def test_normal_observations_of_an_exponential(x64):
    """A normal likelihood that is not quadratic: full steps would end at infinity."""
    X, _ = data()
    y = jnp.array(np.random.default_rng(0).normal(300.0, 1.0, N))

    def model(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(2.0), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(jnp.exp(f), 1.0), obs=y)

    _, result = run(model, guide := auto(model), 60, X, y)
    np.testing.assert_allclose(
        jnp.exp(guide.posterior(result.params, X, y).mean(X)), 300.0, rtol=0.01
    )


def learned(X: Array, y: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(lengthscale), X, mean=level))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.StudentT(3.0, f, SD), obs=y)


@pytest.mark.slow
def test_gradient_of_hyperparameters_holds_the_sites(x64):
    """Against differences of the bound, far from the optimum of the sites."""
    X, y = data()
    guide = auto(learned, rest=AutoDelta)
    svi, result = run(learned, guide, 3, X, y.at[0].set(9.0), rate=0.1)

    @jax.jit
    def bound(params: dict[str, Array]) -> Array:
        return svi.loss.loss(KEY, params, learned, guide, X, y)

    params = result.params
    gradient = jax.grad(bound)(params)
    for name in ("lengthscale_auto_loc", "level_auto_loc"):
        ahead, behind = (bound({**params, name: params[name] + h}) for h in (1e-5, -1e-5))
        np.testing.assert_allclose(gradient[name], (ahead - behind) / 2e-5, rtol=1e-6)


@pytest.mark.slow
def test_hyperparameters_get_their_true_width(x64):
    """That of the exact posterior, where a family that does not follow them is too sure."""
    X, y = data()

    def model(X: Array, y: Array, collapsed: bool = False) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        kernel = sgp.kernels.Matern32(lengthscale)
        if collapsed:
            numpyro.sample("y", sgp.GaussianProcess(kernel, X, SD**2), obs=y)
            return
        f = numpyro.sample("f", sgp.LatentGP(kernel, X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, SD), obs=y)

    guide = auto(model, rest=AutoMultivariateNormal)
    _, result = run(model, guide, 1500, X, y, rate=0.01)
    width = jnp.exp(0.0) * result.params["auto_scale_tril"][0, 0]
    grid = jnp.linspace(-2.0, 3.0, 500)

    def density(log: Array) -> Array:
        gp = sgp.GaussianProcess(sgp.kernels.Matern32(jnp.exp(log)), X, SD**2)
        return gp.log_prob(y) + dist.Normal(0.0, 1.0).log_prob(log)

    weights = jax.nn.softmax(jax.lax.map(density, grid))
    center = jnp.sum(weights * grid)
    exact = jnp.sqrt(jnp.sum(weights * (grid - center) ** 2))
    np.testing.assert_allclose(width, exact, rtol=0.15)


def test_two_functions():
    """A mean and a log scale, with nested guides."""
    X, y = data()

    def model(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(0.7), X))
        g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.Matern32(2.0), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g - 1.0)), obs=y)

    guide = auto(model, "f", rest=functools.partial(auto, site="g"))
    _, result = run(model, guide, 60, X, y)
    scale = jnp.exp(guide.rest.posterior(result.params, X, y).mean(X) - 1.0)
    assert 0.5 * SD < float(jnp.mean(scale)) < 2.0 * SD


@pytest.mark.slow
def test_functions_in_a_plate():
    """A softmax of three functions."""
    X, y = data()
    y = jnp.digitize(y, jnp.array([-0.5, 0.5]))

    def model(X: Array, y: Array | None = None) -> None:
        with numpyro.plate("classes", 3):
            f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(0.7), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Categorical(logits=2.0 * f.T), obs=y)

    guide = auto(model)
    _, result = run(model, guide, 40, X, y)
    posterior = guide.posterior(result.params, X)
    mean = posterior.mean(X)
    assert mean.shape == (3, N)
    assert float(jnp.mean(jnp.argmax(mean, axis=0) == y)) > 0.8
    assert posterior.sample(KEY, NEW, 2).shape == (2, 3, 3)
    assert posterior.sample_functions(KEY, 2)(NEW).shape == (2, 3, 3)


@pytest.mark.slow
def test_new_inputs_get_the_posterior():
    X, y = data()
    y = jnp.round(jnp.exp(1.0 + y))
    guide = auto(learned, rest=AutoDelta)
    _, result = run(learned, guide, 30, X, y, rate=0.05)
    posterior = sgp.posterior(learned, guide, result, X, y)
    for draws in (
        sgp.infer.Predictive(learned, guide=guide, params=result.params, num_samples=400)(KEY, NEW),
        Predictive(guide, params=result.params, num_samples=400)(KEY, NEW),
    ):
        np.testing.assert_allclose(draws["f"].mean(axis=0), posterior.mean(NEW), atol=0.25)
    # In a new process: the guide has not run, and sees other inputs only.
    fresh = auto(learned, rest=AutoDelta).posterior(result.params, NEW, y[:3])
    np.testing.assert_allclose(fresh.mean(NEW), posterior.mean(NEW), rtol=1e-5)
    with pytest.raises(ValueError, match="`SitesPosterior` has no `leave_one_out`"):
        fresh.process.leave_one_out()


def test_other_rows_in_a_step():
    """The sites belong to the rows of the first step."""
    X, y = data()
    guide = auto(fixed)
    svi, result = run(fixed, guide, 2, X, y)
    assert np.isfinite(jax.jit(svi.evaluate)(result.state, X, y))
    with pytest.warns(RuntimeWarning, match="the result is NaN: the parameters of `AutoState"):
        assert np.isnan(jax.jit(svi.evaluate)(result.state, X + 0.1, y))
    options = {"init_state": result.state, "progress_bar": False}
    with pytest.raises(TypeError, match="belong to the rows of its first step, and this step has"):
        svi.run(KEY, 2, X[:20], y[:20], **options)


def test_rows_in_another_order_have_the_same_posterior(x64):
    X, y = data()
    order = jnp.argsort(X[:, 0])
    posteriors = []
    for rows in (slice(None), order):
        _, result = run(
            fixed, guide := auto(fixed), 20, X[rows], jnp.round(jnp.exp(y[rows])), "poisson"
        )
        posteriors.append(guide.posterior(result.params, X[rows]))
    unsorted, ascending = (posterior.mean(NEW) for posterior in posteriors)
    np.testing.assert_allclose(unsorted, ascending, rtol=1e-9)


def test_one_row():
    X, y = jnp.array([[0.3]]), jnp.array([2])
    svi, result = run(fixed, guide := auto(fixed), 20, X, y, "poisson")
    assert np.isfinite(svi.evaluate(result.state, X, y, "poisson"))
    assert guide.posterior(result.params, X).mean(X).shape == (1,)


@pytest.mark.slow
def test_parts_of_a_sum():
    X, y = data()

    def model(X: Array, y: Array) -> None:
        kernel = sgp.kernels.Matern32(0.7) + sgp.kernels.Linear(0.1)
        f = numpyro.sample("f", sgp.LatentGP(kernel, X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    _, result = run(model, guide := auto(model), 20, X, jnp.round(jnp.exp(y)))
    posterior = guide.posterior(result.params, X, y)
    left = posterior.component(lambda kernel: kernel.left)
    right = posterior.component(lambda kernel: kernel.right)
    np.testing.assert_allclose(left.mean(NEW) + right.mean(NEW), posterior.mean(NEW), atol=1e-4)


@pytest.mark.usefixtures("unchecked")
def test_errors():
    X, y = data()

    def batches(X: Array, y: Array) -> None:
        rows = sgp.plate("rows", N, 10)
        X, y = rows.take(X, y)
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(0.7), X))
        with rows:
            numpyro.sample("y", dist.Normal(f, SD), obs=y)

    with pytest.raises(ValueError, match="the plate `rows` takes a mini-batch, and `AutoState"):
        run(batches, auto(batches), 1, X, y)

    def smooth(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.7), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, SD), obs=y)

    with pytest.raises(ValueError, match="`RBF` has no state-space form"):
        run(smooth, auto(smooth), 1, X, y)
    with pytest.raises(ValueError, match="`num_harmonics` must be at least 1"):
        auto(fixed, num_harmonics=0)
    optimizer = sgp.infer.natural_gradients(optax.adam(0.01))
    with pytest.raises(ValueError, match="natural parameters have no derivatives through draws"):
        SVI(fixed, auto(fixed), optimizer, Trace_ELBO()).run(KEY, 1, X, y, progress_bar=False)


def test_warns_of_parameters_from_another_optimizer():
    X, y = data()
    guide = auto(fixed)
    _, result = run(fixed, guide, 1, X, y)
    params = {**result.params, "f_auto_natural_precision": jnp.linspace(-1.0, 1.0, N)}
    with pytest.warns(RuntimeWarning, match="has the entry -1, but must not be negative: train"):
        guide.posterior(params, X)
