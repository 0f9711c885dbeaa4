"""The exact log marginal likelihood against SciPy, and its derivatives by autodiff."""

import functools
import logging
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jaxtyping import Array

import numpyro_scalegp as sgp

N, D = 12, 3


def data(n: int = N) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, D))
    return jnp.array(X), jnp.array(np.sin(X.sum(axis=1)) + 0.1 * rng.normal(size=n))


def parameters(noise: Any) -> dict[str, Array]:
    X, y = data()
    return {
        "lengthscale": jnp.array([0.7, 1.1, 1.6]),
        "variance": jnp.array(1.3),
        "noise": jnp.asarray(noise),
        "level": jnp.array(0.4),
        "slope": jnp.array([0.3, -0.2, 0.1]),
        "X": X,
        "y": y,
    }


PER_ROW = np.linspace(0.05, 0.5, N)


def log_prob(p: dict[str, Array], jitter: float | None = None) -> Array:
    def mean(X: Array) -> Array:
        return p["level"] + X @ p["slope"]

    kernel = sgp.kernels.Matern52(p["lengthscale"], p["variance"])
    estimator = sgp.estimators.Cholesky(jitter)
    gp = sgp.GaussianProcess(kernel, p["X"], p["noise"], mean=mean, estimator=estimator)
    return gp.log_prob(p["y"])


def dense_log_prob(p: dict[str, Array], jitter: float | None = None) -> Array:
    """The definition, for JAX to differentiate through the factorization."""
    K = sgp.kernels.Matern52(p["lengthscale"], p["variance"])(p["X"], p["X"])
    H = K + jnp.diag(jnp.broadcast_to(p["noise"], (N,)))
    if jitter is not None:
        H = H + jitter * jnp.mean(jnp.diagonal(H)) * jnp.eye(N)
    residual = p["y"] - p["level"] - p["X"] @ p["slope"]
    return jax.scipy.stats.multivariate_normal.logpdf(residual, jnp.zeros(N), H)


@pytest.mark.parametrize("noise", [0.1, PER_ROW], ids=["scalar", "per_row"])
def test_value_against_scipy(noise, dtype):
    p = parameters(noise)
    X = np.asarray(p["X"], np.float64)
    scaled = X / np.array([0.7, 1.1, 1.6])
    r = np.sqrt(5 * np.sum((scaled[:, None] - scaled[None]) ** 2, axis=-1))
    H = 1.3 * (1 + r + r**2 / 3) * np.exp(-r) + np.diag(np.broadcast_to(noise, (N,)))
    mean = 0.4 + X @ [0.3, -0.2, 0.1]
    expected = scipy.stats.multivariate_normal(mean, H).logpdf(np.asarray(p["y"], np.float64))
    value = jax.jit(log_prob)(p)
    assert value.shape == ()
    assert value.dtype == dtype
    np.testing.assert_allclose(value, expected, rtol=1e-11 if dtype == jnp.float64 else 1e-4)


@functools.partial(jax.jit, static_argnames="jitter")
def both_with_gradients(p: dict[str, Array], jitter: float | None = None) -> Any:
    return [jax.value_and_grad(f)(p, jitter) for f in (log_prob, dense_log_prob)]


NOISES = [
    *[pytest.param(noise, None, id=str(noise)) for noise in (1e-6, 1e-3, 0.1, 10.0)],
    pytest.param(PER_ROW, None, id="per_row"),
    pytest.param(PER_ROW, 1e-2, id="per_row_with_jitter"),
]


@pytest.mark.parametrize(("noise", "jitter"), NOISES)
def test_gradients_of_everything(noise, jitter, x64):
    p = parameters(noise)
    (value, gradients), (expected_value, expected) = both_with_gradients(p, jitter)
    np.testing.assert_allclose(value, expected_value, rtol=1e-9)
    for name in p:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(
            gradients[name], expected[name], rtol=1e-7, atol=1e-8 * scale, err_msg=name
        )
        assert np.all(gradients[name] != 0), name


