"""Hilbert-space features against the kernels that they approximate, and against NumPyro's."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro.contrib.hsgp.approximation import hsgp_matern, hsgp_squared_exponential
from scipy.special import ive, kv

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels.stationary import _log_bessel
from tests.conformance import each

HilbertSpace = sgp.features.HilbertSpace
X = np.linspace(0.0, 1.0, 25)[:, None]
PLANE = np.random.default_rng(0).uniform(-1.0, 1.0, (20, 2))
SMOOTH = [
    ("rbf", lambda s: sgp.kernels.RBF(s, 1.3)),
    ("matern52", lambda s: sgp.kernels.Matern52(s)),
    ("matern32", lambda s: sgp.kernels.Matern32(s)),
    ("rational_quadratic", lambda s: sgp.kernels.RationalQuadratic(s, alpha=1.4, variance=0.9)),
    ("sum", lambda s: 2.0 * (sgp.kernels.RBF(s) + sgp.kernels.Matern52(2.0 * s, 0.5))),
]


# Spectral densities


@each("kernel", [*SMOOTH, ("matern12", lambda s: sgp.kernels.Matern12(s, 0.7))])
def test_a_spectral_density_is_the_transform_of_the_kernel(kernel, x64):
    covariance = kernel(0.5)
    w = jnp.linspace(0.0, 1000.0, 50_001)[1:, None] - 0.01  # midpoints
    density = covariance.spectral_density(w)
    r = np.array([[0.0], [0.2], [0.7]])
    transforms = [jnp.sum(density * jnp.cos(w[:, 0] * x)) * 0.02 / jnp.pi for x in r[:, 0]]
    atol = 2e-3 if "12" in type(covariance).__name__ else 1e-6
    np.testing.assert_allclose(np.array(transforms), covariance(r[:1], r)[0], rtol=2e-4, atol=atol)


@pytest.mark.slow
@each("kernel", SMOOTH[:4])
def test_densities_in_two_dimensions(kernel, x64):
    covariance = kernel(jnp.array([0.5, 0.8]))
    axis = np.linspace(-40.0, 40.0, 401)
    w = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    density = covariance.spectral_density(jnp.array(w))
    for x in (np.array([0.3, -0.2]), np.array([0.0, 0.6])):
        transform = jnp.sum(density * jnp.cos(w @ x)) * (0.2 / (2.0 * jnp.pi)) ** 2
        np.testing.assert_allclose(
            transform, covariance(np.zeros((1, 2)), x[None])[0, 0], atol=1e-3
        )


def test_bessel_functions(x64):
    z = np.array([1e-3, 0.1, 1.0, 10.0, 300.0])
    for order in (0.0, 0.3, -1.2, 4.5, 30.0):
        values = jnp.exp(_log_bessel(jnp.array(order), jnp.array(z)))
        np.testing.assert_allclose(values, kv(order, z), rtol=1e-12)
    for lengthscale in (0.1, 0.3, 1.0, 5.0):
        expected = ive(np.arange(12), lengthscale**-2.0)
        np.testing.assert_allclose(
            sgp.kernels.Periodic(lengthscale, period=1.0).fourier_weights(12), expected, rtol=1e-10
        )


# Features


@each("kernel", SMOOTH)
def test_inner_products_tend_to_the_kernel(kernel, x64):
    covariance, box = kernel(0.3), np.array([[-1.5], [2.5]])
    errors = [HilbertSpace(covariance, num, box).error(X) for num in (10, 20, 80)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-2
    # A box that ends with the data is not accurate with any number of features.
    assert HilbertSpace(covariance, 200, np.array([[0.0], [1.0]])).error(X) > 0.5


@each("kernel", SMOOTH[:3])
@each("lengthscales", [("wide", lambda: (0.1, 0.5)), ("short", lambda: (0.05, 0.05))])
def test_the_chosen_box_and_basis_suffice(kernel, lengthscales, x64):
    short, long = lengthscales()
    box, num = HilbertSpace.box_and_num_basis(X, (short, long), type(kernel(1.0)))
    for scale in (short, long):
        assert HilbertSpace(kernel(scale), num, box).error(X) < 0.03
    assert HilbertSpace(kernel(short), (num[0] // 2,), box).error(X) > 0.03


def test_a_box_for_each_column(x64):
    box, num = HilbertSpace.box_and_num_basis(PLANE, (np.array([0.5, 1.0]), 2.0), sgp.kernels.RBF)
    assert num[0] in (2 * num[1], 2 * num[1] - 1)
    phi = HilbertSpace(sgp.kernels.RBF([0.5, 2.0], 3.0), num, box)
    assert phi(PLANE).shape == (20, num[0] * num[1])
    assert phi.error(PLANE) < 0.05
    constant = np.ones((3, 1))
    box, num = HilbertSpace.box_and_num_basis(constant, (1.0, 1.0), sgp.kernels.RBF)
    assert HilbertSpace(sgp.kernels.RBF(1.0), num, box).error(constant) < 0.05


@each("peer", [("matern", lambda: hsgp_matern), ("rbf", lambda: hsgp_squared_exponential)])
def test_numpyro_has_the_same_features(peer, x64):
    options = {"nu": 2.5} if peer() is hsgp_matern else {}
    kernel = sgp.kernels.Matern52 if options else sgp.kernels.RBF
    phi = HilbertSpace(kernel([0.5, 0.7], 1.3), (5, 6), np.array([[-1.5, -2.0], [1.5, 2.0]]))

    def column(beta):
        with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data={"beta": beta}):
            scales = {"alpha": 1.3, "length": jnp.array([0.5, 0.7])}
            return peer()(PLANE, ell=[1.5, 2.0], m=[5, 6], **scales, **options)

    expected = jnp.stack([column(beta) for beta in jnp.eye(30)], axis=1)
    np.testing.assert_allclose(phi(PLANE), expected, atol=1e-12)


@pytest.mark.slow
def test_a_periodic_kernel_has_its_fourier_series(x64):
    kernel = 1.7 * sgp.kernels.Periodic(0.7, period=0.3, variance=1.2)
    phi = HilbertSpace(kernel, 12)
    assert phi.num_features == 23
    assert phi.error(X) < 1e-8
    far = X + 3e5
    np.testing.assert_allclose(phi(far) @ phi(far).T, kernel(far, far), atol=1e-6)
    assert HilbertSpace(kernel, 2).error(X) > 0.01

    def total(scale):
        return jnp.sum(HilbertSpace(sgp.kernels.Periodic(scale, period=0.3), 5)(X)[:, 3])

    assert np.isfinite(jax.grad(total)(0.7))


@pytest.mark.parametrize("lengthscale", [0.4, 0.7, 2.0])
def test_a_periodic_kernel_without_a_constant_has_none_in_its_series(lengthscale, x64):
    kernel = sgp.kernels.Periodic(lengthscale, period=0.3, variance=1.2, constant=False)
    phi = HilbertSpace(1.7 * kernel, 20)
    assert phi.num_features == 38
    assert phi.error(X) < 1e-8
    over_a_period = jnp.arange(100)[:, None] * 0.003
    np.testing.assert_allclose(phi(over_a_period).mean(axis=0), 0.0, atol=1e-12)


@pytest.mark.slow
def test_amplitudes_that_underflow_leave_a_gradient():
    """In single precision, where a smooth kernel has no power at the highest frequencies."""
    rows = np.linspace(0.0, 5.0, 30, dtype=np.float32)[:, None]
    box, num = HilbertSpace.box_and_num_basis(rows, (0.2, 2.0), sgp.kernels.RBF)

    def of_box(scale):
        return jnp.sum(HilbertSpace(sgp.kernels.RBF(scale), num, box)(rows))

    def of_series(scale):
        return jnp.sum(HilbertSpace(sgp.kernels.Periodic(scale, period=1.0), 20)(rows))

    for total, scale in ((of_box, 2.0), (of_series, 3.0)):
        gradient = jax.grad(total)(jnp.float32(scale))
        step = (total(jnp.float32(1.01 * scale)) - total(jnp.float32(0.99 * scale))) / 0.02 / scale
        np.testing.assert_allclose(gradient, step, rtol=0.02, atol=1e-3)


@pytest.mark.slow
def test_sums_and_products(x64):
    box = np.array([[-1.5], [2.5]])
    trend = HilbertSpace(sgp.kernels.RBF(0.4), 40, box)
    season = HilbertSpace(sgp.kernels.Periodic(0.9, 0.25, 0.5), 8)
    together = trend + season
    assert together(X).shape[1] == 55
    assert (trend * season)(X).shape[1] == 40 * 15
    np.testing.assert_allclose(sum([trend, season])(X), together(X))
    index = jnp.array([3, 39, 40, 54])
    np.testing.assert_allclose(together.columns(X, index), together(X)[:, index], rtol=1e-12)
    for phi in (together, trend * season):
        np.testing.assert_allclose(phi(X) @ phi(X).T, phi.kernel(X, X), atol=1e-4)
        np.testing.assert_allclose(
            phi.covariance(jnp.array(X), jnp.array(X)), phi(X) @ phi(X).T, rtol=1e-10
        )
    columns = HilbertSpace(sgp.kernels.RBF(0.9).on((0,)), 30, np.array([[-4.0], [4.0]]))
    second = HilbertSpace(sgp.kernels.Matern52(0.8).on((1,)), 40, np.array([[-4.0], [4.0]]))
    product = columns * second
    np.testing.assert_allclose(
        product(PLANE) @ product(PLANE).T, product.kernel(PLANE, PLANE), atol=5e-3
    )
    with pytest.raises(ValueError, match="are correlated a priori"):
        trend + sgp.features.InducingPoints(sgp.kernels.RBF(1.0), X[:3])


@pytest.mark.slow
def test_components_of_a_sum_come_from_the_posterior(x64):
    box = np.array([[-1.5], [2.5]])
    phi = HilbertSpace(sgp.kernels.RBF(0.4), 30, box) + HilbertSpace(
        sgp.kernels.Periodic(0.9, 0.25, 0.5), 8
    )
    logdet, y = sgp.log_determinants.MiniBatch(), np.sin(9.0 * X[:, 0])
    gp = sgp.FeatureSpaceGP(phi, X, 0.1, jnp.zeros(45), num_data=25, logdet=logdet)
    posterior = gp.condition(y)
    components = [posterior.component(operator.attrgetter(name)) for name in ("left", "right")]
    np.testing.assert_allclose(
        sum(component.mean(X) for component in components), posterior.mean(X), atol=1e-9
    )
    of_sum = HilbertSpace(sgp.kernels.RBF(0.4) + sgp.kernels.Matern52(0.1), 45, box)
    gp = sgp.FeatureSpaceGP(of_sum, X, 0.1, jnp.zeros(45), num_data=25, logdet=logdet)
    with pytest.raises(ValueError, match="features of a sum of kernels have no components"):
        gp.condition(y).component(lambda k: k.left)
    exact = sgp.GaussianProcess(phi.kernel, X, 0.1).condition(y).component(lambda k: k.left)
    np.testing.assert_allclose(components[0].mean(X), exact.mean(X), atol=1e-3)
    np.testing.assert_allclose(components[0].variance(X), exact.variance(X), atol=1e-3)


def test_inputs_outside_of_the_box_are_refused(x64):
    phi = HilbertSpace(sgp.kernels.RBF(0.3), 20, np.array([[0.0], [1.0]]))
    with pytest.raises(ValueError, match=r"2 row\(s\) outside of the box, the first at 24"):
        phi(np.concatenate([X[:-1], X[-1:] + 1e-6, X[-1:] + 1.0]))
    values = jax.jit(lambda X: phi(X))(np.array([[0.5], [1.5]]))
    assert np.isfinite(values[0]).all()
    assert np.isnan(values[1]).all()


# In models


@pytest.mark.slow
def test_weights_under_a_sampler_and_the_posterior_after_it(x64):
    box = np.array([[-1.0], [2.0]])
    y = np.sin(5.0 * X[:, 0])

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", numpyro.distributions.LogNormal(-1.0, 0.5))
        phi = HilbertSpace(sgp.kernels.Matern52(lengthscale), 15, box)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", numpyro.distributions.Normal(f, 0.1), obs=y)

    white = numpyro.handlers.reparam(model, config={"f": sgp.infer.WhitenReparam()})
    kernel = numpyro.infer.NUTS(white)
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=200, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), X, y)
    draws = mcmc.get_samples()
    assert draws["f_white"].shape == (200, 15)
    posterior = sgp.posterior(model, draws, X, y)
    new = np.array([[0.13], [0.77], [1.2]])
    mean, variance = posterior.mean(new), posterior.variance(new)

    # With the function integrated out, on a grid of the same prior.
    grid = np.linspace(-2.5, 0.5, 61)
    weights, means, squares = [], [], []
    for log_scale in grid:
        phi = HilbertSpace(sgp.kernels.Matern52(np.exp(log_scale)), 15, box)
        Phi, Phi_new = np.asarray(phi(X)), np.asarray(phi(new))
        H = Phi @ Phi.T + 0.01 * np.eye(25)
        solved = np.linalg.solve(H, Phi @ Phi_new.T)
        prior = -0.5 * ((log_scale + 1.0) / 0.5) ** 2
        weights.append(prior - 0.5 * (np.linalg.slogdet(H)[1] + y @ np.linalg.solve(H, y)))
        means.append(y @ solved)
        remaining = np.sum(Phi_new**2, axis=1) - np.sum((Phi @ Phi_new.T) * solved, axis=0)
        squares.append(means[-1] ** 2 + remaining)
    weights = np.exp(weights - np.max(weights))
    weights /= weights.sum()
    expected = weights @ np.array(means)
    expected_variance = weights @ np.array(squares) - expected**2
    np.testing.assert_allclose(mean, expected, atol=0.35 * np.sqrt(expected_variance).max())
    np.testing.assert_allclose(variance, expected_variance, rtol=0.5)


@pytest.mark.slow
def test_the_basis_times_amplitudes_is_all_features(x64):
    kernel = sgp.kernels.Matern52(0.3, 2.0)
    sines = sgp.features.HilbertSpace(1.5 * kernel, 7, np.array([[-2.0], [2.0]]))
    waves = sgp.features.HilbertSpace(sgp.kernels.Periodic(0.8, period=0.7), 4)
    fourier = sgp.features.RandomFourier(kernel, 6, seed=0)
    together = sines + waves
    component = together.restrict(lambda kernel: kernel.component(kernel.right))
    X = np.linspace(-1.0, 1.0, 9)[:, None]
    white = jax.random.normal(jax.random.key(0), (3, 14))
    for phi in (sines, waves, fourier, together, component, sines * waves, together + fourier):
        basis, amplitudes = phi.basis_and_amplitudes(X)
        np.testing.assert_allclose(basis * amplitudes, phi(X), rtol=1e-12, atol=1e-14)
    precision = np.linspace(1.0, 3.0, 14)
    prior = sgp.WeightSpaceGP(together, X, precision)
    expected = white @ (np.asarray(together(X)) / np.sqrt(precision)).T
    np.testing.assert_allclose(prior.of_white(white), expected, rtol=1e-12)
