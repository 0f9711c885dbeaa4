"""The posterior of one part of a sum of kernels, against dense algebra."""

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
    """Mean and covariance of a part given noisy observations of the sum."""
    H = kernel()(X, X) + noise * jnp.eye(N)
    across = component(Xs, X)
    return across @ jnp.linalg.solve(H, y), component(Xs, Xs) - across @ jnp.linalg.solve(
        H, across.T
    )


def trend(kernel):
    return kernel.kernel.left


ITERATIVE = sgp.estimators.Pathwise(sgp.solvers.Cholesky(), 2000, num_features=400)


@pytest.mark.parametrize("select", [trend, lambda kernel: kernel.kernel.right])
@pytest.mark.parametrize("estimator", [sgp.estimators.Cholesky(), ITERATIVE])
def test_given_observations(select, estimator, x64):
    X, y, Xs = data()
    gp = sgp.GaussianProcess(
        kernel(), X, NOISE, mean=5.0, estimator=estimator, key=jax.random.key(0)
    )
    whole = gp.condition(y + 5.0)
    part = whole.component(select)
    k = kernel()
    mean, covariance = dense(k.component(select(k)), X, y, Xs)
    np.testing.assert_allclose(part.mean(Xs), mean, rtol=1e-6, atol=1e-8)
    variance, error = jnp.diagonal(covariance), 1e-8
    if estimator is ITERATIVE:  # from samples
        error = 5.0 * np.sqrt(2.0 / 2000) * variance
    assert np.all(np.abs(part.variance(Xs) - variance) < error)
    draws = part.sample(jax.random.key(1), Xs, 2000)
    spread = np.sqrt(variance / 2000)
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 5.0 * spread + 1e-6)
    found, squares = np.cov(np.asarray(draws), rowvar=False), np.asarray(covariance)
    error = np.sqrt((np.outer(variance, variance) + squares**2) / 2000)
    assert np.all(np.abs(found - squares) < 5.0 * error + 1e-6)


