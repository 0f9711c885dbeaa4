"""Kernels of places, and of places and times, against their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import gamma, kv

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels import Gneiting, Matern, OnSphere, Wendland

SMOOTHNESSES = (0.1, 0.3, 0.5, 1.0, 1.7, 2.5, 4.0, 11.0, 25.0)
PLACES = np.random.default_rng(0).uniform((-180.0, -90.0), (180.0, 90.0), (60, 2))


def matern(r, nu):
    t = math.sqrt(2.0 * nu) * r
    return 2.0 ** (1.0 - nu) / gamma(nu) * t**nu * kv(nu, t)


@pytest.mark.parametrize("nu", SMOOTHNESSES)
def test_matern_of_any_smoothness(nu, dtype):
    r = np.geomspace(1e-5, 20.0, 3000)
    actual = Matern(1.0, nu)(np.zeros((1, 1)), r[:, None].astype(dtype))[0]
    is_double = dtype == jnp.float64
    atol = {True: 1e-10, False: 4e-6}[is_double] if nu >= 0.5 else 2e-5
    expected = np.nan_to_num(matern(r, nu), nan=1.0)  # zero times infinity near zero
    np.testing.assert_allclose(actual, expected, atol=atol)
    same = Matern(1.0, nu, 1.3)(np.ones((1, 1), dtype), np.ones((1, 1), dtype))
    np.testing.assert_allclose(same, 1.3, rtol=1e-6)
    assert Matern(1.0, nu)(np.zeros((1, 1)), np.full((1, 1), 1e30, dtype)) == 0.0


@pytest.mark.parametrize("nu", SMOOTHNESSES[2:-1])
def test_derivatives_of_matern(nu, x64):
    r = np.geomspace(1e-3, 10.0, 50)

    def of(nu, lengthscale):
        return Matern(lengthscale, nu)(np.zeros((1, 1)), r[:, None])[0]

    slopes = jax.jacfwd(of, argnums=(0, 1))(nu, 1.0)
    h = 1e-4
    by_nu = (matern(r, nu + h) - matern(r, nu - h)) / (2.0 * h)
    by_lengthscale = (matern(r / (1.0 + h), nu) - matern(r / (1.0 - h), nu)) / (2.0 * h)
    np.testing.assert_allclose(slopes[0], by_nu, atol=1e-6)
    np.testing.assert_allclose(slopes[1], by_lengthscale, atol=1e-6)
    second = jax.jacfwd(jax.jacrev(of))(nu, 1.0)
    h = 1e-3
    expected = (matern(r, nu + h) - 2.0 * matern(r, nu) + matern(r, nu - h)) / h**2
    np.testing.assert_allclose(second, expected, atol=1e-4)


@pytest.mark.slow
def test_matern_smoothness_is_found(x64):
    """The maximum of the density of an exact draw is near the draw's smoothness."""
    X = np.random.default_rng(1).uniform(size=(400, 1))
    y = sgp.LatentGP(Matern(0.2, 0.9), X).sample(jax.random.key(0))

    @jax.jit
    @jax.value_and_grad
    def density(nu):
        return sgp.GaussianProcess(Matern(0.2, nu), X, 1e-6).log_prob(y)

    nus = np.linspace(0.6, 1.3, 15)
    values, slopes = map(np.array, zip(*map(density, nus), strict=True))
    best = nus[np.argmax(values)]
    assert abs(best - 0.9) < 0.15
    h = 1e-4
    numerical = (density(1.0 + h)[0] - density(1.0 - h)[0]) / (2.0 * h)
    np.testing.assert_allclose(density(1.0)[1], numerical, rtol=1e-4)
    assert slopes[0] > 0.0 > slopes[-1]


@pytest.mark.parametrize(
    ("smoothness", "polynomial"),
    [
        (0, lambda r: (1 - r) ** 2),
        (1, lambda r: (1 - r) ** 4 * (4 * r + 1)),
        (2, lambda r: (1 - r) ** 6 * (35 * r**2 + 18 * r + 3) / 3),
    ],
)
def test_wendland(smoothness, polynomial, x64):
    """In three dimensions, and positive definite in as many as it says."""
    r = np.linspace(0.0, 1.5, 40)
    kernel = Wendland(2.0, smoothness=smoothness)
    actual = kernel(np.zeros((1, 1)), 2.0 * r[:, None])[0]
    np.testing.assert_allclose(actual, np.where(r < 1.0, polynomial(r), 0.0), atol=1e-14)
    slope = jax.vmap(jax.grad(lambda r: kernel(np.zeros((1, 1)), 2.0 * r[None, None])[0, 0]))(r)
    h = 1e-6
    expected = [(polynomial(s + h) - polynomial(s - h)) / (2 * h) if 0 < s < 1 else 0.0 for s in r]
    np.testing.assert_allclose(slope, expected, atol=1e-5)
    for d in (1, 3, 6):
        X = np.random.default_rng(0).uniform(size=(150, d))
        K = np.asarray(Wendland(1.3, smoothness=smoothness, max_dims=d)(X, X))
        assert np.linalg.eigvalsh(K)[0] > -1e-12


