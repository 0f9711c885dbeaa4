"""Blocked products with H = K(X, X) + noise, and their gradients, against dense float64 algebra."""

import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels import RBF, Linear, Matern12, Matern32, Periodic
from numpyro_scalegp.linear.products import kernel_matmul
from numpyro_scalegp.solvers import KernelOperator
from tests.conformance import each, inputs
from tests.registry import KERNELS, NUM_COLUMNS

N = 23
# Budgets, and the rows of a block that they leave for N rows in float64: single rows, blocks that
# do not divide N, and all of N in a block that could be larger.
BLOCKS = {1: 1, 4 * 8 * 5**2: 5, 4 * 8 * 9**2: 8, 4 * 8 * 100**2: N}


def rows(n=N, seed=0):
    """Random rows; the last three repeat the first three, in another block."""
    X = np.random.default_rng(seed).normal(size=(n, NUM_COLUMNS))
    return jnp.array(np.concatenate([X[: n - 3], X[:3]]) if n > 6 else X)


def vectors(n, k, seed=0):
    return jnp.array(np.random.default_rng(100 + seed).normal(size=(n, k)))


def noises(n=N):
    return {"scalar": jnp.array(0.3), "per_row": jnp.linspace(0.1, 2.0, n)}


def dense(H):
    """H as a NumPy matrix, with exact variances for equal rows."""
    noise = np.broadcast_to(np.asarray(H.noise_variance), (H.size,))
    return np.asarray(H.kernel.covariance(H.X)) + np.diag(noise)


@jax.jit
def products(H, V, W, index, columns):
    """All products and entries, in one compilation."""
    return {
        "matmul": H.matmul(V),
        "rows": H.rows(index),
        "block": H.block(index, columns),
        "diagonal": H.diagonal(),
        "noise": H.noise(),
        "rows_matmul": H.rows_matmul(index, V),
        "columns_matmul": H.columns_matmul(index, W),
    }


def expected_products(H, V, W, index, columns):
    A, V, W = dense(H), np.asarray(V), np.asarray(W)
    return {
        "matmul": A @ V,
        "rows": A[index],
        "block": A[index][:, columns],
        "diagonal": np.diagonal(A),
        "noise": np.broadcast_to(H.noise_variance, (H.size,)),
        "rows_matmul": A[index] @ V,
        "columns_matmul": A[:, index] @ W,
    }


# Products


@pytest.mark.parametrize("noise", ["scalar", "per_row"])
@pytest.mark.parametrize("budget", BLOCKS)
def test_products(budget, noise, x64):
    kernel = Matern32(jnp.array([0.7, 1.1, 1.6, 2.3]), 1.7)
    H = KernelOperator(kernel, rows(), noises()[noise], memory_budget=budget)
    assert (H.size, H.dtype, H.block_size) == (N, jnp.float64, BLOCKS[budget])
    # Indices of rows that occur twice in X, and columns with the same indices.
    index, columns = jnp.array([20, 3, 0, 11]), jnp.array([0, 20, 5, 3, 22, 1])
    args = H, vectors(N, 3), vectors(4, 2), index, columns
    results, expected = products(*args), expected_products(*args)
    for name, value in results.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("n", [1, 2])
def test_few_rows(n, x64):
    H = KernelOperator(RBF(0.8), rows(n), 0.3)
    V = vectors(n, 2)
    np.testing.assert_allclose(H.matmul(V), dense(H) @ V, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["sum", "nested", "matern12_ard", "mapped_equinox_mlp"])
def test_products_with_other_kernels(name, x64):
    H = KernelOperator(dict(KERNELS)[name](1.2), rows(), 0.3, memory_budget=4 * 8 * 5**2)
    V = vectors(N, 3)
    product = jax.jit(KernelOperator.matmul)(H, V)
    np.testing.assert_allclose(product, dense(H) @ V, rtol=0, atol=1e-12)


def test_equal_rows_of_an_index_add_up(x64):
    H = KernelOperator(RBF(0.8), rows(), noises()["per_row"], memory_budget=4 * 8 * 5**2)
    index, V, W = jnp.array([4, 4, 2]), vectors(N, 2), vectors(3, 2)
    A = dense(H)
    np.testing.assert_allclose(H.columns_matmul(index, W), A[:, index] @ W, rtol=0, atol=1e-13)
    np.testing.assert_allclose(H.rows_matmul(index, V), A[index] @ V, rtol=0, atol=1e-13)