def test_new_samples_of_a_part_are_solved_with_the_whole(x64):
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
    part = family(X, y).posterior().component(trend)
    k = kernel()
    mean, covariance = dense(k.component(trend(k)), X, y, Xs)
    np.testing.assert_allclose(part.mean(Xs), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(part.variance(Xs), jnp.diagonal(covariance), rtol=1e-4, atol=1e-6)
    draws = part.sample(jax.random.key(0), Xs, 2000)
    variance = np.diagonal(covariance)
    assert np.all(np.abs(np.var(draws, axis=0) - variance) < 5.0 * np.sqrt(2 / 2000) * variance)


def test_of_features(x64):
    """With random features, parts of the weights: means add up, and each is that of its columns."""
    X, y, Xs = data()
    estimator = sgp.estimators.RandomFourier(2000)
    gp = sgp.GaussianProcess(kernel(), X, NOISE, estimator=estimator, key=jax.random.key(0))
    whole = gp.condition(y)
    parts = [whole.component(trend), whole.component(lambda kernel: kernel.kernel.right)]
    np.testing.assert_allclose(sum(part.mean(Xs) for part in parts), whole.mean(Xs), rtol=1e-9)
    k = kernel()
    mean, covariance = dense(k.component(trend(k)), X, y, Xs)
    np.testing.assert_allclose(parts[0].mean(Xs), mean, atol=0.3)
    np.testing.assert_allclose(parts[0].variance(Xs), jnp.diagonal(covariance), atol=0.3)

    phi = sgp.features.RandomFourier(k, 40, seed=0)
    q = sgp.ChevronGP(phi, X, jnp.linspace(-1.0, 1.0, 40), 0.3 * jnp.ones(40), jnp.ones((40, 1)))
    whole = q.posterior()
    parts = [whole.component(trend), whole.component(lambda kernel: kernel.kernel.right)]
    np.testing.assert_allclose(sum(part.mean(Xs) for part in parts), whole.mean(Xs), rtol=1e-9)


def test_parts_of_parts_and_mistakes():
    X, y, Xs = data()
    whole = sgp.GaussianProcess(kernel() + sgp.kernels.Linear(0.2), X, NOISE).condition(y)
    curve = whole.component(lambda kernel: kernel.left)
    again = curve.component(lambda kernel: kernel.left.kernel.left)
    directly = whole.component(lambda kernel: kernel.left.kernel.left)
    np.testing.assert_allclose(again.mean(Xs), directly.mean(Xs), rtol=1e-6)
    with pytest.raises(ValueError, match="`noise_variance` must be given"):
        curve.predictive(Xs)
    assert curve.predictive(Xs, NOISE).batch_shape == (5,)
    with pytest.raises(ValueError, match="part"):
        whole.component(lambda kernel: sgp.kernels.RBF(1.0))
    learned = sgp.features.Learned(jnp.sin)
    chevron = sgp.ChevronGP(learned, X, jnp.zeros(1), jnp.ones(1), jnp.zeros((1, 0)))
    with pytest.raises(ValueError, match="`Learned` features have no kernel"):
        chevron.posterior().component(lambda kernel: kernel)


@pytest.mark.parametrize("make", ["random waves", "inducing points", "given precision"])
def test_given_values_of_a_function_in_weight_space(make, x64, tmp_path):
    """After NUTS: of f = Phi w with S, cov(f_1(x), f(z)) = phi_1(x)'S^-1 phi(z), for any phi_1."""
    X, _, Xs = data()
    points = jnp.linspace(0.0, 3.0, 7)[:, None]
    features = sgp.features.InducingPoints(kernel(), points, jitter=1e-3)
    precision = jnp.linspace(0.5, 2.0, 7) if make == "given precision" else None
    S = features.precision(jnp.arange(7), jnp.arange(7))
    if make == "given precision":
        S = jnp.diag(precision)
    if make == "random waves":
        features, S = sgp.features.RandomFourier(kernel(), 40, seed=0), jnp.eye(40)

    def model(X):
        f = numpyro.sample("f", sgp.WeightSpaceGP(features, X, precision, jitter=1e-4))
        numpyro.deterministic("g", f)

    draws = jax.random.normal(jax.random.key(0), (2, N))
    whole = sgp.posterior(model, {"f": draws}, X)
    parts = [whole.component(trend), whole.component(lambda kernel: kernel.kernel.right)]
    own = features.restrict(lambda kernel: kernel.component(trend(kernel)))(Xs)
    covariance = jnp.linalg.inv(S)
    at_data = features(X)
    H = at_data @ covariance @ at_data.T
    H += 1e-4 * jnp.mean(jnp.diagonal(H)) * jnp.eye(N)
    across = own @ covariance @ at_data.T
    means = jnp.linalg.solve(H, draws.T).T @ across.T
    left = jnp.diagonal(own @ covariance @ own.T - across @ jnp.linalg.solve(H, across.T))
    np.testing.assert_allclose(parts[0].mean(Xs), means.mean(0), rtol=1e-6, atol=1e-6)
    expected = left + jnp.var(means, axis=0)
    np.testing.assert_allclose(parts[0].variance(Xs), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sum(part.mean(Xs) for part in parts), whole.mean(Xs), rtol=1e-6)
    key = jax.random.key(1)
    functions, *shares = (one.sample_functions(key, 3) for one in [whole, *parts])
    np.testing.assert_allclose(sum(share(Xs) for share in shares), functions(Xs), rtol=1e-5)

    one = sgp.WeightSpaceGP(features, X, precision, jitter=1e-4).condition(draws[0])
    found = one.component(trend).sample(key, Xs, 4000)
    assert np.all(np.abs(np.var(found, axis=0) - left) < 5.0 * np.sqrt(2 / 4000) * left + 1e-6)
    again = one.component(trend).component(lambda kernel: kernel)
    np.testing.assert_allclose(again.mean(Xs), means[0], rtol=1e-6, atol=1e-6)
    sgp.save(tmp_path / "part.npz", one.component(trend))
    loaded = sgp.load(tmp_path / "part.npz")
    np.testing.assert_allclose(loaded.variance(Xs), left, rtol=1e-6, atol=1e-6)
