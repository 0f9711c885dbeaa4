"""Factorizations against NumPy, their derivatives against JAX's, and their failures."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import solve_triangular

from numpyro_scalegp.numerics import blocked, linalg

# Around the sizes at which splittings stop.
FACTORIZED = [(n, "float64") for n in (1, 63, 64, 65, 257)] + [(2, "float32"), (257, "float32")]
INVERTED = [(n, "float64") for n in (1, 2, 255, 256, 257, 700)] + [(700, "float32")]


def positive_definite(n, seed=0):
    """Draw a well-conditioned symmetric positive definite matrix."""
    A = np.random.default_rng(seed).normal(size=(n, 2 * n + 2))
    return A @ A.T / A.shape[1] + 0.2 * np.eye(n)


def relative_error(value, expected):
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(value - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(("n", "dtype"), FACTORIZED, indirect=["dtype"])
def test_factorize(n, dtype):
    K = positive_definite(n)
    factor = jax.jit(linalg.factorize)(jnp.array(K, dtype))
    assert factor.tril.dtype == factor.jitter.dtype == dtype
    assert factor.jitter == 0
    assert np.array_equal(factor.tril, np.tril(factor.tril))
    bound = 20 * math.sqrt(n) * jnp.finfo(dtype).eps
    assert relative_error(factor.tril, np.linalg.cholesky(K)) < bound


@pytest.mark.parametrize(("n", "dtype"), INVERTED, indirect=["dtype"])
def test_inverses(n, dtype):
    K = positive_definite(n)
    L = np.linalg.cholesky(K)
    inverses = jax.jit(lambda L: (linalg.triangular_inverse(L), linalg.inverse_from_factor(L)))
    W, P = inverses(jnp.array(L, dtype))
    assert W.dtype == P.dtype == dtype
    assert np.array_equal(W, np.tril(W))
    np.testing.assert_allclose(P, P.T, rtol=0, atol=10 * jnp.finfo(dtype).eps * np.max(P))
    bound = 20 * math.sqrt(n) * jnp.finfo(dtype).eps
    assert relative_error(W, np.linalg.inv(L)) < bound
    assert relative_error(P, np.linalg.inv(K)) < bound


@pytest.mark.parametrize("n", [1, 256, 257, 700])
def test_products_of_triangular_matrices(n, x64):
    A, B = np.tril(np.random.default_rng(n).normal(size=(2, n, n)))
    product = jax.jit(linalg.triangular_product)(jnp.array(A), jnp.array(B))
    outer = jax.jit(linalg.triangular_outer)(jnp.array(A))
    np.testing.assert_array_equal(product, np.tril(product))
    assert relative_error(product, A @ B) < 1e-13
    assert relative_error(outer, A @ A.T) < 1e-13


def test_sizes_beyond_the_blocked_loops(monkeypatch, x64):
    monkeypatch.setattr(blocked, "MAX_SIZE", 100)
    n = 600
    K = positive_definite(n)
    L = np.linalg.cholesky(K)
    assert relative_error(linalg.factorize(jnp.array(K)).tril, L) < 1e-13
    assert relative_error(linalg.triangular_inverse(jnp.array(L)), np.linalg.inv(L)) < 1e-13
    assert relative_error(linalg.inverse_from_factor(jnp.array(L)), np.linalg.inv(K)) < 1e-12


@pytest.mark.parametrize("size", (200, 512))
def test_accuracy_relative_to_the_jitter(size, x64):
    x = np.linspace(-3.0, 3.0, size)
    K = np.exp(-0.5 * np.square((x[:, None] - x) / 0.8))
    K += linalg.default_jitter(K.dtype) * np.eye(size)
    factor = linalg.factorize(jnp.array(K))
    assert factor.jitter == 0.0
    np.testing.assert_allclose(factor.tril @ factor.tril.T, K, atol=1e-14)
    inverse = linalg.triangular_inverse(factor.tril)
    by_substitution = solve_triangular(factor.tril, jnp.eye(size), lower=True)
    error, expected = (
        jnp.linalg.norm(W @ factor.tril - jnp.eye(size)) for W in (inverse, by_substitution)
    )
    assert error < 3.0 * expected


def test_log_density_value(dtype):
    n = 40
    K = positive_definite(n)
    y = np.random.default_rng(1).normal(size=(2, 3, n))
    expected = -0.5 * (
        np.einsum("abi,ij,abj->ab", y, np.linalg.inv(K), y)
        + np.linalg.slogdet(K)[1]
        + n * math.log(2 * math.pi)
    )
    K = jnp.array(K, dtype)
    value = linalg.gaussian_log_density(K, jnp.array(y, dtype), linalg.factorize(K))
    assert value.dtype == dtype
    np.testing.assert_allclose(value, expected, rtol=100 * float(jnp.finfo(dtype).eps))
    first = linalg.gaussian_log_density(K, jnp.array(y[0, 0], dtype), linalg.factorize(K))
    np.testing.assert_allclose(first, expected[0, 0], rtol=100 * float(jnp.finfo(dtype).eps))


# Derivatives: each function of a symmetric K and y against the same function by JAX's rules.


def by_cholesky(K, y):
    return jnp.sum(jnp.sin(linalg.cholesky(K)) @ y)


def by_cholesky_of_jax(K, y):
    return jnp.sum(jnp.sin(jnp.linalg.cholesky(K)) @ y)


def by_inverse(K, y):
    return jnp.sum(jnp.sin(linalg.inverse_cholesky(K)) @ y)


def by_inverse_of_jax(K, y):
    L = jnp.linalg.cholesky(K)
    return jnp.sum(jnp.sin(solve_triangular(L, jnp.eye(K.shape[0]), lower=True)) @ y)


def by_density(K, y):
    return linalg.gaussian_log_density(K, y, linalg.factorize(K))


def by_density_of_jax(K, y):
    L = jnp.linalg.cholesky(K)
    white = solve_triangular(L, y, lower=True)
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(L)))
    return -0.5 * (white @ white + log_det + y.size * math.log(2 * math.pi))


DERIVATIVES = [
    pytest.param(by_cholesky, by_cholesky_of_jax, id="cholesky"),
    pytest.param(by_inverse, by_inverse_of_jax, id="inverse_cholesky"),
    pytest.param(by_density, by_density_of_jax, id="gaussian_log_density"),
]


def symmetrized(gradient):
    """The part of a gradient in K along symmetric directions."""
    dK, dy = gradient
    return 0.5 * (dK + dK.T), dy


@pytest.mark.parametrize(("function", "reference"), DERIVATIVES)
def test_first_derivatives(function, reference, x64):
    n = 9
    K, y = jnp.array(positive_definite(n)), jnp.cos(jnp.arange(float(n)))
    np.testing.assert_allclose(function(K, y), reference(K, y), rtol=1e-12)
    gradient = symmetrized(jax.jit(jax.grad(function, argnums=(0, 1)))(K, y))
    expected = symmetrized(jax.jit(jax.grad(reference, argnums=(0, 1)))(K, y))
    for ours, theirs in zip(gradient, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)

    directions = jnp.array(positive_definite(n, seed=3)), jnp.sin(jnp.arange(float(n)))
    forward = jax.jit(lambda *args: jax.jvp(function, args, directions)[1])(K, y)
    product = sum(jnp.sum(a * b) for a, b in zip(expected, directions, strict=True))
    np.testing.assert_allclose(forward, product, rtol=1e-10)


@pytest.mark.parametrize(("function", "reference"), DERIVATIVES)
def test_second_derivatives(function, reference, x64):
    n = 6
    K, y = jnp.array(positive_definite(n)), jnp.cos(jnp.arange(float(n)))
    A, B = jnp.array(positive_definite(n, seed=3)), jnp.eye(n)[::-1]

    def hessian(function):
        def at(t):  # symmetric in K for every t
            return function(
                K + t[0] * A + jnp.sin(t[1]) * B, y + jnp.sin(t[2]) * jnp.arange(float(n))
            )

        def value(t):  # in a loop, where JAX drops the rules of its `custom_jvp`
            return jnp.sum(jax.lax.map(at, jnp.stack([t, 0.5 * t])))

        return jax.jit(jax.jacfwd(jax.grad(value)))(jnp.array([0.1, 0.05, 0.2]))

    H = hessian(function)
    assert np.all(np.abs(H) > 1e-3)
    np.testing.assert_allclose(H, hessian(reference), rtol=1e-9)


def test_derivatives_in_float32():
    n = 9
    K, y = jnp.array(positive_definite(n), jnp.float32), jnp.cos(jnp.arange(float(n)))
    for function, reference in (parameters.values for parameters in DERIVATIVES):
        gradient = symmetrized(jax.jit(jax.grad(function, argnums=(0, 1)))(K, y))
        with jax.enable_x64(True):
            wide = jnp.array(np.array(K, np.float64)), jnp.array(np.array(y, np.float64))
            expected = symmetrized(jax.jit(jax.grad(reference, argnums=(0, 1)))(*wide))
        for ours, theirs in zip(gradient, expected, strict=True):
            assert ours.dtype == jnp.float32
            assert relative_error(ours, theirs) < 1e-5


# Failure: jitter if that suffices, otherwise NaN and a warning.

JITTERED = "jitter was added"
FAILED = "not positive definite or not finite: the result is NaN"
TRANSFORMATIONS = [
    pytest.param(lambda function: function, id="eager"),
    pytest.param(jax.jit, id="jit"),
    pytest.param(
        lambda function: (
            lambda K: jax.tree.map(
                lambda leaf: leaf[1], jax.jit(jax.vmap(function))(jnp.stack([jnp.eye(len(K)), K]))
            )
        ),
        id="vmap",
    ),
]


def rank_deficient(n=30):
    X = jnp.linspace(0.0, 1.0, n)[:, None]
    return jnp.exp(-0.5 * jnp.square(X - X.T))


def indefinite(n=30):
    return jnp.eye(n).at[-1, -1].set(-1.0)


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_jitter_where_a_matrix_is_singular_in_this_precision(transformation):
    K = rank_deficient()
    with pytest.warns(RuntimeWarning, match=JITTERED) as caught:
        factor = transformation(linalg.factorize)(K)
        jax.block_until_ready(factor)
        jax.effects_barrier()
    assert not [warning for warning in caught if FAILED in str(warning.message)]
    eps = float(jnp.finfo(K.dtype).eps)
    np.testing.assert_allclose(factor.jitter, 10 * eps, rtol=1e-5)  # the first step suffices
    assert np.isfinite(factor.tril).all()
    restored = K + factor.jitter * jnp.eye(len(K))
    np.testing.assert_allclose(factor.tril @ factor.tril.T, restored, atol=len(K) * eps)


@pytest.mark.parametrize("platform", ("cpu", "default"))
def test_jitter_grows_until_it_suffices(platform, x64, monkeypatch):
    """Also as on an accelerator, where the first attempt is before the loop."""
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *args, **functions: functions[platform](*args)
    )
    np.testing.assert_array_equal(linalg.factorize(4.0 * jnp.eye(3)).tril, 2.0 * jnp.eye(3))
    n = 12
    for size, step in ((5e0, 1), (5e1, 2), (5e2, 3), (5e3, 4)):
        K = jnp.eye(n).at[-1, -1].set(-size * jnp.finfo(float).eps)
        with pytest.warns(RuntimeWarning, match=JITTERED):
            factor = linalg.factorize(K)
            jax.effects_barrier()
        scale = jnp.finfo(float).eps * jnp.mean(jnp.diagonal(K))
        np.testing.assert_allclose(factor.jitter, linalg.JITTER_LADDER[step] * scale)
        assert np.isfinite(factor.tril).all()


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_nan_where_a_matrix_is_indefinite(transformation):
    K = indefinite()

    def density(K):
        return linalg.gaussian_log_density(K, jnp.ones(len(K)), linalg.factorize(K))

    with pytest.warns(RuntimeWarning, match=FAILED) as caught:
        value = transformation(density)(K)
        jax.block_until_ready(value)
        jax.effects_barrier()
    assert not [warning for warning in caught if JITTERED in str(warning.message)]
    assert np.isnan(value)


def test_nan_has_a_nan_gradient():
    def density(K):
        return linalg.gaussian_log_density(K, jnp.ones(len(K)), linalg.factorize(K))

    with pytest.warns(RuntimeWarning, match=FAILED):
        gradient = jax.jit(jax.grad(density))(indefinite())
        jax.block_until_ready(gradient)
        jax.effects_barrier()
    assert np.isnan(gradient).all()


def test_nan_in_a_matrix_gives_nan():
    K = jnp.eye(4).at[0, 0].set(jnp.nan)
    with pytest.warns(RuntimeWarning, match=FAILED):
        factor = linalg.factorize(K)
        jax.effects_barrier()
    assert np.isnan(factor.tril[-1, -1])


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_no_jitter_without_escalation(transformation):
    with pytest.warns(RuntimeWarning, match=FAILED) as caught:
        factor = transformation(lambda K: linalg.factorize(K, escalate=False))(rank_deficient())
        jax.block_until_ready(factor)
        jax.effects_barrier()
    assert not [warning for warning in caught if JITTERED in str(warning.message)]
    assert factor.jitter == 0
    assert np.isnan(factor.tril[-1, -1])


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_no_warning_where_nothing_fails(transformation):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        factor = transformation(linalg.factorize)(2.0 * jnp.eye(30))
        jax.block_until_ready(factor)
        jax.effects_barrier()
    assert not [warning for warning in caught if issubclass(warning.category, RuntimeWarning)]
    assert factor.jitter == 0


def test_a_batch_adds_jitter_only_to_members_that_need_it():
    good, singular, bad = 2.0 * jnp.eye(30), rank_deficient(), indefinite()
    with pytest.warns(RuntimeWarning, match=FAILED):  # the worst of a batch
        factors = jax.vmap(linalg.factorize)(jnp.stack([good, singular, bad]))
        jax.block_until_ready(factors)
        jax.effects_barrier()
    assert factors.jitter[0] == 0
    np.testing.assert_allclose(factors.tril[0], jnp.sqrt(2.0) * jnp.eye(30), rtol=1e-6)
    assert factors.jitter[1] > 0
    assert np.isfinite(factors.tril[1]).all()
    assert np.isnan(factors.tril[2, -1, -1])


def test_fixed_jitter_is_relative_to_the_mean_diagonal(dtype):
    eps = float(jnp.finfo(dtype).eps)
    K = jnp.array(positive_definite(5), dtype)
    added = linalg.add_jitter(K, 0.5) - K
    assert added.dtype == dtype
    expected = 0.5 * jnp.mean(jnp.diagonal(K)) * jnp.eye(5)
    np.testing.assert_allclose(added, expected, atol=10 * eps)
    assert linalg.default_jitter(dtype) == 100 * eps
    by_default = jnp.diagonal(linalg.add_jitter(jnp.eye(3, dtype=dtype)))
    np.testing.assert_allclose(by_default, 1 + 100 * eps, rtol=eps)
    gradient = jax.grad(lambda K: jnp.sum(linalg.add_jitter(K, 0.5)))(K)
    np.testing.assert_allclose(gradient, 1.0 + 0.5 * jnp.eye(5), rtol=1e-6)
