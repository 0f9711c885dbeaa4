"""Helpers of the conformance tests."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.numerics import lapack
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


def by_python(X: Array) -> Array:
    """A mean function that calls Python from a compiled program: the first column."""
    shape = jax.ShapeDtypeStruct(X.shape[:1], X.dtype)
    return jax.pure_callback(lambda X: np.asarray(X)[:, 0], shape, X)


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


def assert_one_line(value: Any) -> None:
    """What `repr` shows is short and holds no address, also of a tree without its arrays."""
    for tree in (value, *eqx.partition(value, eqx.is_array)):
        if tree is None:
            continue
        line = repr(tree)
        assert "\n" not in line
        assert " at 0x" not in line
        assert len(line) < 400
        assert type(value).__name__ in line or isinstance(value, AbstractKernel)


def large_batched_calls(jaxpr: Any) -> list[str]:
    """Factorizations and solves of several matrices that jaxlib would divide among threads.

    Two such calls at once wait for each other forever; see `numerics.lapack`.
    """
    large = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("cholesky", "eigh", "lu", "qr", "svd", "triangular_solve"):
            shape = equation.invars[-1].aval.shape
            is_batched = math.prod(shape[:-2]) > 1
            if is_batched and math.prod(shape) * shape[-2] // 3 > lapack.MAX_OPERATIONS:
                large.append(f"{equation.primitive.name} of {shape}")
        for leaf in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(leaf, "jaxpr", leaf)
            if hasattr(inner, "eqns"):
                large += large_batched_calls(inner)
    return large


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
