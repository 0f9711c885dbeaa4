"""Posterior predictive draws against NumPyro's own and against dense algebra."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from jaxtyping import Array
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_scalegp as sgp
from numpyro_scalegp.infer import Predictive
from tests.compilation import assert_compiled_once

N = 8
KEY = jax.random.key(0)
X = jnp.linspace(-1.5, 1.5, N)[:, None]
Y = jnp.sin(2 * X[:, 0])


def linear(X: Array, y: Array | None = None) -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    line = numpyro.deterministic("line", slope * X[:, 0])
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(line, 0.5), obs=y)


def slopes(num: int) -> dict[str, Array]:
    return {"slope": 1.0 + 0.3 * jax.random.normal(jax.random.key(7), (num,))}


def assert_same_distribution(left: np.ndarray, right: np.ndarray) -> None:
    """Means and variances of two sets of draws agree within four standard errors."""
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    error = np.sqrt(left.var(axis=0) / len(left) + right.var(axis=0) / len(right))
    assert np.all(np.abs(left.mean(axis=0) - right.mean(axis=0)) < 4 * error + 1e-6)
    # For approximately normal draws.
    spread = np.sqrt(2 / len(left) + 2 / len(right)) * right.var(axis=0)
    assert np.all(np.abs(left.var(axis=0) - right.var(axis=0)) < 4 * spread + 1e-6)


@pytest.mark.parametrize("observations", [None, Y])
def test_draws_agree_with_numpyro(observations):
    samples = slopes(3000)
    ours = Predictive(linear, posterior_samples=samples, chunk_size=1000)(KEY, X, observations)
    theirs = numpyro.infer.Predictive(linear, samples)(jax.random.key(1), X)
    np.testing.assert_array_equal(ours["slope"], samples["slope"])
    np.testing.assert_allclose(ours["line"], theirs["line"], rtol=1e-6)
    assert ours["y"].shape == (3000, N)
    assert_same_distribution(ours["y"], theirs["y"])


def gp_model(X: Array, y: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.slow
def test_draws_by_a_guide_agree_with_numpyro():
    guide = sgp.guides.AutoSparseGP(gp_model, inducing_points=X[::2])
    svi = SVI(gp_model, guide, optax.adam(0.05), sgp.infer.QuadratureELBO(2))
    params = svi.run(KEY, 50, X, Y, progress_bar=False).params
    Xs = X[:3] + 0.1
    ours = Predictive(gp_model, guide=guide, params=params, num_samples=3000, chunk_size=3000)
    draws = ours(jax.random.key(1), Xs)
    theirs = functools.partial(numpyro.infer.Predictive, params=params, num_samples=3000)
    expected = theirs(guide)(jax.random.key(2), Xs)
    expected["y"] = theirs(gp_model, guide=guide)(jax.random.key(3), Xs)["y"]
    assert {name: leaf.shape for name, leaf in draws.items()} == {
        "lengthscale": (3000,),
        "f": (3000, 3),
        "y": (3000, 3),
    }
    for name in ("f", "y"):
        assert_same_distribution(draws[name], expected[name])
    assert_same_distribution(np.log(draws["lengthscale"]), np.log(expected["lengthscale"]))


def collapsed(X: Array, y: Array | None = None, noise: Any = 0.05) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, noise), obs=y)


PER_ROW = jnp.linspace(0.02, 0.2, N)


@pytest.mark.parametrize("noise", [0.05, PER_ROW], ids=["scalar", "per_row"])
def test_collapsed_site_is_replicated_from_its_posterior(noise, x64):
    y = jnp.asarray(Y, float)
    samples = {"lengthscale": jnp.full(4000, 0.7)}
    draws = Predictive(collapsed, posterior_samples=samples, chunk_size=4000).draws(
        KEY, jnp.asarray(X, float), y, noise=noise
    )
    x = np.asarray(X, float)
    K = np.exp(-0.5 * (x - x.T) ** 2 / 0.49)
    noises = np.broadcast_to(noise, N)
    H = K + np.diag(noises)
    mean = K @ np.linalg.solve(H, y)
    variance = np.diagonal(K - K @ np.linalg.solve(H, K)) + noises
    replicates = draws.predictive["y"]
    assert np.all(np.abs(replicates.mean(axis=0) - mean) < 4 * np.sqrt(variance / 4000))
    spread = np.abs(replicates.var(axis=0) - variance)
    assert np.all(spread < 4 * variance * np.sqrt(2 / 4000))
    # The prior has mean zero and variance above one: far away.
    assert np.all(variance < 0.5)

    precision = np.linalg.inv(H)
    held_out = dist.Normal(y - precision @ y / precision.diagonal(), precision.diagonal() ** -0.5)
    np.testing.assert_allclose(draws.log_likelihood["y"][0], held_out.log_prob(y), rtol=1e-8)
    np.testing.assert_array_equal(draws.diagnostics["y"]["jitter"], np.zeros(4000))
    np.testing.assert_array_equal(draws.observed["y"][17], y)
    density = draws.log_predictive_density()["y"]
    np.testing.assert_allclose(density, held_out.log_prob(y), rtol=1e-8)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_chunks_change_nothing(chunk_size):
    samples = slopes(7)
    expected = Predictive(linear, posterior_samples=samples, chunk_size=7).draws(KEY, X, Y)
    draws = Predictive(linear, posterior_samples=samples, chunk_size=chunk_size).draws(KEY, X, Y)
    jax.tree.map(np.testing.assert_array_equal, draws, expected)
    assert draws.predictive["y"].shape == (7, N)
    assert len(np.unique(draws.predictive["y"][:, 0])) == 7


def test_draws_lie_on_the_host_and_hold_every_kind_of_site():
    draws = Predictive(linear, posterior_samples=slopes(5)).draws(KEY, X, Y)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(draws))
    assert set(draws.sites) == {"slope", "line"}
    assert set(draws.predictive) == set(draws.log_likelihood) == set(draws.observed) == {"y"}
    assert draws.diagnostics == {}
    expected = dist.Normal(draws.sites["line"], 0.5).log_prob(Y)
    np.testing.assert_allclose(draws.log_likelihood["y"], expected, rtol=1e-5)
    density = np.log(np.mean(np.exp(np.asarray(expected, np.float64)), axis=0))
    np.testing.assert_allclose(draws.log_predictive_density()["y"], density, rtol=1e-5)


def test_a_guide_or_draws():
    message = "give either a `guide` with its `params`, or `posterior_samples`"
    with pytest.raises(ValueError, match=message):
        Predictive(linear, guide=linear, params={}, posterior_samples=slopes(2))
    with pytest.raises(ValueError, match="`data` needs a `guide` or `posterior_samples`"):
        Predictive(linear, data=(X, Y))


def test_without_either_draws_are_of_the_prior():
    predictive = Predictive(gp_model, num_samples=3000)
    draws = predictive(KEY, X)
    assert draws["f"].shape == draws["y"].shape == (3000, N)
    assert abs(np.mean(np.square(draws["f"])) - 1.0) < 0.1


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({}, r"leading axis of draws, the same for all, got the shapes \{\}"),
        ({"slope": 1.0}, r"got the shapes \{'slope': \(\)\}"),
        ({**slopes(3), "line": jnp.zeros(4)}, r"'slope': \(3,\), 'line': \(4,\)"),
        ({"slope": jnp.zeros((2, 5))}, r"a draw of the site `slope`.* \(5,\).* site \(\).*chain"),
        ({"slop": jnp.zeros(2)}, r"has \['slop'\], and the model none of these.*\['slope'\]"),
    ],
)
def test_draws_of_another_model_or_shape(samples, message):
    with pytest.raises(ValueError, match=message):
        Predictive(linear, posterior_samples=samples)(KEY, X, Y)


def test_parameters_that_are_missing():
    """Initial parameters of a guide must not stand in for missing ones."""
    guide = sgp.guides.AutoSparseGP(gp_model, inducing_points=X[::2])
    init = SVI(gp_model, guide, optax.adam(0.05), sgp.infer.QuadratureELBO(2)).init
    jax.eval_shape(init, KEY, X, Y)
    with pytest.raises(ValueError, match="`params` lacks `lengthscale_auto_loc`"):
        Predictive(gp_model, guide=guide)(KEY, X)


def noisy(X: Array, Y: Array | None = None) -> None:
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.2))
    numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, noise, mean=2.0), obs=Y)


def bernoulli(X: Array, Y: Array | None = None) -> None:
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
    numpyro.deterministic("p", jax.nn.sigmoid(f))
    numpyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=Y)


NEW = X[::-1] + 2.0  # as many rows as there were


@pytest.mark.parametrize("joint", [False, True])
def test_a_collapsed_gp_at_new_inputs(joint, x64):
    samples = {"noise": jnp.array([0.2, 0.5] * 2000)}
    draws = Predictive(noisy, posterior_samples=samples, data=(X, Y), joint=joint)(KEY, NEW)
    gps = [sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, s, mean=2.0) for s in (0.2, 0.5)]
    exact = [gp.condition(Y).predictive(NEW) for gp in gps]
    for number in range(2):
        y, normal = draws["y"][number::2], exact[number]
        assert np.all(np.abs(y.mean(axis=0) - normal.mean) < 5.0 * normal.scale / 2000**0.5)
        np.testing.assert_allclose(y.var(axis=0), normal.variance, rtol=0.2)
    covariance = exact[0].variance[0]
    if joint:
        covariance = gps[0].condition(Y).covariance(NEW)[0, 1]
        of_draws = np.cov(draws["y"][::2, :2], rowvar=False)[0, 1]
        assert abs(of_draws - covariance) < 0.2 * abs(covariance)
    test = Predictive(noisy, posterior_samples=samples, data=(X, Y)).draws(KEY, NEW, Y)
    np.testing.assert_allclose(test.log_likelihood["y"][0], exact[0].log_prob(Y), rtol=1e-5)


def test_replicates_of_a_collapsed_gp_at_its_own_inputs_are_joint(x64):
    samples = {"noise": jnp.full(4000, 0.05)}
    joint = Predictive(noisy, posterior_samples=samples, joint=True).draws(KEY, X, Y)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.05, mean=2.0)
    expected = gp.condition(Y).covariance(X) + 0.05 * jnp.eye(N)
    covariance = np.cov(joint.predictive["y"], rowvar=False)
    error = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / 4000)
    assert np.all(np.abs(covariance - expected) < 5.0 * error)
    assert abs(expected[0, 1]) > 5.0 * error[0, 1]


@pytest.mark.slow
def test_draws_of_a_function_at_new_inputs(x64):
    """The function is predicted given its values in the fit, and does not repeat them."""
    f = jnp.sin(jnp.arange(N) + jnp.arange(4000.0)[:, None])
    draws = Predictive(bernoulli, posterior_samples={"f": f}, data=(X, Y > 0))(KEY, NEW)
    prior = sgp.LatentGP(sgp.kernels.RBF(1.0), X)
    expected = np.array([prior.condition(f[i]).mean(NEW) for i in range(3)])
    error = draws["f"][:3] - expected
    assert np.all(np.abs(error) < 6.0 * np.sqrt(prior.condition(f[0]).variance(NEW)))
    weights = jnp.linalg.solve(prior.covariance(), f.T)
    expected = weights.T @ sgp.kernels.RBF(1.0)(X, NEW)
    posterior = prior.condition(f[0])
    error = draws["f"] - expected
    variance = np.asarray(posterior.variance(NEW))
    assert np.all(np.abs(error.mean(axis=0)) < 5.0 * np.sqrt(variance / 4000) + 1e-3)
    np.testing.assert_allclose(error.var(axis=0), variance, rtol=0.2, atol=1e-4)
    np.testing.assert_allclose(draws["p"], jax.nn.sigmoid(draws["f"]), rtol=1e-6)
    assert abs(draws["y"].mean() - draws["p"].mean()) < 0.02


@pytest.mark.slow
def test_a_guide_of_hyperparameters_at_new_inputs(x64):
    guide = AutoNormal(noisy)
    svi = SVI(noisy, guide, optax.adam(0.1), Trace_ELBO())
    params = svi.get_params(svi.init(KEY, X, Y))
    with_data = Predictive(noisy, guide=guide, params=params, num_samples=500, data=(X, Y))
    expected = with_data(KEY, NEW)
    exact = sgp.posterior(noisy, guide, params, X, Y).predictive(NEW)
    assert np.all(np.abs(expected["y"].mean(axis=0) - exact.mean) < 6.0 * exact.scale / 500**0.5)
    first_run = Predictive(noisy, guide=guide, params=params, num_samples=500)
    with pytest.warns(UserWarning, match=f"`y` is conditioned on the {N} rows .*data=\\(X, y\\)"):
        predicted = first_run(KEY, NEW)
    assert np.all(np.abs(predicted["y"].mean(axis=0) - exact.mean) < 6.0 * exact.scale / 500**0.5)
    # In a new process, the guide has not run on data.
    fresh = Predictive(noisy, guide=AutoNormal(noisy), params=params, num_samples=2)
    with pytest.raises(ValueError, match=r"has not run yet|data=\(X, y\)"):
        fresh(KEY, NEW)
    again = Predictive(noisy, guide=AutoNormal(noisy), params=params, num_samples=500, data=(X, Y))
    np.testing.assert_allclose(again(KEY, NEW)["y"], expected["y"], rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "samples"),
    [(noisy, {"noise": jnp.ones(2)}), (bernoulli, {"f": jnp.zeros((2, N))})],
)
def test_a_function_is_never_drawn_from_its_prior(model, samples):
    """Nor does it keep its values in the fit, if the new inputs are equally many."""
    predictive = Predictive(model, posterior_samples=samples)
    with pytest.raises(ValueError, match=r"neither observations nor draws.*prior.*data=\(X, y\)"):
        predictive(KEY, NEW)


def test_held_hyperparameters_are_conditioned_on_once():
    solves = 0

    class Counted(sgp.estimators.Cholesky):
        def factorize(self, *args: Any) -> Any:
            nonlocal solves
            jax.debug.callback(count)
            return super().factorize(*args)

    def count() -> None:
        nonlocal solves
        solves += 1

    def model(X: Array, Y: Array | None = None) -> None:
        scale = numpyro.param("scale", 0.7)
        gp = sgp.GaussianProcess(sgp.kernels.RBF(scale), X, 0.1, estimator=Counted())
        numpyro.sample("y", gp, obs=Y)

    options = {"guide": lambda X, Y=None: None, "params": {"scale": 0.5}, "num_samples": 20}
    predictive = Predictive(model, data=(X, Y), **options)
    predicted = predictive(KEY, NEW)["y"]
    jax.effects_barrier()
    assert solves == 1
    assert len(np.unique(predicted[:, 0])) == 20


def test_a_second_call_compiles_nothing():
    predictive = Predictive(noisy, posterior_samples={"noise": jnp.ones(2)}, data=(X, Y))
    assert_compiled_once(lambda shift: predictive(jax.random.key(1), NEW + shift))


@pytest.mark.slow
def test_sites_that_combine_rows():
    """Independent draws of rows give a sum the wrong spread; joint draws the right one."""
    kernel = sgp.kernels.RBF(1.0)

    def model() -> None:
        f = numpyro.sample("f", sgp.LatentGP(kernel, X))
        numpyro.deterministic("square", f**2)
        numpyro.deterministic("sum", jnp.sum(f))
        numpyro.sample("y", dist.Normal(f[:-1] - f[1:], 1.0))

    process = sgp.SparseGP(kernel, X, X[::3], jnp.array([0.3, 0.1, -0.3]), 0.5 * jnp.eye(3))
    options = {"guide": lambda: numpyro.sample("f", process), "num_samples": 4000}
    with pytest.warns(UserWarning, match="^`sum`, `y` combine rows of the function `f`.*joint="):
        by_rows = Predictive(model, **options)(KEY)["sum"]
    jointly = Predictive(model, joint=True, **options)(KEY)["sum"]
    sums = process.posterior().sample(jax.random.key(5), X, 4000).sum(axis=1)
    assert_same_distribution(jointly, sums)
    with pytest.raises(AssertionError):
        assert_same_distribution(by_rows, sums)


def test_only_latent_sites_take_the_values_of_draws():
    """Deterministic sites are recomputed at new inputs, and observations are kept."""
    samples = {**slopes(3), "line": jnp.full((3, N), 7.0), "y": jnp.full((3, 2), 7.0)}
    samples["rows"] = jnp.ones((3, N), int)  # a plate's indices, as from HMCECS
    draws = Predictive(linear, posterior_samples=samples).draws(KEY, X[:2] + 1.0, Y[:2])
    expected = samples["slope"][:, None] * (X[:2, 0] + 1.0)
    np.testing.assert_allclose(draws.sites["line"], expected, rtol=1e-6)
    np.testing.assert_array_equal(draws.observed["y"], np.tile(Y[:2], (3, 1)))


def test_factor_terms_are_no_data(x64):
    """Factors in the prior, and NeuTra's factors, do not count as observations of the fit."""

    def model(X: Array, y: Array | None = None) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
        numpyro.factor("prior", -0.1 * jnp.sum(f**2))
        numpyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=y)

    samples = {"f": jnp.stack([jnp.sin(X[:, 0])] * 3)}
    draws = Predictive(model, posterior_samples=samples).draws(KEY, X, Y)
    assert set(draws.predictive) == set(draws.log_likelihood) == set(draws.observed) == {"y"}
    assert set(draws.log_predictive_density()) == {"y"}
    with pytest.raises(ValueError, match="neither observations nor draws"):
        Predictive(model, posterior_samples=samples)(KEY, NEW)