@pytest.mark.parametrize("budget", [1, 4 * 8 * 5 * 17, 2**28])
def test_kernel_matmul(budget, x64):
    kernel, X, Z, V = Matern32(0.9), rows(), rows(17, seed=1), vectors(17, 3)
    product = jax.jit(kernel_matmul, static_argnums=4)(kernel, X, Z, V, budget)
    np.testing.assert_allclose(product, kernel(X, Z) @ V, rtol=0, atol=1e-13)


@pytest.mark.slow
def test_float32():
    # Python numbers as hyperparameters and noise must not widen the dtype.
    X = rows()
    assert X.dtype == jnp.float32
    H = KernelOperator(Matern32(0.8, 1.7), X, 0.3, memory_budget=4 * 4 * 5**2)
    assert (H.dtype, H.block_size) == (jnp.float32, 5)
    args = H, vectors(N, 3), vectors(2, 2), jnp.array([20, 3]), jnp.array([0, 20, 5])
    with jax.numpy_dtype_promotion("strict"):
        results = products(*args)
        gradient = gradient_of(H, args[1], args[1])
    assert {value.dtype for value in results.values()} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    with jax.enable_x64(True):
        wide = KernelOperator(Matern32(0.8, 1.7), np.asarray(X, np.float64), 0.3)
        expected = expected_products(wide, *args[1:])
    for name, value in results.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=2e-5, err_msg=name)


def test_float64_noise_widens_the_result(x64):
    X = rows().astype(jnp.float32)
    kernel = RBF(jnp.float32(0.8), jnp.float32(1.0))
    narrow = KernelOperator(kernel, X, jnp.float32(0.3))
    wide = KernelOperator(kernel, X, jnp.full(N, 0.3, jnp.float64))
    V = vectors(N, 1)
    assert (narrow.dtype, narrow.matmul(V).dtype) == (jnp.float32, jnp.float32)
    assert (wide.dtype, wide.matmul(V).dtype) == (jnp.float64, jnp.float64)


# Gradients


@jax.jit
def gradient_of(H, U, V):
    return H.bilinear_gradient(U, V)


@eqx.filter_jit
@eqx.filter_grad
def dense_gradient(H, U, V):
    A = H.kernel.covariance(H.X) + jnp.diag(jnp.broadcast_to(H.noise_variance, (H.size,)))
    return jnp.sum(U * (A @ V))


