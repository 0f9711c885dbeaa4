"""Log densities with a normal variable integrated out, against fine grids and closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special
import scipy.stats

from numpyro_scalegp.integrated.laplace.log_expectation import log_expectation

# Likelihoods with the densities that SciPy has, and observations from tiny to huge.
LIKELIHOODS = [
    (
        lambda f: dist.Poisson(jnp.exp(f)),
        lambda y, f: scipy.stats.poisson.logpmf(y, np.exp(f)),
        (0, 1, 30, 1e3, 1e6),
    ),
    (
        lambda f: dist.NegativeBinomial2(jnp.exp(f), 3.0),
        lambda y, f: scipy.stats.nbinom.logpmf(y, 3, 3.0 / (3.0 + np.exp(f))),
        (0, 2, 5, 1e4, 1e6),
    ),
    (
        lambda f: dist.Binomial(10_000, logits=f),
        lambda y, f: scipy.stats.binom.logpmf(y, 10_000, scipy.special.expit(f)),
        (0, 1, 17, 5000, 10_000),
    ),
    (
        lambda f: dist.ZeroInflatedPoisson(0.3, jnp.exp(f)),
        lambda y, f: np.logaddexp(
            np.log(0.3) + np.where(y == 0, 0.0, -np.inf),
            np.log(0.7) + scipy.stats.poisson.logpmf(y, np.exp(f)),
        ),
        (0, 1, 3, 50, 1000),
    ),
    (
        lambda f: dist.StudentT(3.0, f, 0.05),
        lambda y, f: scipy.stats.t.logpdf(y, 3.0, f, 0.05),
        (-8.0, 0.0, 0.3, 4.0, 30.0),
    ),
    (
        lambda f: dist.Exponential(jnp.exp(-f)),
        lambda y, f: -f - y * np.exp(-f),
        (1e-6, 0.1, 1.0, 20.0, 1e5),
    ),
    (
        lambda f: dist.Beta(200.0 * jax.nn.sigmoid(f), 200.0 * jax.nn.sigmoid(-f)),
        lambda y, f: scipy.stats.beta.logpdf(
            y, 200.0 * scipy.special.expit(f), 200.0 * scipy.special.expit(-f)
        ),
        (1e-5, 0.02, 0.3, 0.9, 0.999),
    ),
]
Y = np.array([observations for *_, observations in LIKELIHOODS])[:, :, None]
MEAN = np.array([0.0, 1.5, -2.0, 5.0, 0.5, 0.0, 1.0, 3.0])
SCALE = np.array([0.01, 0.01, 0.22, 0.5, 1.0, 3.0, 10.0, 2.0])
SHAPE = np.broadcast_shapes(Y.shape, MEAN.shape)


def entries(f, y):
    """One likelihood for each entry of the first axis."""
    return jnp.stack(
        [likelihood(f[k]).log_prob(y[k]) for k, (likelihood, *_) in enumerate(LIKELIHOODS)]
    )


def on_grids(log_density, mean, scale):
    """The trapezoidal rule on the interval in which a coarse grid finds the integrand."""
    grid = mean + scale * 3.0 * np.sinh(np.linspace(-12.0, 12.0, 20_001) / 3.0)
    grid = np.concatenate([grid, np.linspace(-40.0, 40.0, 4001)])
    grid.sort()
    for _ in range(8):
        with np.errstate(all="ignore"):
            logs = log_density(grid) + scipy.stats.norm.logpdf(grid, mean, scale)
        logs = np.where(np.isfinite(logs), logs, -np.inf)
        near = np.flatnonzero(logs > logs.max() - 45.0)
        start, end = max(near[0] - 1, 0), min(near[-1] + 1, len(grid) - 1)
        last, grid = grid, np.linspace(grid[start], grid[end], 20_001)
    largest = logs.max()
    return largest + np.log(np.trapezoid(np.exp(logs - largest), last))


@pytest.mark.slow
def test_against_fine_grids(dtype):
    y = jnp.broadcast_to(jnp.asarray(Y, dtype), SHAPE)
    mean, scale = (jnp.broadcast_to(jnp.asarray(a, dtype), SHAPE) for a in (MEAN, SCALE))
    logs = jax.jit(lambda *arguments: log_expectation(entries, *arguments))(y, mean, scale)
    assert logs.dtype == dtype
    values = [np.asarray(array, float) for array in (y, mean, scale)]
    for k, (_, log_density, _) in enumerate(LIKELIHOODS):
        expected = [
            on_grids(functools.partial(log_density, y), mean, scale)
            for y, mean, scale in zip(*(array[k].ravel() for array in values), strict=True)
        ]
        # Observations near one, of a beta distribution, have a rounding error of one eps.
        rtol, atol = (1e-7, 1e-7) if dtype == jnp.float64 else (1e-5, 1e-4)
        np.testing.assert_allclose(logs[k].ravel(), expected, rtol=rtol, atol=atol, err_msg=str(k))


def normal(mean, scale, noise, y=0.7):
    def entries(f, data):
        return dist.Normal(f, data).log_prob(y)

    shape = jnp.broadcast_shapes(*map(jnp.shape, (mean, scale, noise)))
    parts = (jnp.broadcast_to(argument, shape) for argument in (noise, mean, scale))
    return log_expectation(entries, *parts)


def closed_form(mean, scale, noise, y=0.7):
    return dist.Normal(mean, jnp.hypot(scale, noise)).log_prob(y)


def test_normal_noise_has_a_closed_form(dtype):
    """Even if the density is narrow and far from the mean."""
    mean = jnp.asarray(0.7 + 1.4 * np.array([[0.0], [0.3], [5.0], [40.0]]), dtype)
    noise = jnp.asarray([1e-4, 1e-2, 0.22, 1.0, 30.0], dtype)
    arguments = mean, jnp.asarray(1.4, dtype), noise
    rtol = 1e-8 if dtype == jnp.float64 else 1e-6
    np.testing.assert_allclose(normal(*arguments), closed_form(*arguments), rtol=rtol)


@pytest.mark.slow
def test_derivatives_of_every_order(x64):
    point = jnp.array(0.2), jnp.array(1.4), jnp.array(0.01)
    for differentiate in (jax.grad, jax.hessian):
        derivative, expected = (
            jnp.array(jax.tree.leaves(jax.jit(differentiate(function, argnums=(0, 1, 2)))(*point)))
            for function in (normal, closed_form)
        )
        np.testing.assert_allclose(derivative, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_jumps_corners_and_bounds(dtype):
    """Likelihoods that are not smooth."""
    mean, scale = jnp.array([0.1, -3.0, 0.4]), jnp.array([1.0, 0.7, 9.0])
    of_f = scipy.stats.norm(np.asarray(mean, float), np.asarray(scale, float))
    rtol = 1e-6 if dtype == jnp.float64 else 1e-4

    def jump(mean):
        return log_expectation(lambda f, y: jnp.where(f > 0.3217, 0.0, -5.0), None, mean, scale)

    values, derivatives = jax.jvp(jump, (mean,), (jnp.ones_like(mean),))
    density = of_f.sf(0.3217) + np.exp(-5.0) * of_f.cdf(0.3217)
    np.testing.assert_allclose(values, np.log(density), rtol=rtol, atol=1e-6)
    slope = (1.0 - np.exp(-5.0)) * of_f.pdf(0.3217) / density
    np.testing.assert_allclose(derivatives, slope, rtol=1e-3)
    within = log_expectation(
        lambda f, _: jnp.where((f > 0.1) & (f < 0.74), 0.0, -jnp.inf), None, mean, scale
    )
    np.testing.assert_allclose(within, np.log(of_f.cdf(0.74) - of_f.cdf(0.1)), rtol=rtol, atol=1e-6)
    corner = log_expectation(lambda f, _: -jnp.abs(f - 0.2) / 0.1, None, mean, scale)
    expected = [
        on_grids(lambda f: -np.abs(f - 0.2) / 0.1, *map(float, pair))
        for pair in zip(mean, scale, strict=True)
    ]
    np.testing.assert_allclose(corner, expected, rtol=2e-6, atol=2e-6)


def test_two_modes(x64):
    """A narrow peak within the normal distribution and in its tail, next to a wide one."""
    y, mean = jnp.array([0.123, -2.0, 5.0]), jnp.zeros(3)
    weights, noise = jnp.array([0.7, 0.3]), jnp.array([0.03, 3.0])

    def entries(f, y):
        normal = dist.Normal(f[..., None], noise)
        return dist.MixtureSameFamily(dist.Categorical(weights), normal).log_prob(y)

    values = log_expectation(entries, y, mean, jnp.ones(3))
    log_densities = dist.Normal(0.0, jnp.hypot(1.0, noise)).log_prob(y[:, None])
    expected = jax.nn.logsumexp(log_densities + jnp.log(weights), axis=-1)
    np.testing.assert_allclose(values, expected, rtol=1e-7)


def test_likelihoods_without_a_density(x64):
    ones = jnp.ones(3)

    def entries(f, y):
        return jnp.stack([f[0] * jnp.nan, f[1] - jnp.inf, f[2] + jnp.inf])

    values = log_expectation(entries, None, ones, ones)
    np.testing.assert_array_equal(values, [jnp.nan, -jnp.inf, jnp.inf])
    # Above a mean of 700 rates overflow, and differences of infinities are NaN.
    values = log_expectation(lambda f, y: y * f - jnp.exp(f), 3.0 * ones, ones, 100.0 * ones)
    assert np.all(np.isfinite(values))


def test_a_likelihood_that_changes_too_fast_gives_a_warning():
    def entries(f, _):
        return 5.0 * jnp.sin(1e6 * f)

    with pytest.warns(RuntimeWarning, match="integrated over the function is inaccurate"):
        jax.jit(lambda mean: log_expectation(entries, None, mean, mean))(jnp.ones(()))
        jax.effects_barrier()


def test_no_scale_is_the_density_at_the_mean(dtype):
    value = log_expectation(lambda f, _: -jnp.square(f), None, jnp.array(2.0), jnp.array(0.0))
    np.testing.assert_allclose(value, -4.0, rtol=1e-6)
