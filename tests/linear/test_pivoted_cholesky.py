"""The pivoted Cholesky factor of a kernel against the same algorithm on a dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.kernels import RBF, Linear, Matern12, Matern32
from numpyro_scalegp.linear.pivoted_cholesky import pivoted_cholesky, randomly_pivoted_cholesky

# Kernels with equal variances, with unequal ones, rough and of low rank.
KERNELS = {
    "rbf": lambda: RBF(0.6, 1.7),
    "matern12": lambda: Matern12(0.5),
    "sum": lambda: Matern32(0.7) + Linear(0.4, 0.2),
    "linear": lambda: Linear(1.0, 0.3),
}
factorize = jax.jit(pivoted_cholesky, static_argnums=2)
randomly_factorize = jax.jit(randomly_pivoted_cholesky, static_argnums=2)


def rows(n, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=(n, 2)))


def dense_pivoted_cholesky(K, rank):
    """The textbook algorithm with explicit Schur complements."""
    remaining = np.array(K, np.float64)
    factor, pivots = np.zeros((rank, len(K))), []
    allowed = np.ones(len(K), bool)
    for i in range(rank):
        pivot = int(np.argmax(np.where(allowed, np.diagonal(remaining), -np.inf)))
        factor[i] = remaining[pivot] / np.sqrt(remaining[pivot, pivot])
        remaining = remaining - np.outer(factor[i], factor[i])
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
    # Rows in the order of the pivots form a triangle: a Cholesky factor.
    triangle = np.asarray(factor[:, pivots])
    np.testing.assert_allclose(np.tril(triangle, -1), 0, atol=1e-12)
    assert np.all(np.diagonal(triangle) > 0)


def test_the_error_falls_and_no_variance_is_overestimated(x64):
    kernel, X = KERNELS["rbf"](), rows(40)
    factor, _ = factorize(kernel, X, 40)
    diagonals = np.cumsum(np.square(factor), axis=0)
    traces = np.sum(kernel.diag(X)[None] - diagonals, axis=1)
    assert np.all(np.diff(traces) <= 1e-12)
    assert traces[24] < 0.05 * np.sum(kernel.diag(X))
    for rank in (5, 20):
        remaining = kernel(X, X) - factor[:rank].T @ factor[:rank]
        assert np.min(np.linalg.eigvalsh(remaining)) > -1e-12


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
        # No variance remains: further pivots would divide rounding errors by each other.
        assert np.max(np.abs(factor[12:]), initial=0.0) < np.sqrt(bound)


@pytest.mark.parametrize("name", KERNELS)
def test_pivots_are_distinct(name, dtype):
    # The linear kernel has rank three, so that most pivots are arbitrary.
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


@pytest.mark.parametrize("rank", [1, 9, 30])
@pytest.mark.parametrize("name", ["rbf", "matern12", "sum"])
def test_random_pivots_give_the_projection_on_them(name, rank, x64):
    kernel, X = KERNELS[name](), rows(30)
    factor, pivots = randomly_factorize(kernel, X, rank, jax.random.key(0))
    pivots = np.asarray(pivots)
    assert len(set(pivots.tolist())) == rank
    K = np.asarray(kernel(X, X))
    projection = (
        K[:, pivots] @ np.linalg.lstsq(K[np.ix_(pivots, pivots)], K[pivots], rcond=1e-14)[0]
    )
    np.testing.assert_allclose(factor.T @ factor, projection, rtol=0, atol=1e-9)
    np.testing.assert_allclose(np.tril(np.asarray(factor[:, pivots]), -1), 0, atol=1e-12)


def pivot_pairs(K):
    """The probability of each first and second pivot."""
    first = np.diagonal(K) / np.trace(K)
    pairs = np.zeros_like(K)
    for i in range(len(K)):
        remaining = np.maximum(np.diagonal(K) - K[i] ** 2 / K[i, i], 0.0)
        pairs[i] = first[i] * remaining / remaining.sum()
    return pairs


@pytest.mark.monte_carlo
def test_random_pivots_follow_the_remaining_variances(x64):
    kernel, X, num = Matern32(1.5) + Linear(0.4, 0.2), rows(5), 20_000
    keys = jax.random.split(jax.random.key(1), num)
    pivots = jax.jit(jax.vmap(lambda key: randomly_pivoted_cholesky(kernel, X, 2, key)[1]))(keys)
    frequencies = np.zeros((5, 5))
    np.add.at(frequencies, tuple(np.asarray(pivots).T), 1 / num)
    expected = pivot_pairs(np.asarray(kernel(X, X)))
    error = np.sqrt(expected * (1 - expected) / num)
    assert np.all(np.abs(frequencies - expected) <= 4 * error)
    # The test distinguishes them from pivots that follow the prior variances.
    prior = np.diagonal(kernel(X, X)) / np.trace(kernel(X, X))
    from_prior = prior[:, None] * prior / (1 - prior)[:, None]
    np.fill_diagonal(from_prior, 0)
    assert np.any(np.abs(frequencies - from_prior) > 8 * error)


def test_random_pivots_end_where_no_variance_remains(x64):
    kernel, X = Linear(1.0, 0.3), rows(30)
    factor, pivots = randomly_factorize(kernel, X, 9, jax.random.key(0))
    assert np.sum(np.asarray(pivots) >= 0) == 3
    np.testing.assert_array_equal(factor[3:], 0)
    np.testing.assert_allclose(factor.T @ factor, kernel(X, X), rtol=0, atol=1e-12)


def test_random_pivots_are_not_outliers():
    """A few distant rows take all greedy pivots, and reduce no variance of the other rows."""
    rng = np.random.default_rng(0)
    far = 20.0 * rng.normal(size=(20, 2))
    X = jnp.array(np.concatenate([rng.normal(size=(200, 2)), far]), jnp.float32)
    kernel = RBF(2.0)
    greedy, _ = factorize(kernel, X, 20)
    factor, _ = randomly_factorize(kernel, X, 20, jax.random.key(0))
    errors = [220.0 - float(jnp.sum(jnp.square(L))) for L in (factor, greedy)]
    assert errors[0] < 0.5 * errors[1]


def test_random_pivots_end_at_the_rounding_errors_of_float32():
    X = jnp.linspace(0.0, 1.0, 300, dtype=jnp.float32)[:, None]
    factor, pivots = randomly_factorize(RBF(0.5), X, 100, jax.random.key(0))
    pivots = np.asarray(pivots)
    accepted = pivots[pivots >= 0]
    assert 4 < len(accepted) < 60 and len(set(accepted.tolist())) == len(accepted)
    np.testing.assert_allclose(factor.T @ factor, RBF(0.5)(X, X), rtol=0, atol=1e-4)
    of_nan = jax.jit(lambda scale: randomly_pivoted_cholesky(RBF(scale), X, 9, jax.random.key(0)))
    assert np.all(of_nan(jnp.nan)[1] == -1)  # and the loop ends
