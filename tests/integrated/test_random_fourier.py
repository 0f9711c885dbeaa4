"""Random Fourier features against dense algebra: biased alone, unbiased as a single sample."""

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.core import chunks
from numpyro_scalegp.estimators import Cholesky, Hutchinson, RandomFourier, SingleSampleRFF
from numpyro_scalegp.linear.preconditioners import Identity
from numpyro_scalegp.solvers import ConjugateGradients

N, NUM_DRAWS = 60, 1000
KEY = jax.random.key(3)

pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, 2))
    return X, np.sin(2 * X.sum(axis=1)) + 0.3 * rng.normal(size=N)


def parameters() -> dict[str, Any]:
    kernel = sgp.kernels.Matern32(jnp.array([0.7, 1.3]), 1.4)
    return {"kernel": kernel, "noise": jnp.array(0.05), "y": jnp.array(data()[1])}


def log_prob(p: dict[str, Any], estimator: Any, key: Any = None) -> Any:
    gp = sgp.GaussianProcess(p["kernel"], data()[0], p["noise"], estimator=estimator, key=key)
    return gp.log_prob(p["y"])


def dense_log_prob(p: dict[str, Any], num_features: int) -> Any:
    Phi = p["kernel"].random_features(KEY, data()[0], num_features)
    H = Phi @ Phi.T + p["noise"] * jnp.eye(N)
    quadratic = p["y"] @ jnp.linalg.solve(H, p["y"])
    return -0.5 * (quadratic + jnp.linalg.slogdet(H)[1] + N * math.log(2 * math.pi))


# RandomFourier: the exact density of the approximate kernel


@pytest.mark.parametrize("chunk_size", [N, 64])
def test_value_and_gradient_are_exact_for_the_features(chunk_size, monkeypatch):
    monkeypatch.setattr(chunks, "_MAX_ENTRIES", 40 * chunk_size)
    result = jax.value_and_grad(log_prob)(parameters(), RandomFourier(40), KEY)
    expected = jax.value_and_grad(dense_log_prob)(parameters(), 40)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-7), result, expected)


@pytest.mark.parametrize("estimator", [RandomFourier(40), SingleSampleRFF(40, 20)])
@pytest.mark.parametrize("noise", [0.1, 1e-4])
def test_too_few_digits_are_warned_of(estimator, noise):
    X, y = (jnp.asarray(array, jnp.float32) for array in data())
    gp = sgp.GaussianProcess(
        sgp.kernels.RBF(jnp.float32(3.0)), X, noise, estimator=estimator, key=KEY
    )
    expected = "of features has few digits left" if noise < 0.1 else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.block_until_ready(gp.log_prob(y))
        jax.effects_barrier()
    assert any(expected in str(warning.message) for warning in caught) if expected else not caught