def test_a_collapsed_site_in_a_plate_is_refused():
    def model(X: Array, Y: Array) -> None:
        with numpyro.plate("outputs", 2):
            numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1), obs=Y)

    draws = Predictive(model, posterior_samples={"unused": jnp.zeros(2)})
    with pytest.raises(ValueError, match="GP site `y` stands inside a plate"):
        draws(jax.random.key(0), jnp.ones((3, 1)), jnp.zeros((2, 3)))


@pytest.mark.parametrize("level", [1e4, 1e6])
def test_log_likelihoods_of_large_counts_keep_their_digits(level):
    """Against float64 with the same rates; NumPyro's log likelihoods are off by several nats."""
    counts = np.random.default_rng(0).poisson(level, N)
    trials = 2 * counts

    def model(y: Any = None, k: Any = None) -> None:
        rate = numpyro.sample("rate", dist.LogNormal(np.log(level), 0.001))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Poisson(rate), obs=y)
            numpyro.sample("k", dist.Binomial(trials, 0.5), obs=k)

    rates = {"rate": jnp.asarray(level * np.array([0.999, 1.001]), jnp.float32)}
    draws = Predictive(model, posterior_samples=rates).draws(KEY, counts, counts)
    rate = np.asarray(rates["rate"], float)[:, None]
    log_likelihood = draws.log_likelihood
    np.testing.assert_allclose(
        log_likelihood["y"], scipy.stats.poisson(rate).logpmf(counts), rtol=1e-5
    )
    expected = np.broadcast_to(scipy.stats.binom(trials, 0.5).logpmf(counts), (2, N))
    np.testing.assert_allclose(log_likelihood["k"], expected, rtol=1e-5)


