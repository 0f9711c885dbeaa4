"""Natural gradients in NumPyro's SVI: single steps, mini-batches and other likelihoods."""

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
from numpyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal

import numpyro_scalegp as sgp
from numpyro_scalegp.variational.sparse.natural import NaturalSparseGP

N, M, SD = 40, 6, 0.2
KEY = jax.random.key(0)
natural = functools.partial(sgp.guides.AutoSparseGP, natural=True)


def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, size=(N, 1))
    return jnp.array(X), jnp.array(np.sin(2.0 * X[:, 0]) + SD * rng.normal(size=N))


def likelihood(kind: str, f: Array) -> Any:
    return {
        "normal": dist.Normal(f, SD),
        "poisson": dist.Poisson(jnp.exp(1.0 + f)),
        "student": dist.StudentT(3.0, f, SD),
    }[kind]


def fixed(X: Array, y: Array, kind: str = "normal", batch: int | None = None) -> None:
    rows = sgp.plate("rows", N, batch)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.7), X))
    with rows:
        numpyro.sample("y", likelihood(kind, f), obs=y)


def counts(y: Array) -> Array:
    return jnp.round(jnp.exp(1.0 + y))


@pytest.mark.slow
@pytest.mark.parametrize("tight", (True, False))
def test_one_step_of_size_one_is_the_optimum(tight, x64):
    X, y = data()
    Z = X[:M]
    guide = natural(fixed, inducing_points=Z, jitter=1e-10)
    freeze = functools.partial(sgp.infer.natural_gradients, optax.set_to_zero(), step_size=1.0)
    svi = SVI(fixed, guide, freeze(), sgp.infer.QuadratureELBO(2, tight=tight))
    state, _ = svi.update(svi.init(KEY, X, y), X, y)
    bound = -svi.evaluate(state, X, y)
    kernel = sgp.kernels.RBF(0.7)
    K = kernel.covariance(Z) + 1e-10 * jnp.eye(M)
    Q = kernel(X, Z) @ jnp.linalg.solve(K, kernel(Z, X))
    left = (1.0 - jnp.diagonal(Q)) / SD**2
    optimum = dist.MultivariateNormal(jnp.zeros(N), Q + SD**2 * jnp.eye(N)).log_prob(y)
    optimum -= 0.5 * jnp.sum(jnp.log1p(left) if tight else left)
    np.testing.assert_allclose(bound, optimum, rtol=1e-6)
    again, _ = svi.update(state, X, y)
    np.testing.assert_allclose(-svi.evaluate(again, X, y), bound, rtol=1e-8)


def test_steps_of_mini_batches_are_unbiased(x64):
    X, y = data()
    guide = natural(fixed, inducing_points=X[:M])
    rng = np.random.default_rng(1)
    root = rng.normal(size=(M, M))
    params = {
        "f_auto_inducing_points": X[:M],
        "f_auto_natural_loc": jnp.array(rng.normal(size=M)),
        "f_auto_natural_precision": jnp.array(root @ root.T),
    }
    loss = sgp.infer.QuadratureELBO(2)

    def direction(key: Array, batch: int | None) -> dict[str, Array]:
        def bound(params: dict[str, Array]) -> Array:
            return loss.loss(key, params, fixed, guide, X, y, "normal", batch)

        return jax.grad(bound)(params)

    keys = jax.random.split(KEY, 1000)
    draws = jax.jit(lambda keys: jax.lax.map(lambda key: direction(key, 8), keys))(keys)
    for name, exact in direction(KEY, None).items():
        error = np.std(draws[name], axis=0) / np.sqrt(len(keys))
        assert np.all(np.abs(np.mean(draws[name], axis=0) - exact) <= 4.5 * error + 1e-9), name