@pytest.mark.parametrize("noise", [5e-4, 1e-5])
def test_posterior_of_little_noise_in_single_precision(noise):
    X, y = (jnp.asarray(array, jnp.float32) for array in data())
    kernel = sgp.kernels.RBF(jnp.float32(3.0))
    gp = sgp.GaussianProcess(kernel, X, noise, estimator=RandomFourier(40), key=KEY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mean = gp.condition(y).mean(X)
        jax.effects_barrier()
    Phi = np.asarray(kernel.random_features(KEY, X, 40, origin=X[0]), float)
    A = np.eye(40) + Phi.T @ Phi / noise
    expected = Phi @ np.linalg.solve(A, Phi.T @ y) / noise
    deviation = np.sqrt(np.sum(Phi * np.linalg.solve(A, Phi.T).T, axis=1))
    says_so = any("posterior mean of features is off" in str(warning.message) for warning in caught)
    assert says_so == (noise < 5e-4)
    assert says_so or np.max(np.abs(mean - expected) / deviation) < 0.01


@pytest.mark.slow
def test_posterior_is_that_of_the_features():
    p, (X, y) = parameters(), data()
    Xs = jnp.linspace(-1.0, 1.0, 10).reshape(5, 2)
    gp = sgp.GaussianProcess(
        p["kernel"], X, p["noise"], mean=0.3, estimator=RandomFourier(40), key=KEY
    )
    posterior = gp.condition(y)
    Phi, phi = (p["kernel"].random_features(KEY, inputs, 40) for inputs in (X, Xs))
    H = Phi @ Phi.T + p["noise"] * jnp.eye(N)
    gain = phi @ Phi.T @ jnp.linalg.inv(H)
    mean = 0.3 + gain @ (y - 0.3)
    covariance = phi @ phi.T - gain @ Phi @ phi.T
    np.testing.assert_allclose(posterior.mean(Xs), mean, rtol=1e-8)
    np.testing.assert_allclose(posterior.variance(Xs), jnp.diagonal(covariance), rtol=1e-6)
    np.testing.assert_allclose(posterior.covariance(Xs), covariance, atol=1e-8)
    predictive = posterior.predictive(Xs)
    np.testing.assert_allclose(predictive.variance, jnp.diagonal(covariance) + 0.05, rtol=1e-6)

    draws = posterior.sample(jax.random.key(1), Xs, 4000)
    error = np.sqrt(np.diagonal(covariance) / 4000)
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 4 * error)
    scale = np.sqrt(np.outer(np.diagonal(covariance), np.diagonal(covariance)))
    assert np.max(np.abs(np.cov(draws.T) - covariance) / scale) < 4 * np.sqrt(2 / 4000)
    # The same key gives the same functions elsewhere.
    again = posterior.sample(jax.random.key(1), Xs[2:3], 4000)
    np.testing.assert_allclose(again[:, 0], draws[:, 2], rtol=1e-8)

    left_out, P = posterior.leave_one_out(), jnp.linalg.inv(H)
    np.testing.assert_allclose(left_out.variance, 1 / jnp.diagonal(P), rtol=1e-6)
    expected = y - (P @ (y - 0.3)) / jnp.diagonal(P)
    np.testing.assert_allclose(left_out.mean, expected, rtol=1e-6)
    np.testing.assert_allclose(posterior.at_data().mean, posterior.mean(X))
    assert posterior.diagnostics["jitter"] == 0.0


def test_prior_draws_have_the_kernels_variance():
    p = parameters()
    gp = sgp.GaussianProcess(p["kernel"], data()[0], 0.05, estimator=RandomFourier(40), key=KEY)
    draws = gp.sample(jax.random.key(0), (1000,))
    assert draws.shape == (1000, N)
    np.testing.assert_allclose(draws.var(), 1.45, rtol=0.05)


def test_posterior_can_be_saved(tmp_path):
    p, (X, y) = parameters(), data()
    gp = sgp.GaussianProcess(p["kernel"], X, 0.05, estimator=RandomFourier(40), key=KEY)
    posterior = gp.condition(y)
    sgp.save(tmp_path / "posterior.npz", posterior)
    again = sgp.load(tmp_path / "posterior.npz")
    np.testing.assert_allclose(again.mean(X[:3]), posterior.mean(X[:3]))


# Both against the kernel itself


@functools.cache
def draws(estimator: Any) -> Any:
    """Value and gradient over many keys."""
    keys = jax.random.split(jax.random.key(5), NUM_DRAWS)
    function = functools.partial(jax.value_and_grad(log_prob), parameters(), estimator)
    return jax.jit(lambda keys: jax.lax.map(function, keys))(keys)


def scores(estimator: Any) -> dict[str, np.ndarray]:
    """Mean errors of value and gradient, in standard errors."""
    exact = jax.value_and_grad(log_prob)(parameters(), Cholesky())
    errors = jax.tree.map(
        lambda draws, exact: (
            np.abs(np.mean(draws, axis=0) - exact) / np.std(draws, axis=0) * math.sqrt(NUM_DRAWS)
        ),
        draws(estimator),
        exact,
    )
    return {
        jax.tree_util.keystr(path): score
        for path, score in jax.tree_util.tree_leaves_with_path(errors)
    }


