"""NUTS over hyperparameters by the bound of a sparse guide, against dense algebra."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal
from numpyro.infer.util import potential_energy

import numpyro_scalegp as sgp
from numpyro_scalegp.infer.conditioning import parameters_of
from numpyro_scalegp.infer.refinement import _Marginal, _sites_of
from numpyro_scalegp.variational.sparse.natural import NaturalSparseGP

N, M = 40, 8
KEY = jax.random.key(0)
PRIORS = {"lengthscale": dist.LogNormal(0.0, 1.0), "noise": dist.LogNormal(-1.0, 0.5)}
refine = functools.partial(sgp.infer.refine_hyperparameters, progress_bar=False)


def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-2.0, 2.0, size=(N, 1)), axis=0)
    return jnp.array(X), jnp.array(np.sin(2.0 * X[:, 0]) + 0.2 * rng.normal(size=N))


def model(X: Array, y: Array, batch_size: int | None = None, *, counts: bool = False) -> None:
    values = {name: numpyro.sample(name, prior) for name, prior in PRIORS.items()}
    rows = sgp.plate("rows", N, batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(values["lengthscale"]), X))
    with rows:
        if counts:
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=jnp.round(jnp.exp(y)))
        else:
            numpyro.sample("y", dist.Normal(f, values["noise"]), obs=y)


def fitted(natural: bool, steps: int = 30, **options: Any) -> tuple[Any, Any]:
    X, y = data()
    guide = sgp.guides.AutoSparseGP(
        model, inducing_points=X[:: N // M], natural=natural, rest=AutoMultivariateNormal
    )
    adam = optax.adam(0.02)
    optimizer = sgp.infer.natural_gradients(adam) if natural else adam
    svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())
    return guide, svi.run(KEY, steps, X, y, progress_bar=False, **options)


def bound(Z: Array, lengthscale: Array, noise: Array) -> Array:
    """The bound of Titsias (2025), by dense algebra."""
    X, y = data()
    kernel = sgp.kernels.RBF(lengthscale)
    K = kernel.covariance(Z) + 1e-6 * jnp.eye(M)
    Q = kernel(X, Z) @ jnp.linalg.solve(K, kernel(Z, X))
    normal = dist.MultivariateNormal(jnp.zeros(N), Q + noise**2 * jnp.eye(N))
    return normal.log_prob(y) - 0.5 * jnp.sum(jnp.log1p((1.0 - jnp.diagonal(Q)) / noise**2))


@pytest.mark.slow
@pytest.mark.parametrize("natural", (True, False))
def test_the_density_is_the_prior_times_the_bound(natural, x64):
    X, y = data()
    guide, result = fitted(natural)
    guide.jitter = 1e-6
    params = parameters_of(result)
    medians = guide.median(params, X, y)
    marginal = _Marginal(model, guide, medians, params, (X, y), {})
    Z = params["f_auto_inducing_points"]
    # With the log determinants of NumPyro's transformations to unconstrained values.
    for log_values in ((0.0, -1.5), (-0.5, -1.0), (0.7, -2.0)):
        unconstrained = dict(zip(PRIORS, map(jnp.array, log_values), strict=True))
        values = {name: jnp.exp(value) for name, value in unconstrained.items()}
        expected = bound(Z, *values.values())
        expected += sum(PRIORS[name].log_prob(value) for name, value in values.items())
        expected += sum(log_values)
        seeded = handlers.seed(marginal, KEY)
        energy = potential_energy(seeded, (X, y), {}, unconstrained)
        np.testing.assert_allclose(-energy, expected, rtol=1e-5)


@pytest.mark.slow
def test_draws_and_their_posterior():
    X, y = data()
    guide, result = fitted(False)
    refined = refine(KEY, model, guide, result, X, y, num_warmup=20, num_samples=12)
    samples = refined.mcmc.get_samples()
    assert {name: samples[name].shape for name in PRIORS} == {name: (12,) for name in PRIORS}
    assert refined.posterior.num_draws == 12
    mean, variance = refined.posterior.mean(X[:3]), refined.posterior.variance(X[:3])
    assert np.sqrt(np.mean((mean - np.sin(2.0 * X[:3, 0])) ** 2)) < 0.5
    assert np.all(refined.posterior.predictive(X[:3]).variance > variance)


def with_level(X: Array, y: Array, kind: str, as_mean: bool) -> None:
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", PRIORS["lengthscale"])
    prior = sgp.LatentGP(sgp.kernels.RBF(lengthscale), X, mean=level if as_mean else None)
    f = numpyro.sample("f", prior)
    f = numpyro.deterministic("with level", f if as_mean else level + f)
    with numpyro.plate("rows", N):
        family = dist.Poisson(jnp.exp(f)) if kind == "counts" else dist.StudentT(3.0, f, 0.3)
        numpyro.sample("y", family, obs=jnp.round(jnp.exp(1.0 + y)) if kind == "counts" else y)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("counts", "student"))
def test_a_level_of_the_likelihood_has_the_density_of_one_of_the_prior(kind, x64):
    """Also far from the guide's medians, and with the derivative."""
    X, y = data()
    energies = []
    for as_mean in (True, False):
        guide = sgp.guides.AutoSparseGP(
            with_level, inducing_points=X[::4], natural=True, rest=AutoMultivariateNormal
        )
        optimizer = sgp.infer.natural_gradients(optax.set_to_zero(), 0.3)
        svi = SVI(with_level, guide, optimizer, sgp.infer.QuadratureELBO())
        run: Any = (X, y, kind, as_mean), {}
        params = parameters_of(svi.run(KEY, 5, *run[0], progress_bar=False))
        seeded = handlers.seed(_Marginal(with_level, guide, guide.median(params), params, *run), 0)
        energies.append(functools.partial(potential_energy, seeded, *run))
    for level, log_lengthscale in ((0.3, -0.2), (2.0, 0.5), (-2.0, -0.5)):
        values = {"level": jnp.array(level), "lengthscale": jnp.array(log_lengthscale)}
        (of_mean, slopes), (of_level, others) = (
            jax.value_and_grad(energy)(values) for energy in energies
        )
        np.testing.assert_allclose(of_level, of_mean, atol=0.02)
        for name, slope in slopes.items():
            np.testing.assert_allclose(others[name], slope, atol=0.1, err_msg=name)


