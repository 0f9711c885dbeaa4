"""A matrix of outputs in one site, against the dense matrix of all entries' covariances."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.stats import multivariate_normal
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoNormal

import numpyro_scalegp as sgp
from tests.conformance import assert_round_trip, each

N, P, D, M = 6, 3, 2, 4
RNG = np.random.default_rng(0)
X, NEW = RNG.normal(size=(N, D)), RNG.normal(size=(M, D))
Y = RNG.normal(size=(N, P))
OBSERVED = RNG.uniform(size=(N, P)) < 0.7
ROWS = np.array([True, False, True, True, False, True])
PARAMETERS = {
    "lengthscale": np.array([0.8, 1.2]),
    "W": RNG.normal(size=(P, 1)),
    "diag": np.array([0.2, 0.0, 0.5]),
    "mean": RNG.normal(size=P),
}
NOISES = {"one": np.array(0.2), "outputs": np.array([0.1, 0.3, 0.2])}
NOISES["entries"] = RNG.uniform(0.1, 0.4, size=(N, P))

# Masks of observed entries; a NumPy mask is concrete while the density is traced.
MASKS = [
    ("all", lambda: None),
    ("rows", lambda: np.tile(ROWS[:, None], (1, P))),
    ("some", lambda: OBSERVED),
    ("some_traced", lambda: jnp.array(OBSERVED)),
]


def process(parameters, noise, observed=None):
    kernel = sgp.kernels.RBF(parameters["lengthscale"])
    outputs = sgp.kernels.Coregion(parameters["W"], parameters["diag"])
    mean = parameters["mean"]
    return sgp.MultiOutputGP(kernel, outputs, X, noise, mean=mean, observed=observed)


def covariance(parameters, left, right):
    difference = (left[:, None] - right[None]) / parameters["lengthscale"]
    K = jnp.exp(-0.5 * jnp.sum(difference**2, axis=-1))
    W = parameters["W"]
    return jnp.kron(K, W @ W.T + jnp.diag(parameters["diag"]))


def entries(observed):
    """The indices of observed entries in row-major order."""
    return np.flatnonzero(np.ones((N, P), bool) if observed is None else np.asarray(observed))


def dense(parameters, noise, indices, Y=Y):
    """Covariance and residual of the observed entries."""
    H = covariance(parameters, X, X) + jnp.diag(jnp.broadcast_to(noise, (N, P)).ravel())
    residual = (Y - parameters["mean"]).ravel()
    return H[np.ix_(indices, indices)], residual[indices]


def with_gaps(observed):
    return Y if observed is None else np.where(np.asarray(observed), Y, np.nan)


@pytest.mark.parametrize("noise", list(NOISES))
@each("mask", MASKS)
def test_density_of_the_observed_entries(mask, noise, x64):
    observed = mask()
    indices, values = entries(observed), with_gaps(observed)

    def density(parameters, noise, values, observed):
        return process(parameters, noise, observed).log_prob(values)

    def expected(parameters, noise):
        H, residual = dense(parameters, noise, indices)
        return multivariate_normal.logpdf(residual, jnp.zeros(indices.size), H)

    arguments = jax.tree.map(jnp.asarray, (PARAMETERS, NOISES[noise]))
    evaluate = jax.value_and_grad(density, argnums=(0, 1))
    if isinstance(observed, jax.Array):
        value, gradient = jax.jit(evaluate)(*arguments, values, observed)
    else:
        value, gradient = jax.jit(lambda *args: evaluate(*args, values, observed))(*arguments)
    expected_value, expected_gradient = jax.jit(jax.value_and_grad(expected, (0, 1)))(*arguments)
    np.testing.assert_allclose(value, expected_value, rtol=1e-10)
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True)
    for leaf, of_dense in pairs:
        np.testing.assert_allclose(leaf, of_dense, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("noise", ["outputs", "entries"])
@each("mask", MASKS)
def test_posterior_given_the_observed_entries(mask, noise, x64):
    observed = mask()
    indices, values = entries(observed), with_gaps(observed)
    noise = NOISES[noise]

    @jax.jit
    def everything(observed_if_traced):
        mask = observed if observed_if_traced is None else observed_if_traced
        posterior = process(PARAMETERS, noise, mask).condition(values)
        loo = posterior.leave_one_out()
        return posterior, posterior.mean(NEW), posterior.variance(NEW), loo.loc, loo.scale

    traced = observed if isinstance(observed, jax.Array) else None
    posterior, mean, variance, loc, scale = everything(traced)
    H, residual = dense(PARAMETERS, noise, indices)
    cross = covariance(PARAMETERS, NEW, X)[:, indices]
    gain = np.linalg.solve(H, cross.T).T
    expected = np.asarray(gain @ residual).reshape(M, P) + PARAMETERS["mean"]
    np.testing.assert_allclose(mean, expected, rtol=1e-8, atol=1e-10)
    prior = np.tile(np.diag(covariance(PARAMETERS, NEW[:1], NEW[:1])), M)
    explained = np.sum(gain * cross, axis=1)
    np.testing.assert_allclose(variance.ravel(), prior - explained, rtol=1e-8, atol=1e-10)
    np.testing.assert_array_equal(posterior.y, np.nan_to_num(values))

    # Refit without each entry; for hidden entries there is nothing to leave out.
    at_data, flat = covariance(PARAMETERS, X, X), np.broadcast_to(noise, (N, P)).ravel()
    for place in range(N * P):
        remaining = indices[indices != place]
        H, residual = dense(PARAMETERS, noise, remaining)
        weights = np.linalg.solve(H, at_data[remaining, place])
        expected_loc = PARAMETERS["mean"][place % P] + weights @ residual
        left = at_data[place, place] + flat[place] - weights @ at_data[remaining, place]
        np.testing.assert_allclose(loc.ravel()[place], expected_loc, rtol=1e-7)
        np.testing.assert_allclose(scale.ravel()[place] ** 2, left, rtol=1e-7)


@pytest.mark.slow
def test_the_structured_posterior_is_equal_to_the_dense_one(x64):
    """Samples, functions and components, too."""

    @jax.jit
    def everything(noise):
        kernel = sgp.kernels.RBF(PARAMETERS["lengthscale"]) + sgp.kernels.Linear(0.5)
        outputs = sgp.kernels.Coregion(PARAMETERS["W"], PARAMETERS["diag"])
        gp = sgp.MultiOutputGP(kernel, outputs, X, noise, mean=PARAMETERS["mean"])
        posterior = gp.condition(Y)
        parts = [posterior.component(lambda k: k.left), posterior.component(lambda k: k.right)]
        functions = posterior.sample_functions(jax.random.key(0), 2, num_features=8)
        draws = posterior.sample(jax.random.key(0), NEW, 4000)
        moments = posterior.variance(NEW), parts[1].variance(NEW), posterior.mean(NEW)
        return moments, sum(component.mean(NEW) for component in parts), draws, functions(NEW)

    moments = []
    noise = NOISES["outputs"]
    for noise_shape in (noise, np.tile(noise, (N, 1))):
        (*variances, mean), total, draws, values = everything(noise_shape)
        np.testing.assert_allclose(total + PARAMETERS["mean"], mean, rtol=1e-9)
        assert draws.shape == (4000, M, P)
        assert values.shape == (2, M, P)
        flat = np.asarray(draws - mean).reshape(4000, -1)
        moments.append((*variances, flat.T @ flat / 4000))
    for noise_shape, expected in zip(*(pair[:2] for pair in moments), strict=True):
        np.testing.assert_allclose(noise_shape, expected, rtol=1e-8, atol=1e-10)
    # Joint draws: covariances between rows and outputs are the same up to their standard errors.
    first, second = moments[0][2], moments[1][2]
    error = np.sqrt((np.outer(np.diag(first), np.diag(first)) + first**2) * 2 / 4000)
    assert np.all(np.abs(first - second) < 4.5 * error)


@pytest.mark.slow
def test_a_noisy_output_beside_a_precise_one_in_single_precision(x64):
    def variance(dtype):
        W, noise = jnp.ones((2, 1), dtype), jnp.array([1e-6, 1e2], dtype)
        outputs = sgp.kernels.Coregion(W, jnp.full(2, 0.1, dtype))
        kernel = sgp.kernels.Matern12(jnp.asarray(1.0, dtype))
        gp = sgp.MultiOutputGP(kernel, outputs, X.astype(dtype), noise)
        return gp.condition(Y[:, :2].astype(dtype)).variance(NEW.astype(dtype))

    np.testing.assert_allclose(variance(np.float32), variance(np.float64), rtol=1e-2)


def test_prior_draws_have_the_covariance(x64):
    draws = process(PARAMETERS, NOISES["outputs"]).sample(jax.random.key(0), (2, 4000))
    assert draws.shape == (2, 4000, N, P)
    H, _ = dense(PARAMETERS, NOISES["outputs"], entries(None))
    flat = np.asarray(draws - PARAMETERS["mean"]).reshape(8000, -1)
    error = np.sqrt((np.outer(np.diag(H), np.diag(H)) + H**2) / 8000)
    assert np.all(np.abs(flat.T @ flat / 8000 - H) < 4.5 * error)
    assert process(PARAMETERS, 0.1).sample(jax.random.key(1)).shape == (N, P)


@pytest.mark.slow
def test_means_and_predictions():
    def trend(X):
        return X[:, :1] * jnp.array([1.0, 0.0, -1.0])

    outputs = sgp.kernels.Coregion(jnp.eye(P, 1), jnp.ones(P))
    make = functools.partial(sgp.MultiOutputGP, sgp.kernels.RBF(1.0), outputs, X)
    np.testing.assert_allclose(make(0.1, mean=trend).mean, trend(jnp.array(X)))
    np.testing.assert_allclose(make(0.1).mean, np.zeros((N, P)))
    np.testing.assert_allclose(make(0.1, mean=2.0).mean, np.full((N, P), 2.0))
    np.testing.assert_allclose(make(0.1).variance[0], [2.1, 1.1, 1.1], rtol=1e-6)
    noise = jnp.array([0.1, 0.2, 0.3])
    posterior = make(noise, mean=trend).condition(Y)
    predictive = posterior.predictive(NEW)
    np.testing.assert_allclose(predictive.variance, posterior.variance(NEW) + noise, rtol=1e-5)
    assert posterior.at_data().batch_shape == (N, P)
    of_entries = make(jnp.full((N, P), 0.1)).condition(Y)
    with pytest.raises(ValueError, match=r"one noise variance for each entry"):
        of_entries.predictive(NEW)
    assert of_entries.predictive(NEW, 0.2).batch_shape == (M, P)
    # In long format, a component has the same categories of outputs.
    component = of_entries.component(lambda kernel: kernel)
    np.testing.assert_allclose(component.mean(NEW), of_entries.mean(NEW), rtol=1e-5)
    with pytest.raises(ValueError, match=r"\(\) or \(3,\), got \(4,\): .* for each output"):
        posterior.predictive(NEW, np.ones(M))


def test_derivatives_of_the_posterior_are_right_or_refused(x64):
    def value(parameters, Xs):
        return jnp.sum(process(parameters, 0.1).condition(Y).mean(Xs))

    lengthscale = jnp.asarray(PARAMETERS["lengthscale"])

    def of_lengthscale(lengthscale):
        return value({**PARAMETERS, "lengthscale": lengthscale}, NEW)

    step = 1e-5 * np.eye(D)
    expected = [
        (of_lengthscale(lengthscale + offset) - of_lengthscale(lengthscale - offset)) / 2e-5
        for offset in step
    ]
    np.testing.assert_allclose(jax.grad(of_lengthscale)(lengthscale), expected, rtol=1e-6)
    with pytest.raises(
        TypeError, match="no derivatives with respect to `outputs` and `noise_variance`"
    ):
        jax.grad(lambda W: value({**PARAMETERS, "W": W}, NEW))(PARAMETERS["W"])


# In models


def model(X, Y=None, observed=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    W = numpyro.sample("W", dist.Normal(jnp.eye(2, 1), 1.0).to_event(2))
    diagonal = numpyro.sample("own", dist.LogNormal(-1.0, 0.5).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 0.5).expand([2]).to_event(1))
    outputs = sgp.kernels.Coregion(W, diagonal)
    gp = sgp.MultiOutputGP(sgp.kernels.RBF(lengthscale), outputs, X, noise, observed=observed)
    numpyro.sample("y", gp, obs=Y)


def data(observed):
    rng = np.random.default_rng(1)
    X = np.sort(rng.uniform(-2.0, 2.0, size=(12, 1)), axis=0)
    f = np.concatenate([np.sin(2 * X), 0.5 * np.sin(2 * X)], axis=1)
    Y = f + 0.1 * rng.normal(size=f.shape)
    Y = np.where(rng.uniform(size=Y.shape) < 0.7, Y, np.nan) if observed else Y
    return jnp.array(X), jnp.array(Y), (~np.isnan(Y) if observed else None)


@pytest.mark.slow
@pytest.mark.parametrize("gaps", [False, True], ids=["complete", "gaps"])
def test_models_train_and_predict(gaps, tmp_path):
    X, Y, observed = data(gaps)
    guide = AutoNormal(model, init_scale=0.1)
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
    result = svi.run(jax.random.key(0), 60, X, Y, observed, progress_bar=False)
    assert result.losses[-1] < result.losses[0]
    posterior = sgp.posterior(model, guide, result, X, Y, observed)
    mean = posterior.mean(X)
    assert mean.shape == (12, 2)
    assert np.nanmean((mean - Y) ** 2) < 0.1

    if not gaps:
        sgp.save(tmp_path / "posterior", posterior)
        np.testing.assert_array_equal(sgp.load(tmp_path / "posterior").mean(X), mean)
        return
    new = jnp.linspace(-1.0, 1.0, 3)[:, None]
    predictive = sgp.infer.Predictive(
        model, guide=guide, params=result.params, data=(X, Y, observed), num_samples=5
    )
    assert predictive(jax.random.key(1), new)["y"].shape == (5, 3, 2)

    exported = sgp.to_arviz(
        result, model, guide, key=jax.random.key(2), model_args=(X, Y, observed), num_samples=4
    )
    terms = np.asarray(exported["log_likelihood"]["y"])
    assert terms.shape == (1, 4, observed.sum())
    assert np.isfinite(terms).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a covariance matrix:RuntimeWarning")
def test_nuts_and_its_posterior():
    X, Y, _ = data(False)
    mcmc = MCMC(NUTS(model), num_warmup=20, num_samples=8, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    posterior = sgp.posterior(model, mcmc.get_samples(), X, Y)
    assert posterior.mean(X[:3]).shape == posterior.variance(X[:3]).shape == (3, 2)
    assert posterior.predictive(X[:3]).batch_shape == (3, 2)
    assert posterior.sample(jax.random.key(1), X[:3], 2).shape == (2, 3, 2)
    assert np.isfinite(posterior.mean(X[:3])).all()


@pytest.mark.slow
def test_laplace_approximation():
    X, Y, _ = data(False)
    guide = AutoLaplaceApproximation(model)
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
    result = svi.run(jax.random.key(0), 150, X, Y, progress_bar=False)
    samples = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(3,))
    assert samples["W"].shape == (3, 2, 1)
    assert all(np.isfinite(leaf).all() for leaf in samples.values())


@pytest.mark.slow
def test_it_is_a_distribution_of_numpyro():
    gp = process(PARAMETERS, 0.1, jnp.array(OBSERVED))
    assert_round_trip(gp)
    value = jnp.array(with_gaps(OBSERVED))
    density = jax.jit(lambda gp, value: gp.log_prob(value))(gp, value)
    np.testing.assert_allclose(density, gp.log_prob(value), rtol=1e-5)
    copies = gp.expand([2])
    assert copies.batch_shape == (2,)
    np.testing.assert_allclose(copies.log_prob(jnp.stack([value, value])), [density] * 2, rtol=1e-5)

    def drawn():
        return numpyro.sample("y", process(PARAMETERS, 0.1))

    assert handlers.seed(drawn, jax.random.key(0))().shape == (N, P)
    with pytest.raises(ValueError, match=r"got a mask of shape \(6, 3\) with 6 rows in `X`"):
        gp.mask(OBSERVED)
    with pytest.raises(ValueError, match=r"take the site out of the plate over the rows"):
        gp.expand([N])
