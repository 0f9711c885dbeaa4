"""`StateSpace` against `Cholesky`: values, derivatives, posteriors, in all orders of rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from tests.kernels.test_state_space import KERNELS

RNG = np.random.default_rng(0)
N = 70
# In no order, with gaps, a long one among them, and with repeated times.
TIMES = np.round(np.concatenate([RNG.uniform(0.0, 6.0, N - 10), RNG.uniform(9.0, 10.0, 10)]), 3)
TIMES[[7, 8]] = TIMES[3]
X, Y = TIMES[:, None], np.sin(2.0 * TIMES) + 0.3 * RNG.normal(size=N)
NOISE = RNG.uniform(0.05, 0.3, N)
NEW = np.concatenate([[-3.0, -0.1, 7.0, 10.5, 14.0], TIMES[:4], RNG.uniform(0.0, 10.0, 6)])[:, None]
# Their functions have no derivative, so that neither has the density at repeated times.
ROUGH = ("matern12", "wiener", "sum", "product", "large_product")
EXACT = sgp.estimators.Cholesky()
LINEAR = sgp.estimators.StateSpace(num_harmonics=20)
KEY = jax.random.key(0)


def level(X):
    return 0.3 * X[..., 0]


def process(kernel, X, noise, estimator, **options):
    return sgp.GaussianProcess(kernel, X, noise, mean=level, estimator=estimator, **options)


def rows_for(name):
    """The rows, without repeated times for the kernels of rough functions."""
    times = TIMES.copy()
    if name in ROUGH:
        times[[7, 8]] += [0.0004, 0.0007]
    return times[:, None]


def everything(kernel, X, noise, y, estimator):
    """The density with its gradient, the posterior's moments and the leave-one-out moments."""

    def density(kernel, X, noise, y):
        return process(kernel, X, noise, estimator).log_prob(y)

    value, gradient = jax.value_and_grad(density, (0, 1, 2, 3))(kernel, X, noise, y)
    posterior = process(kernel, X, noise, estimator).condition(y)
    left_out = posterior.leave_one_out()
    moments = posterior.mean(NEW), posterior.variance(NEW), posterior.covariance(NEW)
    return value, gradient, moments, (left_out.mean, left_out.variance)


def assert_close(actual, expected, rtol):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(1.0, np.abs(b).max()))


