"""The marginal likelihood of a batch: digits in single precision, and second derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import multivariate_normal
from jaxtyping import Array

import numpyro_scalegp as sgp
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import AbstractLogDeterminant
from numpyro_scalegp.log_determinants import MiniBatch, Variational


def problem(b: int, d: int, noise: float) -> tuple[np.ndarray, ...]:
    """Rectified features, as in a network, and observations from them."""
    rng = np.random.default_rng(0)
    Phi = np.maximum(rng.normal(size=(b, d)) + 0.3 * rng.normal(size=(b, 1)), 0.0) / np.sqrt(d)
    y = Phi @ rng.normal(size=d) + np.sqrt(noise) * rng.normal(size=b)
    w = np.linalg.solve(Phi.T @ Phi + noise * np.eye(d), Phi.T @ y)
    return tuple(np.asarray(a, np.float32) for a in (Phi, np.asarray(noise), w, y))


def errors(logdet: AbstractLogDeterminant, b: int, d: int) -> np.ndarray:
    """Errors of value and gradients in single precision, relative to double precision."""

    @jax.jit
    def single_and_double(*args: Array) -> tuple[Array, Array]:
        def log_prob(Phi: Array, noise: Array, w: Array, y: Array) -> Array:
            gp = sgp.FeatureSpaceGP(lambda X: X, Phi, noise, w, num_data=b, logdet=logdet)
            return gp.log_prob(y)

        results = [jax.value_and_grad(log_prob, argnums=(0, 1, 2, 3))(*args)]
        args = tuple(a.astype(jnp.float64) for a in args)
        results.append(jax.value_and_grad(log_prob, argnums=(0, 1, 2, 3))(*args))
        return tuple(results)

    worst = np.zeros(5)
    for noise in (1e-3, 1e-4, 1e-5):
        single, double = (
            jax.tree.leaves(a) for a in single_and_double(*map(jnp.array, problem(b, d, noise)))
        )
        pairs = zip(single, double, strict=True)
        off = [np.linalg.norm(a - A) / max(np.linalg.norm(A), 1e-300) for a, A in pairs]
        worst = np.maximum(worst, off)
    return worst


@pytest.mark.parametrize(("b", "d"), [(32, 128), (128, 32)])  # fewer rows than features, and more
def test_little_noise_in_single_precision(b, d, x64):
    """No jitter is added, which would raise a warning."""
    assert np.max(errors(MiniBatch(), b, d)) < (1e-5 if b < d else 5e-4)


@pytest.mark.slow
def test_too_few_digits_are_warned_of():
    X = jnp.linspace(-3.0, 3.0, 100)[:, None]
    phi = lambda X: sgp.kernels.RBF(2.0).random_features(jax.random.key(0), X, 20)  # noqa: E731
    gp = sgp.FeatureSpaceGP(phi, X, 6e-6, jnp.zeros(20), num_data=100, logdet=MiniBatch())
    with pytest.warns(RuntimeWarning, match="of features has few digits left"):
        jax.block_until_ready(gp.log_prob(jnp.sin(X[:, 0])))
        jax.effects_barrier()


def test_all_rows_in_single_precision_where_there_are_fewer_than_features(x64):
    value, _, of_noise, *_ = errors(Variational(), 32, 128)
    assert value < 1e-5
    assert of_noise < 2e-2  # mostly from the rounded weights


@pytest.mark.slow
def test_second_derivatives_are_exact(x64):
    rng = np.random.default_rng(0)
    Phi, y = jnp.array(rng.normal(size=(9, 4))), jnp.array(rng.normal(size=(2, 9)))

    def ours(at: Array) -> Array:
        phi, noise, zero = lambda X: at[0] * X, jnp.exp(at[1]), jnp.zeros(4)
        gp = sgp.FeatureSpaceGP(phi, Phi, noise, zero, num_data=18, logdet=MiniBatch())
        return gp.log_prob(y)

    def exact(at: Array) -> Array:
        K = at[0] ** 2 * Phi @ Phi.T + jnp.exp(at[1]) * jnp.eye(9)
        return 2.0 * multivariate_normal.logpdf(y, jnp.zeros(9), K)

    @jax.jit
    def derivatives(at: Array) -> list[tuple[Array, Array, Array]]:
        return [(f(at), jax.jacrev(f)(at), jax.hessian(f)(at)) for f in (ours, exact)]

    values, expected_values = derivatives(jnp.array([0.7, -1.0]))
    for value, expected in zip(values, expected_values, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-9)
