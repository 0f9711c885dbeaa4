"""Random features: their expected inner product, and their dependence on the key and the rows."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.kernels import RBF, AbstractKernel, Constant, FeatureMapped, Linear, Matern32
from tests.registry import KERNELS, NUM_COLUMNS

NUM_KEYS = 4000
# Kernels of categories have exact features, or another kernel's features, tested separately.
WITHOUT = (
    "wendland", "wendland_twice_smooth", "great_circle", "gneiting", "multiscale", "own",
    "coregion", "derivatives", "wiener", "integrated_wiener", "orthogonal_additive",
)  # fmt: skip
WITH_FEATURES = [(name, kernel) for name, kernel in KERNELS if name not in WITHOUT]
compiled = functools.partial(jax.jit, static_argnums=3)


def rows(n, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=(n, NUM_COLUMNS)))


def keys():
    return jax.random.split(jax.random.key(5), NUM_KEYS)


def each(registry):
    return pytest.mark.parametrize("kernel", [pytest.param(f, id=key) for key, f in registry])


class WithoutFeatures(AbstractKernel):
    """A user's kernel, k(x, z) = exp(x'z), without features."""

    def evaluate(self, X, Z):
        return jnp.exp(X @ Z.T)

    def evaluate_diag(self, X):
        return jnp.exp(jnp.sum(X * X, axis=1))


@compiled
def features(kernel, key, X, num_features=8):
    return kernel.random_features(key, X, num_features)


@compiled
def features_of_keys(kernel, keys, X, num_features=8):
    return jax.vmap(lambda key: kernel.random_features(key, X, num_features))(keys)


def standard_errors_off(kernel, expected, X):
    """How far the mean of Phi Phi' is off; products that never vary must be exact."""
    drawn = np.asarray(features_of_keys(kernel, keys(), X))
    products = drawn @ np.swapaxes(drawn, 1, 2)
    error = np.std(products, axis=0) / np.sqrt(NUM_KEYS)
    return np.max(np.abs(np.mean(products, axis=0) - expected) / np.maximum(error, 1e-11))


# Expected inner products


@each(WITH_FEATURES)
def test_inner_products_are_unbiased(kernel, x64):
    kernel, X = kernel(1.2), rows(4)
    assert standard_errors_off(kernel, kernel(X, X), X) < 4


@pytest.mark.parametrize("name", ["rbf", "matern52", "sum", "nested", "mapped_equinox_mlp"])
def test_features_of_another_kernel_are_detected(name, x64):
    kernel, X = dict(KERNELS)[name], rows(4)
    assert standard_errors_off(kernel(1.5), kernel(1.2)(X, X), X) > 4


@pytest.mark.parametrize("kernel", [RBF(1.0), Linear(0.2, 1.0)], ids=["rbf", "linear"])
def test_products_with_exact_features_are_unbiased(kernel, x64):
    # Not stationary, so there are no Fourier features.
    kernel, X = kernel * Linear(0.5, 0.3), rows(4)
    assert standard_errors_off(kernel, kernel(X, X), X) < 4


@pytest.mark.parametrize(
    "kernel",
    [Matern32(1.2), RBF(1.0) * Linear(0.5, 0.3), RBF(1.0) + Matern32(0.5)],
    ids=["stationary", "product", "sum"],
)
def test_more_features_come_closer(kernel, x64):
    X, errors = rows(4), []
    for num_features in (8, 8 * 256):
        Phi = features(kernel, jax.random.key(0), X, num_features)
        assert Phi.shape == (4, num_features)
        errors.append(np.linalg.norm(Phi @ Phi.T - kernel(X, X)))
    assert errors[1] < errors[0] / 4  # a sixteenth is expected


# Shapes, rows and keys


