"""The kernel of categories against its matrix, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels import RBF, Constant, Coregion, FeatureMapped, Matern52

W = np.array([[1.0, 0.3], [-0.5, 0.8], [0.2, -0.6]])
DIAG = np.array([0.4, 0.0, 0.7])
B = W @ W.T + np.diag(DIAG)


def rows(n=9, seed=0):
    random = np.random.default_rng(seed)
    return np.stack([random.normal(size=n), random.integers(0, 3, n)], axis=1)


def outputs(lengthscale=0.8):
    return RBF(lengthscale).on((0,)) * Coregion(jnp.array(W), jnp.array(DIAG)).on((1,))


def test_entries_are_those_of_the_matrix(dtype):
    X, Z = rows(), rows(7, 1)
    a, b = X[:, 1].astype(int), Z[:, 1].astype(int)
    kernel = outputs()
    tolerance = 20 * float(jnp.finfo(dtype).eps)
    expected = np.exp(-0.5 * np.square((X[:, :1] - Z[:, 0]) / 0.8)) * B[a][:, b]
    for k in (kernel, jax.jit(lambda X, Z: kernel(X, Z))):
        np.testing.assert_allclose(k(X, Z), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(kernel.diag(X), np.diagonal(B)[a], rtol=0, atol=tolerance)


def test_linear_coregionalization_conditions_as_dense_algebra(x64):
    """A sum of two products; one output is predicted from observations of another."""
    second = Matern52(2.0).on((0,)) * Coregion(jnp.array(W[:, :1]), jnp.ones(3)).on((1,))
    kernel = outputs() + second
    X, Xs = rows(30), rows(5, 1)
    y = np.sin(X[:, 0]) * W[X[:, 1].astype(int), 0]
    posterior = sgp.GaussianProcess(kernel, X, 0.1).condition(y)
    r = np.sqrt(5.0) * np.abs(np.concatenate([X, Xs])[:, None, 0] - X[:, 0]) / 2.0
    a, b = np.concatenate([X, Xs])[:, 1].astype(int), X[:, 1].astype(int)
    smooth = np.exp(-0.5 * np.square(r / np.sqrt(5.0) * 2.0 / 0.8)) * B[a][:, b]
    C = W[:, :1] @ W[:, :1].T + np.eye(3)
    K = smooth + (1 + r + r**2 / 3) * np.exp(-r) * C[a][:, b]
    expected = K[30:] @ np.linalg.solve(K[:30] + 0.1 * np.eye(30), y)
    np.testing.assert_allclose(posterior.mean(Xs), expected, rtol=0, atol=1e-10)


def test_gradients_against_the_matrix(x64):
    X, weights = rows(), np.random.default_rng(2).normal(size=(9, 9))
    a = X[:, 1].astype(int)

    def total(W, diag, X):
        return jnp.sum(weights * Coregion(W, diag).on((1,))(X, X))

    def dense(W, diag):
        return jnp.sum(weights * (W @ W.T + jnp.diag(diag))[a][:, a])

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(jnp.array(W), jnp.array(DIAG), X)
    for gradient, expected in zip(
        gradients, jax.grad(dense, argnums=(0, 1))(W, DIAG), strict=False
    ):
        np.testing.assert_allclose(gradient, expected, rtol=1e-12)
    assert not np.any(gradients[2])


def test_features_are_exact_for_any_key(dtype):
    kernel = Coregion(jnp.array(W), jnp.array(DIAG))
    X = rows()[:, 1:]
    phi = kernel.random_features(jax.random.key(0), X, 2)
    assert phi.shape == (9, 5)
    tolerance = 20 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(phi @ phi.T, kernel(X, X), rtol=0, atol=tolerance)
    np.testing.assert_array_equal(phi, kernel.random_features(jax.random.key(1), X, 200))


def test_features_of_a_product_have_the_kernel_as_expectation(x64):
    kernel, X = outputs(), rows(6)
    keys = jax.random.split(jax.random.key(0), 400)
    phi = jax.jit(jax.vmap(lambda key: kernel.random_features(key, X, 40)))(keys)
    grams = phi @ jnp.swapaxes(phi, 1, 2)
    error = np.std(grams, axis=0) / 20.0

    def is_expectation(expected):
        return np.all(np.abs(np.mean(grams, axis=0) - expected) < 4.0 * error)

    assert is_expectation(kernel(X, X))
    a = X[:, 1].astype(int)
    assert not is_expectation(kernel(X, X) * ((W @ W.T) / B)[a][:, a])  # without `diag`


@pytest.mark.filterwarnings("ignore:a covariance matrix is not positive:RuntimeWarning")
@pytest.mark.parametrize("category", [-1.0, 3.0, 1.4])
def test_values_that_are_no_category(category, x64):
    kernel, X = outputs(), rows(4)
    broken = jnp.array(X).at[2, 1].set(category)
    message = (
        rf"`Z` must hold the kernel's categories in column 1, 0, 1, 2, got {category} in row 2"
    )
    with pytest.raises(ValueError, match=message):
        kernel(X, broken)
    message = message.replace("`Z`", "`X`")
    with pytest.raises(ValueError, match=message):
        sgp.GaussianProcess(kernel, broken, 0.1)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda: sgp.LatentGP(kernel, broken).variance)()  # inputs that are concrete
    K, variance = jax.jit(lambda X: (kernel(X, X), kernel.diag(X)))(broken)
    is_bad = np.arange(4) == 2
    np.testing.assert_array_equal(np.isnan(K), is_bad[:, None] | is_bad)
    np.testing.assert_array_equal(np.isnan(variance), is_bad)
    phi = jax.jit(lambda X: kernel.random_features(jax.random.key(0), X, 8))(broken)
    np.testing.assert_array_equal(np.isnan(phi).all(axis=1), is_bad)
    value = jax.jit(lambda X: sgp.GaussianProcess(kernel, X, 0.1).log_prob(jnp.ones(4)))(broken)
    assert np.isnan(value)


def test_bad_arguments(unchecked):
    for bad in (np.ones(3), np.ones((3, 0)), 1.0):
        with pytest.raises(ValueError, match=r"`W` must have shape \(p, r\), got"):
            Coregion(bad, np.ones(3))
    with pytest.raises(ValueError, match="`W` must be finite"):
        Coregion(np.full((3, 1), np.nan), np.ones(3))
    with pytest.raises(ValueError, match=r"`diag` must have shape \(3,\), got \(\): one value for"):
        Coregion(W, 1.0)
    with pytest.raises(ValueError, match="`diag` must be finite and not negative, got"):
        Coregion(W, [1.0, -1.0, 1.0])
    with pytest.raises(ValueError, match=r"one column of categories, got 2 columns: .*\.on\(\(1,"):
        Coregion(W, DIAG)(rows(), rows())


def test_bad_hyperparameters_under_jit_give_nan():
    X = rows()[:, 1:]
    evaluate = jax.jit(lambda W, diag: Coregion(W, diag)(X, X))
    assert np.isnan(evaluate(jnp.array(W), jnp.array([1.0, -1.0, 1.0]))).any()
    assert np.isnan(evaluate(jnp.full((3, 2), jnp.nan), jnp.ones(3))).any()


def test_categories_of_composed_kernels():
    three, two = Coregion(W, DIAG), Coregion(np.ones((2, 1)), np.ones(2))
    assert (RBF(1.0) * three.on((4,)) + 2.0 * two.on((1,))).categories(5) == {
        4: (0, 1, 2),
        1: (0, 1),
    }
    assert (three * two).categories(1) == {0: (0, 1)}
    assert (three + Constant(1.0)).on((3,)).categories(7) == {3: (0, 1, 2)}
    assert FeatureMapped(three, lambda X: X[:, :1]).categories(3) == {}
