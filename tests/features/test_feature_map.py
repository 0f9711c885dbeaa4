"""Finite feature maps: the kernels that they approximate, and the cost of a few columns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp

kernels, features = sgp.kernels, sgp.features
ARD = (0.7, 1.4, 2.5)


def inputs(n: int = 5) -> Array:
    return jnp.array(np.random.default_rng(0).normal(size=(n, 3)))


@pytest.mark.parametrize(
    "kernel",
    [
        lambda: kernels.RBF(jnp.array(ARD), 1.7),
        lambda: kernels.Matern32(jnp.array(ARD), 0.8),
        lambda: kernels.Matern52(0.9) + kernels.RBF(2.0).on((0, 2)),
    ],
    ids=["rbf", "matern", "sum"],
)
def test_inner_products_are_the_kernel_on_average(kernel, x64):
    X, seeds = inputs(), jax.random.split(jax.random.key(0), 4000)

    def gram(seed: Array) -> Array:
        Phi = features.RandomFourier(kernel(), 6, seed)(X)
        return Phi @ Phi.T

    grams = jax.jit(jax.vmap(gram))(seeds)
    error = jnp.std(grams, axis=0) / len(seeds) ** 0.5 + 1e-10
    assert jnp.max(jnp.abs(jnp.mean(grams, axis=0) - kernel()(X, X)) / error) < 4


@pytest.mark.parametrize("kernel", [kernels.RBF, kernels.Matern12, kernels.Matern32])
def test_stored_and_regenerated_columns_agree(kernel, dtype):
    X, index = inputs(), jnp.array([7, 0, 3, 4])
    start = kernel(jnp.array(ARD), 1.3)
    drawn = features.RandomFourier(start, 20, seed=3)
    stored = drawn.stored(3)
    assert stored.table is not None
    assert stored.table.shape == (10, 3)
    close = 1e-4 if dtype == jnp.float32 else 1e-9
    np.testing.assert_allclose(stored.columns(X, index), drawn.columns(X, index), atol=close)
    # Both follow the hyperparameters, and so do their derivatives.
    changed = 2.0 * kernel(jnp.array([1.1, 0.4, 0.9]), 0.6)
    np.testing.assert_allclose(
        stored.with_kernel(changed)(X), drawn.with_kernel(changed)(X), atol=10 * close
    )

    def total(phi: features.RandomFourier, lengthscale: Array) -> Array:
        return jnp.sum(jnp.sin(phi.with_kernel(kernel(lengthscale)).columns(X, index)))

    gradient, expected = [
        jax.grad(total, argnums=1)(phi, jnp.array(ARD)) for phi in (stored, drawn)
    ]
    np.testing.assert_allclose(gradient, expected, atol=10 * close)


def test_the_cost_of_columns_does_not_grow_with_the_number_of_features():
    phi = features.RandomFourier(kernels.RBF(1.0), 10**9, seed=0)
    index = jnp.array([0, 1, 10**9 - 1])
    compiled = jax.jit(lambda X: phi.columns(X, index)).lower(inputs()).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 10_000
    pair = phi.columns(inputs(), jnp.array([10, 11])) * (10**9 / 2) ** 0.5
    np.testing.assert_allclose(jnp.sum(jnp.square(pair), axis=1), 1.0, rtol=1e-5)


def test_seeds_and_columns_differ():
    X = inputs()
    first, second = (features.RandomFourier(kernels.RBF(1.0), 8, seed)(X) for seed in (0, 1))
    assert not np.any(np.isclose(first, second, atol=1e-6))
    as_key = features.RandomFourier(kernels.RBF(1.0), 8, jax.random.key(0))(X)
    np.testing.assert_array_equal(first, as_key)
    as_numpy = features.RandomFourier(kernels.RBF(1.0), 8, np.int64(0))(X)
    np.testing.assert_array_equal(first, as_numpy)
    assert np.linalg.matrix_rank(first) == 5


@pytest.mark.slow
def test_inducing_points_have_the_nystrom_kernel(x64):
    X, Z = inputs(6), inputs(4) + 0.2
    kernel = kernels.RBF(1.2, 1.5)
    phi = features.InducingPoints(kernel, Z, jitter=0.0)
    index = jnp.arange(4)
    S = phi.precision(index, index)
    np.testing.assert_allclose(S, kernel(Z, Z))
    nystrom = kernel(X, Z) @ jnp.linalg.solve(kernel(Z, Z), kernel(Z, X))
    np.testing.assert_allclose(phi(X) @ jnp.linalg.solve(S, phi(X).T), nystrom)
    rows, columns = jnp.array([2, 0]), jnp.array([0, 2, 3])
    np.testing.assert_allclose(phi.precision(rows, columns), S[rows][:, columns])
    jittered = features.InducingPoints(kernel, Z, jitter=0.1)
    np.testing.assert_allclose(jittered.precision(index, index), S + 0.15 * jnp.eye(4))
    np.testing.assert_allclose(jittered.precision_diagonal(rows), 1.65)
    np.testing.assert_allclose(phi.covariance(X, Z), kernel(X, Z))


def test_learned_columns():
    phi = features.Learned(
        lambda X: jnp.concatenate([X, 2.0 * X], axis=1),
        columns_map=lambda X, index: X[:, index % 3] * (1.0 + index // 3),
    )
    assert phi.size(inputs()) == 6
    index = jnp.array([4, 1])
    np.testing.assert_allclose(phi.columns(inputs(), index), phi(inputs())[:, index])


def test_bad_arguments(unchecked):
    periodic = features.RandomFourier(kernels.Periodic(1.0, period=1.0), 4, seed=0)
    with pytest.raises(ValueError, match="frequencies of `Periodic` cannot be stored"):
        periodic.stored(3)
    stored = features.RandomFourier(kernels.RBF(1.0), 4, seed=0).stored(3)
    with pytest.raises(ValueError, match="stored frequencies are for `RBF`, not for `Matern12`"):
        stored.with_kernel(2.0 * kernels.Matern12(1.0))
    with pytest.raises(ValueError, match="`Linear` has no spectral density"):
        features.RandomFourier(kernels.Linear(), 4, seed=0)(inputs())
    with pytest.raises(ValueError, match=r"to features of shape \(5, m\), got \(3,\)"):
        features.Learned(lambda X: X[0])(inputs())
