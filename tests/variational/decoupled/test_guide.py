"""Guides with a separate basis for the mean: solves, growth, saving and export."""

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
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_scalegp as sgp
from numpyro_scalegp.guides import AutoDecoupledGP, AutoHybridGP, AutoSparseGP

N = 40
KEY = jax.random.key(0)
NOISE = 0.1
KERNEL = sgp.kernels.RBF(0.7, 1.3)


def data(n: int = N) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(n, 1))
    return jnp.array(X), jnp.array(np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=n))


def fixed(X: Array, y: Array | None = None) -> None:
    f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE**0.5), obs=y)


def counts(X: Array, y: Array | None = None) -> None:
    f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def learned(X: Array, y: Array | None = None, size: int = N) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.5))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with numpyro.plate("rows", size, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def guides(X: Array) -> dict[str, Any]:
    return {
        "hybrid": lambda model: AutoHybridGP(
            model, inducing_points=X[:5], residual_points=X, num_columns=None, jitter=1e-10
        ),
        "decoupled": lambda model: AutoDecoupledGP(
            model, mean_points=X, cov_points=X[:5], num_columns=None
        ),
    }


every_guide = pytest.mark.parametrize("name", ["hybrid", "decoupled"])


def start(model: Any, guide: Any, *args: Any) -> tuple[SVI, Any]:
    svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(8))
    return svi, jax.jit(svi.init)(KEY, *args)


# Solves


@pytest.mark.slow
@every_guide
def test_the_solved_mean_is_the_exact_posterior_mean(name, x64):
    X, y = data()
    guide = guides(X)[name](fixed)
    svi, state = start(fixed, guide, X, y)
    params = guide.solve_mean(svi.get_params(state), X, y, tolerance=1e-7).params
    exact = sgp.GaussianProcess(KERNEL, X, NOISE).condition(y)
    Xs = jnp.linspace(-2.5, 2.5, 9)[:, None]
    mean = guide.posterior(params, X, y).mean(Xs)
    np.testing.assert_allclose(mean, exact.mean(Xs), atol=1e-4)


@pytest.mark.slow
@every_guide
@pytest.mark.parametrize("model", [fixed, counts])
def test_the_solved_mean_is_where_the_bound_is_flat(name, model, x64):
    X, y = data()
    y = y if model is fixed else jnp.round(jnp.exp(y))
    # Fewer points than observations, so that the optimum is not the exact posterior.
    guide = guides(X[:12])[name](model)
    svi, state = start(model, guide, X, y)
    params = svi.get_params(state)
    steps = 1 if model is fixed else 8
    solved = guide.solve_mean(params, X, y, num_newton_steps=steps, tolerance=1e-7).params
    if name == "hybrid":  # the inducing points' part of the mean is fixed, and counts
        params["f_auto_loc"] = jnp.array([0.4, -0.3, 0.2, 0.5, 0.1])
    weights = [key for key in params if key.endswith("weights")]

    @jax.jit
    def derivatives(params: Any) -> Any:
        def loss(values: Any) -> Array:
            return svi.loss.loss(KEY, {**params, **values}, model, guide, X, y)

        return jax.grad(loss)({key: params[key] for key in weights})

    gradients, solved_gradients = (jax.tree.leaves(derivatives(p)) for p in (params, solved))
    # Not all bounds include the jitter of the solve.
    for before, after in zip(gradients, solved_gradients, strict=True):
        assert np.max(np.abs(after)) < 1e-4 * max(1.0, np.max(np.abs(before)))


@pytest.mark.slow
@every_guide
def test_newton_steps_that_would_be_too_long(name, x64):
    """From zero to the logarithm of large counts, where a full step ends at exp(50)."""
    X, y = data()[0], jnp.full(N, 200)
    guide = guides(X)[name](counts)
    svi, state = start(counts, guide, X, y)
    params = svi.get_params(state)

    def bound(params: dict[str, Array]) -> Array:
        return sgp.infer.QuadratureELBO(20).loss(KEY, params, counts, guide, X, y)

    solved = guide.solve_mean(params, X, y, num_newton_steps=1).params
    assert bound(solved) < bound(params)
    solved = guide.solve_mean(params, X, y, num_newton_steps=20, tolerance=1e-8).params
    gradient = jax.grad(bound)(solved)[f"f_auto_{guide.weights_name}"]
    np.testing.assert_allclose(gradient, 0.0, atol=1e-3)