@pytest.mark.parametrize("kind", ("poisson", "student"))
def test_other_likelihoods_reach_the_same_optimum(kind, x64):
    X, y = data()
    y = counts(y) if kind == "poisson" else y.at[0].set(5.0)
    loss = sgp.infer.QuadratureELBO(20, tight=False)

    def best(make: Any, optimizer: Any, steps: int) -> float:
        svi = SVI(fixed, make(fixed, inducing_points=X[:M]), optimizer, loss)

        @jax.jit
        def run(key: Array) -> Any:
            step = lambda state, _: svi.update(state, X, y, kind)  # noqa: E731
            return jax.lax.scan(step, svi.init(key, X, y, kind), length=steps)

        return -float(run(KEY)[1][-1])

    def labels(params: dict) -> dict:
        return {name: "no" if "points" in name else "yes" for name in params}

    adam = optax.multi_transform({"no": optax.set_to_zero(), "yes": optax.adam(0.02)}, labels)
    optimum = best(sgp.guides.AutoSparseGP, adam, 2000)
    bound = best(natural, sgp.infer.natural_gradients(optax.set_to_zero(), 0.5), 40)
    assert bound == pytest.approx(optimum, abs=0.02)


def learned(X: Array, y: Array, batch: int | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    rows = sgp.plate("rows", len(X), batch)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.slow
def test_learns_hyperparameters():
    X, y = data()
    loss = sgp.infer.QuadratureELBO(2)
    guide = natural(learned, rest=AutoDelta, num_inducing=10)
    svi = SVI(learned, guide, sgp.infer.natural_gradients(optax.adam(0.05), 0.2), loss)
    result = svi.run(KEY, 300, X, y, 20, progress_bar=False)
    assert float(guide.median(result.params)["noise"]) == pytest.approx(SD, rel=0.4)
    posterior = sgp.posterior(learned, guide, result, X, y)
    grid = jnp.linspace(-1.5, 1.5, 20)[:, None]
    error = posterior.mean(grid) - jnp.sin(2.0 * grid[:, 0])
    assert float(jnp.sqrt(jnp.mean(error**2))) < 0.12
    draws = posterior.sample(KEY, grid, 400)
    np.testing.assert_allclose(draws.std(axis=0), jnp.sqrt(posterior.variance(grid)), rtol=0.2)


def test_the_distribution_follows_the_hyperparameters(x64):
    """With an inducing point at each row, sites of one kernel and mean are exact at every other."""
    X, y = data()

    def model(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        mean = lambda X: 1.0 + slope * X[:, 0]  # noqa: E731
        kernel = sgp.kernels.Matern32(lengthscale, variance)
        f = numpyro.sample("f", sgp.LatentGP(kernel, X, mean=mean))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(f, SD), obs=y)

    guide = natural(model, inducing_points=X, jitter=1e-10, rest=AutoDelta)
    still = sgp.infer.natural_gradients(optax.set_to_zero(), 1.0)
    svi = SVI(model, guide, still, sgp.infer.QuadratureELBO())
    params = svi.get_params(svi.update(svi.init(KEY, X, y), X, y)[0])
    for lengthscale, variance, slope in ((0.5, 1.0, 2.0), (1.5, 0.3, -1.0), (0.2, 4.0, 0.0)):
        values = {"lengthscale": lengthscale, "variance": variance, "slope": slope}
        values = jax.tree.map(jnp.array, values)
        mean = jax.tree_util.Partial(lambda slope, X: 1.0 + slope * X[:, 0], slope)
        posterior = guide.posterior_at(values, params, (X, y), {})
        kernel = sgp.kernels.Matern32(lengthscale, variance)
        prior = sgp.GaussianProcess(kernel, X, SD**2, mean=mean)
        exact, Xs = prior.condition(y), X[::3] + 0.05
        np.testing.assert_allclose(posterior.mean(Xs), exact.mean(Xs), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(posterior.variance(Xs), exact.variance(Xs), rtol=1e-5)


@pytest.mark.slow
def test_hyperparameters_have_their_spread(x64):
    """Beside a guide for the model with the function integrated out; the default family fails."""
    X, y = data()

    def integrated(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        gp = sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, noise**2)
        numpyro.sample("y", gp, obs=y)

    def spread(model: Any, guide: Any, optimizer: Any, loss: Any, *batch: int) -> Array:
        result = SVI(model, guide, optimizer, loss).run(KEY, 1500, X, y, *batch, progress_bar=False)
        rest = getattr(guide, "rest", guide)
        draws = rest.sample_posterior(KEY, result.params, sample_shape=(2000,))
        return jnp.array([jnp.std(jnp.log(draws[name])) for name in ("lengthscale", "noise")])

    adam = optax.adam(optax.cosine_decay_schedule(0.03, 1500))
    step_size = optax.cosine_decay_schedule(0.1, 1500)
    loss = sgp.infer.QuadratureELBO()
    sparse = functools.partial(
        sgp.guides.AutoSparseGP, learned, rest=AutoMultivariateNormal, num_inducing=12
    )
    exact = spread(integrated, AutoMultivariateNormal(integrated), adam, Trace_ELBO())
    optimizer = sgp.infer.natural_gradients(adam, step_size)
    followed = spread(learned, sparse(natural=True), optimizer, loss, 20)
    held = spread(learned, sparse(), adam, loss, 20)
    np.testing.assert_allclose(followed, exact, rtol=0.25)
    assert held[0] < 0.6 * exact[0]


@pytest.mark.slow
def test_inducing_points_can_be_held():
    X, y = data()
    for options in ({}, {"natural": True}):
        guide = sgp.guides.AutoSparseGP(
            fixed, inducing_points=X[:M], learn_inducing_points=False, **options
        )
        adam = optax.adam(0.1)
        optimizer = sgp.infer.natural_gradients(adam) if options else adam
        svi = SVI(fixed, guide, optimizer, sgp.infer.QuadratureELBO())
        params = svi.run(KEY, 3, X, y, progress_bar=False).params
        np.testing.assert_array_equal(params["f_auto_inducing_points"], X[:M])


@pytest.mark.slow
def test_functions_of_a_plate(x64):
    X, y = data()
    Y = jnp.stack([y, -0.5 * y])

    def model(X: Array, Y: Array) -> None:
        outputs = numpyro.plate("outputs", 2, dim=-2)
        with numpyro.plate("functions", 2):
            f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.7), X))
        with outputs, numpyro.plate("rows", N, dim=-1):
            numpyro.sample("y", dist.Normal(f, SD), obs=Y)

    still = sgp.infer.natural_gradients(optax.set_to_zero(), 1.0)
    guide = natural(model, inducing_points=X[:M])
    svi = SVI(model, guide, still, sgp.infer.QuadratureELBO(2))
    state, _ = svi.update(svi.init(KEY, X, Y), X, Y)
    batch = guide.posterior(svi.get_params(state), X, Y)
    for index, y in enumerate(Y):
        alone = natural(fixed, inducing_points=X[:M])
        svi = SVI(fixed, alone, still, sgp.infer.QuadratureELBO(2))
        state, _ = svi.update(svi.init(KEY, X, y), X, y)
        single = alone.posterior(svi.get_params(state), X, y)
        np.testing.assert_allclose(batch.mean(X)[index], single.mean(X), rtol=1e-8)
        np.testing.assert_allclose(batch.variance(X)[index], single.variance(X), rtol=1e-8)


