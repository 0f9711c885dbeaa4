"""Helpers of the conformance tests."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels import AbstractKernel
from tests.registry import NUM_COLUMNS


def each(name: str, registry: list[tuple[str, Any]]) -> pytest.MarkDecorator:
    """Run a test once for each entry of a registry."""
    return pytest.mark.parametrize(name, [pytest.param(f, id=key) for key, f in registry])


def inputs(n: int = 6, seed: int = 0, kernel: AbstractKernel | None = None) -> Array:
    """Draw `n` rows and repeat the first one, so that distances of zero occur off the diagonal.

    Columns where a kernel has categories hold some of these.
    """
    X = np.random.default_rng(seed).normal(size=(n, NUM_COLUMNS))
    for column, categories in {} if kernel is None else kernel.categories(NUM_COLUMNS).items():
        X[:, column] = np.resize(categories, n)
    return jnp.array(np.concatenate([X, X[:1]]))


def with_neighbors(estimator: Any, X: Array) -> Any:
    """The estimator, with the neighbors of the rows of X if it needs them."""
    return estimator.find_neighbors(X) if hasattr(estimator, "find_neighbors") else estimator


def of_columns(kernel: AbstractKernel, estimator: Any) -> AbstractKernel:
    """The kernel, of the last column alone if the estimator is for functions of time."""
    return (
        kernel.on((NUM_COLUMNS - 1,))
        if isinstance(estimator, sgp.estimators.StateSpace)
        else kernel
    )


def assert_all_finite(tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        assert np.isfinite(leaf).all(), f"not finite at {jax.tree_util.keystr(path)}"


def assert_round_trip(tree: Any) -> None:
    """Flatten and unflatten: the same structure, the same leaves, all of them arrays."""
    leaves, structure = jax.tree.flatten(tree)
    assert leaves
    assert all(isinstance(leaf, jax.Array) for leaf in leaves), [type(leaf) for leaf in leaves]
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(tree)
    leaves_again, structure_again = jax.tree.flatten(again)
    assert structure_again == structure
    for leaf, leaf_again in zip(leaves, leaves_again, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, leaf_again = jax.random.key_data(leaf), jax.random.key_data(leaf_again)
        np.testing.assert_array_equal(leaf, leaf_again)


def tolerance(*matrices: Array) -> float:
    """A bound on rounding errors in the entries of Gram matrices."""
    largest = max(float(jnp.max(jnp.abs(matrix))) for matrix in matrices)
    return 50 * float(jnp.finfo(matrices[0].dtype).eps) * max(1.0, largest)


class Compiled:
    """`jax.jit(function)` that counts how often it is traced."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.traces = 0
        self.function = function
        self.compiled = jax.jit(self.counted)

    def counted(self, *args: Any) -> Any:
        self.traces += 1
        return self.function(*args)

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)