@each(WITH_FEATURES)
def test_shape_and_dtype(kernel, request):
    kernel, X = kernel(1.2), rows(3)
    with jax.numpy_dtype_promotion("strict"):
        Phi = jax.eval_shape(
            lambda k, X, key: k.random_features(key, X, 8), kernel, X, jax.random.key(0)
        )
    # Parts with exact features set the number of features.
    exact = {"constant": 1, "cosine": 2, "linear": 5, "sum": 4 + 5, "nested": 2 + 1 + 4}
    width = exact.get(request.node.callspec.id, 8)
    assert (Phi.shape, Phi.dtype) == ((3, width), jnp.float32)


@each(WITH_FEATURES)
def test_rows_do_not_see_each_other(kernel, x64):
    kernel, X = kernel(1.2), rows(4)
    mixed = jnp.concatenate([5.0 + rows(2, seed=1), X[:2]])
    alone, among_others = (features_of_keys(kernel, keys(), Z) for Z in (X, mixed))
    np.testing.assert_allclose(among_others[:, 2:], alone[:, :2], rtol=1e-10, atol=1e-10)
    # The rows differ, so that features which ignore them would fail.
    assert np.max(np.ptp(alone, axis=1)) > 0.1 or isinstance(kernel, Constant)


@each(WITH_FEATURES)
def test_a_key_stands_for_its_functions(kernel, request, x64):
    kernel, X = kernel(1.2), rows(4)
    drawn, backwards = (features_of_keys(kernel, order, X) for order in (keys(), keys()[::-1]))
    np.testing.assert_allclose(backwards[::-1], drawn, rtol=0, atol=1e-13)
    drawn_at_random = request.node.callspec.id not in ("constant", "linear", "cosine")
    assert np.array_equal(drawn[0], drawn[1]) != drawn_at_random


@pytest.mark.parametrize("name", ["rbf_ard", "matern12", "matern32_ard", "mapped_flax_nnx"])
def test_functions_follow_the_hyperparameters(name, x64):
    kernel, X = dict(KERNELS)[name], rows(4)
    still, near, far = (features_of_keys(kernel(s), keys(), X) for s in (1.2, 1.2 + 1e-9, 1.7))
    change = np.max(np.abs(near - still))
    assert 0 < change < 1e-5
    assert np.max(np.abs(far - still)) > 0.1


# Inputs far from the origin


@pytest.mark.parametrize("d", [1, 5])
@pytest.mark.parametrize("offset", [1e5, 1e7])
def test_float32_far_from_the_origin(offset, d):
    """Features of rows as they are in float32, against the same in float64."""
    X = (offset + 4.0 * np.asarray(rows(6))[:, :1] * np.ones(d)).astype(np.float32)
    kernel, key = Matern32(1.0), jax.random.key(0)
    # The same operations as in the package: another rounding of a frequency is another function.
    frequencies = np.asarray(kernel.sample_frequencies(key, 500, d) / (2.0 * math.pi))
    turns = X.astype(np.float64) @ frequencies.T.astype(np.float64)
    angles = 2 * np.pi * (turns - np.round(turns))
    exact = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) / np.sqrt(500)
    Phi = np.asarray(kernel.random_features(key, X, 1000))
    spread = np.max(np.abs((X - X[:1]) @ frequencies.T))
    tolerance = 2 * np.pi * np.finfo(np.float32).eps * (d + spread) + 2e-6
    assert tolerance < 1e-3
    np.testing.assert_allclose(Phi * np.sqrt(500), exact * np.sqrt(500), atol=tolerance)
    # The same functions for every first row.
    apart = np.concatenate([kernel.random_features(key, x[None], 1000) for x in X])
    np.testing.assert_allclose(apart * np.sqrt(500), exact * np.sqrt(500), atol=tolerance)


def test_derivatives_do_not_depend_on_the_first_row(x64):
    X, key = 10.0 + rows(3), jax.random.key(0)

    def total(lengthscale, X):
        return jnp.sum(jnp.sin(3.0 * RBF(lengthscale).random_features(key, X, 8)[-1]))

    of_all, of_last = (jax.grad(total, argnums=(0, 1))(1.2, Z) for Z in (X, X[1:]))
    assert of_all[0] == pytest.approx(float(of_last[0]), rel=1e-9)
    np.testing.assert_allclose(of_all[1][1:], of_last[1], rtol=1e-9, atol=1e-12)