def test_a_mini_batch_is_not_all_rows():
    X, y = data()
    guide = guides(X)["decoupled"](learned)
    svi, state = start(learned, guide, X, y)
    with pytest.raises(ValueError, match="the plate `rows` takes a mini-batch: give the model all"):
        guide.solve_mean(svi.get_params(state), X[:9], y[:9])


@pytest.mark.slow
@every_guide
def test_a_solve_cut_short_does_no_harm(name, x64):
    X, y = data()
    guide = guides(X)[name](fixed)
    svi, state = start(fixed, guide, X, y)
    initial = svi.get_params(state)
    params = guide.solve_mean(initial, X, y, tolerance=1e-7).params
    # Near the optimum, where an initial guess of zero would be far worse.
    near = {key: 1.01 * value if "weights" in key else value for key, value in params.items()}
    short = guide.solve_mean(near, X, y, max_iterations=1).params
    loss = jax.jit(lambda params: svi.loss.loss(KEY, params, fixed, guide, X, y))
    assert loss(params) < loss(short) + 1e-6
    assert loss(short) < loss(near) < loss(initial)


@pytest.mark.slow
def test_residual_points_come_from_all_over_sorted_rows(dtype):
    X = jnp.linspace(0.0, 6.0, 60, dtype=dtype)[:, None]
    truth = jnp.sin(2.0 * X[:, 0])
    y = truth + 0.03 * jax.random.normal(KEY, (60,), dtype)

    def smooth(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
        with numpyro.plate("rows", 60):
            numpyro.sample("y", dist.Normal(f, 0.03), obs=y)

    guide = AutoHybridGP(smooth, num_inducing=5, num_residual=20)
    svi, state = start(smooth, guide, X, y)
    solved = guide.solve_mean(svi.get_params(state), X, y)
    assert solved.converged and solved.residual < 3e-3 and solved.iterations > 0
    mean = guide.posterior(solved.params, X, y).mean(X)
    exact = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 9e-4).condition(y).mean(X)
    assert np.sqrt(np.mean((exact - truth) ** 2)) < 0.02
    assert np.sqrt(np.mean((mean - exact) ** 2)) < 0.008
    with pytest.warns(RuntimeWarning, match=r"`solve_mean` ended .* Raise `max_iterations`"):
        short = guide.solve_mean(svi.get_params(state), X, y, tolerance=1e-5, max_iterations=1)
        jax.effects_barrier()
    assert not short.converged and short.iterations == 1 and short.residual > 1e-5


def test_decoupled_optimum_is_the_exact_posterior(x64):
    """With both bases at the data, the bound's optimum is the exact posterior."""
    X, y = data(12)
    guide = AutoDecoupledGP(fixed, mean_points=X, cov_points=X, num_columns=None)
    svi = SVI(fixed, guide, optax.adam(0.0), sgp.infer.QuadratureELBO(2))
    params = guide.solve_mean(svi.get_params(svi.init(KEY, X, y)), X, y, tolerance=1e-7).params
    # The optimal pseudo-observations have the noise of the data, in units of the prior scale.
    noise = jnp.eye(12) * jnp.sqrt(NOISE / 1.3)
    posterior = guide.posterior({**params, "f_auto_cov_noise_tril": noise}, X, y)
    exact = sgp.GaussianProcess(KERNEL, X, NOISE).condition(y)
    Xs = jnp.linspace(-2.5, 2.5, 9)[:, None]
    np.testing.assert_allclose(posterior.mean(Xs), exact.mean(Xs), atol=1e-4)
    np.testing.assert_allclose(posterior.variance(Xs), exact.variance(Xs), atol=1e-4)
    bound = -svi.loss.loss(KEY, {**params, "f_auto_cov_noise_tril": noise}, fixed, guide, X, y)
    log_prob = sgp.GaussianProcess(KERNEL, X, NOISE).log_prob(y)
    np.testing.assert_allclose(bound, log_prob, atol=1e-4)


