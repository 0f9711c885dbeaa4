"""GPs of finitely many features: exact with all rows, unbiased with mini-batches; use in SVI."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from jaxtyping import Array
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

import numpyro_scalegp as sgp
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import Batch
from numpyro_scalegp.log_determinants import Compositional, MiniBatch, Minimax, Variational
from numpyro_scalegp.processes.feature import FeaturePosterior
from tests.compilation import largest_array
from tests.feature_problem import BATCH, D, N, best_weights, data, exact, features

KEY = jax.random.key(0)
KINDS = [Variational(), Compositional(), Minimax(), MiniBatch()]
NAMES = [type(kind).__name__ for kind in KINDS]


def model(X: Array, y: Array, logdet: Any, batch_size: int | None = None, lowest: float = 0.0):
    log_scale = numpyro.param("log_scale", jnp.full(D, -1.0))
    noise = numpyro.param("noise", 1.0, constraint=constraints.greater_than(lowest))
    weights = numpyro.param("weights", jnp.zeros(D))
    X_batch, y_batch = sgp.plate("rows", len(X), batch_size).take(X, y)
    phi = functools.partial(features, log_scale)
    gp = sgp.FeatureSpaceGP(phi, X_batch, noise, weights, num_data=len(X), logdet=logdet)
    numpyro.sample("y", gp, obs=y_batch)


def nothing(*args: Any, **kwargs: Any) -> None:
    """The guide of a model without latent sites."""


@pytest.mark.parametrize("noise", [0.3, 1e-4])
@pytest.mark.parametrize("n", [N, 12])  # more rows than features, and fewer
@pytest.mark.parametrize("logdet", KINDS, ids=NAMES)
def test_all_rows_give_the_exact_value_and_gradient(logdet, n, noise, x64):
    X, y = data(n)
    log_scale = jnp.linspace(-1.0, 0.5, D)
    weights = best_weights(features(log_scale, X), noise, y)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def ours(log_scale: Array, noise: Array) -> Array:
        phi = functools.partial(features, log_scale)
        gp = sgp.FeatureSpaceGP(phi, X, noise, weights, num_data=n, logdet=logdet)
        return gp.log_prob(y)

    value, gradient = ours(log_scale, jnp.array(noise))
    expected, derivatives = jax.value_and_grad(exact, argnums=(0, 1))(
        log_scale, jnp.array(noise), X, y
    )
    # The inverse of F loses as many digits as its condition number has.
    accuracy = 1e-8 if noise > 1e-3 else 1e-6
    np.testing.assert_allclose(value, expected, rtol=accuracy)
    for gradient_leaf, derivative in zip(gradient, derivatives, strict=True):
        np.testing.assert_allclose(
            gradient_leaf, derivative, rtol=accuracy, atol=accuracy * abs(expected)
        )


@pytest.mark.parametrize("logdet", [Variational(), Compositional(), Minimax(penalty=0.3)])
def test_training_with_all_rows_stays_exact(logdet, x64):
    X, y = data()
    svi = SVI(model, nothing, optax.adam(0.05), Trace_ELBO())
    state = svi.init(KEY, X, y, logdet)
    update = jax.jit(lambda state: svi.update(state, X, y, logdet))
    for _ in range(5):
        state, _ = update(state)
    params = svi.get_params(state)
    Phi = features(params["log_scale"], X)
    params["weights"] = best_weights(Phi, params["noise"], y)

    def log_prob(log_scale: Array, noise: Array) -> Array:
        values = {**params, "log_scale": log_scale, "noise": noise, **state.mutable_state}
        return -Trace_ELBO().loss(KEY, values, model, nothing, X, y, logdet)

    at = (params["log_scale"], params["noise"])
    value, gradient = jax.value_and_grad(log_prob, argnums=(0, 1))(*at)
    expected, derivatives = jax.value_and_grad(exact, argnums=(0, 1))(*at, X, y)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    for gradient_leaf, derivative in zip(gradient, derivatives, strict=True):
        np.testing.assert_allclose(gradient_leaf, derivative, rtol=1e-8, atol=1e-8 * abs(expected))


@pytest.mark.filterwarnings("ignore:a covariance matrix:RuntimeWarning")
@pytest.mark.parametrize("logdet", KINDS[:3], ids=NAMES[:3])
def test_single_precision_with_little_noise(logdet, x64):
    """F has a condition number of 10^8 here, beyond what float32 can factorize."""
    rng = np.random.default_rng(0)
    X, noise = jnp.array(rng.normal(size=(2000, 1))), 1e-4
    y = jnp.sin(2.0 * X[:, 0])
    Phi = sgp.features.RandomFourier(sgp.kernels.RBF(1.0), 2 * D, seed=0)
    weights = jnp.linalg.solve(Phi(X).T @ Phi(X) + noise * jnp.eye(2 * D), Phi(X).T @ y)

    def log_prob(at: Array, dtype: str) -> Array:
        lengthscale, noise = jnp.exp(at)
        phi = Phi.with_kernel(sgp.kernels.RBF(lengthscale))  # the frequencies of float64
        arrays = (phi(X), noise, weights, y)
        features, noise, w, observed = (jnp.asarray(a, dtype) for a in arrays)
        gp = sgp.FeatureSpaceGP(lambda X: X, features, noise, w, num_data=len(X), logdet=logdet)
        return gp.log_prob(observed)

    at = jnp.log(jnp.array([1.0, noise]))
    value, gradient = jax.value_and_grad(log_prob)(at, "float32")
    expected, derivatives = jax.value_and_grad(log_prob)(at, "float64")
    np.testing.assert_allclose(value, expected, rtol=0.01)
    np.testing.assert_allclose(gradient, derivatives, rtol=0.05)


def trained(logdet: Any, batch_size: int | None) -> Array:
    """The exact log marginal likelihood at the hyperparameters that training finds."""
    X, y = data()
    num_steps = 15_000
    rate = optax.cosine_decay_schedule(0.02, num_steps)
    svi = SVI(model, nothing, optax.adam(rate), Trace_ELBO())
    state = svi.init(KEY, X, y, logdet, batch_size)

    @jax.jit
    def run(state: Any) -> Any:
        update = lambda state, _: svi.update(state, X, y, logdet, batch_size)  # noqa: E731
        return jax.lax.scan(update, state, length=num_steps)[0]

    params = svi.get_params(run(state))
    return exact(params["log_scale"], params["noise"], X, y)


@pytest.mark.monte_carlo
def test_small_batches_converge_to_the_optimum_with_all_rows(x64):
    with_all_rows = trained(Variational(), None)
    for logdet in (Variational(), Compositional(), Minimax()):
        assert jnp.abs(trained(logdet, BATCH) / with_all_rows - 1.0) < 0.005, logdet
    assert (
        trained(MiniBatch(), BATCH) / with_all_rows > 1.01
    )  # a lower likelihood, which is negative


@pytest.mark.slow
def test_svi_carries_the_state(x64):
    X, y = data(40)
    logdet = Variational(name="volume")
    svi = SVI(model, nothing, optax.adam(0.05), Trace_ELBO())
    state = svi.init(KEY, X, y, logdet, BATCH)
    before = state.mutable_state["volume"]["state"].state
    state, _ = jax.jit(lambda state: svi.update(state, X, y, logdet, BATCH))(state)
    after = state.mutable_state["volume"]["state"].state
    assert after.step == before.step + 1
    assert not jnp.allclose(after.W, before.W)
    # A step with values that are not finite leaves the state and the parameters unchanged.
    broken = sgp.infer.replace_params(svi, state, {"log_scale": jnp.full(D, 400.0)})
    restored, _ = svi.stable_update(broken, X, y, logdet, BATCH)
    np.testing.assert_array_equal(restored.mutable_state["volume"]["state"].state.W, after.W)
    # Evaluation does not write to the state.
    values = {**svi.get_params(state), **state.mutable_state}
    for batch_size in (BATCH, None):
        Trace_ELBO().loss(KEY, values, model, nothing, X, y, logdet, batch_size)
    assert state.mutable_state["volume"]["state"].state is after


@pytest.mark.slow
@pytest.mark.parametrize("logdet", [Variational(), Compositional(), Minimax()])
def test_an_initial_pass_starts_the_state_from_many_batches(logdet, x64):
    X, y = data()
    svi = SVI(model, nothing, optax.sgd(0.0), Trace_ELBO())
    state = svi.init(KEY, X, y, logdet, BATCH)
    params = svi.get_params(state)
    Phi = features(params["log_scale"], X)
    F = Phi.T @ Phi + params["noise"] * jnp.eye(D)

    def looseness(state: Any) -> Array:
        held = state.mutable_state["log_determinant"]["state"].state
        return logdet.estimate(Batch(Phi, params["noise"], N), held) - jnp.linalg.slogdet(F)[1]

    begun = sgp.infer.initial_pass(svi, state, 400, X, y, logdet, BATCH)
    assert looseness(state) > 1.0
    assert 0.0 <= looseness(begun) < 0.05
    update = jax.jit(lambda state: svi.update(state, X, y, logdet, BATCH)[0])
    for _ in range(5):
        begun = update(begun)
    assert 0.0 <= looseness(begun) < 1.0  # and stays so
    with pytest.raises(ValueError, match="has no `FeatureSpaceGP` whose log-determinant"):
        sgp.infer.initial_pass(svi, state, 4, X, y, MiniBatch(), BATCH)
    with pytest.raises(ValueError, match="`num_batches` must be at least 1, got 0"):
        sgp.infer.initial_pass(svi, state, 0, X, y, logdet, BATCH)
    svi = SVI(numpyro.handlers.scope(model, "a"), nothing, optax.sgd(0.0), Trace_ELBO())
    state = svi.init(KEY, X, y, logdet, BATCH)
    with pytest.raises(ValueError, match=r"mutable sites are \['a/log_determinant'\], without"):
        sgp.infer.initial_pass(svi, state, 4, X, y, logdet, BATCH)


@pytest.mark.slow
def test_several_particles_are_refused():
    X, y = data(40)
    loss = Trace_ELBO(num_particles=2)
    svi = SVI(model, nothing, optax.adam(0.05), loss)
    state = svi.init(KEY, X, y, Variational(), BATCH)
    with pytest.raises(ValueError, match="a state is written by 2 computations at once"):
        svi.update(state, X, y, Variational(), BATCH)


def test_draws_have_the_moments_of_the_prior(x64):
    X, _ = data(4)
    phi = functools.partial(features, jnp.full(D, -1.0))
    gp = sgp.FeatureSpaceGP(phi, X, 0.3, jnp.zeros(D), num_data=N, logdet=MiniBatch())
    Phi = phi(X)
    draws = gp.sample(KEY, (2, 20_000))
    assert draws.shape == (2, 20_000, 4)
    covariance = Phi @ Phi.T + 0.3 * jnp.eye(4)
    np.testing.assert_allclose(np.cov(draws.reshape(-1, 4).T), covariance, atol=0.1)
    np.testing.assert_allclose(gp.variance, jnp.diagonal(covariance))
    np.testing.assert_allclose(gp.mean, 0.0)


def test_posterior(x64, tmp_path):
    X, y = data(40)
    feature_map = functools.partial(features, jnp.linspace(-1.0, 0.5, D))
    Phi, Xs = feature_map(X), X[:5] + 0.1
    K, k = Phi @ Phi.T + 0.3 * jnp.eye(40), feature_map(Xs) @ Phi.T
    mean = k @ jnp.linalg.solve(K, y)
    covariance = feature_map(Xs) @ feature_map(Xs).T - k @ jnp.linalg.solve(K, k.T)

    gp = sgp.FeatureSpaceGP(feature_map, X, 0.3, jnp.zeros(D), num_data=40, logdet=Variational())
    posterior = gp.condition(y)
    np.testing.assert_allclose(posterior.mean(Xs), mean, rtol=1e-8)
    np.testing.assert_allclose(posterior.covariance(Xs), covariance, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(posterior.variance(Xs), jnp.diagonal(covariance), rtol=1e-6)
    draws = posterior.sample(KEY, Xs, 20_000)
    np.testing.assert_allclose(np.mean(draws, axis=0), mean, atol=0.05)

    sgp.save(tmp_path / "fit.npz", posterior)
    again = sgp.load(tmp_path / "fit.npz", trusted=(features,))
    np.testing.assert_array_equal(again.mean(Xs), posterior.mean(Xs))


@pytest.mark.parametrize("num_data", [8, 20])  # all rows, and a mini-batch
@pytest.mark.parametrize("logdet", KINDS, ids=NAMES)
def test_features_are_evaluated_once_for_each_step(logdet, num_data):
    def density(scale: Array, X: Array) -> Array:
        phi = lambda X: jnp.arctan(scale * X)  # noqa: E731
        gp = sgp.FeatureSpaceGP(phi, X, 0.3, jnp.zeros(3), num_data=num_data, logdet=logdet)
        return gp.log_prob(jnp.ones(8))

    assert str(jax.make_jaxpr(density)(1.0, jnp.ones((8, 3)))).count(" atan ") == 1


@pytest.mark.parametrize("logdet", [Variational(), MiniBatch()])
def test_conditioning_never_has_the_features_of_all_rows(logdet):
    n, d = 1_000_000, 64

    def mean(X: Array, y: Array) -> Array:
        phi = lambda X: jnp.sin(X * jnp.arange(64.0))  # noqa: E731
        gp = sgp.FeatureSpaceGP(phi, X, 0.3, jnp.zeros(d), num_data=n, logdet=logdet)
        return gp.condition(y).weights.mean

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, 1), (n,))]
    assert largest_array(jax.make_jaxpr(mean)(*shapes)) < n * d / 2


def given_features(Phi: Array, y: Array, noise: Any) -> FeaturePosterior:
    """The posterior for inputs that are features."""
    zero, num = jnp.zeros(Phi.shape[1], Phi.dtype), len(Phi)
    gp = sgp.FeatureSpaceGP(lambda X: X, Phi, noise, zero, num_data=num, logdet=MiniBatch())
    return gp.condition(y)


def test_leave_one_out_warns_where_digits_are_lost():
    Phi = jnp.array(np.random.default_rng(0).normal(size=(30, 60)), jnp.float32)
    with pytest.warns(RuntimeWarning, match="posterior mean of features is off"):
        posterior = given_features(Phi, Phi[:, 0], 1e-5)
        jax.block_until_ready(posterior.weights.mean)
        jax.effects_barrier()
    with pytest.warns(RuntimeWarning, match="leave-one-out densities of features are inaccurate"):
        jax.block_until_ready(posterior.leave_one_out().scale)
        jax.effects_barrier()


def test_the_posterior_mean_in_single_precision_with_little_noise(x64):
    rng = np.random.default_rng(0)
    Phi = np.maximum(rng.normal(size=(32, 128)), 0.0) / np.sqrt(128.0)
    y, Xs = Phi @ rng.normal(size=128), np.maximum(rng.normal(size=(5, 128)), 0.0)
    means = []
    for dtype in ("float32", "float64"):
        arrays = [jnp.asarray(a.astype(np.float32), dtype) for a in (Phi, y, np.asarray(1e-5))]
        posterior = given_features(*arrays)
        means.append(posterior.mean(jnp.asarray(Xs.astype(np.float32), dtype)))
    single, double = means
    np.testing.assert_allclose(single, double, atol=5e-3 * float(jnp.max(jnp.abs(double))))


def test_bad_arguments(unchecked):
    Phi, zero = jnp.ones((4, 3)), jnp.zeros(3)
    build = functools.partial(sgp.FeatureSpaceGP, jnp.sin, num_data=8, logdet=Variational())
    with pytest.raises(ValueError, match="two rows or more"):
        build(Phi[:1], 0.1, zero, logdet=Minimax())

    def plated():
        with numpyro.plate("rows", 4):
            numpyro.sample("y", build(Phi, 0.1, zero), obs=jnp.zeros(4))

    with pytest.raises(ValueError, match="stands inside a plate"):
        numpyro.handlers.trace(plated).get_trace()