def test_log_likelihoods_outside_of_the_support():
    def model(y: Any = None) -> None:
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Uniform(slope, slope + 1.0).expand((N,)), obs=y)

    y = jnp.linspace(0.0, 3.0, N)
    log_likelihood = (
        Predictive(model, posterior_samples=slopes(3)).draws(KEY, y).log_likelihood["y"]
    )
    expected = scipy.stats.uniform.logpdf(y, slopes(3)["slope"][:, None], 1.0)
    np.testing.assert_allclose(log_likelihood, expected, atol=1e-5)
    assert np.isneginf(log_likelihood).any()


class Tilted(dist.Distribution):
    """A distribution that does not declare its parameters as pytree fields."""

    support = dist.constraints.real

    def __init__(self, slope: Array) -> None:
        self.slope = slope
        super().__init__(jnp.shape(slope))

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.slope + jax.random.normal(key, sample_shape + self.batch_shape)

    def log_prob(self, value: Array) -> Array:
        return dist.Normal(self.slope, 1.0).log_prob(value)


def test_log_likelihoods_of_a_distribution_that_is_no_pytree():
    def model(y: Any = None) -> None:
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.sample("y", Tilted(slope * X[:, 0]), obs=y)

    log_likelihood = (
        Predictive(model, posterior_samples=slopes(3)).draws(KEY, Y).log_likelihood["y"]
    )
    expected = scipy.stats.norm.logpdf(Y, slopes(3)["slope"][:, None] * X[:, 0], 1.0)
    np.testing.assert_allclose(log_likelihood, expected, rtol=1e-5)
