"""Functions of chunks of rows against the same functions of all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.core import chunks


@pytest.mark.parametrize("n", [1, 4, 5, 8, 13])
def test_chunks_equal_all_rows(n, dtype):
    X = jnp.arange(2.0 * n).reshape(n, 2)
    sizes = []

    def function(rows):
        sizes.append(rows.shape[0])
        return {"sum": jnp.sum(rows, axis=1), "outer": rows[:, :, None] * rows[:, None, :]}

    results = chunks.map_rows(function, X, 4)
    assert max(sizes) == min(n, 4)
    assert jax.tree.map(jnp.shape, results) == {"sum": (n,), "outer": (n, 2, 2)}
    assert results["sum"].dtype == dtype
    expected = function(X)
    np.testing.assert_array_equal(results["sum"], expected["sum"])
    np.testing.assert_array_equal(results["outer"], expected["outer"])


def test_one_trace_for_any_number_of_chunks():
    traces = 0

    def function(rows):
        nonlocal traces
        traces += 1
        return rows[:, 0]

    counts = []
    for n in (8, 100):
        traces = 0
        jax.make_jaxpr(lambda X: chunks.map_rows(function, X, 4))(jnp.zeros((n, 2)))
        counts.append(traces)
    assert counts[0] == counts[1]


def test_differentiable():
    X = jnp.arange(10.0).reshape(5, 2)
    gradient = jax.grad(lambda X: jnp.sum(chunks.map_rows(lambda R: R[:, 0] ** 2, X, 2)))(X)
    np.testing.assert_allclose(gradient, jnp.stack([2 * X[:, 0], jnp.zeros(5)], axis=1))


@pytest.mark.parametrize("chunk_size", [0, -3])
def test_bad_chunk_size(chunk_size):
    with pytest.raises(ValueError, match=f"`chunk_size` must be at least 1, got {chunk_size}"):
        chunks.map_rows(lambda rows: rows, jnp.zeros((3, 1)), chunk_size)


def test_rows_per_chunk_keep_to_the_budget():
    assert chunks.rows_per_chunk(1) == 2**24
    assert chunks.rows_per_chunk(1000) * 1000 <= 2**24 < (chunks.rows_per_chunk(1000) + 1) * 1000
    assert chunks.rows_per_chunk(2**30) == 1
    assert chunks.rows_per_chunk(0) >= 1


@pytest.mark.parametrize("chunk_size", [3, 7, 10, 50])
def test_sum_rows_adds_up_all_rows_once(chunk_size, x64):
    X, weights = np.random.default_rng(0).normal(size=(10, 2)), np.arange(10.0)

    def moments(rows):
        X, weights = rows
        return {"total": weights @ X, "gram": (weights[:, None] * X).T @ X}

    def value(X):
        sums = chunks.sum_rows(moments, (X, jnp.array(weights)), chunk_size)
        return jnp.sum(sums["gram"] ** 2) + jnp.sum(sums["total"])

    sums = chunks.sum_rows(moments, (jnp.array(X), jnp.array(weights)), chunk_size)
    expected = moments((X, weights))
    np.testing.assert_allclose(sums["gram"], expected["gram"])
    np.testing.assert_allclose(sums["total"], expected["total"])
    direct = jax.grad(lambda X: jnp.sum(moments((X, weights))["gram"] ** 2) + jnp.sum(weights @ X))
    np.testing.assert_allclose(jax.grad(value)(jnp.array(X)), direct(jnp.array(X)))