@pytest.mark.slow
def test_a_hopeless_value_has_no_large_gradient():
    """NUTS in float32 would accept a step after a gradient of 1e19."""
    X, y = data()
    guide = sgp.guides.AutoSparseGP(with_level, inducing_points=X[::4])
    svi = SVI(with_level, guide, optax.adam(0.02), sgp.infer.QuadratureELBO())
    run: Any = (X, y, "counts", False), {}
    params = parameters_of(svi.run(KEY, 5, *run[0], progress_bar=False))
    marginal = _Marginal(with_level, guide, guide.median(params), params, *run)
    energy = functools.partial(potential_energy, handlers.seed(marginal, 0), *run)
    far = {"level": jnp.array(8.0), "lengthscale": jnp.array(-2.5)}
    value, slopes = jax.value_and_grad(energy)(far)
    assert value < 2e4
    # The derivatives of the log determinants of NumPyro's transformations are left.
    assert all(abs(slope) <= 1.0 for slope in slopes.values())


@pytest.mark.slow
def test_the_posterior_of_each_draw_is_the_best_for_it(x64):
    """With an inducing point at each row it is exact, also where the guide was not fitted."""
    X, y = data()

    def collapsed(X: Array, y: Array) -> None:
        values = {name: numpyro.sample(name, prior) for name, prior in PRIORS.items()}
        kernel = sgp.kernels.RBF(values["lengthscale"])
        numpyro.sample("y", sgp.GaussianProcess(kernel, X, values["noise"] ** 2), obs=y)

    guide = sgp.guides.AutoSparseGP(model, inducing_points=X, natural=True, jitter=1e-8)
    optimizer = sgp.infer.natural_gradients(optax.adam(0.02))
    svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())
    result = svi.run(KEY, 3, X, y, progress_bar=False)
    refined = refine(KEY, model, guide, result, X, y, num_warmup=5, num_samples=5)
    exact = sgp.posterior(collapsed, refined.mcmc.get_samples(), X, y)
    Xs = X[::5] + 0.1
    np.testing.assert_allclose(refined.posterior.mean(Xs), exact.mean(Xs), atol=1e-3)
    np.testing.assert_allclose(refined.posterior.variance(Xs), exact.variance(Xs), rtol=0.02)