def angles(X, Z):
    """The haversine formula."""
    (a, b), (c, d) = np.deg2rad(X).T[:, :, None], np.deg2rad(Z).T
    half = np.sin((b - d) / 2) ** 2 + np.cos(b) * np.cos(d) * np.sin((a - c) / 2) ** 2
    return 2.0 * np.arcsin(np.sqrt(half))


def test_distances_on_a_sphere(dtype):
    X = np.concatenate([PLACES, PLACES[:1], [[-180.0, 10.0], [180.0, 10.0]]]).astype(dtype)
    angle = angles(X.astype(np.float64), X)
    atol = 1e-3 if dtype == jnp.float32 else 1e-7
    for great_circle, distance in ((True, 6371.0 * angle), (False, 12742.0 * np.sin(angle / 2))):
        kernel = OnSphere(sgp.kernels.Matern12(900.0, 2.0), great_circle=great_circle)
        np.testing.assert_allclose(kernel(X, X), 2.0 * np.exp(-distance / 900.0), atol=atol)


@pytest.mark.parametrize(
    "kernel",
    [
        sgp.kernels.Matern12(2.0),
        *(Wendland(math.pi, smoothness=smoothness) for smoothness in (0, 1, 2)),
        Wendland(1.0, smoothness=2, max_dims=5),
    ],
)
def test_great_circles_are_positive_definite(kernel, x64):
    grid = np.stack(np.meshgrid(np.arange(-180, 180, 20), np.arange(-90, 91, 15)), -1)
    X = np.concatenate([PLACES, grid.reshape(-1, 2)])
    K = np.asarray(OnSphere(kernel, radius=1.0, great_circle=True)(X, X))
    assert np.linalg.eigvalsh(K)[0] > -1e-10


def test_other_great_circles_are_not(x64):
    """Why they are refused."""
    X = np.stack(np.meshgrid(np.arange(-180, 180, 15), np.arange(-90, 91, 15)), -1).reshape(-1, 2)
    K = np.exp(-0.5 * angles(X, X) ** 2)
    assert np.linalg.eigvalsh(K)[0] < -1e-3
    with pytest.raises(ValueError, match="`great_circle=True` needs `Matern12`"):
        OnSphere(sgp.kernels.RBF(1.0), radius=1.0, great_circle=True)
    with pytest.raises(ValueError, match="one lengthscale for all directions, got shape"):
        OnSphere(Wendland([1.0, 1.0, 1.0]), radius=1.0, great_circle=True)
    with pytest.raises(ValueError, match=r"lengthscale of at most 3\.14159"):
        OnSphere(Wendland(3.2), radius=1.0, great_circle=True)


@pytest.mark.slow
def test_derivatives_on_a_sphere(x64):
    """At equal and opposite places and poles, too; elsewhere they are difference quotients."""
    X = np.concatenate([PLACES[:5], PLACES[:1], [[0.0, 0.0], [180.0, 0.0], [30.0, 90.0]]])
    kernel = OnSphere(Wendland(3.1), radius=1.0, great_circle=True)

    def total(X, Z):
        return jnp.sum(jnp.arange(1.0, 6.0) * kernel(X, Z))

    gradient = jax.grad(total)(X, PLACES[:5])
    assert np.isfinite(gradient).all()
    step = np.zeros_like(X)
    step[2, 1] = 1e-4
    expected = (total(X + step, PLACES[:5]) - total(X - step, PLACES[:5])) / 2e-4
    np.testing.assert_allclose(gradient[2, 1], expected, rtol=1e-6)


def test_coordinates_out_of_range_are_refused():
    kernel = OnSphere(sgp.kernels.Matern32(500.0))
    swapped = PLACES[:, ::-1]
    for call in (
        lambda: kernel(swapped, swapped),
        lambda: sgp.GaussianProcess(kernel, swapped, 0.1),
        lambda: sgp.GaussianProcess(kernel.on((0, 1)) + sgp.kernels.RBF(1.0), swapped, 0.1),
        lambda: sgp.GaussianProcess(kernel, PLACES, 0.1).condition(PLACES[:, 0]).mean(swapped),
    ):
        with pytest.raises(ValueError, match="must hold values from -90 to 90 in column 1"):
            call()
    with pytest.raises(ValueError, match="two input columns, longitude and latitude, got 3"):
        kernel(np.ones((2, 3)), np.ones((2, 3)))
    sgp.kernels.FeatureMapped(kernel, lambda X: X[:, ::-1])(swapped, swapped)


