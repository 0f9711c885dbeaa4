"""The posterior of one component of a sum of kernels, against dense algebra."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest

import numpyro_scalegp as sgp

N, NOISE = 12, 0.3


def data():
    X = jnp.array(np.random.default_rng(0).uniform(0.0, 3.0, (N, 1)))
    return X, jnp.sin(3.0 * X[:, 0]) + X[:, 0], jnp.linspace(-1.0, 4.0, 5)[:, None]


def kernel():
    return 1.5 * (sgp.kernels.RBF(1.7, 2.0) + sgp.kernels.Periodic(1.0, 2.0, 0.5))


def dense(component, X, y, Xs, noise=NOISE):
    """Mean and covariance of a component given noisy observations of the sum."""
    H = kernel()(X, X) + noise * jnp.eye(N)
    across = component(Xs, X)
    return across @ jnp.linalg.solve(H, y), component(Xs, Xs) - across @ jnp.linalg.solve(
        H, across.T
    )


def trend(kernel):
    return kernel.kernel.left


ITERATIVE = sgp.estimators.Pathwise(sgp.solvers.Cholesky(), 2000, num_features=400)


@pytest.mark.slow
@pytest.mark.parametrize("select", [trend, lambda kernel: kernel.kernel.right])
@pytest.mark.parametrize("estimator", [sgp.estimators.Cholesky(), ITERATIVE])
def test_given_observations(select, estimator, x64):
    X, y, Xs = data()
    gp = sgp.GaussianProcess(
        kernel(), X, NOISE, mean=5.0, estimator=estimator, key=jax.random.key(0)
    )
    posterior = gp.condition(y + 5.0)
    component = posterior.component(select)
    k = kernel()
    mean, covariance = dense(k.component(select(k)), X, y, Xs)
    np.testing.assert_allclose(component.mean(Xs), mean, rtol=1e-6, atol=1e-8)
    variance, error = jnp.diagonal(covariance), 1e-8
    if estimator is ITERATIVE:  # from samples
        error = 5.0 * np.sqrt(2.0 / 2000) * variance
    assert np.all(np.abs(component.variance(Xs) - variance) < error)
    draws = component.sample(jax.random.key(1), Xs, 2000)
    spread = np.sqrt(variance / 2000)
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 5.0 * spread + 1e-6)
    sample_covariance, expected = np.cov(np.asarray(draws), rowvar=False), np.asarray(covariance)
    error = np.sqrt((np.outer(variance, variance) + expected**2) / 2000)
    assert np.all(np.abs(sample_covariance - expected) < 5.0 * error + 1e-6)


@pytest.mark.slow
def test_new_samples_of_a_component_are_solved_with_the_sum(x64):
    X, y, Xs = data()
    estimator = dataclasses.replace(ITERATIVE, num_probes=2)
    gp = sgp.GaussianProcess(kernel(), X, NOISE, estimator=estimator, key=jax.random.key(0))
    draws = gp.condition(y).component(trend).sample(jax.random.key(1), Xs, 3000)
    k = kernel()
    variance = jnp.diagonal(dense(k.component(trend(k)), X, y, Xs)[1])
    assert np.all(np.abs(jnp.var(draws, axis=0) - variance) < 5.0 * np.sqrt(2.0 / 3000) * variance)


def optimal(X, y):
    """The best sparse process with all rows as inducing points: the exact posterior."""
    k = kernel()
    K = k(X, X)
    L = jnp.linalg.cholesky(K)
    A = jnp.eye(N) + L.T @ L / NOISE
    loc = jnp.linalg.solve(A, L.T @ y) / NOISE
    return k, L, loc, jnp.linalg.cholesky(jnp.linalg.inv(A))


def sparse(X, y):
    k, _, loc, scale = optimal(X, y)
    return sgp.SparseGP(k, X, X, loc, scale, jitter=0.0)


def hybrid(X, y):
    k, L, loc, scale = optimal(X, y)
    weights = jnp.linspace(-0.1, 0.1, N)
    return sgp.HybridGP(k, X, X, loc - L.T @ weights, scale, X, weights, jitter=0.0)


def decoupled(X, y):
    weights = jnp.linalg.solve(kernel()(X, X) + NOISE * jnp.eye(N), y)
    return sgp.DecoupledGP(kernel(), X, X, weights, X, jnp.eye(N) / NOISE**0.5)


@pytest.mark.parametrize("family", [sparse, hybrid, decoupled])
def test_of_variational_families(family, x64):
    X, y, Xs = data()
    component = family(X, y).posterior().component(trend)
    k = kernel()
    mean, covariance = dense(k.component(trend(k)), X, y, Xs)
    np.testing.assert_allclose(component.mean(Xs), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        component.variance(Xs), jnp.diagonal(covariance), rtol=1e-4, atol=1e-6
    )
    draws = component.sample(jax.random.key(0), Xs, 2000)
    variance = np.diagonal(covariance)
    assert np.all(np.abs(np.var(draws, axis=0) - variance) < 5.0 * np.sqrt(2 / 2000) * variance)


@pytest.mark.slow
def test_of_features(x64):
    """With random features: the means of the components add up, and each is close to dense."""
    X, y, Xs = data()
    estimator = sgp.estimators.RandomFourier(2000)
    gp = sgp.GaussianProcess(kernel(), X, NOISE, estimator=estimator, key=jax.random.key(0))
    posterior = gp.condition(y)
    components = [
        posterior.component(trend),
        posterior.component(lambda kernel: kernel.kernel.right),
    ]
    np.testing.assert_allclose(
        sum(component.mean(Xs) for component in components), posterior.mean(Xs), rtol=1e-9
    )
    k = kernel()
    mean, covariance = dense(k.component(trend(k)), X, y, Xs)
    np.testing.assert_allclose(components[0].mean(Xs), mean, atol=0.3)
    np.testing.assert_allclose(components[0].variance(Xs), jnp.diagonal(covariance), atol=0.3)

    phi = sgp.features.RandomFourier(k, 40, seed=0)
    q = sgp.ChevronGP(phi, X, jnp.linspace(-1.0, 1.0, 40), 0.3 * jnp.ones(40), jnp.ones((40, 1)))
    posterior = q.posterior()
    components = [
        posterior.component(trend),
        posterior.component(lambda kernel: kernel.kernel.right),
    ]
    np.testing.assert_allclose(
        sum(component.mean(Xs) for component in components), posterior.mean(Xs), rtol=1e-9
    )


def test_components_of_components_and_mistakes():
    X, y, Xs = data()
    posterior = sgp.GaussianProcess(kernel() + sgp.kernels.Linear(0.2), X, NOISE).condition(y)
    curve = posterior.component(lambda kernel: kernel.left)
    nested = curve.component(lambda kernel: kernel.left.kernel.left)
    directly = posterior.component(lambda kernel: kernel.left.kernel.left)
    np.testing.assert_allclose(nested.mean(Xs), directly.mean(Xs), rtol=1e-6)
    with pytest.raises(ValueError, match="`noise_variance` must be given"):
        curve.predictive(Xs)
    assert curve.predictive(Xs, NOISE).batch_shape == (5,)
    with pytest.raises(ValueError, match="part"):
        posterior.component(lambda kernel: sgp.kernels.RBF(1.0))
    learned = sgp.features.Learned(jnp.sin)
    chevron = sgp.ChevronGP(learned, X, jnp.zeros(1), jnp.ones(1), jnp.zeros((1, 0)))
    with pytest.raises(ValueError, match="`Learned` features have no kernel"):
        chevron.posterior().component(lambda kernel: kernel)


def in_weight_space(kind):
    """Features, the precision of their weights as an argument, and as a matrix."""
    k = 1.5 * (sgp.kernels.RBF(1.7, 2.0) + sgp.kernels.RBF(0.4, 0.5))
    if kind == "random waves":
        return sgp.features.RandomFourier(k, 20, seed=0), None, jnp.eye(20)
    features = sgp.features.InducingPoints(k, jnp.linspace(0.0, 3.0, 7)[:, None], jitter=1e-3)
    if kind == "inducing points":
        return features, None, features.precision(jnp.arange(7), jnp.arange(7))
    precision = jnp.linspace(0.5, 2.0, 7)
    return features, precision, jnp.diag(precision)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random waves", "inducing points", "given precision"])
def test_given_values_of_a_function_in_weight_space(kind, x64):
    """Of f = Phi w with precision S, cov(f_1(x), f(z)) = phi_1(x)'S^-1 phi(z) for any phi_1."""
    X, f, Xs = data()
    features, precision, S = in_weight_space(kind)
    posterior = sgp.WeightSpaceGP(features, X, precision, jitter=1e-4).condition(f)

    def change(kernel):
        return kernel.component(trend(kernel))

    component_features, at_data = features.restrict(change)(Xs), features(X)
    H = at_data @ jnp.linalg.solve(S, at_data.T)
    H += 1e-4 * jnp.mean(jnp.diagonal(H)) * jnp.eye(N)
    across = component_features @ jnp.linalg.solve(S, at_data.T)
    expected = component_features @ jnp.linalg.solve(
        S, component_features.T
    ) - across @ jnp.linalg.solve(H, across.T)
    component, remainder = (
        posterior.component(trend),
        posterior.component(lambda kernel: kernel.kernel.right),
    )
    np.testing.assert_allclose(component.mean(Xs), across @ jnp.linalg.solve(H, f), rtol=1e-6)
    np.testing.assert_allclose(component.variance(Xs), jnp.diagonal(expected), rtol=1e-5, atol=1e-7)
    covariance = posterior.restrict(change).covariance(Xs)
    np.testing.assert_allclose(covariance, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        component.mean(Xs) + remainder.mean(Xs), posterior.mean(Xs), rtol=1e-6
    )


@pytest.mark.slow
def test_given_draws_of_a_function_in_weight_space(x64, tmp_path):
    X, f, Xs = data()
    features, *_ = in_weight_space("inducing points")

    def model(X):
        numpyro.sample("f", sgp.WeightSpaceGP(features, X, jitter=1e-4))

    mixture_mean = sgp.posterior(model, {"f": jnp.stack([f, 2.0 * f])}, X).component(trend).mean(Xs)
    posterior = sgp.WeightSpaceGP(features, X, jitter=1e-4).condition(1.5 * f)
    component, remainder = (
        posterior.component(trend),
        posterior.component(lambda kernel: kernel.kernel.right),
    )
    np.testing.assert_allclose(mixture_mean, component.mean(Xs), rtol=1e-6, atol=1e-8)
    sgp.save(tmp_path / "part.npz", component)
    np.testing.assert_array_equal(sgp.load(tmp_path / "part.npz").mean(Xs), component.mean(Xs))
    drawn = [
        process.sample_functions(jax.random.key(1), 3)(Xs)
        for process in (posterior, component, remainder)
    ]
    np.testing.assert_allclose(drawn[1] + drawn[2], drawn[0], rtol=1e-6, atol=1e-8)