@pytest.mark.slow
def test_draws_have_no_deterministic_sites_of_the_function():
    X, y = data()
    guide = sgp.guides.AutoSparseGP(with_level, num_inducing=5)
    svi = SVI(with_level, guide, optax.adam(0.02), sgp.infer.QuadratureELBO())
    run = X, y, "counts", True
    result = svi.run(KEY, 3, *run, progress_bar=False)
    refined = refine(KEY, with_level, guide, result, *run, num_warmup=2, num_samples=2)
    assert refined.mcmc.get_samples().keys() == {"level", "lengthscale"}


@pytest.mark.slow
def test_bad_arguments(unchecked):
    X, y = data()
    guide, result = fitted(True, steps=1)
    with pytest.raises(ValueError, match="the plate `rows` takes a mini-batch"):
        refine(KEY, model, guide, result, X, y, 5)
    with pytest.raises(TypeError, match="`guide` must be an `AutoSparseGP`"):
        refine(KEY, model, AutoDelta(model), result, X, y)
    nested = sgp.guides.AutoSparseGP(model, "f", rest=guide)
    with pytest.raises(ValueError, match="`guide` has a second function in `rest`"):
        refine(KEY, model, nested, result, X, y)
    without_median = sgp.guides.AutoSparseGP(model, rest=lambda X, y: None)
    with pytest.raises(ValueError, match="has no `median`, where the inducing values are"):
        refine(KEY, model, without_median, result, X, y)
    with pytest.raises(ValueError, match="`num_samples` must be"):
        refine(KEY, model, guide, result, X, y, num_samples=0)


@pytest.mark.slow
def test_a_mixture_over_draws_of_the_guide():
    X, y = data()
    guide, result = fitted(True)
    arguments = model, guide, result, X, y
    mixture = sgp.posterior(*arguments, key=KEY, num_draws=3)
    single = [sgp.posterior(*arguments, key=key) for key in jax.random.split(KEY, 3)]
    means = np.stack([posterior.mean(X[:4]) for posterior in single])
    variances = np.stack([posterior.variance(X[:4]) for posterior in single])
    np.testing.assert_allclose(mixture.mean(X[:4]), means.mean(axis=0), rtol=1e-4)
    expected = variances.mean(axis=0) + means.var(axis=0)
    np.testing.assert_allclose(mixture.variance(X[:4]), expected, rtol=1e-4)
    assert np.all(mixture.predictive(X[:4]).variance > mixture.variance(X[:4]))
    with pytest.raises(ValueError, match="`num_draws` is for draws from a guide"):
        sgp.posterior(*arguments, num_draws=3)


@pytest.mark.slow
def test_a_mixture_over_draws_of_a_guide_of_numpyro():
    X, y = data()

    def collapsed(X: Array, y: Array) -> None:
        values = {name: numpyro.sample(name, prior) for name, prior in PRIORS.items()}
        kernel = sgp.kernels.RBF(values["lengthscale"])
        numpyro.sample("y", sgp.GaussianProcess(kernel, X, values["noise"] ** 2), obs=y)

    guide = AutoMultivariateNormal(collapsed)
    svi = SVI(collapsed, guide, optax.adam(0.02), numpyro.infer.Trace_ELBO())
    result = svi.run(KEY, 30, X, y, progress_bar=False)
    mixture = sgp.posterior(collapsed, guide, result, X, y, key=KEY, num_draws=4)
    keys = jax.random.split(KEY, 4)
    means = [sgp.posterior(collapsed, guide, result, X, y, key=key).mean(X[:4]) for key in keys]
    np.testing.assert_allclose(mixture.mean(X[:4]), np.mean(means, axis=0), rtol=1e-4)


@pytest.mark.parametrize("has_mean", (False, True))
def test_sites_of_a_family_without_them(has_mean, x64):
    """The prior times the sites is the family again."""
    X, _ = data()
    Z, kernel = X[:: N // M], sgp.kernels.RBF(0.7)
    rng = np.random.default_rng(1)
    root = rng.normal(size=(M, M))
    scale_tril = jnp.linalg.cholesky(jnp.linalg.inv(jnp.eye(M) + root @ root.T))
    family = sgp.SparseGP(kernel, X, Z, rng.normal(size=M), scale_tril)
    mean = jnp.linspace(-1.0, 2.0, len(Z)) if has_mean else None
    again = NaturalSparseGP(kernel, X, Z, *_sites_of(family, mean), kernel, mean)
    np.testing.assert_allclose(again.loc, family.loc, rtol=1e-9)
    np.testing.assert_allclose(again.scale_tril, family.scale_tril, rtol=1e-9, atol=1e-12)