@pytest.mark.slow
def test_a_sparse_fit_starts_a_hybrid_one():
    X, y = data()
    sparse = AutoSparseGP(learned, inducing_points=X[:5], rest=AutoDelta)
    svi, state = start(learned, sparse, X, y)
    state, _ = jax.jit(svi.update)(state, X, y)
    hybrid = AutoHybridGP(
        learned, inducing_points=X[:5], residual_points=X[5:20], rest=AutoDelta,
        train_residual=False,
    )  # fmt: skip
    svi, state = start(learned, hybrid, X, y)
    state = sgp.infer.replace_params(svi, state, svi.get_params(state))
    params = hybrid.solve_mean(svi.get_params(state), X, y).params
    state = sgp.infer.replace_params(svi, state, params)
    trained, _ = jax.jit(svi.update)(state, X, y)
    after = svi.get_params(trained)
    for name, value in svi.get_params(state).items():
        np.testing.assert_allclose(value, params[name], rtol=1e-5)
        # Gradients train all parameters but the residual points and weights.
        assert np.any(after[name] != value) != ("residual" in name)


@pytest.mark.slow
def test_other_function_sites_are_at_their_means(x64):
    X, y = data()

    def both(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
        g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(3.0), X))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + g, NOISE**0.5), obs=y)

    inner = functools.partial(AutoSparseGP, site="g", inducing_points=X[:4])
    guide = AutoDecoupledGP(both, "f", rest=inner, mean_points=X, cov_points=X[:3])
    svi, state = start(both, guide, X, y)
    params = {**svi.get_params(state), "g_auto_loc": jnp.array([1.0, -0.5, 0.3, 0.2])}
    g = guide.rest.posterior(params, X, y).mean(X)
    params = guide.solve_mean(params, X, y, tolerance=1e-7).params
    exact = sgp.GaussianProcess(KERNEL, X, NOISE).condition(y - g)
    np.testing.assert_allclose(guide.posterior(params, X, y).mean(X), exact.mean(X), atol=1e-4)


def test_an_inner_guide_does_not_solve_without_the_outer_function():
    def both(X: Array, y: Array) -> None:
        f, g = (numpyro.sample(name, sgp.LatentGP(KERNEL, X)) for name in "fg")
        numpyro.sample("y", dist.Normal(f + g, NOISE**0.5), obs=y)

    X, y = data()
    points = {"mean_points": X, "cov_points": X[:3]}
    inner = functools.partial(AutoDecoupledGP, site="g", **points)
    guide = AutoDecoupledGP(both, "f", rest=inner, **points)
    svi, state = start(both, guide, X, y)
    params = svi.get_params(state)
    with pytest.raises(ValueError, match=r"guide of `g` is the `rest` of another.*site='g'"):
        guide.rest.solve_mean(params, X, y)


def test_replace_params_wants_an_optax_optimizer():
    X, y = data()
    guide = AutoSparseGP(fixed, inducing_points=X[:3])
    svi = SVI(fixed, guide, numpyro.optim.Adam(0.1), sgp.infer.QuadratureELBO(2))
    state = svi.init(KEY, X, y)
    with pytest.raises(ValueError, match="`svi` must have an optax optimizer"):
        sgp.infer.replace_params(svi, state, svi.get_params(state))


# Gradient steps alone


