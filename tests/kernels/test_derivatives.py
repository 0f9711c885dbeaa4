"""A function with its derivatives against differentiated formulas and finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels import (
    RBF,
    Constant,
    Coregion,
    FeatureMapped,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    WithDerivatives,
)

KERNELS = {
    "rbf": lambda: RBF(jnp.array([0.7, 1.3]), 2.0),
    "matern32": lambda: Matern32(jnp.array([0.7, 1.3])),
    "matern52": lambda: Matern52(0.9, 1.5),
    "rational_quadratic": lambda: RationalQuadratic(1.1, alpha=0.6),
    "periodic": lambda: Periodic(1.2, period=jnp.array([2.0, 3.0])),
    "composed": lambda: RBF(0.8).on((0,)) * Linear(0.5, 1.0) + 2.0 * Matern52(1.0).on((1,)),
    "mapped": lambda: FeatureMapped(RBF(1.0), lambda X: jnp.stack([jnp.sin(X[:, 0]), X[:, 1]], 1)),
}


def rows(n=8, seed=0, d=2):
    """Inputs, and the codes 0, 1, ..., d in a cycle."""
    X = np.random.default_rng(seed).normal(size=(n, d))
    return np.concatenate([X, np.resize(np.arange(d + 1), n)[:, None]], axis=1)


@pytest.mark.parametrize("name", KERNELS)
def test_against_finite_differences(name, x64):
    kernel, step = KERNELS[name](), 1e-4
    X, Z = rows(), rows(7, 1)

    def ends(X):
        """Both ends of a central difference with weights; for the function, its mean of two."""
        code = X[:, 2].astype(int)
        direction = np.eye(3)[code][:, 1:]
        weight = np.where(code > 0, 0.5 / step, 0.5)
        sign = np.where(code > 0, -1.0, 1.0)
        points = X[:, :2] + step * direction, X[:, :2] - step * direction
        return list(zip(points, (weight, sign * weight), strict=True))

    expected = sum(
        left[:, None] * np.asarray(kernel(x, z)) * right
        for x, left in ends(X)
        for z, right in ends(Z)
    )
    K = WithDerivatives(kernel)(X, Z)
    np.testing.assert_allclose(K, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("kind", "curvature"), [(RBF, 1.0), (Matern32, 3.0), (Matern52, 5 / 3)])
def test_at_zero_distance(kind, curvature, dtype):
    """The variance of a derivative, -variance k'' / lengthscale^2, and no NaN beside it."""
    d = 5  # by a matrix product
    lengthscale = np.linspace(0.5, 2.0, d)
    X = np.tile(rows(1, d=d), (d + 1, 1))
    X[:, -1] = np.arange(d + 1)
    expected = np.diag([1.5, *(1.5 * curvature / lengthscale**2)])
    tolerance = 100 * float(jnp.finfo(dtype).eps)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def total(lengthscale):
        kernel = WithDerivatives(kind(lengthscale, 1.5))
        K, variances = kernel(X, X), kernel.diag(X)
        return jnp.sum(K) + jnp.sum(variances), (K, variances)

    (_, (K, variances)), gradient = total(jnp.array(lengthscale))
    np.testing.assert_allclose(K, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(variances, np.diagonal(expected), rtol=tolerance)
    np.testing.assert_allclose(gradient, -6.0 * curvature / lengthscale**3, rtol=100 * tolerance)


def test_marginal_likelihood_and_gradient_against_a_formula(x64):
    """Of an RBF in one dimension, whose derivatives are known."""
    X, y = rows(9, d=1), np.sin(np.arange(9.0))

    def formula(lengthscale):
        r = (X[:, :1] - X[:, 0]) / lengthscale
        right, left = X[:, 1] > 0, X[:, 1:] > 0
        slope = r / lengthscale
        second = (1.0 - r**2) / lengthscale**2
        factor = jnp.where(left, jnp.where(right, second, -slope), jnp.where(right, slope, 1.0))
        H = factor * jnp.exp(-0.5 * r**2) + 0.1 * jnp.eye(9)
        return jax.scipy.stats.multivariate_normal.logpdf(y, jnp.zeros(9), H)

    def found(lengthscale):
        return sgp.GaussianProcess(WithDerivatives(RBF(lengthscale)), X, 0.1).log_prob(y)

    for actual, expected in zip(
        jax.jit(jax.value_and_grad(found))(0.7), jax.value_and_grad(formula)(0.7), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-10)


def test_a_function_known_by_its_derivatives_and_one_value(x64):
    random = np.random.default_rng(0)
    X = random.uniform(-2.0, 2.0, size=(120, 2))
    code = np.resize([1.0, 2.0], 120)
    gradient = np.stack([np.cos(X[:, 0]) * X[:, 1], np.sin(X[:, 0])], axis=1)
    y = gradient[np.arange(120), code.astype(int) - 1] + 0.01 * random.normal(size=120)
    X, y = np.concatenate([X, code[:, None]], 1), np.append(y, 1.0 + np.sin(0.5))
    X = np.concatenate([X, [[0.5, 1.0, 0.0]]])  # f(0.5, 1)
    kernel = WithDerivatives(RBF(1.5, 4.0) + Constant(10.0))
    posterior = sgp.GaussianProcess(kernel, X, 1e-4).condition(y)
    Xs = np.concatenate([random.uniform(-1.5, 1.5, size=(50, 2)), np.zeros((50, 1))], axis=1)
    expected = 1.0 + np.sin(Xs[:, 0]) * Xs[:, 1]
    assert np.max(np.abs(posterior.mean(Xs) - expected)) < 0.05
    assert np.all(np.abs(posterior.mean(Xs) - expected) < 4.0 * np.sqrt(posterior.variance(Xs)))


def test_features_have_the_kernel_as_expectation(x64):
    """A draw's derivatives are the derivatives of the draw."""
    kernel, X = WithDerivatives(RBF(0.9) + Linear(0.3)), rows(6)
    keys = jax.random.split(jax.random.key(0), 400)
    phi = jax.jit(jax.vmap(lambda key: kernel.random_features(key, X, 40, origin=X[0])))(keys)
    grams = phi @ jnp.swapaxes(phi, 1, 2)
    error = np.std(grams, axis=0) / 20.0

    def is_expectation(expected):
        return np.all(np.abs(np.mean(grams, axis=0) - expected) < 4.0 * error + 1e-12)

    assert is_expectation(kernel(X, X))
    sign = np.where(X[:, 2] > 0, -1.0, 1.0)
    assert not is_expectation(kernel(X, X) * sign)  # derivatives in z alone


