"""The collapsed distribution and its posterior against dense algebra."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jaxtyping import Array
from numpyro import handlers

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators import AbstractEstimator
from tests.extending import CLASSES

N, M = 9, 5
LENGTHSCALE, VARIANCE = 0.8, 1.5
PER_ROW = np.linspace(0.05, 0.4, N)


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(N, 2))
    return X, np.sin(X.sum(axis=1)) + 0.2 * rng.normal(size=N), rng.normal(size=(M, 2))


def rbf(X: np.ndarray, Z: np.ndarray) -> np.ndarray:
    squared = np.sum((X[:, None] - Z[None]) ** 2, axis=-1)
    return VARIANCE * np.exp(-0.5 * squared / LENGTHSCALE**2)


def trend(X: Any) -> Any:
    return 0.5 + X[:, 0] - 0.3 * X[:, 1]


def process(noise: Any = 0.1, mean: Any = trend) -> sgp.GaussianProcess:
    kernel = sgp.kernels.RBF(LENGTHSCALE, VARIANCE)
    return sgp.GaussianProcess(kernel, jnp.array(data()[0]), noise, mean=mean)


def dense_posterior(noise: Any = 0.1) -> tuple[np.ndarray, np.ndarray]:
    X, y, Xs = data()
    H = rbf(X, X) + np.diag(np.broadcast_to(noise, N))
    gain = np.linalg.solve(H, rbf(X, Xs)).T
    return trend(Xs) + gain @ (y - trend(X)), rbf(Xs, Xs) - gain @ rbf(X, Xs)


def assert_within_standard_errors(draws: np.ndarray, mean: Any, covariance: np.ndarray) -> None:
    """Compare mean and covariance of normal draws with what they should be."""
    draws = np.asarray(draws, np.float64)
    sd = np.sqrt(np.diagonal(covariance))
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 4 * sd / np.sqrt(len(draws)))
    error = np.sqrt((np.outer(sd**2, sd**2) + covariance**2) / len(draws))
    centered = draws - np.asarray(mean)
    assert np.all(np.abs(centered.T @ centered / len(draws) - covariance) < 4 * error)


# The distribution


@pytest.mark.parametrize("noise", [0.1, PER_ROW], ids=["scalar", "per_row"])
def test_moments_and_log_prob(noise, dtype):
    X, y, _ = data()
    covariance = rbf(X, X) + np.diag(np.broadcast_to(noise, N))
    gp = process(noise)
    assert (gp.batch_shape, gp.event_shape) == ((), (N,))
    assert gp.mean.dtype == gp.variance.dtype == dtype
    rtol = 1e-12 if dtype == jnp.float64 else 1e-5
    np.testing.assert_allclose(gp.mean, trend(X), rtol=rtol)
    np.testing.assert_allclose(gp.variance, np.diagonal(covariance), rtol=rtol)
    expected = scipy.stats.multivariate_normal(trend(X), covariance).logpdf(y)
    np.testing.assert_allclose(jax.jit(gp.log_prob)(jnp.array(y)), expected, rtol=10 * rtol)


def test_sample_moments(dtype):
    X, _, _ = data()
    draws = process(PER_ROW).sample(jax.random.key(0), (5, 4000))
    assert draws.shape == (5, 4000, N)
    assert draws.dtype == dtype
    assert_within_standard_errors(draws.reshape(-1, N), trend(X), rbf(X, X) + np.diag(PER_ROW))
    assert process().sample(jax.random.key(0)).shape == (N,)


def iterative(noise: Any = 0.1, **options: Any) -> sgp.GaussianProcess:
    solver = sgp.solvers.ConjugateGradients(1e-3, 30, sgp.preconditioners.PivotedCholesky(5))
    options = {"estimator": sgp.estimators.Pathwise(solver, 3, num_features=200), **options}
    kernel = sgp.kernels.RBF(LENGTHSCALE, VARIANCE)
    return sgp.GaussianProcess(kernel, jnp.array(data()[0]), noise, mean=trend, **options)


def test_sample_moments_with_an_iterative_estimator(dtype):
    """By random features: groups of draws share them, so only many groups have the covariance."""
    X, _, _ = data()
    gp = iterative(PER_ROW)
    draws = jax.jit(lambda key: gp.sample(key, (5, 4000)))(jax.random.key(0))
    assert draws.shape == (5, 4000, N)
    assert draws.dtype == dtype
    assert_within_standard_errors(draws.reshape(-1, N), trend(X), rbf(X, X) + np.diag(PER_ROW))
    assert iterative().sample(jax.random.key(0)).shape == (N,)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["hutchinson", "pathwise"])
def test_key_and_state(estimator, x64):
    """A key or a state makes a random estimator a function; both go through `jit`."""
    y = jnp.array(data()[1])
    solver = sgp.solvers.ConjugateGradients(1e-6, 30, sgp.preconditioners.PivotedCholesky(2))
    kinds: dict[str, Any] = {
        "hutchinson": sgp.estimators.Hutchinson,
        "pathwise": sgp.estimators.Pathwise,
    }
    options = {"estimator": kinds[estimator](solver, 3, num_features=16, num_records=3)}
    gp = iterative(**options, key=jax.random.key(1))
    assert gp.state is None
    log_prob = jax.jit(lambda gp: gp.log_prob(y))
    assert log_prob(gp) == log_prob(iterative(**options, key=jax.random.key(1)))
    assert log_prob(gp) != log_prob(iterative(**options, key=jax.random.key(2)))

    def with_state(state: Any, **more: Any) -> sgp.GaussianProcess:
        with handlers.substitute(data={"solver": state}):
            return iterative(**options, **more, state="solver")

    gp = iterative(**options, key=jax.random.key(1), state="solver")
    state: Any = gp.state
    assert state.memory.solutions.shape == (2, N, 4)
    evaluate = jax.jit(lambda gp: (gp.log_prob(y), gp.state))
    value, after = evaluate(gp)
    assert [int(s.memory.step) for s in (state, after)] == [0, 1]
    # The state holds the probes' seed: the key does not matter.
    again, _ = evaluate(with_state(state, key=jax.random.key(2)))
    assert again == value
    value, after = evaluate(with_state(after))
    assert after.memory.step == 2
    assert after.history()["epochs"].shape == (2,)
    # Without a key or a state, there is an error.
    with pytest.raises(ValueError, match=r"a new solver state needs a `key` .* data={name: state}"):
        iterative(**options, state="solver")


@pytest.mark.slow
def test_state_outside_of_a_model(x64):
    """Each distribution has a separate new state, from which it conditions without a solve."""
    y = jnp.array(data()[1])
    gp, second = (iterative(key=jax.random.key(1), state="solver") for _ in range(2))
    state: Any = gp.state
    assert state is not second.state
    gp.log_prob(y)
    assert state.memory.step == 1
    assert second.state.memory.step == 0  # type: ignore[union-attr]
    assert gp.condition(y).diagnostics["epochs"] == 0


def test_a_custom_estimator(x64, monkeypatch):
    """Density, posterior and draws are all computed by the custom estimator."""
    X, y, Xs = data()
    exact = process()
    expected = exact.log_prob(y), exact.condition(y).variance(Xs)
    for name in ("log_prob", "condition", "sample_prior"):
        monkeypatch.setattr(sgp.estimators.Cholesky, name, None)
    gp = sgp.GaussianProcess(exact.kernel, X, 0.1, mean=trend, estimator=CLASSES["Dense"]())
    results = gp.log_prob(y), gp.condition(y).variance(Xs)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), results, expected)
    draws = gp.sample(jax.random.key(0), (2, 500))
    assert draws.shape == (2, 500, N)
    assert_within_standard_errors(draws.reshape(-1, N), trend(X), rbf(X, X) + 0.1 * np.eye(N))
    with pytest.raises(TypeError, match="abstract method"):
        type("Half", (AbstractEstimator,), {"log_prob": CLASSES["Dense"].log_prob})()


class Trend(eqx.Module):
    """The same trend as an Equinox module of one row."""

    weights: Array

    def __call__(self, x: Array) -> Array:
        return 0.5 + x @ self.weights


WEIGHTS = (1.0, -0.3)


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        (None, lambda X: np.zeros(N)),
        (0.7, lambda X: np.full(N, 0.7)),
        (np.float32(2.0), lambda X: np.full(N, 2.0)),
        (trend, trend),
        (lambda X: jnp.array(0.5) + X @ jnp.array(WEIGHTS), trend),
        (functools.partial(lambda w, X: 0.5 + X @ w, jnp.array(WEIGHTS)), trend),
        (Trend(jnp.array(WEIGHTS)), trend),
    ],
    ids=["none", "number", "scalar_array", "function", "closure", "partial", "equinox"],
)
def test_mean_functions(mean, expected):
    X, _, _ = data()
    gp = process(mean=mean)
    assert gp.mean.shape == (N,)
    np.testing.assert_allclose(gp.mean, expected(X), rtol=1e-5)


def test_mean_function_with_traced_parameters(x64):
    X, y, _ = data()

    def with_closure(weights: Array) -> Array:
        return process(mean=lambda X: 0.5 + X @ weights).log_prob(jnp.array(y))

    def with_module(weights: Array) -> Array:
        return process(mean=Trend(weights)).log_prob(jnp.array(y))

    weights = jnp.array(WEIGHTS)
    closure, module = jax.jit(
        lambda w: [jax.value_and_grad(f)(w) for f in (with_closure, with_module)]
    )(weights)
    H = rbf(X, X) + 0.1 * np.eye(N)
    expected = X.T @ np.linalg.solve(H, y - trend(X))
    np.testing.assert_allclose(closure[1], expected, rtol=1e-9)
    np.testing.assert_allclose(closure[0], module[0], rtol=1e-12)
    np.testing.assert_allclose(closure[1], module[1], rtol=1e-12)


def test_pytree_round_trip_through_jit():
    _, y, _ = data()
    gp = process(mean=Trend(jnp.array(WEIGHTS)))
    again = jax.jit(lambda gp: gp)(gp)
    assert isinstance(again, sgp.GaussianProcess)
    assert again.event_shape == (N,)
    assert jax.tree.structure(again) == jax.tree.structure(gp)
    log_prob = jax.jit(lambda gp, y: gp.log_prob(y))
    assert log_prob(again, jnp.array(y)) == log_prob(gp, jnp.array(y))
    gradient = jax.jit(jax.grad(lambda gp, y: gp.log_prob(y)))(gp, jnp.array(y))
    assert isinstance(gradient, sgp.GaussianProcess)
    for leaf in (
        gradient.kernel.lengthscale,
        gradient.noise_variance,
        gradient.X,
        gradient.mean_function(jnp.ones((1, 2))),
    ):
        assert np.all(leaf != 0)


def test_vmap_over_hyperparameters(x64):
    X, y, _ = data()

    @jax.jit
    @jax.vmap
    def log_prob(lengthscale: Array, noise: Array) -> Array:
        gp = sgp.GaussianProcess(sgp.kernels.RBF(lengthscale, VARIANCE), X, noise, mean=trend)
        return gp.log_prob(jnp.array(y))

    values = log_prob(jnp.array([0.4, LENGTHSCALE, 2.0]), jnp.array([0.3, 0.1, 0.2]))
    H = rbf(X, X) + 0.1 * np.eye(N)
    expected = scipy.stats.multivariate_normal(trend(X), H).logpdf(y)
    assert values.shape == (3,)
    np.testing.assert_allclose(values[1], expected, rtol=1e-11)
    assert len(np.unique(values)) == 3


@pytest.mark.parametrize(
    "make", [sgp.LatentGP, lambda kernel, X: sgp.GaussianProcess(kernel, X, 0.1)]
)
def test_a_batch_is_not_copied_along_its_axes(make):
    lengthscale = jnp.array([0.6, 0.8])[:, None, None]
    gp = make(sgp.kernels.RBF(lengthscale), jnp.asarray(data()[0]))
    assert gp.batch_shape == (2, 1)
    assert gp.expand((4, 2, 1)).batch_shape == (4, 2, 1)
    with pytest.raises(ValueError, match=r"the batch shape \(2, 1\) stands inside plates of"):
        gp.expand((2, 3))


def test_expand():
    gp = process()
    expanded = gp.expand([3])
    assert (expanded.batch_shape, expanded.event_shape) == ((3,), (N,))
    draws = expanded.sample(jax.random.key(0), (2,))
    assert draws.shape == (2, 3, N)
    assert not np.allclose(draws[:, 0], draws[:, 1])
    np.testing.assert_allclose(expanded.log_prob(draws), gp.log_prob(draws), rtol=1e-6)
    # The draws are joint over rows, so a batch of n copies means a site in the wrong plate.
    with pytest.raises(ValueError, match=r"`GaussianProcess` got the batch shape \(9,\) with 9 ro"):
        gp.expand((N,))


def test_dtype_follows_the_inputs_and_not_the_default(x64):
    """Python numbers never widen float32 data, even where float64 is the default."""
    X, y, Xs = (jnp.array(a, jnp.float32) for a in data())
    for mean in (None, 0.3, lambda X: X[:, 0]):
        gp = sgp.GaussianProcess(sgp.kernels.RBF(0.8, 1.5), X, 0.1, mean=mean)

        @jax.jit
        def everything(gp: sgp.GaussianProcess, y: Array) -> Any:
            posterior = gp.condition(y)
            predictive = posterior.predictive(Xs)
            return {
                "mean": gp.mean,
                "variance": gp.variance,
                "log_prob": gp.log_prob(y),
                "sample": gp.sample(jax.random.key(0)),
                "posterior_mean": posterior.mean(Xs),
                "posterior_variance": posterior.variance(Xs),
                "posterior_sample": posterior.sample(jax.random.key(0), Xs),
                "predictive_mean": predictive.mean,
                "predictive_variance": predictive.variance,
                "leave_one_out": posterior.leave_one_out().log_prob(y),
            }

        shapes = jax.eval_shape(everything, gp, y)
        wide = [name for name, leaf in shapes.items() if leaf.dtype != jnp.float32]
        assert wide == []
    wide_noise = sgp.GaussianProcess(sgp.kernels.RBF(0.8), X, jnp.array(0.1, jnp.float64))
    assert jax.eval_shape(wide_noise.log_prob, y).dtype == jnp.float64


# The posterior


@pytest.mark.parametrize("noise", [0.1, PER_ROW], ids=["scalar", "per_row"])
def test_condition(noise, x64):
    _, y, Xs = data()
    posterior = process(noise).condition(jnp.array(y))
    mean, covariance = dense_posterior(noise)
    np.testing.assert_allclose(posterior.mean(jnp.array(Xs)), mean, rtol=1e-10)
    np.testing.assert_allclose(posterior.covariance(jnp.array(Xs)), covariance, atol=1e-12)
    np.testing.assert_allclose(
        posterior.variance(jnp.array(Xs)), np.diagonal(covariance), rtol=1e-10
    )


def test_joint_samples(dtype):
    _, y, Xs = data()
    posterior = process().condition(jnp.array(y))
    draws = posterior.sample(jax.random.key(2), jnp.array(Xs), 10_000)
    assert draws.shape == (10_000, M)
    assert draws.dtype == dtype
    assert_within_standard_errors(draws, *dense_posterior())


def test_predictive_adds_the_noise(x64):
    _, y, Xs = data()
    posterior = process().condition(jnp.array(y))
    mean, covariance = dense_posterior()
    predictive = posterior.predictive(jnp.array(Xs))
    assert predictive.batch_shape == (M,)
    np.testing.assert_allclose(predictive.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(predictive.variance, np.diagonal(covariance) + 0.1, rtol=1e-10)
    predictive = posterior.predictive(jnp.array(Xs), noise_variance=jnp.arange(1.0, M + 1))
    np.testing.assert_allclose(
        predictive.variance, np.diagonal(covariance) + np.arange(1, M + 1), rtol=1e-10
    )


def test_predictive_needs_the_noise_at_new_inputs_where_it_varies(x64):
    _, y, Xs = data()
    posterior = process(PER_ROW).condition(jnp.array(y))
    with pytest.raises(ValueError, match=r"`noise_variance` must be given.*shape \(9,\)"):
        posterior.predictive(jnp.array(Xs))
    variance = posterior.predictive(jnp.array(Xs), noise_variance=jnp.array(0.3)).variance
    np.testing.assert_allclose(variance, np.diagonal(dense_posterior(PER_ROW)[1]) + 0.3, rtol=1e-9)


@pytest.mark.parametrize("noise", [0.1, PER_ROW], ids=["scalar", "per_row"])
def test_leave_one_out_against_leaving_each_point_out(noise, x64):
    X, y, _ = data()
    leave_one_out = process(noise).condition(jnp.array(y)).leave_one_out()
    assert leave_one_out.batch_shape == (N,)
    noises = np.broadcast_to(noise, N)
    for i in range(N):
        remaining = np.arange(N) != i
        gain = np.linalg.solve(
            rbf(X[remaining], X[remaining]) + np.diag(noises[remaining]), rbf(X[remaining], X[[i]])
        )
        mean = trend(X[[i]]) + gain.T @ (y - trend(X))[remaining]
        variance = VARIANCE - gain.T @ rbf(X[remaining], X[[i]]) + noises[i]
        np.testing.assert_allclose(leave_one_out.mean[i], mean[0], rtol=1e-10)
        np.testing.assert_allclose(leave_one_out.variance[i], variance[0, 0], rtol=1e-10)


@pytest.mark.parametrize("chunk_size", [1, 3, M, 100])
def test_results_do_not_depend_on_the_chunk_size(chunk_size, x64):
    _, y, Xs = data()
    posterior = process().condition(jnp.array(y))
    mean, covariance = dense_posterior()
    predictive = posterior.predictive(jnp.array(Xs), chunk_size=chunk_size)
    np.testing.assert_allclose(predictive.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(predictive.variance, np.diagonal(covariance) + 0.1, rtol=1e-10)


def test_variance_at_data_without_noise_is_not_negative():
    X, y, _ = data()
    posterior = process(1e-6).condition(jnp.array(y))
    variance = posterior.variance(jnp.array(X))
    assert variance.dtype == jnp.float32
    assert variance.min() >= 0
    assert variance.max() < 1e-4


def test_posterior_goes_through_jit():
    _, y, Xs = data()
    condition = jax.jit(lambda gp, y: gp.condition(y))
    posterior = condition(process(mean=0.2), jnp.array(y))
    direct = process(mean=0.2).condition(jnp.array(y))
    np.testing.assert_allclose(
        jax.jit(lambda p, Xs: p.mean(Xs))(posterior, jnp.array(Xs)),
        direct.mean(jnp.array(Xs)),
        rtol=1e-5,
    )


# Bad input


def test_nan_in_new_inputs_is_named():
    _, y, Xs = data()
    posterior = process().condition(y)
    Xs[1, 0] = np.nan
    with pytest.raises(ValueError, match=r"`Xs` must be finite, got 1 .* index \(1, 0\)"):
        posterior.mean(jnp.array(Xs))


def test_bad_values_inside_jit_give_nan():
    X, y, _ = data()

    @jax.jit
    def log_prob(X: Array, y: Array) -> Array:
        return sgp.GaussianProcess(sgp.kernels.RBF(0.8), X, 0.1).log_prob(y)

    assert np.isnan(log_prob(jnp.array(X), jnp.array(y).at[0].set(jnp.nan)))
    with pytest.warns(RuntimeWarning, match="Check the inputs for NaN"):
        assert np.isnan(log_prob(jnp.array(X).at[0, 0].set(jnp.nan), jnp.array(y)))
        # Kernels have a limit at infinity, and a single row has only its variance.
        assert np.isnan(log_prob(jnp.array(X).at[0, 0].set(jnp.inf), jnp.array(y)))
        assert np.isnan(log_prob(jnp.full((1, 2), jnp.nan), jnp.array(y)[:1]))
        jax.effects_barrier()


def moments(estimator, parameters, Xs):
    """A function of the posterior's moments, for derivatives in all arguments."""
    lengthscale, noise, level, y = parameters
    X = jnp.linspace(0.0, 1.0, 12)[:, None]
    gp = sgp.GaussianProcess(
        sgp.kernels.RBF(lengthscale),
        X,
        noise,
        mean=level,
        estimator=estimator,
        key=jax.random.key(0),
    )
    posterior = gp.condition(y)
    return jnp.sum(posterior.mean(Xs)) + jnp.sum(posterior.variance(Xs))