# Forms of one term each, and one of several.
QUICK = ("matern12", "matern52", "overdamped", "integrated_wiener", "product")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KERNELS],
)
def test_agrees_with_dense_algebra(name, x64):
    X = rows_for(name)
    arguments = KERNELS[name](), jnp.asarray(X), jnp.asarray(NOISE), jnp.asarray(Y)
    actual = everything(*arguments, LINEAR)
    assert_close(actual, everything(*arguments, EXACT), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", ["one row", "one lane", "short last part"])
def test_numbers_of_rows(lanes, x64):
    n = {"one row": 1, "one lane": 20, "short last part": 67}[lanes]
    X = rows_for("product")
    arguments = (
        KERNELS["product"](),
        jnp.asarray(X[-n:]),
        jnp.asarray(NOISE[-n:]),
        jnp.asarray(Y[-n:]),
    )
    assert_close(everything(*arguments, LINEAR), everything(*arguments, EXACT), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["matern32", pytest.param("large_product", marks=pytest.mark.slow)]
)
def test_derivatives_of_every_order_and_mode(name, x64):
    def density(theta, estimator):
        kernel = jnp.exp(theta[1]) * sgp.kernels.Matern32(jnp.exp(theta[0]))
        if name == "large_product":
            kernel = kernel * sgp.kernels.Periodic(1.2, period=2.0) + sgp.kernels.Matern52(3.0)
        return sgp.GaussianProcess(kernel, X, jnp.exp(theta[2]), estimator=estimator).log_prob(Y)

    theta = jnp.array([-0.2, 0.3, -2.0])
    for derivative in (jax.hessian(density), jax.jacfwd(density), jax.jacrev(jax.jacrev(density))):
        compiled = jax.jit(derivative, static_argnums=1)
        assert_close(compiled(theta, LINEAR), compiled(theta, EXACT), 1e-9)


def test_sorted_rows_and_a_second_call_agree(x64):
    kernel, order = KERNELS["matern52"](), np.argsort(TIMES)

    @jax.jit
    def density(X, y):
        return sgp.GaussianProcess(kernel, X, 0.1, estimator=LINEAR).log_prob(y)

    values = [density(X, Y), density(X[order], Y[order]), density(X[::-1], Y[::-1])]
    np.testing.assert_allclose(values, sgp.GaussianProcess(kernel, X, 0.1).log_prob(Y), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("is_traced", [False, True])
def test_rows_without_a_target(is_traced, x64):
    kernel, observed = KERNELS["matern32"](), RNG.uniform(size=N) < 0.6
    y = np.where(observed, Y, np.nan)

    def of(observed, estimator):
        gp = process(kernel, jnp.asarray(X), 0.1, estimator, observed=observed)
        posterior = gp.condition(y)
        return gp.log_prob(y), posterior.mean(NEW), posterior.variance(NEW)

    call = jax.jit(of, static_argnums=1) if is_traced else of
    argument = jnp.asarray(observed) if is_traced else observed
    assert_close(call(argument, LINEAR), call(argument, EXACT), 1e-10)


@pytest.mark.slow
def test_batch_of_series(x64):
    """Each with separate times and hyperparameters, and rows without a target."""
    X = jnp.asarray(RNG.uniform(0.0, 5.0, (3, 40, 1)))
    y, observed = jnp.sin(X[..., 0]), jnp.asarray(RNG.uniform(size=(3, 40)) < 0.8)
    lengthscales, variances = jnp.array([[0.5], [1.0], [2.0]]), jnp.array([1.0, 2.0, 0.5])

    def of(estimator):
        def density(kernel):
            gp = sgp.GaussianProcess(kernel, X, 0.1, observed=observed, estimator=estimator)
            return jnp.sum(gp.log_prob(y)), gp

        kernel = sgp.kernels.Matern32(lengthscales, variances)
        (value, gp), gradient = jax.value_and_grad(density, has_aux=True)(kernel)
        posterior = gp.condition(y)
        draws = posterior.sample_functions(KEY, 2)(NEW)
        assert posterior.sample(KEY, NEW, 3).shape == (3, 3, len(NEW))
        return value, gradient, posterior.mean(NEW), posterior.leave_one_out().mean, draws

    assert_close(of(LINEAR), of(EXACT), 1e-10)


def standard_errors_off(draws, mean, covariance):
    """How far the moments of draws are from others, in standard errors."""
    variances = np.diag(covariance)
    error = np.sqrt((covariance**2 + np.outer(variances, variances)) / len(draws))
    of_mean = (np.mean(draws, axis=0) - mean) / np.sqrt(variances / len(draws))
    of_covariance = (np.cov(draws, rowvar=False) - covariance) / error
    return max(np.abs(of_mean).max(), np.abs(of_covariance).max())


@pytest.mark.monte_carlo
def test_draws_have_the_moments(x64):
    kernel = sgp.kernels.Matern32(0.7, 1.3) + sgp.kernels.Cosine(4.0)
    gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=LINEAR)
    exact = sgp.GaussianProcess(kernel, X, 0.1).condition(Y)
    rows = NEW[[0, 2, 3, 5, 9]]
    draws = np.zeros(0)
    for select in (None, lambda kernel: kernel.left):
        posteriors: list[Any] = [gp.condition(Y), exact]
        if select is not None:
            posteriors = [posterior.component(select) for posterior in posteriors]
        draws = posteriors[0].sample(KEY, rows, 20_000)
        mean, covariance = posteriors[1].mean(rows), np.asarray(posteriors[1].covariance(rows))
        np.testing.assert_allclose(posteriors[0].mean(rows), mean, atol=1e-10)
        np.testing.assert_allclose(posteriors[0].covariance(rows), covariance, atol=1e-10)
        assert standard_errors_off(draws, mean, covariance) < 4.5
    # Independent draws are far from them.
    independent = np.take_along_axis(draws, RNG.permuted(np.indices(draws.shape)[0], axis=0), 0)
    assert standard_errors_off(independent, mean, covariance) > 20
    prior = gp.sample(KEY, (20_000,))[:, :30]
    expected = np.asarray(kernel(X[:30], X[:30]) + 0.1 * np.eye(30))
    assert standard_errors_off(prior, 0.0, expected) < 4.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["matern12", "matern32", "matern52", "harmonic"])
