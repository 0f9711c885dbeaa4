"""Laplace's approximation against searches by another library, finite differences and exactness."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.optimize
from jax.test_util import check_grads

from numpyro_scalegp.integrated.laplace import dense, search
from tests.conformance import each

N = 9
RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0.0, 3.0, N))
COUNTS = RNG.poisson(3.0, N)
LIKELIHOODS = {
    "poisson": (lambda f, s: dist.Poisson(jnp.exp(f + s)), COUNTS),
    "bernoulli": (lambda f, s: dist.Bernoulli(logits=f * jnp.exp(s)), COUNTS % 2),
    "gamma": (lambda f, s: dist.Gamma(jnp.exp(s), jnp.exp(s - f)), COUNTS + 0.5),
    "ordered": (lambda f, s: dist.OrderedLogistic(f, s + jnp.arange(-1.0, 2.0)), COUNTS % 4),
    "normal": (lambda f, s: dist.Normal(f, jnp.exp(s)), COUNTS - 2.5),
}
THETA = np.array([-0.3, 0.5, 0.2, 0.1])


def covariance(theta):
    distance = jnp.square(X[:, None] - X) * jnp.exp(-2.0 * theta[0])
    return jnp.exp(theta[1] - 0.5 * distance) + 1e-6 * jnp.eye(N)


def value(name, theta, y=None):
    likelihood, default_y = LIKELIHOODS[name]

    def entries(f, data):
        return likelihood(f, data[1]).log_prob(data[0])

    y = default_y if y is None else y
    K = covariance(theta)
    return dense.log_marginal(entries, K, theta[2] * jnp.ones_like(K[0]), (y, theta[3]))


@pytest.mark.slow
@each("name", [(name, lambda name=name: name) for name in LIKELIHOODS])
def test_against_a_search_by_scipy(name, x64):
    name = name()
    likelihood, y = LIKELIHOODS[name]
    K, mean = np.asarray(covariance(THETA)), THETA[2]
    L = np.linalg.cholesky(K)

    def log_likelihood(f):
        return jnp.sum(likelihood(f, THETA[3]).log_prob(y))

    loss = jax.jit(lambda z: 0.5 * z @ z - log_likelihood(mean + L @ z))
    options = {"jac": jax.jit(jax.grad(loss)), "hess": jax.jit(jax.hessian(loss))}
    minimum = scipy.optimize.minimize(loss, np.zeros(N), method="trust-exact", tol=1e-10, **options)
    W = -np.diag(jax.hessian(log_likelihood)(mean + L @ minimum.x))
    expected = -minimum.fun - 0.5 * np.linalg.slogdet(np.eye(N) + W[:, None] * K)[1]
    np.testing.assert_allclose(value(name, THETA), expected, rtol=1e-9)
    # First and second derivatives, in both modes, against differences of the value.
    check_grads(jax.jit(lambda theta: value(name, theta)), (THETA,), order=2, rtol=1e-5)


@pytest.mark.slow
def test_a_normal_likelihood_is_exact(x64):
    y = LIKELIHOODS["normal"][1]

    def exact(theta):
        H = covariance(theta) + jnp.exp(2.0 * theta[3]) * jnp.eye(N)
        return dist.MultivariateNormal(theta[2] * jnp.ones(N), H).log_prob(y)

    for leaf, expected in zip(
        jax.value_and_grad(lambda theta: value("normal", theta))(THETA),
        jax.value_and_grad(exact)(THETA),
        strict=True,
    ):
        np.testing.assert_allclose(leaf, expected, rtol=1e-9)


@pytest.mark.slow
def test_the_gradient_at_a_fixed_mode_differs(x64):
    """The part of the gradient from the derivative of the mode is not negligible."""
    likelihood, y = LIKELIHOODS["bernoulli"]

    def held(theta):
        def entries(f, data):
            return likelihood(f, data[1]).log_prob(data[0])

        K, data = covariance(theta), (y, theta[3])
        f = dense.find_mode(entries, K, theta[2] * jnp.ones(N), data).f
        f = jax.lax.stop_gradient(f)
        W = search.derivatives(entries, f, data).curvature
        log_det = jnp.linalg.slogdet(jnp.eye(N) + W[:, None] * K)[1]
        r = f - theta[2]
        return jnp.sum(entries(f, data)) - 0.5 * r @ jnp.linalg.solve(K, r) - 0.5 * log_det

    assert np.isclose(held(THETA), value("bernoulli", THETA), rtol=1e-6)
    difference = jax.grad(held)(THETA) - jax.grad(lambda theta: value("bernoulli", theta))(THETA)
    assert np.abs(difference).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_large_and_small_counts_in_float32(scale):
    """Counts of all sizes, far from where the search starts."""
    y = np.round(scale * np.exp(np.sin(X))).astype(int)
    with jax.enable_x64(True):
        expected = jax.value_and_grad(lambda theta: value("poisson", theta, y))(jnp.array(THETA))
    theta = jnp.array(THETA, jnp.float32)
    value_and_gradient = jax.value_and_grad(lambda theta: value("poisson", theta, y))(theta)
    np.testing.assert_allclose(value_and_gradient[0], expected[0], rtol=2e-3)
    # The last parameter is known to one over the root of all counts.
    deviation = np.sqrt(1.0 + y.sum())
    np.testing.assert_allclose(value_and_gradient[1], expected[1], rtol=2e-3, atol=0.03 * deviation)


def binomial(f, data):
    y, num_trials = data
    return dist.Binomial(num_trials, logits=f).log_prob(y)


def gamma(f, data):
    y, concentration = data
    return dist.Gamma(concentration, concentration * jnp.exp(-f)).log_prob(y)


def poisson(f, data):
    y, exposure = data
    return dist.Poisson(exposure * jnp.exp(f)).log_prob(y)


PLACES = np.linspace(0.0, 10.0, 60)
SHARES_OF_SUCCESS = 1.0 / (1.0 + np.exp(-np.sin(PLACES)))
LEVELS = np.exp(np.sin(PLACES))


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("entries", "y", "size"),
    [
        (binomial, lambda size: np.round(size * SHARES_OF_SUCCESS), (100, 1000, 10_000, 100_000)),
        (poisson, lambda size: np.round(size * LEVELS), (1.0, 1e3, 1e5)),
        (gamma, lambda size: LEVELS, (1.0, 1e2, 1e4)),
    ],
)
def test_informative_rows_in_float32(entries, y, size):
    """The terms of a log likelihood are far larger than their sum and its changes near a mode."""

    @jax.jit
    def density(theta, y, size):
        distance = jnp.abs(PLACES[:, None] - PLACES).astype(theta.dtype) * jnp.exp(-theta[0])
        scaled = 5.0**0.5 * distance
        K = jnp.exp(theta[1] - scaled) * (1.0 + scaled + scaled**2 / 3.0)
        return dense.log_marginal(entries, K, jnp.zeros_like(K[0]), (y, size))

    def of(dtype, size):
        theta = jnp.array([0.7, -0.7], dtype)
        counts = jnp.asarray(y(size), dtype)
        value, gradient = jax.value_and_grad(density)(theta, counts, jnp.asarray(size, dtype))
        jax.effects_barrier()
        return value, gradient

    for number in size:
        with jax.enable_x64(True):
            expected = of(np.float64, number)
        value_and_gradient = of(np.float32, number)
        np.testing.assert_allclose(value_and_gradient[0], expected[0], atol=0.1)
        np.testing.assert_allclose(value_and_gradient[1], expected[1], rtol=0.01, atol=0.5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_counts_far_above_the_prior_mean(dtype, x64):
    """The first step is too long by a factor of the size of the counts."""
    y = jnp.asarray(1e5 * (1 + COUNTS), dtype)
    mode = dense.find_mode(_counts, jnp.eye(N, dtype=dtype), jnp.zeros(N, dtype), y)
    # There each count is near its rate, and y - exp(f) = f without correlations.
    np.testing.assert_allclose(jnp.exp(mode.f) + mode.f, y, rtol=1e-5)


def _counts(f, y):
    return dist.Poisson(jnp.exp(f)).log_prob(y)


@functools.partial(jax.jit, static_argnums=0)
def of(entries, mean, y):
    return dense.log_marginal(entries, covariance(THETA), jnp.full(N, mean), y)


def test_a_likelihood_that_is_not_log_concave_gives_nan_and_a_warning(x64):
    def entries(f, y):
        return dist.StudentT(3.0, f, 0.1).log_prob(y)

    with pytest.warns(RuntimeWarning, match="needs a log-concave likelihood"):
        value = of(entries, 0.0, COUNTS * 1.0)
        jax.effects_barrier()
    assert np.isnan(value)


def test_few_digits_give_a_warning():
    def entries(f, y):
        return dist.Normal(f, 1e-3).log_prob(y)

    with pytest.warns(RuntimeWarning, match="few digits left"):
        dense.log_marginal(entries, jnp.ones((N, N)), jnp.zeros(N), jnp.full(N, 0.5))
        jax.effects_barrier()


def test_no_mode_gives_nan_and_a_warning(x64):
    def entries(f, y):
        return dist.Poisson(jnp.exp(f)).log_prob(y)

    with pytest.warns(RuntimeWarning, match="found no mode"):
        value = of(entries, 1e3, COUNTS)
        jax.effects_barrier()
    assert np.isnan(value)


@pytest.mark.slow
def test_a_batch_is_a_loop(x64):
    y = RNG.poisson(2.0, (2, N))
    theta = np.stack([THETA, THETA[::-1]])

    def entries(f, data):
        return dist.Poisson(jnp.exp(f + data[1])).log_prob(data[0])

    def of(theta, y):
        K = jnp.vectorize(covariance, signature="(k)->(n,n)")(theta)
        mean = theta[..., 2:3] * jnp.ones(N)
        return dense.log_marginal(entries, K, mean, (y, theta[..., 3:]))

    gradient = jax.grad(lambda theta: jnp.sum(of(theta, y)))(theta)
    mapped = jax.vmap(jax.grad(of))(theta, y)
    alone = [
        jax.grad(of)(single_theta, single_y)
        for single_theta, single_y in zip(theta, y, strict=True)
    ]
    np.testing.assert_allclose(of(theta, y), [of(*pair) for pair in zip(theta, y, strict=True)])
    np.testing.assert_allclose(gradient, alone, rtol=1e-8)
    np.testing.assert_allclose(mapped, alone, rtol=1e-8)
