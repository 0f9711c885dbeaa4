import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_scalegp as sgp

pytestmark = pytest.mark.usefixtures("x64")
LENGTHSCALE, LOC, SCALE = np.array([0.7, 1.3, 2.0]), 0.4, np.array([1.0, 0.6, 1.5])
VARIANCES = np.array([0.5, 1.0, 0.3])


@pytest.fixture
def kernel(x64):
    return sgp.kernels.OrthogonalAdditive(LENGTHSCALE, VARIANCES, LOC, SCALE)


def constrained(x, z, i):
    """The constrained kernel by quadrature over the normal distribution of the inputs."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(160)
    nodes, weights = LOC + SCALE[i] * nodes, weights / weights.sum()

    def rbf(a, b):
        return np.exp(-0.5 * ((a[:, None] - b[None]) / LENGTHSCALE[i]) ** 2)

    left, right = rbf(x, nodes) @ weights, rbf(z, nodes) @ weights
    return rbf(x, z) - np.outer(left, right) / (weights @ rbf(nodes, nodes) @ weights)


def test_values_are_sums_over_sets_of_inputs(kernel):
    generator = np.random.default_rng(0)
    X, Z = generator.normal(size=(5, 3)), generator.normal(size=(4, 3))
    factors = [constrained(X[:, i], Z[:, i], i) for i in range(3)]
    expected = np.zeros((5, 4))
    for order, variance in enumerate(VARIANCES):
        for columns in itertools.combinations(range(3), order):
            product = np.prod([np.ones((5, 4)), *(factors[i] for i in columns)], axis=0)
            effect = kernel.effect(columns)
            np.testing.assert_allclose(effect(X, Z), variance * product, rtol=1e-7, atol=1e-9)
            expected += variance * product
    np.testing.assert_allclose(kernel(X, Z), expected, rtol=1e-7)
    np.testing.assert_allclose(kernel.diag(X), np.diagonal(kernel(X, X)), rtol=1e-12)


def test_effects_integrate_to_zero(kernel):
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    X = np.full((60, 3), 0.2)
    X[:, 1] = LOC + SCALE[1] * nodes
    for columns in ((1,), (1, 2)):
        values = kernel.effect(columns)(X, np.array([[0.3, -0.5, 1.0]]))[:, 0]
        assert abs(weights @ values) < 1e-10 * np.max(np.abs(values))


def effect_of(scaled, columns):
    return scaled.kernel.effect(columns)


def test_components_add_up_to_the_posterior_mean(kernel):
    generator = np.random.default_rng(0)
    X = generator.normal(size=(60, 3))
    y = np.sin(2.0 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.1 * generator.normal(size=60)
    posterior = sgp.GaussianProcess(2.0 * kernel, X, 0.01).condition(y)
    total = np.zeros(60)
    for order in range(3):
        for columns in itertools.combinations(range(3), order):
            effect = posterior.component(functools.partial(effect_of, columns=columns))
            total += effect.mean(X)
    np.testing.assert_allclose(total, posterior.mean(X), atol=1e-9)


@pytest.mark.slow
def test_shares_of_known_functions():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(400, 4))
    effects = np.sin(2.0 * X[:, 0]), 0.5 * X[:, 1] ** 2, X[:, 2] * X[:, 3]
    kernel = sgp.kernels.OrthogonalAdditive(jnp.ones(4), jnp.array([1.0, 1.0, 0.5]))
    posterior = sgp.GaussianProcess(kernel, X, 1e-4).condition(sum(effects))
    shares = sgp.infer.variance_shares(posterior, X)
    assert list(shares)[:3] == [(2, 3), (0,), (1,)]
    assert len(shares) == 10
    assert np.isclose(sum(shares.values()), 1.0)
    # Variances under the normal distribution: of a product, a sine and half a square.
    variances = np.array([1.0, 0.5 * (1.0 - np.exp(-8.0)), 0.5])
    expected = variances / variances.sum()
    np.testing.assert_allclose([shares[(2, 3)], shares[(0,)], shares[(1,)]], expected, atol=0.05)
    assert len(sgp.infer.variance_shares(posterior, X, max_order=1)) == 4


def additive_model(X, y=None):
    variances = numpyro.sample("variances", dist.HalfNormal(1.0).expand([3]).to_event(1))
    kernel = sgp.kernels.OrthogonalAdditive(jnp.ones(2), variances)
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, 0.1), obs=y)


@pytest.mark.slow
def test_effects_of_mixtures_and_in_compiled_programs():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(40, 2))
    y = X[:, 0] + 0.1 * generator.normal(size=40)
    mixture = sgp.posterior(additive_model, {"variances": jnp.ones((4, 3))}, X, y)
    kernel = sgp.kernels.OrthogonalAdditive(jnp.ones(2), jnp.ones(3))
    posterior = sgp.GaussianProcess(kernel, X, 0.1).condition(y)

    def first(posterior):
        return posterior.component(lambda kernel: kernel.effect((0,))).mean(X)

    np.testing.assert_allclose(first(mixture), first(posterior), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(first)(posterior), first(posterior), rtol=1e-6)
    shares = sgp.infer.variance_shares(mixture, X)
    expected = sgp.infer.variance_shares(posterior, X)
    assert shares.keys() == expected.keys()
    np.testing.assert_allclose(list(shares.values()), list(expected.values()), rtol=1e-6)


def test_shares_name_the_columns_of_the_inputs():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(120, 3))
    additive = sgp.kernels.OrthogonalAdditive(jnp.ones(2), jnp.array([1.0, 1.0, 0.5]))
    y = np.sin(2.0 * X[:, 0]) + 0.3 * X[:, 2]
    posterior = sgp.GaussianProcess(additive.on((0, 2)), X, 0.01).condition(y)
    shares = sgp.infer.variance_shares(posterior, X)
    assert set(shares) == {(0,), (2,), (0, 2)}
    assert shares[(0,)] > shares[(2,)] > shares[(0, 2)]


@pytest.mark.slow
def test_long_lengthscales_keep_their_digits_in_float32():
    with jax.enable_x64(False):
        X = np.random.default_rng(0).normal(size=(150, 3)).astype(np.float32)
        kernel = sgp.kernels.OrthogonalAdditive(jnp.full(3, 100.0), jnp.array([1.0, 1e4, 1.0]))
        K = np.asarray(kernel.covariance(X), float)
        posterior = sgp.GaussianProcess(kernel, X, 0.01).condition(X[:, 0] + 0.5 * X[:, 1])
        mean = posterior.mean(X[:20])
    assert np.linalg.eigvalsh(K)[0] > -1e-4 * np.linalg.eigvalsh(K)[-1]
    # Nearly linear: v_1 times the sum of x z / l^2, as the constraint leaves no constant.
    expected = 1.0 + X.astype(float) @ X.T.astype(float)
    np.testing.assert_allclose(K, expected, atol=0.01 * np.abs(expected).max())
    np.testing.assert_allclose(mean, X[:20, 0] + 0.5 * X[:20, 1], atol=0.05)


def test_gradients_are_finite_where_points_coincide():
    X = jnp.zeros((3, 3))
    gradient = jax.grad(
        lambda lengthscale: jnp.sum(sgp.kernels.OrthogonalAdditive(lengthscale, VARIANCES)(X, X))
    )(jnp.asarray(LENGTHSCALE))
    assert np.all(np.isfinite(gradient))


def test_errors(kernel):
    with pytest.raises(ValueError, match="`columns` must be at most 2 distinct input dimensions"):
        kernel.effect((0, 0))
    with pytest.raises(ValueError, match="from 0 to 2, got"):
        kernel.effect((3,))
    with pytest.raises(ValueError, match="`variances` must have shape"):
        sgp.kernels.OrthogonalAdditive(1.0, 1.0)
    with pytest.raises(ValueError, match="needs a lengthscale for each input dimension"):
        sgp.kernels.OrthogonalAdditive(1.0, VARIANCES).effect((0,))
    posterior = sgp.GaussianProcess(sgp.kernels.RBF(1.0), np.zeros((1, 1)), 0.1).condition(
        np.zeros(1)
    )
    with pytest.raises(ValueError, match="one `OrthogonalAdditive` in it, got 0"):
        sgp.infer.variance_shares(posterior, np.zeros((2, 1)))