def test_float32_at_close_times_with_little_noise(name, x64):
    """A million lengthscales fit between two times, and the noise is a hundredth of the signal."""
    n, kernel = 3000, KERNELS[name]()
    times = np.cumsum(RNG.exponential(1e-6, n)).astype(np.float32)
    y = (np.sin(times) + 0.01 * RNG.normal(size=n)).astype(np.float32)

    @jax.jit
    def density(kernel, X, y):
        noise = jnp.asarray(1e-4, X.dtype)
        return sgp.GaussianProcess(kernel, X, noise, estimator=LINEAR).log_prob(y)

    results = []
    for dtype in (np.float32, np.float64):
        k = jax.tree.map(lambda leaf: leaf.astype(dtype), kernel)  # noqa: B023
        arguments = k, jnp.asarray(times[:, None], dtype), jnp.asarray(y, dtype)
        results.append(jax.value_and_grad(density)(*arguments))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    assert_close(results[0][1], results[1][1], 1e-3)


@pytest.mark.parametrize("name", ["matern32", "harmonic", "sum"])
def test_float32_with_hardly_any_noise(name, x64):
    """As in float64, or a warning where parts of a sum cancel."""
    times = np.sort(RNG.uniform(0.0, 10.0, 200)).astype(np.float32)

    @jax.jit
    def density(kernel, X, noise):
        y = jnp.sin(2.0 * X[:, 0])
        return sgp.GaussianProcess(kernel, X, noise, estimator=LINEAR).log_prob(y)

    def of(dtype):
        kernel = jax.tree.map(lambda leaf: leaf.astype(dtype), KERNELS[name]())
        value = density(kernel, jnp.asarray(times[:, None], dtype), jnp.asarray(1e-8, dtype))
        jax.effects_barrier()
        return value

    expected = of(np.float64)
    if name != "sum":
        np.testing.assert_allclose(of(np.float32), expected, atol=0.2)
        return
    with pytest.warns(RuntimeWarning, match="few digits left|not positive definite"):
        of(np.float32)


@pytest.mark.parametrize("name", ["matern12", "matern32", "matern52", "harmonic", "overdamped"])
def test_far_from_the_data_the_posterior_is_the_prior(name):
    kernel, far = KERNELS[name](), np.array([[-1e30], [1e30]], np.float32)
    gp = sgp.GaussianProcess(kernel, X.astype(np.float32), 0.1, estimator=LINEAR)
    posterior = gp.condition(Y.astype(np.float32))
    np.testing.assert_array_equal(posterior.mean(far), 0.0)
    np.testing.assert_allclose(posterior.variance(far), kernel.diag(far))


@pytest.mark.slow
def test_a_short_series_warns(recwarn):
    kernel = sgp.kernels.Periodic(0.2, period=2.0) + sgp.kernels.Constant(1.0)
    estimators = (sgp.estimators.StateSpace(), sgp.estimators.StateSpace(num_harmonics=30))
    missing = []
    for estimator in estimators:
        gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator)
        missing.append(gp.condition(Y).diagnostics["missing_variance"])
        jax.effects_barrier()
        assert any("raise `num_harmonics`" in str(w.message) for w in recwarn.list) == (
            estimator is estimators[0]
        )
        recwarn.clear()
    weights = sgp.kernels.Periodic(0.2, period=2.0).fourier_weights(200)
    np.testing.assert_allclose(missing, [jnp.sum(weights[9:]), 0.0], atol=1e-6)


def test_large_times_in_float32_warn():
    days = jnp.asarray(1.7e9 + np.arange(50.0))[:, None]
    gp = sgp.GaussianProcess(sgp.kernels.Matern32(10.0), days, 0.1, estimator=LINEAR)
    with pytest.warns(RuntimeWarning, match="cannot tell their distances: subtract the first time"):
        gp.log_prob(jnp.zeros(50)).block_until_ready()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sgp.estimators.StateSpace(num_harmonics=0), "`num_harmonics` must be at least 1"),
        (
            lambda: sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1, estimator=LINEAR).log_prob(Y),
            "`RBF` has no state-space form",
        ),
        (
            lambda: sgp.GaussianProcess(
                sgp.kernels.Matern32(1.0), np.tile(X, 2), 0.1, estimator=LINEAR
            ).log_prob(Y),
            "inputs of one column, the time, got 2",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