def assert_same_gradient(H, U, V):
    gradient, expected = gradient_of(H, U, V), dense_gradient(H, U, V)
    assert isinstance(gradient, KernelOperator)
    assert jax.tree.structure(gradient.kernel) == jax.tree.structure(expected.kernel)
    shapes = jax.tree.map(jnp.shape, eqx.filter(H, eqx.is_inexact_array))
    assert jax.tree.map(jnp.shape, gradient) == shapes
    paths = jax.tree_util.tree_leaves_with_path(gradient)
    for (path, value), target in zip(paths, jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(value, target, rtol=1e-10, atol=1e-11, err_msg=name)
    return gradient


GRADIENT_KERNELS = {
    "ard": lambda: Matern32(jnp.array([0.7, 1.1, 1.6, 2.3]), 1.7),
    "matern12": lambda: Matern12(0.8),  # without a derivative where rows are equal
    "sum_and_product": lambda: 0.7 * (RBF(0.8) + Linear(0.4, 0.2)) * Periodic(1.2, period=2.0),
    "active_dims": lambda: RBF(0.8).on((1, 3)) + Matern32(0.6).on((0,)),
    "equinox": lambda: dict(KERNELS)["mapped_equinox_mlp"](1.2),
    "flax": lambda: dict(KERNELS)["mapped_flax_nnx"](1.2),
}


@pytest.mark.parametrize("name", GRADIENT_KERNELS)
def test_bilinear_gradient(name, x64):
    H = KernelOperator(GRADIENT_KERNELS[name](), rows(), 0.3, memory_budget=4 * 8 * 5**2)
    assert H.block_size == 5
    gradient = assert_same_gradient(H, vectors(N, 3), vectors(N, 3, seed=1))
    if name in ("equinox", "flax"):
        weights = [leaf for leaf in jax.tree.leaves(gradient.kernel.feature_map) if leaf.ndim == 2]
        assert len(weights) == 2
        assert all(np.max(np.abs(leaf)) > 1e-3 for leaf in weights)


@pytest.mark.parametrize("noise", ["scalar", "per_row"])
@pytest.mark.parametrize("budget", BLOCKS)
def test_bilinear_gradient_in_blocks(budget, noise, x64):
    H = KernelOperator(RBF(0.8, 1.7), rows(), noises()[noise], memory_budget=budget)
    U, V = vectors(N, 3), vectors(N, 3, seed=1)
    gradient = assert_same_gradient(H, U, V)
    products = np.sum(U * V, axis=1)
    expected = {"scalar": np.sum(products), "per_row": products}[noise]
    np.testing.assert_allclose(gradient.noise_variance, expected, rtol=1e-12)


@pytest.mark.parametrize("noise", ["scalar", "per_row"])
def test_quadratic_gradient(noise, x64):
    H = KernelOperator(Matern32(0.8, 1.7), rows(), noises()[noise], memory_budget=4 * 8 * 5**2)
    weights, V = jnp.array([0.5, -2.0, 1.5]), vectors(N, 3)
    gradient = jax.jit(KernelOperator.quadratic_gradient)(H, weights, V)
    expected = dense_gradient(H, weights * V, V)
    for value, target in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(value, target, rtol=1e-10, atol=1e-11)


def test_the_sides_may_change_places_only_together(x64):
    H = KernelOperator(RBF(0.8, 1.7), rows(), 0.3, memory_budget=4 * 8 * 5**2)
    U, V = vectors(N, 2), vectors(N, 2, seed=1)
    gradient, swapped, crossed = (
        gradient_of(H, U, V),
        gradient_of(H, V, U),
        gradient_of(H, U, V[:, ::-1]),
    )
    np.testing.assert_allclose(gradient.X, swapped.X, rtol=1e-10, atol=1e-12)
    assert np.max(np.abs(gradient.X - crossed.X)) > 0.1


def test_leaves_that_are_no_floating_point_arrays_have_no_gradient(x64):
    counted = eqx.tree_at(lambda k: k.lengthscale, RBF(1.0), jnp.array(1))
    H = KernelOperator(counted, rows(), 0.3)
    gradient = gradient_of(H, vectors(N, 1), vectors(N, 1))
    assert gradient.kernel.lengthscale is None
    assert gradient.kernel.variance.shape == ()


# Checks of arguments


def callers_of_checks(work):
    """The files of this package that call `core.checks` while `work` runs."""
    root, callers = Path(sgp.__file__).parent, set()

    def profile(frame, event, _):
        if event != "call" or frame.f_code.co_filename != checks.__file__:
            return
        while (frame := frame.f_back) is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(root) and frame.f_code.co_filename != checks.__file__:
                callers.add(str(path.relative_to(root)))
                return

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return callers


@each("kernel", KERNELS)
def test_nothing_below_the_operator_checks_arguments(kernel):
    kernel = kernel(1.2)
    H = KernelOperator(kernel, inputs(N, kernel=kernel), 0.3, memory_budget=4 * 4 * 9**2)
    V = jnp.ones((H.size, 2), H.dtype)

    def work():
        eqx.filter_eval_shape(lambda H: (H.matmul(V), H.bilinear_gradient(V, V)), H)
        H.diagonal()

    # The vectors are arguments of the operator.
    assert callers_of_checks(work) == {"linear/operator.py"}


# Compilation and memory


def test_compiles_once(x64):
    traces = 0

    @jax.jit
    def work(H, V):
        nonlocal traces
        traces += 1
        return H.matmul(V), H.bilinear_gradient(V, V)

    kernels = [dict(KERNELS)["mapped_equinox_mlp"](scale) for scale in (1.0, 1.3)]
    results = [
        work(KernelOperator(kernel, rows(seed=seed), jnp.array(0.1 + seed)), vectors(N, 2, seed))
        for seed, kernel in enumerate(kernels)
    ]
    assert traces == 1
    H = KernelOperator(kernels[1], rows(seed=1), 1.1)
    np.testing.assert_allclose(results[1][0], dense(H) @ vectors(N, 2, 1), rtol=0, atol=1e-12)


def sub_jaxprs(value):
    """The programs in a parameter of an equation."""
    if hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif hasattr(value, "eqns"):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from sub_jaxprs(item)


def largest_intermediate(jaxpr):
    """The entries of the largest array that a program computes, at any depth."""
    largest = 0
    for equation in jaxpr.eqns:
        sizes = [int(np.prod(getattr(out.aval, "shape", ()))) for out in equation.outvars]
        largest = max(largest, *sizes, 0)
        for value in equation.params.values():
            for inner in sub_jaxprs(value):
                largest = max(largest, largest_intermediate(inner))
    return largest


MEMORY_TASKS = {
    "matmul": lambda H, V: H.matmul(V),
    "rows_matmul": lambda H, V: H.rows_matmul(jnp.arange(500), V),
    "columns_matmul": lambda H, V: H.columns_matmul(jnp.arange(500), V[:500]),
    "bilinear_gradient": lambda H, V: eqx.filter(H.bilinear_gradient(V, V), eqx.is_array),
    "quadratic_gradient": lambda H, V: eqx.filter(H.quadratic_gradient(V[0], V), eqx.is_array),
    "diagonal": lambda H, V: H.diagonal(),
    "rows": lambda H, V: H.rows(jnp.arange(10)),
}


@pytest.mark.parametrize("kernel", [RBF(0.8), Matern12(0.8)], ids=["rbf", "matern12"])
@pytest.mark.parametrize("task", MEMORY_TASKS)
def test_memory(task, kernel):
    n, k, budget = 3000, 4, 2**20
    X, V = jnp.zeros((n, NUM_COLUMNS)), jnp.zeros((n, k))

    def work(X, V):
        return MEMORY_TASKS[task](KernelOperator(kernel, X, 0.3, memory_budget=budget), V)

    entries = largest_intermediate(jax.make_jaxpr(work)(X, V).jaxpr)
    # At most the budget and one row: far fewer than the n * n entries of a dense matrix.
    assert 0 < entries <= budget // (4 * 4) + n


def test_the_memory_test_sees_dense_matrices():
    n = 3000
    H = KernelOperator(RBF(0.8), jnp.zeros((n, NUM_COLUMNS)), 0.3)
    jaxpr = jax.make_jaxpr(lambda X: jax.lax.map(lambda s: H.kernel(X, s * X).sum(), jnp.ones(2)))
    assert largest_intermediate(jaxpr(H.X).jaxpr) >= n * n


# Bad input


def test_blocks_count_rows_from_the_end():
    H = KernelOperator(RBF(0.9), rows(), jnp.linspace(0.1, 2.0, N))
    block = H.block(jnp.array([-1, 2]), jnp.array([N - 1, 2 - N]))
    np.testing.assert_allclose(block, dense(H)[[[-1], [2]], [-1, 2]], rtol=1e-6, atol=1e-7)


def test_vectors_that_do_not_match(unchecked):
    H = KernelOperator(RBF(0.9), rows(), 0.3)
    with pytest.raises(ValueError, match=r"`V` must have shape \(23, 2\), got \(23, 3\)"):
        H.bilinear_gradient(vectors(N, 2), vectors(N, 3))
    for multiply in (H.matmul, lambda V: H.rows_matmul(jnp.arange(2), V)):
        with pytest.raises(ValueError, match=r"`V` must have shape \(23, 2\), got \(22, 2\)"):
            multiply(vectors(N - 1, 2))
        with pytest.raises(ValueError, match=r"got \(23,\): vectors are columns"):
            multiply(jnp.ones(N))
    with pytest.raises(ValueError, match=r"`W` must have shape \(2, 3\), got \(3, 3\)"):
        H.columns_matmul(jnp.arange(2), jnp.ones((3, 3)))
    with pytest.raises(ValueError, match=r"`weights` must have shape \(3,\)"):
        H.quadratic_gradient(jnp.ones(2), vectors(N, 3))


@pytest.mark.parametrize(
    ("setting", "used"),
    [
        (None, "HIGHEST"),
        ("bfloat16", "HIGHEST"),
        ("tensorfloat32", "HIGHEST"),
        ("TF32_TF32_F32_X3", "TF32_TF32_F32_X3"),
        ("BF16_BF16_F32_X6", "BF16_BF16_F32_X6"),
    ],
)
def test_passes_of_products_follow_the_setting_of_jax(setting, used):
    """Only settings with the digits of float32; a TF32 product has three."""
    H = KernelOperator(RBF(0.8), rows(), 0.3)
    V = jnp.ones((len(H.X), 2))
    with jax.default_matmul_precision(setting):
        texts = (
            str(jax.make_jaxpr(lambda H, V: H.matmul(V))(H, V)),
            str(jax.make_jaxpr(lambda H, V: H.quadratic_gradient(jnp.ones(2), V))(H, V)),
        )
    for text in texts:
        assert used in text
        assert setting in (None, used) or setting not in text


def test_several_passes_have_the_digits_of_float32():
    rng = np.random.default_rng(0)
    X, V = (rng.normal(size=(500, k)).astype(np.float32) for k in (5, 8))
    with jax.enable_x64(True):
        kernel = Matern32(np.float64(2.0))
        exact = KernelOperator(kernel, X.astype(float), 0.1).matmul(jnp.asarray(V, float))
    H = KernelOperator(Matern32(np.float32(2.0)), X, 0.1)
    with jax.default_matmul_precision("BF16_BF16_F32_X6"):
        product = jax.jit(lambda H, V: H.matmul(V))(H, V)
    error = np.linalg.norm(product - np.asarray(exact)) / np.linalg.norm(exact)
    assert 0 < error < 2e-6


def test_three_passes_of_tf32_have_the_digits_of_float32():
    """Emulated: numbers are the sums of two with ten binary digits."""

    def rounded(values):
        bits = values.view(np.uint32) + np.uint32(0x1000)
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)

    rng = np.random.default_rng(0)
    X, V = (rng.normal(size=(2000, k)).astype(np.float32) for k in (5, 16))
    K = np.asarray(Matern32(np.float32(2.0)).evaluate(*2 * [jnp.asarray(X)]))
    exact = K.astype(float) @ V.astype(float)
    large, large_V = rounded(K), rounded(V)
    three = large @ rounded(V - large_V) + rounded(K - large) @ large_V + large @ large_V
    errors = [
        np.linalg.norm(product - exact) / np.linalg.norm(exact)
        for product in (three, K @ V, large @ large_V)
    ]
    assert errors[0] < 1.2 * errors[1] < 1e-6
    assert errors[2] > 100.0 * errors[0]


