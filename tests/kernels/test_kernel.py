"""Kernels against their formulas, scikit-learn, their spectral densities and float64."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.gaussian_process import kernels as sklearn_kernels

from numpyro_scalegp.kernels import (
    RBF,
    AbstractKernel,
    Constant,
    FeatureMapped,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    MultiscaleRBF,
    Periodic,
    RationalQuadratic,
)
from numpyro_scalegp.kernels.kernel import Sum

# Correlations written as functions of the scaled squared distance, in float64.
PROFILES = {
    RBF: lambda s: np.exp(-s / 2),
    Matern12: lambda s: np.exp(-np.sqrt(s)),
    Matern32: lambda s: (1 + np.sqrt(3 * s)) * np.exp(-np.sqrt(3 * s)),
    Matern52: lambda s: (1 + np.sqrt(5 * s) + 5 * s / 3) * np.exp(-np.sqrt(5 * s)),
}
ALPHA = 0.8
# The largest derivative of each correlation in the scaled squared distance, at zero: an error
# of the distance is multiplied with it. Matern12 has none, so it never uses matrix products.
STEEPEST = {RBF: 1 / 2, Matern12: 0.0, Matern32: 3 / 2, Matern52: 5 / 6}


def rows(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def scaled_squares(X, Z, lengthscale):
    return np.sum(np.square((X[:, None] - Z[None]) / lengthscale), axis=-1)


def periodic(X, Z, lengthscale, period):
    sines = np.sin(np.pi * (X[:, None] - Z[None]) / period)
    return np.exp(-2 * np.sum(np.square(sines / lengthscale), axis=-1))


# Values


@pytest.mark.parametrize("d", [1, 3, 6])
@pytest.mark.parametrize("kind", PROFILES)
def test_stationary_formulas(kind, d, dtype):
    X, Z = rows(6, d), rows(5, d, seed=1)
    ard = np.linspace(0.5, 2.0, d)
    tolerance = 30 * d * jnp.finfo(dtype).eps
    for lengthscale in (1.3, ard):
        expected = 1.7 * PROFILES[kind](scaled_squares(X, Z, lengthscale))
        K = kind(jnp.array(lengthscale), 1.7)(jnp.array(X), jnp.array(Z))
        np.testing.assert_allclose(K, expected, rtol=0, atol=tolerance)
    s = scaled_squares(X, Z, ard)
    K = RationalQuadratic(jnp.array(ard), ALPHA, 1.7)(jnp.array(X), jnp.array(Z))
    np.testing.assert_allclose(K, 1.7 * (1 + s / (2 * ALPHA)) ** -ALPHA, rtol=0, atol=tolerance)
    K = Periodic(jnp.array(ard), 2 * jnp.array(ard), 1.7)(jnp.array(X), jnp.array(Z))
    expected = 1.7 * periodic(X, Z, ard, 2 * ard)
    np.testing.assert_allclose(K, expected, rtol=0, atol=5 * tolerance)


def test_other_formulas(dtype):
    X, Z = rows(6, 3), rows(5, 3, seed=1)
    close = functools.partial(np.testing.assert_allclose, atol=20 * jnp.finfo(dtype).eps)
    rbf, matern = RBF(0.8, 2.0), Matern32(1.5)
    A = 2 * PROFILES[RBF](scaled_squares(X, Z, 0.8))
    B = PROFILES[Matern32](scaled_squares(X, Z, 1.5))
    arrays = jnp.array(X), jnp.array(Z)
    close(Constant(0.4)(*arrays), np.full((6, 5), 0.4))
    close(Linear(0.5, 0.2)(*arrays), 0.5 * X @ Z.T + 0.2)
    close((rbf + matern)(*arrays), A + B)
    close((rbf * matern)(*arrays), A * B)
    for scale in (3, 3.0, jnp.array(3.0), np.float32(3.0), np.array(3.0)):
        close((scale * rbf)(*arrays), 3 * A)
        close((rbf * scale)(*arrays), 3 * A)
    on = Matern32(jnp.array([0.5, 2.0])).on((2, 0))
    close(on(*arrays), PROFILES[Matern32](scaled_squares(X[:, [2, 0]], Z[:, [2, 0]], [0.5, 2.0])))
    mapped = FeatureMapped(rbf, lambda X: jnp.sin(X[:, :2]))
    close(
        mapped(*arrays), 2 * PROFILES[RBF](scaled_squares(np.sin(X[:, :2]), np.sin(Z[:, :2]), 0.8))
    )


@pytest.mark.parametrize(
    ("kernel", "peer"),
    [
        (lambda scale: RBF(scale), lambda scale: sklearn_kernels.RBF(scale)),
        (lambda scale: Matern12(scale), lambda scale: sklearn_kernels.Matern(scale, nu=0.5)),
        (lambda scale: Matern32(scale), lambda scale: sklearn_kernels.Matern(scale, nu=1.5)),
        (lambda scale: Matern52(scale), lambda scale: sklearn_kernels.Matern(scale, nu=2.5)),
        (
            lambda _: RationalQuadratic(0.9, alpha=ALPHA),
            lambda _: sklearn_kernels.RationalQuadratic(0.9, ALPHA),
        ),
        (
            lambda scale: Matern32(scale, 2.5) * RBF(0.5) + Constant(0.3),
            lambda scale: (
                2.5 * sklearn_kernels.Matern(scale, nu=1.5) * sklearn_kernels.RBF(0.5)
                + sklearn_kernels.ConstantKernel(0.3)
            ),
        ),
        (
            lambda _: Linear(1.0, 0.7**2),
            lambda _: sklearn_kernels.DotProduct(0.7),
        ),
    ],
    ids=["rbf", "matern12", "matern32", "matern52", "rational_quadratic", "composed", "linear"],
)  # fmt: skip
def test_scikit_learn_agrees(kernel, peer, x64):
    X, Z = rows(7, 4), rows(6, 4, seed=1)
    lengthscale = np.array([0.4, 0.8, 1.5, 3.0])
    kernel, peer = kernel(lengthscale), peer(lengthscale)
    np.testing.assert_allclose(kernel(X, Z), peer(X, Z), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(kernel.diag(X), peer.diag(X), rtol=1e-12)


def test_scikit_learn_agrees_on_periodic(x64):
    # In more than one column scikit-learn takes the sine of the distance, another kernel.
    X, Z = rows(7, 1), rows(6, 1, seed=1)
    peer = sklearn_kernels.ExpSineSquared(0.9, 1.7)
    np.testing.assert_allclose(Periodic(0.9, period=1.7)(X, Z), peer(X, Z), rtol=1e-12)


@pytest.mark.parametrize("lengthscale", [0.05, 0.3, 1.0, 1.5, 5.0, 100.0])
def test_periodic_without_a_constant(lengthscale, dtype):
    kernel = Periodic(jnp.asarray(lengthscale, dtype), 2.0, 1.3, constant=False)
    X = jnp.linspace(0.0, 2.0, 401, dtype=dtype)[:-1, None]
    K = np.asarray(kernel(X, X[:1]))[:, 0]
    eps = float(np.finfo(dtype).eps)
    assert kernel.diag(X) == pytest.approx(1.3)
    assert K[0] == pytest.approx(1.3, rel=4 * eps)
    assert abs(K.mean()) < 200 * eps
    # The other kernel less its mean over a period, which is its constant term.
    with_constant = periodic(np.asarray(X, float), np.zeros((1, 1)), lengthscale, 2.0)[:, 0]
    expected = 1.3 * (with_constant - with_constant.mean()) / (1.0 - with_constant.mean())
    np.testing.assert_allclose(K, expected, atol=1e3 * eps if lengthscale < 50 else 1e-3)
    total = lambda scale: Periodic(scale, period=2.0, constant=False)(X[3:4], X[:1])[0, 0]  # noqa: E731
    scale = jnp.asarray(lengthscale, dtype)
    assert jnp.isfinite(jax.grad(total)(scale))


def test_periodic_without_a_constant_for_several_columns():
    kernel = Periodic(1.0, period=1.0, constant=False)
    with pytest.raises(ValueError, match="`constant=False` needs inputs of one dimension, got 2"):
        kernel(np.zeros((3, 2)), np.zeros((3, 2)))
    np.testing.assert_allclose(kernel.on((1,))(np.eye(2), np.eye(2)), np.ones((2, 2)), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lengthscale", [0.1, 0.7, 3.0])
def test_frequencies_without_a_constant(lengthscale):
    kernel = Periodic(lengthscale, period=2.0, constant=False)
    drawn = np.asarray(kernel.sample_frequencies(jax.random.key(0), 20_000, 1), np.float64)
    harmonics = drawn[:, 0] / np.pi
    np.testing.assert_allclose(harmonics, np.round(harmonics), atol=1e-4)
    assert np.abs(harmonics).min() > 0.5
    x = np.array([[0.1], [0.4], [1.0]])
    cosines = np.cos(drawn[:, 0] * x).mean(axis=1)
    np.testing.assert_allclose(cosines, kernel(x, np.zeros((1, 1)))[:, 0], atol=4 / 20_000**0.5)


# Derivatives at zero distance


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize(("kind", "curvature"), [(RBF, 1.0), (Matern32, 3.0), (Matern52, 5 / 3)])
def test_hessian_at_zero_distance(kind, curvature, d, x64):
    lengthscale = jnp.linspace(0.5, 2.0, d)
    kernel = kind(lengthscale, 1.7)

    def at_a_pair(x, z):
        return kernel(x[None], z[None])[0, 0]

    x = jnp.array(rows(1, d)[0])
    expected = 1.7 * curvature * np.diag(1 / np.square(lengthscale))
    np.testing.assert_allclose(jax.grad(at_a_pair)(x, x), np.zeros(d), atol=1e-14)
    hessian = jax.jit(jax.jacfwd(jax.grad(at_a_pair, argnums=(0, 1)), argnums=(0, 1)))(x, x)
    (xx, xz), (zx, zz) = hessian
    for value, sign in ((xx, -1), (zz, -1), (xz, 1), (zx, 1)):
        np.testing.assert_allclose(value, sign * expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("d", [1, 5])
@pytest.mark.parametrize("kind", PROFILES)
def test_gradients_with_duplicates(kind, d, x64):
    X = np.concatenate([rows(4, d), rows(2, d)])  # the first two rows return
    C = np.random.default_rng(2).normal(size=(6, 6))
    lengthscale = np.linspace(0.5, 2.0, d)

    def weighed(lengthscale, variance, X, Z):
        return jnp.sum(C * kind(lengthscale, variance)(X, Z))

    gradient = jax.grad(weighed, argnums=(0, 1, 2))(
        jnp.array(lengthscale), jnp.array(1.7), jnp.array(X), jnp.array(X)
    )
    # d k / d s = -g(s) / 2 with the derivative taken to be zero where Matern12 has none.
    differences = X[:, None] - X[None]
    s = scaled_squares(X, X, lengthscale)
    r = np.sqrt(s)
    with np.errstate(divide="ignore"):
        g = {
            RBF: np.exp(-s / 2),
            Matern12: np.where(s > 0, np.exp(-r) / r, 0.0),
            Matern32: 3 * np.exp(-np.sqrt(3) * r),
            Matern52: 5 / 3 * (1 + np.sqrt(5) * r) * np.exp(-np.sqrt(5) * r),
        }[kind]
    weights = 1.7 * C * g
    by_lengthscale = np.einsum("ij,ijk->k", weights, differences**2) / lengthscale**3
    by_inputs = -np.einsum("ij,ijk->ik", weights, differences) / lengthscale**2
    np.testing.assert_allclose(gradient[0], by_lengthscale, rtol=1e-7)
    np.testing.assert_allclose(gradient[1], np.sum(C * PROFILES[kind](s)), rtol=1e-7)
    np.testing.assert_allclose(gradient[2], by_inputs, rtol=1e-6, atol=1e-7)


# Spectral densities: the kernel is the mean of cos(w'(x - z)) over its frequencies.

STATIONARY = {
    "rbf": lambda scale: RBF(scale, 1.7),
    "matern12": lambda scale: Matern12(scale, 1.7),
    "matern32": lambda scale: Matern32(scale, 1.7),
    "matern52": lambda scale: Matern52(scale, 1.7),
    "rational_quadratic": lambda scale: RationalQuadratic(scale, ALPHA, 1.7),
    "periodic": lambda scale: Periodic(scale, 2 * scale, 1.7),
    "constant": lambda scale: Constant(1.7),
    "sum": lambda scale: RBF(scale, 3.0) + Matern12(0.3, 1.0),
    "product": lambda scale: Matern52(scale) * Periodic(1.0, period=2 * scale),
    "product_with_constant": lambda scale: Constant(0.3) * Matern32(scale),
    "sum_with_constant": lambda scale: Matern32(scale) + Constant(0.5),
    "scaled": lambda scale: 2.0 * RBF(scale) + Matern32(0.5),
    "on": lambda scale: Matern32(scale[-1:], 1.7).on((scale.size - 1,)),
    "on_sum": lambda scale: (
        RBF(scale[-1:]).on((scale.size - 1,)) + 3.0 * Matern12(scale[:1]).on((0,))
    ),
}


def standard_errors_off(frequencies, kernel, d):
    """How many standard errors the rebuilt correlations are off, at several differences."""
    z = np.zeros((1, d))
    directions = np.concatenate([np.eye(d), np.ones((1, d)), rows(2, d)])
    X = np.concatenate([size * directions for size in (0.3, 1.0, 2.5)])
    expected = kernel(X, z)[:, 0] / kernel.diag(z)[0]
    cosines = np.cos(X @ np.asarray(frequencies).T)
    error = np.std(cosines, axis=1) / np.sqrt(len(frequencies))
    return np.abs(np.mean(cosines, axis=1) - expected) / np.maximum(error, 1e-12)


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("name", STATIONARY)
def test_frequencies_rebuild_the_kernel(name, d, x64):
    kernel = STATIONARY[name](jnp.linspace(0.6, 1.8, d))
    frequencies = kernel.sample_frequencies(jax.random.key(3), 20_000, d)
    assert frequencies.shape == (20_000, d)
    assert np.max(standard_errors_off(frequencies, kernel, d)) < 4


@pytest.mark.parametrize("kind", [Matern12, Matern32, Matern52])
def test_a_product_of_one_dimensional_densities_is_detected(kind, x64):
    lengthscale = jnp.linspace(0.6, 1.8, 3)
    keys = jax.random.split(jax.random.key(3), 3)
    columns = [
        kind(scale).sample_frequencies(key, 20_000, 1)
        for key, scale in zip(keys, lengthscale, strict=True)
    ]
    frequencies = jnp.concatenate(columns, axis=1)
    assert np.max(standard_errors_off(frequencies, kind(lengthscale), 3)) > 4


@pytest.mark.parametrize("name", STATIONARY)
def test_frequencies_promote_no_types(name, dtype):
    kernel = STATIONARY[name](jnp.linspace(0.6, 1.8, 3))
    with jax.numpy_dtype_promotion("strict"):
        drawn = jax.eval_shape(
            lambda k, key: k.sample_frequencies(key, 5, 3), kernel, jax.random.key(0)
        )
    assert (drawn.shape, drawn.dtype) == ((5, 3), dtype)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (Linear(), "Linear"),
        (Linear() + RBF(1.0), "Linear"),
        (RBF(1.0) * Linear(), "Linear"),
        (2.0 * Linear().on((0,)), "Linear"),
        (FeatureMapped(RBF(1.0), jnp.tanh), "FeatureMapped"),
    ],
)
def test_no_spectral_density(kernel, name):
    with pytest.raises(ValueError, match=f"`{name}` has no spectral density: only stationary"):
        kernel.sample_frequencies(jax.random.key(0), 4, 2)


# Points with scales


def test_unit_scales_make_an_rbf(dtype):
    X, Z = jnp.array(rows(6, 3)), jnp.array(rows(5, 3, seed=1))
    lengthscale = jnp.array([0.5, 1.0, 2.0])
    with_scales = MultiscaleRBF.with_unit_scales
    K = MultiscaleRBF(lengthscale, 1.7)(with_scales(X), with_scales(Z))
    tolerance = float(20 * jnp.finfo(dtype).eps)
    np.testing.assert_allclose(K, RBF(lengthscale, 1.7)(X, Z), rtol=0, atol=tolerance)


def test_a_scaled_point_is_a_smoothed_function(x64):
    """k((x, 1), (z, c)) is proportional to a wider Gaussian, and to all it must be consistent."""
    X, z, scales = rows(6, 2), rows(1, 2, seed=1), np.array([[0.6, 2.5]])
    lengthscale = np.array([0.5, 2.0])
    kernel = MultiscaleRBF(jnp.array(lengthscale), 1.3)
    points = jnp.array(np.concatenate([z, scales], axis=1))
    column = kernel(MultiscaleRBF.with_unit_scales(X), points)
    widths = lengthscale**2 * (1 + scales**2)
    expected = 1.3 * np.exp(-np.sum((X - z) ** 2 / widths, axis=1))
    expected *= np.sqrt(np.prod(2 * scales / (1 + scales**2)))
    np.testing.assert_allclose(column[:, 0], expected, rtol=1e-12)
    everything = np.random.default_rng(2).uniform(0.3, 3.0, size=(40, 4))
    assert np.linalg.eigvalsh(kernel.covariance(everything)).min() > -1e-12


def test_scales_need_columns():
    with pytest.raises(ValueError, match="needs inputs with a scale for each column, got 3"):
        MultiscaleRBF(1.0)(jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"`lengthscale` must have shape \(\) or \(2,\)"):
        MultiscaleRBF(jnp.ones(3))(jnp.ones((2, 4)), jnp.ones((2, 4)))


# Accuracy in float32, far from the origin


def far_rows(d, offset=1e3, size=2.0):
    """Scattered rows and near copies of some of them, `offset` from the origin."""
    rng = np.random.default_rng(d)
    X = rng.uniform(-size, size, size=(60, d))
    near = X[:20] + 1e-3 * rng.normal(size=(20, d))
    return (offset + np.concatenate([X, near])).astype(np.float32)


def error_bound(kind, X, lengthscale):
    """What a few roundings of a squared distance do to the kernel.

    From matrix products: some eps times the squared spread, times its derivative. From
    differences: some eps times the distance itself, on which the correlations depend weakly.
    """
    eps = np.finfo(np.float32).eps
    by_products = X.shape[1] > 3
    spread = np.sum(np.square((X - X.mean(axis=0)) / lengthscale), axis=1).max()
    return eps * (4.0 + 4.0 * by_products * STEEPEST[kind] * spread)


@pytest.mark.parametrize("d", [1, 2, 8])
@pytest.mark.parametrize("kind", PROFILES)
def test_float32_far_from_the_origin(kind, d):
    X = far_rows(d)
    assert X.dtype == np.float32
    lengthscale = np.linspace(0.8, 1.3, d).astype(np.float32)
    wide = X.astype(np.float64), lengthscale.astype(np.float64)
    exact = PROFILES[kind](scaled_squares(wide[0], wide[0], wide[1]))
    K = kind(jnp.array(lengthscale))(X, X)
    assert K.dtype == jnp.float32
    bound = error_bound(kind, *wide)
    assert bound < 2e-5
    assert np.max(np.abs(K - exact)) < bound

    # Without centering, ||x||^2 + ||z||^2 - 2 x'z loses every digit.
    scaled = X / lengthscale
    squares = np.sum(scaled**2, axis=1)
    naive = np.maximum(squares[:, None] + squares[None] - 2 * scaled @ scaled.T, 0)
    assert naive.dtype == np.float32
    assert np.max(np.abs(PROFILES[kind](naive) - exact)) > 1000 * bound


@pytest.mark.parametrize("d", [1, 2, 8])
def test_float32_far_from_the_origin_for_other_stationary_kernels(d):
    X = far_rows(d)
    wide = X.astype(np.float64)
    alpha = np.float32(ALPHA)
    exact = (1 + scaled_squares(wide, wide, 1.0) / (2 * np.float64(alpha))) ** -np.float64(alpha)
    K = RationalQuadratic(1.0, alpha=alpha)(X, X)
    assert np.max(np.abs(K - exact)) < error_bound(RBF, wide, 1.0)

    K = Periodic(1.25, period=2.0)(X, X)
    assert np.max(np.abs(K - periodic(wide, wide, 1.25, 2.0))) < 20 * np.finfo(np.float32).eps


@pytest.mark.parametrize("d", [1, 2, 8])
@pytest.mark.parametrize("kind", PROFILES)
def test_float32_nearby_points_far_from_the_origin(kind, d):
    # All rows within a few hundredths of a lengthscale, a few hundred roundings of 1e3 apart.
    X = far_rows(d, size=0.02)
    wide = X.astype(np.float64)
    exact = PROFILES[kind](scaled_squares(wide, wide, 1.0))
    K = kind(1.0)(X, X)
    assert np.max(np.abs(K - exact)) < 4 * np.finfo(np.float32).eps
    assert np.linalg.norm(K - exact) < 1e-2 * np.linalg.norm(1 - exact)


# Bad input


@pytest.mark.parametrize("kind", [*PROFILES, RationalQuadratic, Periodic])
@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_hyperparameters_must_be_positive(kind, bad, unchecked):
    third = {RationalQuadratic: {"alpha": 1.0}, Periodic: {"period": 1.0}}.get(kind, {})
    for name in ("lengthscale", "variance", *third):
        with pytest.raises(ValueError, match=f"`{name}` must be positive and finite, got {bad}"):
            kind(**{"lengthscale": 1.0, **third, name: bad})
    with pytest.raises(ValueError, match=r"`lengthscale` must be positive and finite, got \["):
        kind(jnp.array([1.0, bad]), **third)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_other_hyperparameters_must_be_positive(bad, unchecked):
    with pytest.raises(ValueError, match="`variance` must be positive and finite"):
        Constant(bad)
    with pytest.raises(ValueError, match="`variance` must be positive and finite"):
        Linear(bad)
    with pytest.raises(ValueError, match="`scale` must be positive and finite"):
        bad * RBF(1.0)
    with pytest.raises(ValueError, match="`scale` must be positive and finite"):
        RBF(1.0) * bad
    with pytest.raises(ValueError, match="`period` must be positive and finite"):
        Periodic(1.0, period=jnp.array([1.0, bad]))


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_bias_must_not_be_negative(bad, unchecked):
    with pytest.raises(ValueError, match="`bias` must "):
        Linear(1.0, bad)
    X = jnp.ones((2, 1))
    assert np.isnan(jax.jit(lambda bias: Linear(1.0, bias)(X, X))(bad)).all()


def test_shapes_of_hyperparameters(unchecked):
    X = rows(4, 3)
    ard = r"`lengthscale` must have shape \(\) or \(3,\), got \(2,\): one value for each input"
    kinds = [RationalQuadratic(jnp.ones(2), alpha=1.0), Periodic(jnp.ones(2), period=1.0)]
    for kernel in (RBF(jnp.ones(2)), Matern32(jnp.ones(2)), *kinds):
        with pytest.raises(ValueError, match=ard):
            kernel(X, X)
        with pytest.raises(ValueError, match=ard):
            kernel.diag(X)
        with pytest.raises(ValueError, match=ard):
            kernel.sample_frequencies(jax.random.key(0), 5, 3)
    with pytest.raises(ValueError, match=r"`period` must have shape \(\) or \(3,\), got \(2,\)"):
        Periodic(1.0, period=jnp.ones(2))(X, X)
    batches: list[AbstractKernel] = [RBF(1.0, jnp.ones(2)), Constant(jnp.ones(2))]
    batches += [RationalQuadratic(1.0, alpha=jnp.ones(2)), Linear(1.0, jnp.ones(2))]
    batches += [np.ones(2) * RBF(1.0)]
    for batch in batches:
        assert batch.batch_shape == (2,)


@pytest.mark.parametrize("dims", [(), (-1,), (0, -2)])
def test_active_dims_empty_or_negative(dims, unchecked):
    with pytest.raises(ValueError, match=r"`dims` must name at least one column, counted from 0"):
        RBF(1.0).on(dims)


def test_active_dims_that_are_no_numbers_of_columns(unchecked):
    for dims in ((True, False), np.array([True, False]), (0.0, 1.0), "01", 0, None):
        with pytest.raises(TypeError, match=r"`dims` must be a sequence of integers such as"):
            RBF(1.0).on(dims)
    # A repeated column would count twice, with frequencies for it once.
    with pytest.raises(ValueError, match=r"`dims` must name each column once, got \(0, 0\)"):
        RBF(1.0).on((0, 0))
    assert RBF(1.0).on(np.array([2, 0])).dims == (2, 0)


def test_active_dims_out_of_range(unchecked):
    kernel, X = RBF(1.0).on((0, 3)), rows(4, 3)
    message = r"`dims` must lie in 0\.\.2 .*, got \(0, 3\)"
    with pytest.raises(ValueError, match=message):
        kernel(X, X)
    with pytest.raises(ValueError, match=message):
        kernel.diag(X)
    with pytest.raises(ValueError, match=message):
        kernel.sample_frequencies(jax.random.key(0), 5, 3)


def test_feature_maps(unchecked):
    X = rows(4, 3)
    message = r"`feature_map` must return shape \(4, p\) for inputs of shape \(4, 3\), got "
    for wrong, shape in (
        (jnp.sum, r"\(\)"),
        (lambda X: X[:, 0], r"\(4,\)"),
        (jnp.transpose, r"\(3, 4\)"),
    ):
        kernel = FeatureMapped(RBF(1.0), wrong)
        with pytest.raises(ValueError, match=message + shape):
            kernel(X, X)
        with pytest.raises(ValueError, match=message + shape):
            kernel.diag(X)


def test_only_kernels_and_numbers_compose(unchecked):
    for operand in (1, 1.0, "rbf", None):
        with pytest.raises(TypeError):
            operator.add(RBF(1.0), operand)
        with pytest.raises(TypeError):
            operator.add(operand, RBF(1.0))
    total = sum(terms := [RBF(1.0), Linear(), Constant(1.0)])
    assert isinstance(total, Sum) and isinstance(total.left, Sum)
    assert [total.left.left, total.left.right, total.right] == terms


@pytest.mark.parametrize("kernel", [RBF(0.02), Matern32(0.02)], ids=["rbf", "matern32"])
def test_covariance_has_exact_variances(kernel):
    X = jnp.asarray(rows(50, 8), jnp.float32)  # hundreds of lengthscales wide
    covariance = kernel.covariance(X)
    np.testing.assert_array_equal(jnp.diagonal(covariance), kernel.diag(X))
    outside = ~np.eye(50, dtype=bool)
    np.testing.assert_array_equal(covariance[outside], kernel(X, X)[outside])


@pytest.mark.parametrize("d", [3, 6])
@pytest.mark.parametrize("kernel", [RBF, Matern32])
def test_rows_of_two_types(kernel: type[AbstractKernel], d: int, x64: None) -> None:
    rng = np.random.default_rng(0)
    X, Z = rng.normal(size=(4, d)).astype(np.float32), rng.normal(size=(3, d))
    exact = kernel(1.5)(X.astype(np.float64), Z)
    of_single = lambda scale: jnp.sum(kernel(scale)(X, Z))  # noqa: E731
    K, gradient = kernel(jnp.float32(1.5))(X, Z), jax.grad(of_single)(jnp.float32(1.5))
    np.testing.assert_allclose(K, exact, rtol=1e-6)
    expected = jax.grad(lambda scale: jnp.sum(kernel(scale)(X.astype(np.float64), Z)))(1.5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    assert gradient.dtype == jnp.float32