@pytest.mark.parametrize("derivative", [jax.hessian, jax.jacfwd])
def test_misleading_derivatives_of_one_draw_raise(derivative):
    def density(noise: Any) -> Any:
        return log_prob({**parameters(), "noise": noise}, SingleSampleRFF(4, 100), KEY)

    with pytest.raises(TypeError, match=r"only first derivatives in reverse mode.*Laplace"):
        jax.jit(derivative(density))(0.05)


@pytest.mark.monte_carlo
def test_single_sample_is_unbiased():
    estimator = SingleSampleRFF(16, 22)
    # `RandomFourier` with the mean number of features has a bias that the same check finds.
    sizes = np.append(estimator.sizes(N)[1:], N)
    mean = 2 * round(float(estimator.distribution(N).probabilities @ sizes) / 2)
    unbiased, biased = scores(estimator), scores(RandomFourier(mean))
    assert len(unbiased) == 5  # value, lengthscale, variance, noise and y
    for name, score in unbiased.items():
        # One of the 60 entries for y may be an outlier.
        assert np.max(score) < (4.0 if score.size < 5 else 4.5), name
        assert np.max(biased[name]) > 10.0, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a linear solve ended above:RuntimeWarning")
def test_biases_have_the_signs_of_the_theory():
    p = parameters()
    targets = jnp.stack([p["y"], jnp.zeros(N)])

    def terms(estimator: Any, key: Any) -> Any:
        with_data, without = log_prob({**p, "y": targets}, estimator, key)
        return jnp.stack([-2.0 * without, 2.0 * (without - with_data)])

    def errors(estimator: Any) -> Any:
        keys = jax.random.split(KEY, 300)
        draws = jax.lax.map(functools.partial(terms, estimator), keys) - terms(Cholesky(), None)
        # At least 1e-6, for deterministic terms such as a quadratic form by conjugate gradients.
        return draws.mean(axis=0) / np.maximum(np.std(draws, axis=0) / math.sqrt(300), 1e-6)

    log_determinant, quadratic_form = errors(RandomFourier(60))
    assert log_determinant < -10.0
    assert quadratic_form > 10.0
    cut = ConjugateGradients(0.0, 5, Identity(), group_size=1)
    log_determinant, quadratic_form = errors(Hutchinson(cut, 1, num_logdet_probes=1))
    assert log_determinant > 10.0
    assert quadratic_form < -10.0


# SingleSampleRFF itself


def test_terms_and_their_distribution():
    estimator = SingleSampleRFF(50, 20)
    assert estimator.sizes(100) == (50, 70, 90)
    np.testing.assert_allclose(
        estimator.distribution(100).probabilities * np.array([70, 90, 110]) / 70,
        np.full(3, estimator.distribution(100).probabilities[0]),
    )
    assert SingleSampleRFF(50, 10)._widths(1000) == (60, 120, 240, 490, 990)
    # With fewer rows than features at the start, the only term closes the gap.
    assert estimator.sizes(30) == (50,)
    p = {**parameters(), "y": jnp.array(data()[1][:30])}
    gp = sgp.GaussianProcess(p["kernel"], data()[0][:30], 0.05, estimator=estimator, key=KEY)
    exact = sgp.GaussianProcess(p["kernel"], data()[0][:30], 0.05).log_prob(p["y"])
    np.testing.assert_allclose(gp.log_prob(p["y"]), exact, rtol=1e-10)


