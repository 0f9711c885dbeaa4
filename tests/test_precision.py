"""Results in float32 against float64, and with NaN debugging."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from tests.conformance import each, inputs, of_columns
from tests.registry import DISTRIBUTIONS, ESTIMATORS, POSTERIORS

ROWS = np.sort(np.random.default_rng(0).uniform(0.0, 5.0, (200, 1)), axis=0).astype(np.float32)
NEW = np.linspace(0.0, 5.0, 40, dtype=np.float32)[:, None]
POINTS = np.linspace(-0.2, 5.2, 30)[:, None]
LENGTHSCALES = (0.1, 1.0, 3.0, 10.0)
NOISES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def observations(lengthscale: float, noise: float) -> np.ndarray:
    """A draw from the model."""
    distances = (ROWS - ROWS.T).astype(np.float64) / lengthscale
    values, vectors = np.linalg.eigh(np.exp(-0.5 * distances**2) + noise * np.eye(len(ROWS)))
    scales = np.sqrt(np.maximum(values, noise))
    return (vectors * scales @ np.random.default_rng(1).normal(size=len(ROWS))).astype(np.float32)


def process(kernel: Any, X: Any, noise: Any, y: Any, estimator: Any = None) -> tuple[Any, Any]:
    return sgp.GaussianProcess(kernel, X, noise, estimator=estimator), y


def outputs(kernel: Any, X: Any, noise: Any, y: Any) -> tuple[Any, Any]:
    loadings = jnp.array([[1.0], [0.5]], X.dtype), jnp.array([0.1, 0.2], X.dtype)
    gp = sgp.MultiOutputGP(kernel, sgp.kernels.Coregion(*loadings), X, noise)
    return gp, jnp.stack([y, 0.5 * y], axis=1)


def gaussian_sites(kernel: Any, X: Any, noise: Any, y: Any) -> tuple[Any, Any]:
    import numpyro.distributions as dist

    return sgp.LaplaceGP(kernel, X, lambda f: dist.Normal(f, jnp.sqrt(noise))), y


def rows_as(X: Any) -> np.ndarray:
    """The rows, which are traced in a test, in their dtype."""
    return ROWS.astype(X.dtype)


def neighbors(kernel: Any, X: Any, noise: Any, y: Any) -> tuple[Any, Any]:
    return process(kernel, X, noise, y, sgp.estimators.Vecchia(20).find_neighbors(rows_as(X)))


def points(kernel: Any, X: Any, noise: Any, y: Any) -> tuple[Any, Any]:
    return process(kernel, X, noise, y, sgp.estimators.SGPR(jnp.asarray(POINTS, X.dtype)))


def points_and_neighbors(kernel: Any, X: Any, noise: Any, y: Any) -> tuple[Any, Any]:
    estimator = sgp.estimators.FullScale(jnp.asarray(POINTS[::2], X.dtype), num_neighbors=15)
    return process(kernel, X, noise, y, estimator.find_neighbors(rows_as(X)))


MODELS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "exact": process,
    "outputs": outputs,
    "laplace": gaussian_sites,
    "neighbors": neighbors,
    "points": points,
    "points_and_neighbors": points_and_neighbors,
}


def moments(name: str) -> Callable[..., Any]:
    """Means, variances and leave-one-out distributions, compiled once for all values."""

    @jax.jit
    def compute(lengthscale: Any, noise: Any, X: Any, y: Any, Xs: Any) -> Any:
        gp, values = MODELS[name](sgp.kernels.RBF(lengthscale), X, noise, y)
        posterior = gp.condition(values)
        predicted = posterior.mean(Xs), posterior.variance(Xs)
        if name == "laplace":
            return *predicted, *predicted
        left_out = posterior.leave_one_out()
        return *predicted, left_out.loc, left_out.scale**2

    return compute


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_float32_agrees_with_float64_or_warns(name):
    """Over a grid of lengthscales and noise variances; and where noise is large, nothing warns."""
    single = moments(name)
    with jax.enable_x64(True):
        double = moments(name)
    num_silent = 0
    for lengthscale in LENGTHSCALES:
        for noise in NOISES:
            y = observations(lengthscale, noise)
            arguments = np.float32(lengthscale), np.float32(noise), ROWS, y, NEW
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                actual = [np.asarray(array, np.float64) for array in single(*arguments)]
                jax.effects_barrier()
            label = f"lengthscale {lengthscale}, noise {noise}: {len(caught)} warnings"
            assert not (caught and noise >= 1e-2), label
            if any(issubclass(warning.category, RuntimeWarning) for warning in caught):
                continue
            with jax.enable_x64(True), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wide = [np.asarray(argument, np.float64) for argument in arguments]
                expected = [np.asarray(array) for array in double(*wide)]
                jax.effects_barrier()
            num_silent += 1
            for mean, variance in ((0, 1), (2, 3)):
                deviation = np.sqrt(expected[variance])
                error = np.abs(actual[mean] - expected[mean]) / deviation
                assert error.max() < 0.06, label
                ratio = np.sqrt(actual[variance]) / deviation
                np.testing.assert_allclose(ratio, 1.0, atol=0.05, err_msg=label)
    # Most of the grid gives no warning.
    assert num_silent >= 6


def test_density_and_digits(dtype):
    """The diagnostics also report the digits of the density."""
    y = observations(1.0, 1e-5).astype(dtype)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(1.0), ROWS.astype(dtype), 1e-5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        digits = gp.condition(y).diagnostics["digits"]
        gp.log_prob(y).block_until_ready()
        jax.effects_barrier()
    few = [warning for warning in caught if "few digits left" in str(warning.message)]
    assert bool(few) == (dtype == jnp.float32)
    assert (digits < 1.0) == (dtype == jnp.float32)


def test_variances_are_not_zero():
    y = observations(10.0, 1e-6)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(10.0, 2.0), ROWS, 1e-6)
    with pytest.warns(RuntimeWarning, match="covariance matrix"):
        variance = gp.condition(y).variance(NEW)
        jax.effects_barrier()
    assert np.all(variance >= 2.0 * np.finfo(np.float32).eps)


def test_draws_that_jitter_widens_are_warned_of():
    y = observations(1.0, 1e-4)
    posterior = sgp.GaussianProcess(sgp.kernels.RBF(1.0), ROWS, 1e-2).condition(y)
    draws = posterior.sample(jax.random.key(0), NEW, 4000)
    np.testing.assert_allclose(np.std(draws, axis=0), posterior.variance(NEW) ** 0.5, rtol=0.1)
    with pytest.warns(RuntimeWarning, match="wider than its variances"):
        sgp.GaussianProcess(sgp.kernels.RBF(1.0), ROWS, 2e-5).condition(y).sample(
            jax.random.key(0), NEW
        ).block_until_ready()
        jax.effects_barrier()


def without_nan(function: Callable[[Any], Any]) -> None:
    """Call a function of a lengthscale as it stands: compiled, its result alone is looked at."""
    with jax.debug_nans(True):
        jax.block_until_ready(function(jnp.asarray(1.3)))


def left_out_mean(posterior: Any) -> Any:
    try:
        return posterior.leave_one_out().mean
    except ValueError:  # of a function that was given no noisy observations
        return None


@pytest.mark.slow
@each("factory", POSTERIORS)
def test_posteriors_make_no_nan(factory):
    """With `jax_debug_nans`, valid computations raise no error."""
    X = inputs()

    def compute(lengthscale: Any) -> Any:
        posterior = factory(sgp.kernels.Matern52(lengthscale), X)
        numbers = (
            posterior.mean(X[:2]),
            posterior.variance(X[:2]),
            posterior.sample(jax.random.key(0), X[:2]),
            left_out_mean(posterior),
        )
        return sum(jnp.sum(array) for array in jax.tree.leaves(numbers))

    try:
        without_nan(jax.value_and_grad(compute))
    except TypeError as error:
        assert "has no derivatives with respect to" in str(error)
        without_nan(compute)


@pytest.mark.slow
@each("factory", DISTRIBUTIONS)
def test_distributions_make_no_nan(factory):
    X = inputs()

    def compute(lengthscale: Any) -> Any:
        distribution = factory(sgp.kernels.RBF(lengthscale), X)
        try:
            values = distribution.sample(jax.random.key(0))
        except NotImplementedError:
            values = jnp.zeros(distribution.event_shape)
        return distribution.log_prob(values)

    without_nan(jax.value_and_grad(compute))


@pytest.mark.slow
@each("factory", ESTIMATORS)
def test_estimators_make_no_nan(factory):
    X = inputs()

    def compute(lengthscale: Any) -> Any:
        estimator = factory()
        key = jax.random.key(0) if estimator.is_stochastic else None
        if hasattr(estimator, "find_neighbors"):
            estimator = estimator.find_neighbors(X)
        kernel = of_columns(sgp.kernels.Matern52(lengthscale), estimator)
        gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator, key=key)
        return gp.log_prob(jnp.sin(X[:, 0]))

    without_nan(jax.value_and_grad(compute))


TOGETHER = """
import jax
import jax.numpy as jnp
from numpyro_scalegp.numerics import lapack

K = jnp.stack([jnp.eye(300) + 0.001 * i for i in range(16)])
B = jnp.ones((16, 300, 8))

def of_one(K, B):
    L = lapack.cholesky(K)
    return jnp.sum(lapack.solve_lower(L, B))

@jax.jit
def total(scale):
    return sum(jnp.sum(jax.vmap(of_one)(scale * K + i * jnp.eye(300), B)) for i in range(3))

print(all(bool(jnp.isfinite(total(1.0 + 0.01 * i))) for i in range(100)))
"""


@pytest.mark.one_interpreter
def test_batches_in_one_program_do_not_wait_for_each_other():
    # Without the XLA options of the tests.
    environment = {**os.environ, "NPROC": "2", "XLA_FLAGS": "", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", TOGETHER]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["True"], done.stderr