def test_gradients_in_float32():
    (_, gradients), (_, expected) = both_with_gradients(parameters(0.1))
    for name in gradients:
        assert gradients[name].dtype == jnp.float32
        np.testing.assert_allclose(
            gradients[name], expected[name], rtol=1e-3, atol=1e-3, err_msg=name
        )


def test_hessian_and_forward_mode(x64):
    p = parameters(PER_ROW)
    names = ("lengthscale", "variance", "noise", "level", "y")

    def derivatives(function: Any, chosen: dict[str, Array]) -> Any:
        def value(chosen: dict[str, Array]) -> Array:
            return function({**p, **chosen})

        ones = jax.tree.map(jnp.ones_like, chosen)
        return jax.hessian(value)(chosen), jax.jvp(value, (chosen,), (ones,))[1]

    @jax.jit
    def both_derivatives(chosen: dict[str, Array]) -> Any:
        return derivatives(log_prob, chosen), derivatives(dense_log_prob, chosen)

    (hessian, slope), (expected, expected_slope) = both_derivatives(
        {name: p[name] for name in names}
    )
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-9)
    for row in names:
        for column in names:
            np.testing.assert_allclose(
                hessian[row][column],
                expected[row][column],
                rtol=1e-7,
                atol=1e-8,
                err_msg=row + column,
            )


def test_batch_of_observations(x64):
    X, y = data()
    y = np.asarray(y)
    batch = jnp.array([y, 2 * y, y - 1, np.cos(y), y**2, -y]).reshape(2, 3, N)

    @jax.jit
    def results(batch: Array) -> Any:
        gp = sgp.GaussianProcess(sgp.kernels.RBF(0.8), X, 0.2, mean=0.3)
        single = jax.value_and_grad(gp.log_prob)(batch[1, 2])
        each = jax.lax.map(gp.log_prob, batch.reshape(6, N))
        return gp.log_prob(batch), each, jax.grad(lambda b: gp.log_prob(b)[1, 2])(batch), single[1]

    values, each, gradient, single = results(batch)
    assert values.shape == (2, 3)
    np.testing.assert_allclose(values.reshape(-1), each, rtol=1e-12)
    np.testing.assert_allclose(gradient[1, 2], single, rtol=1e-10)
    assert np.all(np.asarray(gradient)[0] == 0)


@functools.partial(jax.jit, static_argnames="jitter")
def evaluate(X: Array, y: Array, noise: Any, jitter: float | None = None) -> tuple[Array, Array]:
    """The log marginal likelihood, and the jitter that conditioning reports."""
    estimator = sgp.estimators.Cholesky(jitter)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(0.5, 2.0), X, noise, estimator=estimator)
    return gp.log_prob(y), gp.condition(y).diagnostics["jitter"]


def test_is_few_programs_outside_of_compiled_code(caplog):
    """As when NUTS searches for initial values."""
    X, y = data()

    def log_density(lengthscale: float) -> Array:
        return sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, 0.1).log_prob(y)

    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        jax.value_and_grad(log_density)(0.5)
    num = sum("Finished XLA compilation" in record.message for record in caplog.records)
    assert 0 < num <= 20


def test_fixed_jitter_is_added_relative_to_the_diagonal(x64):
    X, y = data()
    jittered = evaluate(X, y, 0.1, jitter=1e-2)[0]
    np.testing.assert_allclose(jittered, evaluate(X, y, 0.1 + 1e-2 * 2.1)[0], rtol=1e-12)
    assert abs(jittered - evaluate(X, y, 0.1)[0]) > 1e-3


def test_all_jitter_is_reported(x64):
    """`jitter` of the diagnostics is the total, including a fixed jitter."""
    X, y = data()
    np.testing.assert_allclose(evaluate(X, y, 0.1, jitter=1e-2)[1], 1e-2 * 2.1, rtol=1e-12)


def test_no_jitter_where_none_is_needed(dtype):
    X, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, jitter = evaluate(X, y, 0.1)
        fixed, zero = evaluate(X, y, 0.1, jitter=0.0)
        jax.effects_barrier()
    assert np.isfinite(value)
    assert value == fixed
    assert jitter == zero == 0


