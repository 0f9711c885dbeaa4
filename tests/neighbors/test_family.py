"""The nearest-neighbor variational family, against dense algebra."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions.kl import kl_divergence

import numpyro_scalegp as sgp
from numpyro_scalegp.neighbors.family import level_ends
from numpyro_scalegp.neighbors.search import coarse_to_fine

KEY = jax.random.key(0)
M = 40


def kernel(lengthscale=0.4):
    return sgp.kernels.Matern32(lengthscale, 1.3)


def parts(n=30, d=2):
    keys = jax.random.split(KEY, 4)
    X = jax.random.uniform(keys[0], (n + 3 * M, d))
    Z = X[n:][coarse_to_fine(X[n:], M)]
    loc = jax.random.normal(keys[1], (M,))
    return X[:n], Z, loc, jax.random.uniform(keys[2], (M,), minval=0.2)


def family(num, k=None, **options):
    k = kernel() if k is None else k
    return sgp.VariationalNearestNeighborGP(k, *parts(), num_neighbors=num, **options)


def dense(num, k, X, Z, loc, scale):
    """Moments by sequential conditional distributions, in NumPy."""
    K, across, X, Z = (np.asarray(array) for array in (k.covariance(Z), k(X, Z), X, Z))
    K = K + np.eye(M) * 100.0 * np.finfo(K.dtype).eps * np.mean(np.diag(K))
    ends = level_ends(M, num)
    B = np.zeros((M, M))
    B[: ends[0], : ends[0]] = np.linalg.cholesky(K[: ends[0], : ends[0]])

    def given(z, row, before):
        near = np.argsort(np.sum(np.square(Z[:before] - z), axis=1))[:num]
        return near, np.linalg.solve(K[np.ix_(near, near)], row[near])

    for start, end in itertools.pairwise(ends):
        for i in range(start, end):
            near, a = given(Z[i], K[i], start)
            B[i] = a @ B[near]
            B[i, i] = np.sqrt(K[i, i] - a @ K[i, near])
    A, unexplained = np.zeros((len(X), M)), np.zeros(len(X))
    for i, x in enumerate(X):
        near, a = given(x, across[i], M)
        A[i, near] = a
        unexplained[i] = k.diag(X[i : i + 1])[0] - a @ across[i, near]
    covariance = A @ B @ np.diag(np.square(scale)) @ B.T @ A.T
    return A @ B @ np.asarray(loc), covariance, unexplained


@pytest.mark.parametrize("num", [1, 4, 9])
def test_moments_are_those_of_dense_algebra(x64, num):
    q = family(num)
    mean, covariance, unexplained = dense(num, kernel(), *parts())
    marginals = q.split_marginals()
    for array, expected in zip(marginals, (mean, np.diag(covariance), unexplained), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-8, atol=1e-10)
    posterior = q.posterior()
    np.testing.assert_allclose(posterior.variance(q.X, chunk_size=7), marginals[1] + marginals[2])


@pytest.mark.slow
def test_with_all_for_neighbors_it_is_the_sparse_gp(x64):
    X, Z, loc, scale = parts()

    def bound(lengthscale, loc, scale, of):
        k = kernel(lengthscale)
        q = of(k, loc, scale)
        mean, inside, unexplained = q.split_marginals()
        total = jnp.sum(jnp.sin(mean) + jnp.log(inside) + jnp.sqrt(unexplained))
        return total - kl_divergence(q, sgp.LatentGP(k, X))

    def of_neighbors(k, loc, scale):
        return sgp.VariationalNearestNeighborGP(k, X, Z, loc, scale, num_neighbors=M)

    def of_points(k, loc, scale):
        return sgp.SparseGP(k, X, Z, loc, jnp.diag(scale))

    value = jax.value_and_grad(bound, (0, 1, 2))
    sparse, exact = (eqx.filter_jit(value)(0.4, loc, scale, of) for of in (of_neighbors, of_points))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), sparse, exact)


@pytest.mark.slow
def test_the_prior_comes_closer_with_more_neighbors(x64):
    """The divergence of the exact prior of the inducing values from the nearest-neighbor prior."""
    Z = parts()[1]
    K = kernel().covariance(Z) + 100.0 * jnp.finfo(float).eps * 1.3 * jnp.eye(M)
    divergences = []
    for num in (2, 4, 8, 16):
        B = family(num).posterior().levels.values(jnp.eye(M))
        log_ratio = jnp.linalg.slogdet(B @ B.T)[1] - jnp.linalg.slogdet(K)[1]
        divergences.append(0.5 * (jnp.trace(jnp.linalg.solve(B @ B.T, K)) - M + log_ratio) / M)
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < 0.01 < divergences[0]


@pytest.mark.monte_carlo
def test_a_bound_given_draws_is_unbiased(x64):
    """Values and gradients for counts, over many keys, within four standard errors."""
    X, Z, loc, scale = parts()
    y = jnp.arange(len(X)) % 4

    def likelihood(theta, key, shift=1.0):
        lengthscale, loc, scale = theta
        q = sgp.VariationalNearestNeighborGP(
            kernel(lengthscale), X, Z, loc, scale, num_neighbors=4, key=key
        )
        mean, inside, unexplained = q.split_marginals()
        return jnp.sum(y * mean - jnp.exp(mean + 0.5 * shift * (inside + unexplained)))

    value = jax.jit(jax.value_and_grad(likelihood))
    theta = jnp.array(0.4), loc, scale
    exact = jax.tree.leaves(value(theta, None))
    keys = jax.random.split(jax.random.key(1), 2_000)
    drawn = jax.tree.leaves(jax.lax.map(lambda key: value(theta, key), keys))

    def deviations(drawn, exact):
        error = drawn.std(axis=0, ddof=1) / np.sqrt(len(keys))
        return np.abs(drawn.mean(axis=0) - exact) / error

    assert max(np.max(deviations(*pair)) for pair in zip(drawn, exact, strict=True)) < 4.0
    # The mean in place of a draw loses the variance of the inducing values.
    means = jax.lax.map(lambda key: likelihood((0.4, loc, 1e-6 * scale), key), keys)
    assert abs(means.mean() - exact[0]) > 4.0 * drawn[0].std() / np.sqrt(len(keys))


@pytest.mark.monte_carlo
def test_joint_draws_and_functions_have_the_moments(x64):
    num, k = 12, kernel(0.9)
    q = family(num, k)
    X, posterior = q.X[:8], q.posterior()
    mean, covariance, unexplained = dense(num, k, *parts())
    size = 4_000
    for values in (
        posterior.sample(jax.random.key(1), X, size),
        posterior.sample_functions(jax.random.key(2), size, num_features=500)(X),
    ):
        scale = np.sqrt(np.diag(covariance) + unexplained)[:8]
        np.testing.assert_allclose(
            values.mean(axis=0), mean[:8], atol=5.0 * scale.max() / size**0.5
        )
        of_draws, expected = np.cov(values.T), covariance[:8, :8] + np.diag(unexplained[:8])
        np.testing.assert_allclose(of_draws, expected, atol=0.1 * scale.max() ** 2)


@pytest.mark.slow
def test_a_batch_of_functions():
    X, Z, loc, scale = parts()
    locs, scales = jnp.stack([loc, 2.0 - loc]), jnp.stack([scale, 0.5 * scale])
    batch = sgp.VariationalNearestNeighborGP(kernel(), X, Z, locs, scales, num_neighbors=5)
    prior = sgp.LatentGP(kernel(), X)
    for i in range(2):
        q = sgp.VariationalNearestNeighborGP(kernel(), X, Z, locs[i], scales[i], num_neighbors=5)
        np.testing.assert_allclose(batch.mean[i], q.mean, rtol=1e-5)
        np.testing.assert_allclose(batch.variance[i], q.variance, rtol=1e-5)
        np.testing.assert_allclose(kl_divergence(batch, prior)[i], kl_divergence(q, prior))
    posterior = batch.posterior()
    assert posterior.sample(KEY, X, 3).shape == (3, 2, len(X))
    assert posterior.sample_functions(KEY, 3, num_features=20)(X).shape == (3, 2, len(X))
    drawn = sgp.VariationalNearestNeighborGP(
        kernel(), X, Z, locs, scales, num_neighbors=5, key=KEY
    ).split_marginals()
    assert [draws.shape for draws in drawn] == 3 * [(2, len(X))]
    assert not np.any(drawn[1])


@pytest.mark.slow
def test_many_draws_of_a_batch():
    """The same as for each function separately, with more than 2^15 draws."""
    X, Z, loc, scale = parts()
    loc_and_scale = jnp.stack([loc, -loc]), jnp.stack([scale, scale])
    posterior = sgp.VariationalNearestNeighborGP(
        kernel(), X, Z, *loc_and_scale, num_neighbors=5
    ).posterior()
    white = jax.random.normal(KEY, (2, M, 20_000))
    levels = posterior.levels
    together = jax.jit(jax.vmap(levels.values))(white)
    for values, alone in zip(together, white, strict=True):
        np.testing.assert_allclose(values, levels.values(alone), rtol=1e-4, atol=1e-4)
    draws = posterior.sample(KEY, X[:3], 20_000)
    deviation = jnp.sqrt(posterior.variance(X[:3]))
    assert jnp.max(jnp.abs(draws.mean(axis=0) - posterior.mean(X[:3])) / deviation) < 0.3
    with pytest.raises(ValueError, match=r"`Xs` must have shape \(n, d\)"):
        posterior.sample(KEY, jnp.stack([X, X]))


def test_each_point_is_the_farthest_from_those_before():
    X = np.asarray(jax.random.normal(KEY, (60, 3))) * [1.0, 10.0, 0.1]
    rows = np.asarray(coarse_to_fine(jnp.asarray(X), 20))
    scaled = (X - X.mean(axis=0)) / X.std(axis=0)
    gaps = np.sum(np.square(scaled[:, None] - scaled), axis=2)
    for i in range(1, 20):
        nearest = gaps[:, rows[:i]].min(axis=1)
        assert nearest[rows[i]] == pytest.approx(nearest.max(), rel=1e-5)
    assert sorted(np.asarray(coarse_to_fine(jnp.asarray(X), 60)).tolist()) == list(range(60))
    # A constant column has no scale.
    assert len(set(np.asarray(coarse_to_fine(jnp.ones((5, 2)), 5)).tolist())) == 5