PARAMETERS = 0.3, 0.01, 0.5, np.sin(6.0 * np.linspace(0.0, 1.0, 12))


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [sgp.estimators.Cholesky(), sgp.estimators.RandomFourier(20)])
def test_derivatives_of_a_posterior_are_exact(estimator, x64):
    """The derivative includes the derivative of the factor of H."""
    at = jax.tree.map(jnp.asarray, PARAMETERS), jnp.array([[0.33], [1.2]])
    value = functools.partial(moments, estimator)
    generator, step = np.random.default_rng(0), 1e-6
    direction = jax.tree.map(lambda leaf: jnp.array(generator.normal(size=leaf.shape)), at)
    tangent = jax.jvp(value, at, direction)[1]
    low, high = (jax.tree.map(lambda a, b, s=s: a + s * b, at, direction) for s in (-step, step))
    np.testing.assert_allclose(tangent, (value(*high) - value(*low)) / (2.0 * step), rtol=1e-5)
    products = jax.tree.map(jnp.vdot, jax.grad(value, argnums=(0, 1))(*at), direction)
    np.testing.assert_allclose(sum(jax.tree.leaves(products)), tangent, rtol=1e-9)


def test_an_iterative_posterior_has_derivatives_in_new_inputs_only(x64):
    estimator = sgp.estimators.Pathwise(sgp.solvers.Cholesky(), 4, num_features=16)
    Xs = jnp.array([[0.33], [1.2]])
    parameters = jax.tree.map(jnp.asarray, PARAMETERS)
    value = functools.partial(moments, estimator)
    assert np.all(np.isfinite(jax.grad(value, argnums=1)(parameters, Xs)))
    with pytest.raises(TypeError, match="has no derivatives with respect to hyperparameters"):
        jax.grad(value)(parameters, Xs)


def test_arrays_that_the_user_changes_later_are_kept_as_they_were(x64):
    X, y, _ = data()
    observed, noise, mean = np.arange(N) % 3 > 0, PER_ROW.copy(), np.ones(N)
    rows = X.copy()
    gp = sgp.GaussianProcess(sgp.kernels.RBF(0.8), rows, noise, mean=mean, observed=observed)
    density, posterior = gp.log_prob(y), gp.condition(y).mean(X)
    for array in (observed, noise, mean, rows):
        array[:] = 1
    np.testing.assert_array_equal(gp.log_prob(y), density)
    np.testing.assert_array_equal(gp.condition(y).mean(X), posterior)


def test_arrays_of_either_byte_order(x64):
    X, y, _ = data()
    swapped = sgp.GaussianProcess(sgp.kernels.RBF(0.8), X.astype(">f8"), PER_ROW.astype(">f8"))
    gp = sgp.GaussianProcess(sgp.kernels.RBF(0.8), X, PER_ROW)
    np.testing.assert_allclose(swapped.log_prob(y.astype(">f8")), gp.log_prob(y), rtol=1e-12)