def duplicated() -> tuple[Array, Array]:
    X, y = data(40)
    return jnp.concatenate([X, X]), jnp.concatenate([y, y])


def test_duplicate_rows_with_tiny_noise_take_reported_jitter():
    X, y = duplicated()
    with pytest.warns(RuntimeWarning, match=r"about 10+ times the noise variance \(see"):
        value, jitter = evaluate(X, y, 1e-9)
        jax.effects_barrier()
    assert value.dtype == jnp.float32
    assert np.isfinite(value)
    steps = jitter / (np.finfo(np.float32).eps * 2.0)
    assert any(np.isclose(steps, step, rtol=1e-3) for step in (1e1, 1e2, 1e3, 1e4)), steps
    # The reported jitter is the jitter in use.
    with pytest.warns(RuntimeWarning, match="few digits left"):
        again = evaluate(X, y, 1e-9 + float(jitter))[0]
        jax.effects_barrier()
    np.testing.assert_allclose(value, again, rtol=1e-2)


def test_duplicate_rows_in_double_precision_need_no_jitter(x64):
    X, y = duplicated()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, jitter = evaluate(X, y, 1e-9)
        jax.effects_barrier()
    assert jitter == 0
    H = np.asarray(sgp.kernels.RBF(0.5, 2.0)(X, X)) + 1e-9 * np.eye(len(y))
    eigenvalues, vectors = np.linalg.eigh(H)
    white = vectors.T @ np.asarray(y) / np.sqrt(eigenvalues)
    expected = -0.5 * (white @ white + np.log(2 * np.pi * eigenvalues).sum())
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_fixed_jitter_that_does_not_suffice_gives_nan(compiled):
    X, y = duplicated()
    estimator = sgp.estimators.Cholesky(0.0)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(0.5, 2.0), X, 1e-9, estimator=estimator)
    message = r"not positive definite.*result is NaN.*raise the noise variance"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        value = (jax.jit(gp.log_prob) if compiled else gp.log_prob)(y)
        jax.effects_barrier()
    assert np.isnan(value)
    assert len(caught) == 1
    for remedy in ("noise variance", "`jitter`", "duplicate rows", "float64"):
        assert remedy in str(caught[0].message)


class Indefinite(sgp.kernels.RBF):
    """Negative definite: no jitter helps."""

    def evaluate(self, X: Array, Z: Array) -> Array:
        return -super().evaluate(X, Z)


def test_covariance_that_is_not_positive_definite_gives_nan(dtype):
    X, y = data()

    @jax.jit
    def evaluate(y: Array) -> Any:
        gp = sgp.GaussianProcess(Indefinite(1.0), X, 0.1)
        posterior = gp.condition(y)
        return jax.value_and_grad(gp.log_prob)(y), posterior.mean(X), posterior.variance(X)

    with pytest.warns(RuntimeWarning, match=r"not positive definite.*raise the noise variance"):
        results = evaluate(y)
        jax.effects_barrier()
    for leaf in jax.tree.leaves(results):
        assert np.isnan(leaf).all()


def test_nan_hyperparameter_inside_jit_gives_nan():
    X, y = data()

    @jax.jit
    def value(lengthscale: Array) -> Array:
        return sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, 0.1).log_prob(y)

    with pytest.warns(RuntimeWarning, match="Check the inputs for NaN"):
        assert np.isnan(value(jnp.nan))
        jax.effects_barrier()
    assert np.isfinite(value(1.0))


@pytest.mark.parametrize("noise", [1e-4, 1e-7])
def test_warns_of_pivots_that_are_rounding_errors(noise):
    """In single precision the factor exists, but the gradient is wrong by a factor of 2 to 200."""
    X = np.random.default_rng(5).uniform(-2.0, 2.0, (60, 2)).astype(np.float32)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, noise)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.block_until_ready(gp.log_prob(jnp.sin(2.0 * X[:, 0])))
        jax.effects_barrier()
    assert len(caught) == (noise < 1e-4)
    assert all("few digits left" in str(warning.message) for warning in caught)