def test_several_outputs_with_derivatives(x64):
    """The category of an output has no derivative; its column does not count as an input."""
    outputs = Coregion(jnp.array([[1.0], [0.5]]), jnp.array([0.1, 0.2]))
    kernel = WithDerivatives(RBF(0.7).on((0,)) * outputs.on((1,)))
    assert kernel.categories(3) == {1: (0, 1), 2: (0, 1)}
    X = np.array([[0.3, 0.0, 1.0], [0.3, 1.0, 1.0]])
    np.testing.assert_allclose(kernel(X, X), np.array([[1.1, 0.5], [0.5, 0.45]]) / 0.49)
    message = "`X` must hold the kernel's categories in column 2, 0, 1, got 2.0 in row 1"
    with pytest.raises(ValueError, match=message):
        sgp.GaussianProcess(kernel, np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), 0.1)
    assert np.isnan(jax.jit(lambda X: kernel.diag(X))(jnp.array([[0.0, 1.0, 2.0]]))).all()


def test_what_has_no_derivative(unchecked):
    X = rows()
    with pytest.raises(ValueError, match=r"no derivative in any of the 2 column\(s\).*`Matern12`"):
        WithDerivatives(RBF(1.0) + Matern12(1.0))(X, X)
    with pytest.raises(ValueError, match=r"no derivative in any"):
        sgp.LatentGP(WithDerivatives(WithDerivatives(RBF(1.0))), X)
    with pytest.raises(ValueError, match=r"no derivative in any"):
        WithDerivatives(FeatureMapped(Matern12(1.0), jnp.tanh)).diag(X)
    rough_in_one = WithDerivatives(Matern12(1.0).on((0,)) * RBF(1.0).on((1,)))
    assert rough_in_one.categories(3) == {2: (0, 2)}
    with pytest.raises(ValueError, match=r"`X` must hold .* in column 2, 0, 2, got 1.0 in row 1"):
        rough_in_one(X, X)
    with pytest.raises(ValueError, match=r"a last column that says .* got 1 column"):
        WithDerivatives(RBF(1.0))(X[:, :1], X[:, :1])
    with pytest.raises(TypeError, match=r"`kernel` must be one of `sgp.kernels`"):
        WithDerivatives(1.0)