def test_can_be_saved(tmp_path):
    X, y = data()
    guide = natural(fixed, inducing_points=X[:M])
    svi = SVI(fixed, guide, sgp.infer.natural_gradients(optax.adam(0.1)), TraceMeanField_ELBO())
    posterior = guide.posterior(svi.get_params(svi.init(KEY, X, y)), X, y)
    sgp.save(tmp_path / "one", posterior)
    np.testing.assert_array_equal(sgp.load(tmp_path / "one").mean(X), posterior.mean(X))


@pytest.mark.parametrize("scale", (1.0 / N, 10.0))
def test_steps_under_a_scale(scale, x64):
    X, y = data()
    guide = natural(fixed, inducing_points=X[:M])
    still = sgp.infer.natural_gradients(optax.set_to_zero(), 1.0)
    svi = SVI(fixed, guide, still, sgp.infer.QuadratureELBO(2))
    expected = svi.get_params(svi.update(svi.init(KEY, X, y), X, y)[0])
    scaled = [numpyro.handlers.scale(program, scale=scale) for program in (fixed, guide)]
    svi = SVI(*scaled, still, sgp.infer.QuadratureELBO(2))
    params = svi.get_params(svi.update(svi.init(KEY, X, y), X, y)[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-8), params, expected)


@pytest.mark.filterwarnings("ignore:the density of a GP at the rows of a mini-batch")
@pytest.mark.parametrize("loss", (TraceMeanField_ELBO(), TraceGraph_ELBO(), sgp.infer.JointELBO()))
def test_draws_have_no_natural_gradients(loss):
    X, y = data()
    guide = natural(fixed, inducing_points=X[:M])
    svi = SVI(fixed, guide, sgp.infer.natural_gradients(optax.adam(0.1)), loss)
    state = svi.init(KEY, X, y)
    assert jnp.isfinite(svi.evaluate(state, X, y))
    with pytest.raises(ValueError, match="no derivatives through draws of their function"):
        svi.update(state, X, y)
    posterior = guide.posterior(svi.get_params(state), X, y)
    slope = jax.grad(lambda X: jnp.sum(posterior.sample(KEY, X)))(X[:3])
    assert jnp.all(jnp.isfinite(slope))


