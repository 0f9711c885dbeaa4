"""The pivoted Cholesky factor of a kernel against the same algorithm on a dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.kernels import RBF, Linear, Matern12, Matern32
from numpyro_scalegp.kernels.pivoted_cholesky import pivoted_cholesky

# Kernels with equal variances, with unequal ones, rough and of low rank.
KERNELS = {
    "rbf": lambda: RBF(0.6, 1.7),
    "matern12": lambda: Matern12(0.5),
    "sum": lambda: Matern32(0.7) + Linear(0.4, 0.2),
    "linear": lambda: Linear(1.0, 0.3),
}
factorize = jax.jit(pivoted_cholesky, static_argnums=2)


def rows(n, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=(n, 2)))


def dense_pivoted_cholesky(K, rank):
    """The textbook algorithm with explicit Schur complements."""
    rest = np.array(K, np.float64)
    factor, pivots = np.zeros((rank, len(K))), []
    allowed = np.ones(len(K), bool)
    for i in range(rank):
        pivot = int(np.argmax(np.where(allowed, np.diagonal(rest), -np.inf)))
        factor[i] = rest[pivot] / np.sqrt(rest[pivot, pivot])
        rest = rest - np.outer(factor[i], factor[i])
        allowed[pivot] = False
        pivots.append(pivot)
    return factor, pivots


@pytest.mark.parametrize("rank", [1, 2, 9])
@pytest.mark.parametrize("name", ["rbf", "matern12", "sum"])
def test_dense_algorithm_agrees(name, rank, x64):
    kernel, X = KERNELS[name](), rows(30)
    factor, pivots = factorize(kernel, X, rank)
    expected, expected_pivots = dense_pivoted_cholesky(kernel(X, X), rank)
    assert factor.shape == (rank, 30)
    assert pivots.tolist() == expected_pivots
    np.testing.assert_allclose(factor, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["matern12", "sum"])
def test_full_rank_reproduces_the_matrix(name, x64):
    kernel, X = KERNELS[name](), rows(30)
    factor, pivots = factorize(kernel, X, 30)
    np.testing.assert_allclose(factor.T @ factor, kernel(X, X), rtol=0, atol=1e-12)
    # Rows in the order of the pivots make a triangle: a Cholesky factor indeed.
    triangle = np.asarray(factor[:, pivots])
    np.testing.assert_allclose(np.tril(triangle, -1), 0, atol=1e-12)
    assert np.all(np.diagonal(triangle) > 0)


def test_the_error_falls_and_no_variance_is_overestimated(x64):
    kernel, X = KERNELS["rbf"](), rows(40)
    factor, _ = factorize(kernel, X, 40)
    explained = np.cumsum(np.square(factor), axis=0)
    traces = np.sum(kernel.diag(X)[None] - explained, axis=1)
    assert np.all(np.diff(traces) <= 1e-12)
    assert traces[24] < 0.05 * np.sum(kernel.diag(X))
    for rank in (5, 20):
        rest = kernel(X, X) - factor[:rank].T @ factor[:rank]
        assert np.min(np.linalg.eigvalsh(rest)) > -1e-12


@pytest.mark.parametrize("rank", [4, 12, 20])
def test_duplicate_rows(rank, dtype):
    kernel = Matern12(0.5)
    X = jnp.concatenate([rows(12), rows(8)])  # the first eight rows return
    factor, pivots = factorize(kernel, X, rank)
    assert (factor.dtype, factor.shape) == (dtype, (rank, 20))
    assert len(set(pivots.tolist())) == rank
    copies = np.asarray(factor[:, 12:])
    np.testing.assert_allclose(copies, factor[:, :8], rtol=0, atol=float(50 * jnp.finfo(dtype).eps))
    if rank >= 12:
        bound = 100 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(factor.T @ factor, kernel(X, X), rtol=0, atol=bound)
        # The variance is explained: what follows would divide rounding errors by each other.
        assert np.max(np.abs(factor[12:]), initial=0.0) < np.sqrt(bound)


@pytest.mark.parametrize("name", KERNELS)
def test_pivots_are_distinct(name, dtype):
    # The linear kernel has rank three, so that most pivots are taken as they come.
    kernel, X = KERNELS[name](), rows(25)
    factor, pivots = factorize(kernel, X, 25)
    assert sorted(pivots.tolist()) == list(range(25))
    assert jnp.issubdtype(pivots.dtype, jnp.integer)
    K = np.asarray(kernel(X, X))
    bound = 200 * float(jnp.finfo(dtype).eps) * np.max(K)
    np.testing.assert_allclose(factor.T @ factor, K, rtol=0, atol=bound)


def test_no_loop_is_unrolled():
    def equations(rank):
        jaxpr = jax.make_jaxpr(lambda X: pivoted_cholesky(RBF(0.6), X, rank))(rows(30))
        return str(jaxpr).count("\n")

    assert equations(3) == equations(30)