def test_with_an_origin_near_the_data_programs_agree():
    # Compiled, some of RBF's frequencies are rounded in another way.
    X, kernel, key = 1e5 + 2.0 * rows(6), RBF(1.3), jax.random.key(0)

    def functions(kernel, X):
        return kernel.random_features(key, X, 1000, origin=X[0]) * 500**0.5

    compiled = jax.jit(functions)(kernel, X)
    np.testing.assert_allclose(compiled, functions(kernel, X), atol=1e-4)


@pytest.mark.parametrize("name", ["active_dims", "nested", "mapped_function"])
def test_an_origin_changes_no_inner_product(name, x64):
    kernel, X, key = dict(KERNELS)[name](1.2), rows(4), jax.random.key(0)
    still, moved = (kernel.random_features(key, X, 8, origin=o) for o in (None, X[1] + 0.3))
    assert np.max(np.abs(moved - still)) > 0.01
    np.testing.assert_allclose(moved @ moved.T, still @ still.T, atol=1e-12)


# Exact features


def test_exact_features(dtype):
    X, key = rows(5), jax.random.key(0)
    close = pytest.approx(np.asarray(Linear(0.7, 0.3)(X, X)), rel=1e-5)
    features = Linear(0.7, 0.3).random_features(key, X, 8)
    assert (features.shape, features.dtype) == ((5, NUM_COLUMNS + 1), dtype)
    assert np.asarray(features @ features.T) == close
    features = Constant(0.7).random_features(key, X, 8)
    np.testing.assert_allclose(features, np.full((5, 1), np.sqrt(0.7)), rtol=1e-6)


def test_a_trend_beside_a_stationary_kernel_is_exact(x64):
    # The trend is so large that an error of its features would exceed every other term.
    X = 1e3 * rows(4)
    kernel = RBF(1.0) + 5.0 * Linear(2.0, 0.3)
    features = kernel.random_features(jax.random.key(0), X, 8)
    np.testing.assert_allclose(features @ features.T, kernel(X, X), atol=1 + 1e-6)


def test_features_of_a_product_do_not_depend_on_the_dtype_of_the_inputs(x64):
    kernel, X, key = RBF(1.0) * Linear(2.0, 0.3), rows(4), jax.random.key(0)
    features = kernel.random_features(key, X, 8)
    single = kernel.random_features(key, X.astype(jnp.float32), 8)
    np.testing.assert_allclose(single, features, rtol=1e-4, atol=1e-5)


# Kernels without features


@pytest.mark.parametrize(
    "compose",
    [
        lambda kernel: kernel,
        lambda kernel: 2.0 * kernel,
        lambda kernel: kernel.on((0, 1)),
        lambda kernel: RBF(1.0) + kernel,
        lambda kernel: kernel * Linear(),
        lambda kernel: FeatureMapped(kernel, jnp.tanh),
    ],
    ids=["itself", "scaled", "active_dims", "sum", "product", "mapped"],
)
def test_kernels_without_features(compose):
    kernel = compose(WithoutFeatures())
    assert kernel(rows(3), rows(2)).shape == (3, 2)
    message = "`WithoutFeatures` has no spectral density: only stationary.* exact estimator"
    with pytest.raises(ValueError, match=message):
        kernel.random_features(jax.random.key(0), rows(3), 8)


def test_bad_inputs(unchecked):
    for kernel in (
        RBF(1.0),
        Linear(),
        Constant(1.0),
        RBF(1.0) * Linear(),
        Constant(1.0) + RBF(1.0),
    ):
        with pytest.raises(ValueError, match=r"`X` must have shape \(n, d\), got \(3,\)"):
            kernel.random_features(jax.random.key(0), jnp.ones(3), 8)