@pytest.mark.parametrize("widths", [(1.0,) * 6, (1000.0, 1000.0, *(1.0,) * 4), (1000.0,) * 6])
def test_blocks_share_the_method_that_all_rows_need(widths):
    """By a product, by differences of the widest columns, and by differences of all columns."""
    X = np.random.default_rng(0).normal(size=(30, 6)) * np.array(widths)
    X = np.concatenate([X, X + 0.1, X[:3]]).astype(np.float32)
    V = np.random.default_rng(1).normal(size=(len(X), 2)).astype(np.float32)
    H = KernelOperator(Matern32(np.float32(1.0)), X, 0.1, memory_budget=4 * 4 * 10**2)
    assert H.block_size < len(X) / 4
    product = H.matmul(jnp.asarray(V))
    gradient = H.quadratic_gradient(jnp.ones(2), jnp.asarray(V)).kernel.lengthscale
    with jax.enable_x64(True):
        exact = KernelOperator(Matern32(np.float64(1.0)), X.astype(float), 0.1)
        V = jnp.asarray(V, float)
        expected = exact.matmul(V), exact.quadratic_gradient(jnp.ones(2), V).kernel.lengthscale
    np.testing.assert_allclose(product, expected[0], rtol=1e-4, atol=1e-4)
    # As accurate as the gradient of a dense matrix in float32, whose terms cancel.
    np.testing.assert_allclose(gradient, expected[1], atol=1e-3)