def gneiting(X, Z, beta, delta, alpha):
    h = np.linalg.norm((X[:, None, :2] - Z[None, :, :2]) / np.array([0.8, 1.3]), axis=-1)
    u = np.abs(X[:, None, 2] - Z[None, :, 2]) / 1.4
    psi = 1.0 + u ** (2.0 * alpha)
    s = math.sqrt(3.0) * h / psi ** (beta / 2.0)
    return 0.7 * (1.0 + s) * np.exp(-s) * psi ** -(delta + beta)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_gneiting(beta, alpha, x64):
    rng = np.random.default_rng(2)
    X, Z = 2.0 * rng.normal(size=(150, 3)), 2.0 * rng.normal(size=(20, 3))
    space = sgp.kernels.Matern32([0.8, 1.3], 0.7)
    kernel = Gneiting(space, 1.4, beta, time_decay=0.6, time_power=alpha)
    np.testing.assert_allclose(kernel(X, Z), gneiting(X, Z, beta, 0.6, alpha), rtol=1e-10)
    assert np.linalg.eigvalsh(kernel(X, X))[0] > -1e-12
    if beta == 0.0:
        at_a_time, at_a_place = X.copy(), X.copy()
        at_a_time[:, 2] = at_a_place[:, :2] = 0.0
        product = kernel(at_a_time, at_a_time) * kernel(at_a_place, at_a_place)
        np.testing.assert_allclose(kernel(X, X), product / 0.7, rtol=1e-10)


def test_gneiting_takes_kernels_of_any_dimension():
    for kernel in (sgp.kernels.Periodic(1.0, 1.0), Wendland(1.0)):
        with pytest.raises(TypeError, match="`space` must be a kernel that is valid in any dim"):
            Gneiting(kernel, 1.0)
    with pytest.raises(ValueError, match=r"`interaction` must be at most 1, got 1\.5"):
        Gneiting(sgp.kernels.RBF(1.0), 1.0, 1.5)
    with pytest.raises(ValueError, match="at least two input columns"):
        Gneiting(sgp.kernels.RBF(1.0), 1.0)(np.ones((2, 1)), np.ones((2, 1)))


@pytest.mark.parametrize(
    "kernel",
    [
        Matern([0.4, 0.7], 1.1),
        Wendland(1.5),
        Gneiting(sgp.kernels.Matern32(0.5), 0.9),
        OnSphere(sgp.kernels.Matern32(0.5), radius=57.3),
    ],
)
def test_neighbors(kernel, x64):
    """With all rows as neighbors, densities are exact; neighbors are by the kernel's distances."""
    X = np.random.default_rng(3).uniform(size=(60, 2))
    y = np.sin(5.0 * X[:, 0])
    estimator = sgp.estimators.Vecchia(59).find_neighbors(X, kernel)
    exact = sgp.GaussianProcess(kernel, X, 0.1).log_prob(y)
    near = sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator).log_prob(y)
    np.testing.assert_allclose(near, exact, rtol=1e-8)


def test_traced_values_out_of_range_give_nan():
    """Where no error can be raised, as in a sampler's program."""
    X = np.random.default_rng(4).uniform(size=(5, 2))

    @jax.jit
    def values(lengthscale, interaction, power, X):
        circle = OnSphere(Wendland(lengthscale), radius=1.0, great_circle=True)
        product = Gneiting(sgp.kernels.RBF(1.0), 1.0, interaction, time_power=power)
        return circle(X, X), product(X, X)

    def is_nan(*arguments):
        return [bool(jnp.isnan(value).all()) for value in values(*arguments)]

    assert is_nan(3.1, 1.0, 1.0, X) == [False, False]
    assert is_nan(3.2, 1.1, 1.0, X) == [True, True]
    assert is_nan(3.1, 1.0, 1.1, X) == [False, True]
    outside = X.copy()
    outside[:, 1] += 90.0
    assert is_nan(3.1, 1.0, 1.0, outside) == [True, False]


@pytest.mark.parametrize("smoothness", [1.0, True, 3])
def test_wendland_needs_an_integer(smoothness):
    with pytest.raises((TypeError, ValueError), match="`smoothness` must be"):
        Wendland(1.0, smoothness=smoothness)


def test_opposite_places(dtype):
    """Distances near half the circumference, where arcsin loses digits in float32."""
    X = np.zeros((1, 2), dtype)
    away = np.array([[180.0, 1e-3], [180.0, 0.02], [179.0, 0.0], [90.0, 0.0]], dtype)
    kernel = OnSphere(sgp.kernels.Matern12(1.0), radius=1.0, great_circle=True)
    distances = -np.log(np.asarray(kernel(X, away), np.float64))[0]
    # The logarithm loses digits, too.
    atol = {True: 1e-12, False: 5e-6}[dtype == jnp.float64]
    expected = np.deg2rad(180.0 - np.array([1e-3, 0.02, 1.0, 90.0]))
    np.testing.assert_allclose(distances, expected, atol=atol)


def test_features_of_a_rough_matern_are_finite():
    X = np.random.default_rng(5).uniform(size=(20, 2)).astype(np.float32)
    for nu in (0.02, 0.1, 1.0):
        features = Matern(1.0, nu).random_features(jax.random.key(0), X, 400)
        assert np.isfinite(features).all()
    assert not Matern(1.0, 1.0).has_smooth_features
