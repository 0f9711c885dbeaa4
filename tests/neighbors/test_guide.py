"""The nearest-neighbor guide: training, inducing points and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from numpyro_scalegp.guides import AutoNearestNeighborGP

KEY = jax.random.key(0)


def data(n=800):
    X = jax.random.uniform(KEY, (n, 2))
    f = 2.0 * jnp.sin(9.0 * X[:, 0]) * jnp.cos(7.0 * X[:, 1])
    return X, f, jax.random.poisson(jax.random.key(1), jnp.exp(f)).astype(f.dtype)


def model(X, y=None, batch_size=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.5))
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern52(lengthscale, 2.0), X))
    with rows:
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def run(guide, loss, X, y, steps=400):
    svi = SVI(model, guide, optax.adam(0.03), loss)
    return svi.run(KEY, steps, X, y, 200, progress_bar=False)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [sgp.infer.QuadratureELBO(5), TraceMeanField_ELBO()])
def test_counts_in_mini_batches(loss):
    X, f, y = data()
    guide = AutoNearestNeighborGP(model, num_inducing=200, num_neighbors=8, rest=AutoDelta)
    result = run(guide, loss, X, y)
    posterior = sgp.posterior(model, guide, result, X, y)
    mean, variance = posterior.mean(X), posterior.variance(X)
    assert jnp.sqrt(jnp.mean(jnp.square(mean - f))) < 0.45  # 1.0 a priori
    z = (mean - f) / jnp.sqrt(variance)
    assert 0.5 < jnp.sqrt(jnp.mean(jnp.square(z))) < 1.6
    # The inducing points are rows of the data.
    Z = result.params["f_auto_inducing_points"]
    assert np.all(np.min(np.abs(Z[:, None] - X).sum(axis=2), axis=1) == 0.0)
    # The same in a new process.
    again = AutoNearestNeighborGP(model, num_inducing=200, num_neighbors=8, rest=AutoDelta)
    np.testing.assert_allclose(again.posterior(result.params, X, y).mean(X), mean, rtol=1e-6)


def test_given_points_may_have_any_order():
    X, _, y = data(60)

    def points(inducing_points):
        guide = AutoNearestNeighborGP(model, inducing_points=inducing_points)
        svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(5))
        return svi.get_params(svi.init(KEY, X, y))["f_auto_inducing_points"]

    params = points(X[:20])
    np.testing.assert_array_equal(params, points(X[:20][::-1]))
    assert {tuple(row) for row in np.asarray(params)} == {tuple(row) for row in np.asarray(X[:20])}


@pytest.mark.slow
def test_two_functions_and_a_batch():
    X, _, y = data(60)

    def two(X, y=None):
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern52(0.3), X))
        with numpyro.plate("outputs", 2):
            g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(0.5), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(f + g[0]), jnp.exp(g[1])), obs=y)

    make_guide = functools.partial(AutoNearestNeighborGP, num_inducing=20, num_neighbors=3)
    guide = make_guide(two, "f", rest=functools.partial(make_guide, site="g"))
    svi = SVI(two, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(3))
    state = svi.init(KEY, X, y)
    params = svi.get_params(svi.update(state, X, y)[0])
    assert params["g_auto_loc"].shape == params["g_auto_scale"].shape == (2, 20)
    assert guide.posterior(params, X, y).mean(X).shape == (60,)
    assert guide.rest.posterior(params, X, y).mean(X).shape == (2, 60)


def test_a_plate_that_is_made_twice_raises():
    X, _, y = data(60)

    def twice(X, y=None):
        X, y = sgp.plate("rows", len(X), 10).take(X, y)
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern52(0.3), X))
        with sgp.plate("rows", 60, 10):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    guide = AutoNearestNeighborGP(twice, num_inducing=10)
    with pytest.raises(ValueError, match="the plate `rows` is made twice"):
        SVI(twice, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(3)).init(KEY, X, y)