def test_forward_mode_is_refused():
    X, y = data()
    guide = natural(fixed, inducing_points=X[:M])
    svi = SVI(fixed, guide, optax.adam(0.1), sgp.infer.QuadratureELBO(2))
    with pytest.raises(TypeError, match=r"reverse mode alone: leave out `forward_mode_diff"):
        svi.update(svi.init(KEY, X, y), X, y, forward_mode_differentiation=True)


def test_steps_of_another_optimizer_warn():
    X, y = data()
    guide = natural(fixed, inducing_points=X[:M])
    svi = SVI(fixed, guide, optax.adam(0.003), sgp.infer.QuadratureELBO(2))
    params = svi.run(KEY, 60, X, y, progress_bar=False).params
    with pytest.warns(RuntimeWarning, match="must be positive semidefinite: train natural"):
        guide.posterior(params, X, y)
    not_finite = {**params, "f_auto_natural_precision": jnp.full((M, M), jnp.nan)}
    with pytest.raises(ValueError, match="`natural_precision` must be finite"):
        guide.posterior(not_finite, X, y)


def test_a_precision_that_rounding_made_indefinite_warns():
    X, _ = data()
    P = jnp.diag(jnp.array([1e6, 1.0, -100.0]))
    q = NaturalSparseGP(sgp.kernels.RBF(0.7), X, X[:3], jnp.zeros(3), P)
    with pytest.warns(RuntimeWarning, match="jitter was added"):
        assert jnp.all(jnp.isfinite(q.posterior().variance(X)))


def test_bad_arguments(unchecked):
    X, y = data()
    with pytest.raises(ValueError, match=r"`step_size` must be in \(0, 1\], got 1.5"):
        sgp.infer.natural_gradients(optax.adam(0.1), 1.5)
    with pytest.raises(TypeError, match="`optimizer` must be an optimizer of optax"):
        sgp.infer.natural_gradients(numpyro.optim.Adam(0.1))
    with pytest.raises(TypeError, match="`natural` must be True or False"):
        sgp.guides.AutoSparseGP(fixed, natural="yes")
    guide = sgp.guides.AutoSparseGP(fixed, inducing_points=X[:M])
    svi = SVI(fixed, guide, sgp.infer.natural_gradients(optax.adam(0.1)), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match="found no natural parameters: give the guide"):
        svi.init(KEY, X, y)
    with pytest.raises(ValueError, match="`natural_precision` must have shape"):
        NaturalSparseGP(sgp.kernels.RBF(1.0), X, X[:M], jnp.zeros(M), jnp.zeros((M, M + 1)))


@pytest.mark.slow
def test_delay_holds_other_parameters_and_their_optimizer():
    X, y = data()
    guide = natural(learned, rest=AutoDelta, num_inducing=5)
    optimizer = sgp.infer.natural_gradients(optax.adam(0.05), 0.5, delay=3)
    svi = SVI(learned, guide, optimizer, sgp.infer.QuadratureELBO(2))
    state = svi.init(KEY, X, y)
    start, held = svi.get_params(state), []
    for _ in range(5):
        state, _ = svi.update(state, X, y)
        params = svi.get_params(state)
        held.append(params["lengthscale_auto_loc"] == start["lengthscale_auto_loc"])
        assert not np.array_equal(params["f_auto_natural_loc"], start["f_auto_natural_loc"])
    assert held == [True, True, True, False, False]
    with pytest.raises(ValueError, match="`delay` must be at least 0"):
        sgp.infer.natural_gradients(optax.adam(0.05), delay=-1)