@pytest.mark.slow
def test_a_batch_of_data_vectors_shares_the_draw():
    p, estimator = parameters(), SingleSampleRFF(50, 120)
    batch = jnp.stack([p["y"], 2.0 * p["y"]])

    @jax.jit
    @jax.value_and_grad
    def total(y: Any, weights: Any) -> Any:
        return jnp.sum(log_prob({**p, "y": y}, estimator, KEY) * weights)

    value, gradient = total(batch, jnp.array([1.0, 3.0]))
    parts = [total(jnp.stack([y, y]), jnp.array([1.0, 0.0])) for y in batch]
    np.testing.assert_allclose(value, parts[0][0] + 3.0 * parts[1][0], rtol=1e-10)
    expected = jnp.stack([parts[0][1][0], 3.0 * parts[1][1][0]])
    np.testing.assert_allclose(gradient, expected, rtol=1e-8)


def test_the_backward_pass_stores_only_the_drawn_term():
    def value(p: Any, estimator: Any) -> Any:
        return log_prob(p, estimator, KEY)

    # Residuals of the forward pass; differentiating the switch would store n x n arrays.
    estimator = SingleSampleRFF(50, 120)
    _, pull_back = jax.vjp(functools.partial(value, estimator=estimator), parameters())
    assert max(leaf.size for leaf in jax.tree.leaves(pull_back)) <= 2 * N


def test_posterior_of_a_single_sample_is_exact():
    p, (X, y) = parameters(), data()
    gp = sgp.GaussianProcess(p["kernel"], X, 0.05, estimator=SingleSampleRFF(50, 26), key=KEY)
    exact = sgp.GaussianProcess(p["kernel"], X, 0.05).condition(y)
    np.testing.assert_allclose(gp.condition(y).mean(X[:3]), exact.mean(X[:3]))


def test_rejects_bad_arguments(unchecked):
    for estimator in (RandomFourier(4), SingleSampleRFF(4, 2)):
        name = type(estimator).__name__
        with pytest.raises(
            ValueError, match=rf"`{name}` draws at random: give the .* a `key=`, or"
        ):
            log_prob(parameters(), estimator)
    gp = sgp.GaussianProcess(
        sgp.kernels.Linear(), data()[0], 0.1, estimator=SingleSampleRFF(4, 2), key=KEY
    )
    with pytest.raises(ValueError, match=r"`kernel` must be stationary .* got `Linear`"):
        gp.log_prob(data()[1])
    gp = sgp.GaussianProcess(parameters()["kernel"], data()[0], 0.1, estimator=RandomFourier(4))
    with pytest.raises(ValueError, match="`RandomFourier` draws at random"):
        gp.condition(data()[1])


@pytest.mark.parametrize(
    "kernel",
    [
        sgp.kernels.Periodic(1.0, period=2.0),
        2.0 * (sgp.kernels.RBF(1.0) + sgp.kernels.RBF(2.0)) * sgp.kernels.RBF(3.0),
    ],
    ids=["periodic", "product_of_a_sum"],
)
def test_refuses_kernels_whose_features_have_no_derivative(kernel):
    X = jnp.linspace(0.0, 1.0, 8)[:, None]
    gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=RandomFourier(6), key=KEY)
    with pytest.raises(ValueError, match="between discrete frequencies"):
        gp.log_prob(jnp.zeros(8))
    # Without derivatives, such kernels are valid.
    assert jnp.all(jnp.isfinite(gp.condition(jnp.zeros(8)).mean(X)))


def test_posterior_is_differentiable_in_hyperparameters():
    p = parameters()

    def mean(lengthscale: Any) -> Any:
        kernel = sgp.kernels.RBF(lengthscale)
        gp = sgp.GaussianProcess(kernel, data()[0], 0.1, estimator=RandomFourier(20), key=KEY)
        return gp.condition(p["y"]).mean(data()[0][:1])[0]

    step = 1e-5
    derivative = jax.jit(jax.grad(mean))(1.0)
    differences = (mean(1.0 + step) - mean(1.0 - step)) / (2.0 * step)
    np.testing.assert_allclose(derivative, differences, rtol=1e-4)
