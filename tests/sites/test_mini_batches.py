"""Densities that need all rows are refused at a mini-batch; other uses are legal."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro.infer import HMCECS, MCMC, NUTS, SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import log_density

import numpyro_scalegp as sgp
from numpyro_scalegp.sites.rows import role_of
from tests.conformance import each
from tests.registry import DISTRIBUTIONS, NUM_COLUMNS

N, BATCH = 12, 5
KEY = jax.random.key(0)
X = jnp.array(np.random.default_rng(0).normal(size=(N, NUM_COLUMNS)))
Y = jnp.sin(X[:, 0])
KERNEL = sgp.kernels.RBF(0.7)


def taken(X: Array, size: int | None) -> Array:
    return sgp.plate("rows", len(X), size).take(X)


def scaled(X: Array, size: int | None) -> Array:
    return (taken(X, size) - 1.0) / 2.0


def indexed(X: Array, size: int | None) -> Array:
    """By the indices of a `numpyro.plate`."""
    with numpyro.plate("rows", len(X), subsample_size=size) as index:
        return X[index]


def unrelated(X: Array, size: int | None) -> Array:
    """All rows, next to a plate that takes a subsample."""
    taken(X, size)
    return X


WAYS = (taken, scaled, indexed)


@pytest.mark.parametrize("rows", WAYS)
@each("distribution", DISTRIBUTIONS)
def test_a_density_at_a_mini_batch_is_refused(distribution, rows):
    """For every prior and collapsed distribution except `FeatureSpaceGP`."""

    def model(size: int | None, rows: Callable = rows) -> None:
        if role_of(fn := distribution(KERNEL, rows(X, size))) not in ("prior", "collapsed"):
            pytest.skip("no distribution over the rows")
        numpyro.sample("f", fn, obs=jnp.zeros(fn.shape()))

    def density(*args: Any) -> Array:
        return log_density(numpyro.handlers.seed(model, 0), args, {}, {})[0]

    if rows is taken:
        for size in (None, N):
            assert jnp.isfinite(density(size))
        assert jnp.isfinite(density(BATCH, unrelated))
    if isinstance(distribution(KERNEL, X), sgp.FeatureSpaceGP):
        assert jnp.isfinite(density(BATCH))
        return
    with pytest.raises(ValueError, match=r"mini-batch, of which the plate `rows` takes 5 of 12"):
        density(BATCH)
    # Draws from the prior are legal.
    sites = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(BATCH)
    assert sites["f"]["fn"].shape()[0] == BATCH


def latent(X: Array, y: Array | None = None, size: int | None = BATCH) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    rows = sgp.plate("rows", len(X), size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with rows:
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def collapsed(X: Array, y: Array | None = None, size: int | None = BATCH) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    X, y = sgp.plate("rows", len(X), size).take(X, y)
    numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, 0.1), obs=y)


whitened = numpyro.handlers.reparam(latent, config={"f": sgp.infer.WhitenReparam()})
OF_FUNCTION = r"(?s)`LatentGP`.*sgp\.guides\.AutoSparseGP\(model\).*without a `subsample_size`"
OF_OBSERVATIONS = r"(?s)`GaussianProcess`.*marginal likelihood.*sgp\.LatentGP\(kernel, X\)"


@pytest.mark.parametrize(
    ("model", "guide", "message"),
    (
        (latent, AutoNormal, OF_FUNCTION),
        (collapsed, AutoDelta, OF_OBSERVATIONS),
        (whitened, AutoMultivariateNormal, OF_FUNCTION),
    ),
)
def test_numpyros_guides_refuse_a_mini_batch(model, guide, message):
    with pytest.raises(ValueError, match=message):
        SVI(model, guide(model), optax.adam(0.1), Trace_ELBO()).init(KEY, X, Y)


def with_energies(model: Callable) -> HMCECS:
    return HMCECS(NUTS(model), num_blocks=2)


@pytest.mark.parametrize(
    ("model", "kernel", "message"),
    (
        (latent, NUTS, OF_FUNCTION),
        (latent, with_energies, OF_FUNCTION),
        (whitened, with_energies, OF_FUNCTION),
        (collapsed, NUTS, OF_OBSERVATIONS),
        (collapsed, with_energies, OF_OBSERVATIONS),
    ),
)
def test_samplers_refuse_a_mini_batch(model, kernel, message):
    mcmc = MCMC(kernel(model), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match=message):
        mcmc.run(KEY, X, Y)


@pytest.mark.parametrize("model", (latent, collapsed))
def test_all_rows_are_legal(model):
    for size in (None, N):
        svi = SVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
        assert jnp.isfinite(svi.update(svi.init(KEY, X, Y, size), X, Y, size)[1])


@pytest.mark.slow
@pytest.mark.parametrize("loss", (sgp.infer.QuadratureELBO(2), TraceMeanField_ELBO()))
def test_guides_of_the_package_take_mini_batches(loss):
    guide = sgp.guides.AutoSparseGP(latent, num_inducing=4)
    svi = SVI(latent, guide, optax.adam(0.1), loss)
    assert jnp.isfinite(jax.jit(svi.update)(svi.init(KEY, X, Y), X, Y)[1])


def test_a_function_of_groups_beside_a_mini_batch_of_rows_is_legal():
    """With NumPyro's guides and samplers, since each step has all values of the function."""
    groups, places = jnp.arange(N) % 3, jnp.arange(3.0)[:, None]

    def model(groups: Array, y: Array) -> None:
        rows = sgp.plate("rows", N, BATCH)
        groups, y = rows.take(groups, y)
        f = numpyro.sample("f", sgp.LatentGP(KERNEL, places))
        with rows:
            numpyro.sample("y", dist.Normal(f[groups], 0.3), obs=y)

    svi = SVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
    assert jnp.isfinite(jax.jit(svi.update)(svi.init(KEY, groups, Y), groups, Y)[1])