@pytest.mark.slow
def test_gradients_train_both_bases(x64):
    """Without a solve, the bound exceeds a sparse GP's with the points of the covariance.

    The first version of the guide left its covariance near the prior.
    """
    rng = np.random.default_rng(0)
    X = jnp.array(rng.uniform(-4.0, 4.0, size=(300, 1)))
    y = jnp.sinc(X[:, 0]) + 0.1 * jnp.array(rng.normal(size=300))

    def model(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
        with numpyro.plate("rows", 300):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    few, many = (jnp.linspace(-4.0, 4.0, size)[:, None] for size in (5, 30))
    bounds = []
    for guide in (
        AutoSparseGP(model, rest=AutoDelta, inducing_points=few),
        AutoDecoupledGP(model, rest=AutoDelta, mean_points=many, cov_points=few, num_columns=8),
    ):
        schedule = optax.cosine_decay_schedule(0.03, 1500)
        svi = SVI(model, guide, optax.adam(schedule), sgp.infer.QuadratureELBO())
        bounds.append(-np.mean(svi.run(KEY, 1500, X, y, progress_bar=False).losses[-100:]))
    assert bounds[1] > bounds[0] + 5.0


# Growth


def stream(guide: Any, num_batches: int, batch_size: int = 8) -> Any:
    """The states after each batch of a stream."""
    rng = np.random.default_rng(1)
    svi = SVI(learned, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(2))
    update = jax.jit(svi.update, static_argnums=3)
    states: list[Any] = []
    for i in range(num_batches):
        X = jnp.array(rng.uniform(-2, 2, size=(batch_size, 1)), jnp.float32)
        y = jnp.sin(2 * X[:, 0]) + 0.3 * jnp.array(rng.normal(size=batch_size), jnp.float32)
        state = svi.init(KEY, X, y, 1000) if i == 0 else states[-1]
        state, _ = update(state, X, y, 1000)
        states.append(state)
    assert update._cache_size() == 1
    return svi, states, X, y


@pytest.mark.slow
def test_bases_grow_until_they_are_full():
    guide = AutoDecoupledGP(learned, mean_size=20, cov_size=7, growth=5, num_columns=4)
    _, states, *_ = stream(guide, 6)
    bases = [state.mutable_state["f_auto_bases"] for state in states]
    assert [int(basis["size"]) for basis in bases] == [5, 10, 15, 20, 20, 20]
    assert bases[-1]["mean"].shape == (20, 1)
    np.testing.assert_array_equal(bases[-1]["mean"][:5], bases[0]["mean"][:5])
    np.testing.assert_array_equal(bases[-1]["cov"], bases[-1]["mean"][:7])
    assert len(np.unique(bases[0]["mean"][5:])) == 1  # a row of the first mini-batch
    assert len(np.unique(bases[-1]["mean"])) == 20


@pytest.mark.slow
def test_a_small_basis_is_from_all_over_sorted_rows():
    guide = AutoDecoupledGP(learned, mean_size=200, cov_size=6, growth=100, num_columns=4)
    svi = SVI(learned, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(2))
    X = jnp.linspace(0.0, 1.0, 200)[:, None]
    state = svi.init(KEY, X, jnp.sin(6.0 * X[:, 0]), 200)
    basis = state.mutable_state["f_auto_bases"]
    assert int(basis["size"]) == 100
    for points in (basis["cov"], basis["mean"][:100]):
        gaps = np.diff(np.sort(np.concatenate([[0.0], points[:, 0], [1.0]])))
        assert gaps.max() < 2.0 / (len(points) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("train_residual", [True, False])
def test_residual_points_grow(train_residual):
    guide = AutoHybridGP(
        learned, num_inducing=4, num_residual=20, growth=5, train_residual=train_residual
    )
    svi, states, X, y = stream(guide, 6)
    bases = [state.mutable_state["f_auto_bases"] for state in states]
    assert [int(basis["size"]) for basis in bases] == [5, 10, 15, 20, 20, 20]
    params: dict[str, Any] = {**svi.get_params(states[0]), **states[0].mutable_state}
    grown = {**params, "f_auto_bases": {**bases[-1], "size": bases[0]["size"]}}
    more = {**params, "f_auto_bases": bases[-1]}
    means = [guide.posterior(values, X, y).mean(X) for values in (params, grown, more)]
    # Inactive points do not change the mean, and added ones hardly do.
    np.testing.assert_allclose(means[0], means[1], atol=1e-7)
    np.testing.assert_allclose(means[0], means[2], atol=0.02 if train_residual else 1e-7)
    # The solve sets the weights of active points, and leaves the others at zero.
    solved = guide.solve_mean(params, X, y, size=len(X)).params
    assert np.all(solved["f_auto_residual_weights"][5:] == 0.0)
    assert np.all(solved["f_auto_residual_weights"][:5] != 0.0)
    with pytest.raises(ValueError, match=r"`params` lacks the mutable site `f_auto_bases`"):
        guide.posterior(svi.get_params(states[-1]), X, y)


@pytest.mark.slow
def test_points_with_separate_scales_grow_and_learn():
    """In a stream of inputs with unit scales nothing turns NaN, and points learn other scales."""
    with_scales = sgp.kernels.MultiscaleRBF.with_unit_scales

    def model(X: Array, y: Array | None = None) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.MultiscaleRBF(0.7), X))
        with numpyro.plate("rows", 1000, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = AutoDecoupledGP(model, mean_size=12, cov_size=4, growth=4, num_columns=None)
    svi = SVI(model, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(2))
    X, y = data()
    X, y = with_scales(X.astype(jnp.float32)), y.astype(jnp.float32)
    state = jax.jit(svi.init)(KEY, X[:10], y[:10])
    update = jax.jit(svi.update)
    for first in (0, 10, 20, 30, 0, 10):
        state, loss = update(state, X[first : first + 10], y[first : first + 10])
        assert np.isfinite(loss)
    shift = svi.get_params(state)["f_auto_mean_shift"]
    assert np.all(np.isfinite(shift))
    assert np.all(shift[:, 1] != 0.0)


@pytest.mark.slow
def test_a_bad_row_does_not_grow_the_bases():
    X, y = data()
    guide = AutoDecoupledGP(learned, mean_size=20, cov_size=6, growth=5)
    svi = SVI(learned, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(2))
    bad = X[10:20].at[3].set(jnp.nan)
    update = jax.jit(svi.stable_update)
    state, _ = update(jax.jit(svi.init)(KEY, bad, y[:10]), X[:10], y[:10])
    for rows, targets in ((bad, y[10:20]), (X[10:20], y[10:20].at[0].set(jnp.inf))):
        state, loss = update(state, rows, targets)
        assert not np.isfinite(loss)
    state, loss = update(state, X[20:30], y[20:30])
    assert np.isfinite(loss)
    bases = state.mutable_state["f_auto_bases"]
    assert int(bases["size"]) == 15  # of three mini-batches
    assert all(np.all(np.isfinite(bases[key])) for key in ("mean", "cov"))


@pytest.mark.slow
@pytest.mark.parametrize("train_mean", [True, False])
def test_growth_hardly_changes_the_posterior(train_mean):
    guide = AutoDecoupledGP(
        learned, mean_size=20, cov_size=20, growth=5, num_columns=4, train_mean=train_mean
    )
    svi, states, X, y = stream(guide, 3)
    Xs = jnp.linspace(-2.0, 2.0, 7)[:, None]
    params: dict[str, Any] = {**svi.get_params(states[-1]), **states[-1].mutable_state}

    def moments(params: dict[str, Any], size: int) -> tuple[Array, Array]:
        bases = {**params["f_auto_bases"], "size": size}
        posterior = guide.posterior({**params, "f_auto_bases": bases}, X, y)
        return posterior.mean(Xs), posterior.variance(Xs)

    (mean, variance), (new_mean, new_variance) = moments(params, 15), moments(params, 20)
    np.testing.assert_allclose(mean, new_mean, atol=0.01 if train_mean else 0.0)
    # The noise of new pseudo-observations is as large as the prior variance.
    assert np.all(new_variance <= variance + 1e-5)
    assert np.any(new_variance < variance)
    # Weights from a solve stay as they are.
    solved = guide.solve_mean(params, X, y, len(X)).params
    np.testing.assert_allclose(moments(solved, 15)[0], moments(solved, 20)[0], atol=2e-4)
    # Computing the posterior does not grow the bases.
    assert int(params["f_auto_bases"]["size"]) == 15


@pytest.mark.slow
def test_solves_with_a_basis_that_is_not_full(x64):
    X, y = data()
    guide = AutoDecoupledGP(fixed, mean_size=60, cov_size=10, growth=40)
    svi, state = start(fixed, guide, X, y)
    params = {**svi.get_params(state), **state.mutable_state}
    params = guide.solve_mean(params, X, y, tolerance=1e-7).params
    assert np.all(params["f_auto_mean_weights"][40:] == 0.0)
    exact = sgp.GaussianProcess(KERNEL, X, NOISE).condition(y)
    np.testing.assert_allclose(guide.posterior(params, X, y).mean(X), exact.mean(X), atol=1e-4)


@pytest.mark.slow
def test_a_result_goes_to_arviz_with_its_bases():
    pytest.importorskip("arviz")
    X, y = data()
    guide = AutoDecoupledGP(learned, mean_size=20, cov_size=5, growth=10)
    svi = SVI(learned, guide, optax.adam(0.05), sgp.infer.QuadratureELBO(2))
    result = svi.run(KEY, 30, X, y, progress_bar=False)
    exported = sgp.to_arviz(result, learned, guide, key=KEY, model_args=(X, y), num_samples=50)
    posterior = guide.posterior({**result.params, **result.state.mutable_state}, X, y)
    f = np.asarray(exported["posterior"]["f"])[0]
    error = np.sqrt(posterior.variance(X) / 50)
    assert np.mean(np.abs(f.mean(axis=0) - posterior.mean(X)) < 4 * error) > 0.9
    # Without the bases there is an error, not another function.
    draws = sgp.infer.Predictive(learned, guide=guide, params=result.params, num_samples=2)
    with pytest.raises(ValueError, match=r"`params` lacks the mutable site `f_auto_bases`"):
        draws(KEY, X, y)


def test_a_posterior_needs_the_bases():
    X, y = data()
    guide = AutoDecoupledGP(fixed, mean_size=20, cov_size=5)
    svi, state = start(fixed, guide, X, y)
    with pytest.raises(ValueError, match=r"`params` lacks the mutable site `f_auto_bases`"):
        guide.posterior(svi.get_params(state), X, y)


@pytest.mark.slow
def test_points_with_separate_scales_raise_the_bound():
    X, y = data(100)
    X, y = X.astype(jnp.float32), y.astype(jnp.float32)
    few = jnp.linspace(-1.9, 1.9, 5)[:, None]

    def bound(kernel: Any, with_scales: Any) -> float:
        def model(X: Array, y: Array) -> None:
            f = numpyro.sample("f", sgp.LatentGP(kernel, X))
            with numpyro.plate("rows", X.shape[0]):
                numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

        guide = AutoSparseGP(model, inducing_points=with_scales(few))
        svi = SVI(model, guide, optax.adam(0.03), sgp.infer.QuadratureELBO(2))
        state = jax.jit(svi.init)(KEY, with_scales(X), y)

        @jax.jit
        def run(state: Any) -> Any:
            step = lambda state, _: svi.update(state, with_scales(X), y)  # noqa: E731
            return jax.lax.scan(step, state, length=1500)

        return -float(run(state)[1][-1])

    with_scales = sgp.kernels.MultiscaleRBF.with_unit_scales
    scaled = bound(sgp.kernels.MultiscaleRBF(0.3), with_scales)
    assert scaled > bound(sgp.kernels.RBF(0.3), lambda X: X) + 10.0


# Objectives, saving and export


@every_guide
@pytest.mark.parametrize("loss", ["quadrature", "stock"])
def test_the_registered_divergence_is_used(name, loss, monkeypatch):
    X, y = data()
    guide = guides(X)[name](fixed)
    calls: list[Any] = []
    family = sgp.HybridGP if name == "hybrid" else sgp.DecoupledGP
    rule = kl_divergence.dispatch(family, sgp.LatentGP)

    def spy(q: Any, p: Any) -> Any:
        calls.append(q)
        return rule(q, p)

    monkeypatch.setitem(kl_divergence.funcs, (family, sgp.LatentGP), spy)
    kl_divergence._cache.clear()
    objective = sgp.infer.QuadratureELBO(2) if loss == "quadrature" else TraceMeanField_ELBO()
    svi = SVI(fixed, guide, optax.adam(0.01), objective)
    start = jax.eval_shape(svi.init, KEY, X, y)
    jax.eval_shape(svi.update, start, X, y)
    kl_divergence._cache.clear()
    assert calls


@every_guide
def test_can_be_saved(name, tmp_path):
    X, y = data()
    guide = guides(X)[name](fixed)
    svi, state = start(fixed, guide, X, y)
    posterior = guide.posterior(svi.get_params(state), X, y)
    sgp.save(tmp_path / "fit.npz", posterior)
    again = sgp.load(tmp_path / "fit.npz")
    np.testing.assert_array_equal(again.mean(X), posterior.mean(X))
    np.testing.assert_array_equal(again.variance(X), posterior.variance(X))


@pytest.mark.slow
@every_guide
def test_goes_to_arviz(name):
    pytest.importorskip("arviz")
    X, y = data()
    guide = guides(X)[name](learned)
    svi = SVI(learned, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(2))
    result = svi.run(KEY, 3, X, y, progress_bar=False)
    exported = sgp.to_arviz(result, learned, guide, key=KEY, model_args=(X, y), num_samples=4)
    assert np.asarray(exported["posterior"]["f"]).shape == (1, 4, N)
    assert np.asarray(exported["log_likelihood"]["y"]).shape == (1, 4, N)


@pytest.mark.slow
def test_rest_is_a_guide_like_any_other():
    X, y = data()
    guide = AutoHybridGP(learned, rest=AutoNormal, num_inducing=5, num_residual=9)
    svi, state = start(learned, guide, X, y)
    draws = guide.sample_posterior(KEY, svi.get_params(state), X, y, sample_shape=(2,))
    assert draws["f"].shape == (2, N)
    assert set(draws) == {"f", "lengthscale", "noise"}
