"""Posterior draws as functions: covariance, chunks, derivatives and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.processes.mixture import MixturePosterior
from tests.extending import CLASSES
from tests.processes.test_component import N, data

KEY, NOISE = jax.random.key(2), 0.3
PATHWISE = sgp.estimators.Pathwise(sgp.solvers.Cholesky(), 4, num_features=16)


def kernel():
    return 1.5 * (sgp.kernels.RBF(1.7, 2.0) + sgp.kernels.RBF(0.4, 0.5))


def given(estimator=None, **options):
    """The posterior given observations, with the mean function 5."""
    X, y, _ = data()
    estimator = sgp.estimators.Cholesky() if estimator is None else estimator
    key = jax.random.key(0) if estimator.is_stochastic else None
    gp = sgp.GaussianProcess(kernel(), X, NOISE, mean=5.0, estimator=estimator, key=key)
    return gp.condition(y + 5.0, **options)


def chevron():
    X, _, _ = data()
    phi = sgp.features.RandomFourier(kernel(), 40, seed=0)
    weights = jnp.linspace(-1.0, 1.0, 40), 0.3 * jnp.ones(40), jnp.ones((40, 1))
    return sgp.ChevronGP(phi, X, *weights).posterior()


def features():
    return given(sgp.estimators.RandomFourier(40))


def mixture():
    X, y, _ = data()
    return MixturePosterior(
        lambda noise: sgp.GaussianProcess(kernel(), X, noise).condition(y), jnp.array([0.2, 0.4])
    )


def covariances(Xs):
    """Sample covariances of 16 functions with the same four features, minus the exact one."""
    posterior = given()
    values = posterior.sample_functions(KEY, 16 * 400, num_features=4)(Xs)
    deviations = (values - posterior.mean(Xs)).reshape(400, 16, -1)
    sample_covariances = jnp.einsum("gsi,gsj->gij", deviations, deviations) / 16
    return deviations, np.asarray(sample_covariances - posterior.covariance(Xs))


@pytest.mark.slow
def test_covariance_is_exact_on_average_over_features(x64, monkeypatch):
    _, _, Xs = data()
    deviations, covariance_errors = covariances(Xs)
    mean = np.asarray(jnp.mean(deviations, axis=1))
    for errors in (mean, covariance_errors):
        assert np.all(np.abs(errors.mean(axis=0)) < 4 * errors.std(axis=0) / np.sqrt(400))
    # Without the noise of the observed prior draws, functions vary too little.
    monkeypatch.setattr(PriorDraws, "errors", lambda self, noise: 0.0)
    jax.clear_caches()
    _, covariance_errors = covariances(Xs)
    jax.clear_caches()
    assert np.any(
        np.abs(covariance_errors.mean(axis=0)) > 8 * covariance_errors.std(axis=0) / np.sqrt(400)
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [given, features, chevron, mixture])
def test_functions_are_the_same_wherever_they_are_called(make, x64, tmp_path):
    X, _, Xs = data()
    Xs = jnp.concatenate([Xs, X[:1]])
    functions = make().sample_functions(KEY, 2, num_features=16)
    values = functions(Xs)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    close(jax.jit(lambda functions, Xs: functions(Xs))(functions, Xs), values)
    close(functions(Xs, chunk_size=4), values)
    close(functions(Xs[-2:]), values[..., -2:])
    sgp.save(tmp_path / "functions.npz", functions)
    close(sgp.load(tmp_path / "functions.npz")(Xs), values)
    gradient = jax.vmap(jax.grad(lambda x: functions(x[None])[..., 0].sum()))(Xs)[:, 0]
    assert np.isfinite(gradient).all()
    step = 1e-5
    expected = jnp.sum(functions(Xs + step) - functions(Xs - step), axis=0) / (2 * step)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_stored_samples_or_new_ones(x64):
    """An iterative posterior gives the functions it stores, unless they are not enough."""
    X, _, Xs = data()
    posterior = given(PATHWISE)
    stored = posterior.sample_functions(KEY, 3)
    assert stored.draws.num_features == 16
    assert stored.draws.num_draws == 4
    assert posterior.sample_functions(KEY, 6).draws.num_draws == 6
    resampled = posterior.sample_functions(KEY, 3, num_features=32)
    assert resampled.draws.num_features == 32
    assert not np.allclose(resampled(Xs), stored(Xs))
    # Between observations with little noise all functions are close to the mean.
    kernel = sgp.kernels.RBF(1.0)
    precise = sgp.GaussianProcess(kernel, X, 1e-6).condition(jnp.sin(X[:, 0]))
    values = precise.sample_functions(KEY, 5)(X)
    np.testing.assert_allclose(values, jnp.tile(jnp.sin(X[:, 0]), (5, 1)), atol=0.01)


@pytest.mark.slow
def test_kernels_without_features_and_other_mistakes():
    X, y, Xs = data()
    custom = sgp.GaussianProcess(CLASSES["NeuralNetwork"](1.0), X, NOISE).condition(y)
    assert custom.sample(KEY, Xs).shape == (1, 5)
    message = r"the kernel `NeuralNetwork` has none: draw at all inputs at once by `sample`"
    with pytest.raises(ValueError, match=message):
        custom.sample_functions(KEY)
    exact = given()
    with pytest.raises(ValueError, match="`num_features` must be even and at least 2, got 3"):
        exact.sample_functions(KEY, num_features=3)
    with pytest.raises(ValueError, match="`num_samples` must be at least 1, got 0"):
        exact.sample_functions(KEY, 0)
    functions = exact.sample_functions(KEY)
    with pytest.raises(ValueError, match=r"`Xs` must have shape \(n, 1\)"):
        functions(jnp.ones((3, 2)))
    with pytest.raises(ValueError, match="`Xs` must be finite"):
        functions(jnp.full((1, 1), jnp.nan))


@pytest.mark.slow
def test_decoupled_without_a_basis_for_the_covariance(x64):
    """The functions vary like the prior."""
    (X, _, Xs), num = data(), 0
    q = sgp.DecoupledGP(kernel(), X, X, 0.1 * jnp.ones(N), X[:num], jnp.zeros((num, num)))
    posterior = q.posterior()
    functions = posterior.sample_functions(KEY, 2, num_features=8)
    prior = functions.draws(kernel(), Xs).T
    np.testing.assert_allclose(functions(Xs), posterior.mean(Xs) + prior, atol=1e-9)