def test_concrete_rows_are_not_rows_of_traced_indices():
    """They have the same number: under `jit` the rows are concrete and the indices traced."""
    places = jnp.arange(float(BATCH))[:, None]

    def model(y: Array) -> None:
        rows = sgp.plate("rows", N, BATCH)
        index, y = rows.take(jnp.arange(N) % BATCH, y)
        f = numpyro.sample("f", sgp.LatentGP(KERNEL, places))
        with rows:
            numpyro.sample("y", dist.Normal(f[index], 0.3), obs=y)

    def density(key: Array) -> Array:
        f = jnp.zeros(BATCH)
        return log_density(numpyro.handlers.seed(model, key), (Y,), {}, {"f": f})[0]

    assert jnp.isfinite(jax.jit(density)(KEY))
    with pytest.raises(
        ValueError, match="only have the same number, take mini-batches of another size"
    ):
        density(KEY)


@pytest.mark.slow
def test_features_in_mini_batches_train_under_numpyros_guides():
    phi = sgp.features.RandomFourier(KERNEL, 6, seed=0)

    def model(X: Array, y: Array) -> None:
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        X, y = sgp.plate("rows", len(X), BATCH).take(X, y)
        logdet = sgp.log_determinants.MiniBatch()
        weights = numpyro.param("weights", jnp.zeros(6))
        gp = sgp.FeatureSpaceGP(phi, X, noise, weights, num_data=N, logdet=logdet)
        numpyro.sample("y", gp, obs=y)

    svi = SVI(model, AutoDelta(model), optax.adam(0.1), Trace_ELBO())
    assert jnp.isfinite(jax.jit(svi.update)(svi.init(KEY, X, Y), X, Y)[1])


def test_rows_that_an_estimator_takes_are_legal():
    estimator = sgp.estimators.Vecchia(3).find_neighbors(X)

    def model(X: Array, y: Array) -> None:
        with numpyro.plate("rows", len(X), subsample_size=BATCH) as index:
            pass
        gp = sgp.GaussianProcess(KERNEL, X, 0.1, estimator=estimator.on(index))
        numpyro.sample("y", gp, obs=y)

    density = functools.partial(log_density, numpyro.handlers.seed(model, 0))
    assert jnp.isfinite(density((X, Y), {}, {})[0])
