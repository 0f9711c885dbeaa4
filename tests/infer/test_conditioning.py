"""`sgp.posterior`, for each kind of fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoIAFNormal, AutoLaplaceApproximation, AutoNormal

import numpyro_scalegp as sgp

KEY = jax.random.key(0)
X = jnp.linspace(0.0, 2.0, 9)[:, None]
Y = jnp.sin(3.0 * X[:, 0])
XS = jnp.linspace(-0.3, 2.5, 4)[:, None]


def kernel(lengthscale):
    return sgp.kernels.Matern32(lengthscale, 1.3)


def collapsed(X, y=None, estimator=None, state=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    gp = sgp.GaussianProcess(
        kernel(lengthscale), X, noise**2, mean=0.5, estimator=estimator, state=state
    )
    numpyro.sample("y", gp, obs=y)


def latent(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    f = numpyro.sample("f", sgp.LatentGP(kernel(lengthscale), X))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def started(model, guide, loss, *args):
    """Perturbed initial parameters, and mutable state."""
    svi = SVI(model, guide, optax.adam(0.1), loss)
    state = svi.init(KEY, *args)
    moved = {n: 0.9 * p if p.ndim > 1 else p + 0.1 for n, p in svi.get_params(state).items()}
    return {**moved, **(state.mutable_state or {})}


def assert_same(left, right):
    np.testing.assert_allclose(left.mean(XS), right.mean(XS), rtol=2e-5)
    np.testing.assert_allclose(left.variance(XS), right.variance(XS), rtol=2e-5)


def test_of_a_collapsed_gp():
    guide = AutoNormal(collapsed)
    params = started(collapsed, guide, Trace_ELBO(), X, Y)
    posterior = sgp.posterior(collapsed, guide, params, X, Y)
    median = guide.median(params)
    gp = sgp.GaussianProcess(kernel(median["lengthscale"]), X, median["noise"] ** 2, mean=0.5)
    assert_same(posterior, gp.condition(Y))
    expected = posterior.variance(XS) + median["noise"] ** 2
    np.testing.assert_allclose(posterior.predictive(XS).variance, expected, rtol=1e-5)
    draw = sgp.posterior(collapsed, guide, params, X, Y, key=jax.random.key(1))
    assert not np.allclose(draw.mean(XS), posterior.mean(XS), rtol=1e-3)
    with pytest.raises(ValueError, match="GP site `y` has no observations"):
        sgp.posterior(collapsed, guide, params, X)
    with pytest.raises(ValueError, match="`params` lacks `lengthscale_auto_loc`"):
        sgp.posterior(collapsed, guide, {}, X, Y)
    with pytest.raises(TypeError, match=r"after the guide, give what `SVI.run` returned"):
        sgp.posterior(collapsed, guide, X, Y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda model, **options: sgp.guides.AutoSparseGP(model, num_inducing=4, **options),
        lambda model, **options: sgp.guides.AutoDecoupledGP(
            model, mean_points=X[::2], cov_points=X[::3], **options
        ),
        lambda model, **options: sgp.guides.AutoHybridGP(
            model, num_inducing=3, num_residual=5, **options
        ),
    ],
)
def test_of_a_guide(make):
    guide = make(latent)
    params = started(latent, guide, sgp.infer.QuadratureELBO(2), X, Y)
    posterior = sgp.posterior(latent, guide, params, X, Y)
    assert_same(posterior, guide.posterior(params, X, Y))
    noise = guide.median(params)["noise"] ** 2
    expected = posterior.variance(XS) + noise
    np.testing.assert_allclose(posterior.predictive(XS).variance, expected, rtol=1e-5)
    draw = sgp.posterior(latent, guide, params, X, Y, key=KEY)
    assert_same(draw, guide.posterior(params, X, Y, key=KEY))
    noise = guide.rest_values(params, X, Y, key=KEY)["noise"]
    assert float(draw.noise_variance) == pytest.approx(float(noise) ** 2)


def test_of_one_of_two_sites():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.LatentGP(kernel(0.5), X))
        g = numpyro.sample("g", sgp.LatentGP(kernel(1.5), X))
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)).to_event(1), obs=y)

    rest = functools.partial(sgp.guides.AutoSparseGP, num_inducing=3)
    guide = sgp.guides.AutoSparseGP(model, "f", rest=rest, num_inducing=4)
    params = started(model, guide, sgp.infer.QuadratureELBO(2), X, Y)
    with pytest.raises(ValueError, match=r"the GP sites \['f', 'g'\]: name one with `site=`"):
        sgp.posterior(model, guide, params, X, Y)
    with pytest.raises(ValueError, match=r"`site` is 'h', and the model's GP sites are"):
        sgp.posterior(model, guide, params, X, Y, site="h")
    assert_same(sgp.posterior(model, guide, params, X, Y, site="f"), guide.posterior(params, X, Y))
    inner = guide.rest.posterior(params, X, Y)
    posterior = sgp.posterior(model, guide, params, X, Y, site="g")
    assert_same(posterior, inner)
    with pytest.raises(ValueError, match="has no Gaussian noise"):
        posterior.predictive(XS)


def test_over_draws_of_two_functions(x64):
    """A draw of each function is found by name, with any other sites among the draws."""

    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
        g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.Matern32(0.3), X))
        total = numpyro.deterministic("total", f + g)
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(total, noise), obs=y)

    X = jnp.linspace(0.0, 3.0, 5)[:, None]
    f, g = jnp.sin(X[:, 0] + jnp.arange(3.0)[:, None]), jnp.cos(2.0 * X[:, 0] * jnp.ones((3, 1)))
    draws = {"f": f, "g": g, "noise": jnp.ones(3), "total": f + g}
    for name in ("f", "g"):
        posterior = sgp.posterior(model, draws, X, X[:, 0], site=name)
        np.testing.assert_allclose(posterior.mean(X), draws[name].mean(axis=0), atol=1e-6)
    with pytest.raises(ValueError, match=r"the GP sites \['f', 'g'\]: name one with `site=`"):
        sgp.posterior(model, draws, X, X[:, 0])


def test_of_a_guide_written_by_hand():
    process = sgp.SparseGP(kernel(0.7), X, X[::3], jnp.array([0.3, 0.1, -0.3]), 0.5 * jnp.eye(3))

    def model(X, y=None):
        f = numpyro.sample("f", sgp.LatentGP(kernel(0.7), X))
        numpyro.sample("y", dist.Normal(f, 0.2).to_event(1), obs=y)

    def guide(X, y=None):
        numpyro.sample("f", process)

    posterior = sgp.posterior(model, guide, {}, X, Y)
    assert_same(posterior, process.posterior())
    assert float(posterior.noise_variance) == pytest.approx(0.04)

    def random(X, y=None):
        numpyro.sample("scale", dist.LogNormal())
        numpyro.sample("f", process)

    with pytest.raises(ValueError, match=r"no medians of \['scale'\]: give a `key`"):
        sgp.posterior(model, random, {}, X, Y)
    assert_same(sgp.posterior(model, random, {}, X, Y, key=KEY), process.posterior())


def by_hand(draws, each):
    """Moments of the mixture over draws, computed one draw at a time."""
    posteriors = [
        each({name: leaf[i] for name, leaf in draws.items()}) for i in range(len(draws["noise"]))
    ]
    means, variances = (
        np.array([np.asarray(getattr(p, moment)(XS)) for p in posteriors])
        for moment in ("mean", "variance")
    )
    return means.mean(axis=0), variances.mean(axis=0) + means.var(axis=0)


def draws_of(model, names):
    generator = np.random.default_rng(1)
    values = {
        "lengthscale": generator.uniform(0.3, 0.9, 5),
        "noise": generator.uniform(0.1, 0.4, 5),
        "f": generator.normal(size=(5, len(X))),
    }
    return {name: jnp.array(values[name]) for name in names}


@pytest.mark.slow
def test_over_draws_of_a_collapsed_gp(x64):
    draws = draws_of(collapsed, ["lengthscale", "noise"])
    posterior = sgp.posterior(collapsed, draws, X, Y)

    def each(draw):
        gp = sgp.GaussianProcess(kernel(draw["lengthscale"]), X, draw["noise"] ** 2, mean=0.5)
        return gp.condition(Y)

    mean, variance = by_hand(draws, each)
    np.testing.assert_allclose(posterior.mean(XS), mean, rtol=1e-9)
    np.testing.assert_allclose(posterior.variance(XS), variance, rtol=1e-9)
    predictive = posterior.predictive(XS)
    noise = np.mean(np.square(draws["noise"]))
    np.testing.assert_allclose(predictive.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(predictive.variance, variance + noise, rtol=1e-9)
    samples = posterior.sample(KEY, XS, 4000)
    assert np.all(np.abs(samples.mean(axis=0) - mean) < 5.0 * np.sqrt(variance / 4000))
    assert np.all(np.abs(np.var(samples, axis=0) - variance) < 0.2 * variance)
    assert posterior.diagnostics["jitter"].shape == (5,)
    with pytest.raises(ValueError, match="`key` is for one draw of a guide"):
        sgp.posterior(collapsed, draws, X, Y, key=KEY)


@pytest.mark.slow
def test_over_draws_of_a_latent_function(x64):
    draws = draws_of(latent, ["lengthscale", "noise", "f"])
    posterior = sgp.posterior(latent, draws, X, Y)

    def each(draw):
        return sgp.LatentGP(kernel(draw["lengthscale"]), X).condition(draw["f"])

    mean, variance = by_hand(draws, each)
    np.testing.assert_allclose(posterior.mean(XS), mean, rtol=1e-9)
    np.testing.assert_allclose(posterior.variance(XS), variance, rtol=1e-9)
    noise = np.mean(np.square(draws["noise"]))
    np.testing.assert_allclose(posterior.predictive(XS).variance, variance + noise, rtol=1e-9)
    with pytest.raises(ValueError, match="none of the function `f`"):
        sgp.posterior(latent, {"noise": jnp.ones(3)}, X, Y)


def in_a_plate(X, Y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    with numpyro.plate("each", 2, dim=-2):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    with numpyro.plate("functions", 2):
        f = numpyro.sample("f", sgp.LatentGP(kernel(lengthscale), X))
    with numpyro.plate("each", 2, dim=-2), numpyro.plate("rows", len(X), dim=-1):
        numpyro.sample("y", dist.Normal(f, noise), obs=Y)


@pytest.mark.slow
def test_over_draws_of_functions_in_a_plate(x64):
    draws = {**draws_of(latent, ["lengthscale"]), "f": jnp.zeros((5, 2, 9))}
    draws["f"] = draws["f"] + jnp.stack([Y, jnp.cos(X[:, 0])]) / draws["lengthscale"][:, None, None]
    draws["noise"] = jnp.ones((5, 2, 1)) * jnp.array([[0.1], [0.3]])
    posterior = sgp.posterior(in_a_plate, draws, X, jnp.stack([Y, Y]))
    predictive, samples = posterior.predictive(XS), posterior.sample(KEY, XS, 2)
    assert samples.shape == (2, 2, 4)
    assert not np.allclose(samples[:, 0], samples[:, 1])
    data = X, jnp.stack([Y, Y])
    new = sgp.infer.Predictive(in_a_plate, posterior_samples=draws, data=data)(KEY, XS)
    assert new["y"].shape == (5, 2, 4)
    for output, noise in enumerate((0.1, 0.3)):

        def each(draw, output=output):
            return sgp.LatentGP(kernel(draw["lengthscale"]), X).condition(draw["f"][output])

        mean, variance = by_hand(draws, each)
        np.testing.assert_allclose(posterior.mean(XS)[output], mean, rtol=1e-9)
        np.testing.assert_allclose(posterior.variance(XS)[output], variance, rtol=1e-9)
        np.testing.assert_allclose(predictive.variance[output], variance + noise**2, rtol=1e-9)


@pytest.mark.slow
def test_a_noise_of_each_output():
    guide = sgp.guides.AutoSparseGP(in_a_plate, num_inducing=4)
    args = X, jnp.stack([Y, Y])
    params = started(in_a_plate, guide, sgp.infer.QuadratureELBO(2), *args)
    posterior = sgp.posterior(in_a_plate, guide, params, *args)
    noise = jnp.square(guide.median(params)["noise"])
    predictive = posterior.predictive(XS)
    np.testing.assert_allclose(predictive.variance, posterior.variance(XS) + noise, rtol=1e-5)


@pytest.mark.slow
def test_over_draws_of_a_function_of_features(x64):
    points = jnp.linspace(-0.2, 2.2, 5)[:, None]
    features = sgp.features.InducingPoints(kernel(0.5), points)

    def model(X, y=None):
        f = numpyro.sample("f", sgp.WeightSpaceGP(features, X))
        numpyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)

    f = Y[::3]
    posterior = sgp.posterior(model, {"f": f[None]}, X[::3], f)
    S, P, Q = kernel(0.5)(points, points), features(X[::3]), features(XS)
    root = np.linalg.solve(np.linalg.cholesky(S), np.concatenate([P, Q]).T)
    K = root.T @ root
    weights = np.linalg.solve(K[:3, :3], K[:3, 3:])
    np.testing.assert_allclose(posterior.mean(XS), weights.T @ f, rtol=1e-8)
    variance = np.diag(K[3:, 3:]) - np.sum(K[:3, 3:] * weights, axis=0)
    np.testing.assert_allclose(posterior.variance(XS), variance, atol=1e-8)


@pytest.mark.parametrize("handler", [numpyro.handlers.substitute, numpyro.handlers.condition])
def test_a_value_that_a_handler_gives(handler):
    draws = {"lengthscale": [0.4, 0.7]}  # lists are draws, too
    posterior = sgp.posterior(handler(collapsed, data={"noise": jnp.array(0.3)}), draws, X, Y)
    assert_same(posterior, sgp.posterior(collapsed, {**draws, "noise": [0.3, 0.3]}, X, Y))


def test_a_value_that_a_loop_draws():
    def model(X, y=None):
        _, scales = scan(lambda c, _: (c, numpyro.sample("s", dist.LogNormal())), 0.0, None, 2)
        numpyro.sample("y", sgp.GaussianProcess(kernel(scales[0]), X, 0.1), obs=y)

    draws = {"lengthscale": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"no values of the latent sites \['s'\]"):
        sgp.posterior(model, draws, X, Y).mean(XS)


def test_the_rest_of_a_guide_is_run_once(monkeypatch):
    guide = sgp.guides.AutoSparseGP(latent, num_inducing=4)
    params = started(latent, guide, sgp.infer.QuadratureELBO(2), X, Y)
    calls, run = [], guide._rest_values

    def counted(*args, **kwargs):
        calls.append(args)
        return run(*args, **kwargs)

    monkeypatch.setattr(guide, "_rest_values", counted)
    sgp.posterior(latent, guide, params, X, Y)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.arange(9) < 4, "a row cannot be masked"),
        (jnp.array(True), "has a mask around it"),
    ],
)
def test_a_mask_around_a_collapsed_gp(mask, message):
    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal())
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", sgp.GaussianProcess(kernel(0.5), X, noise), obs=y)

    with pytest.raises(ValueError, match=message):
        sgp.posterior(model, {"noise": jnp.ones(2)}, X, Y).mean(XS)


@pytest.mark.slow
def test_a_plain_guide_of_a_latent_function():
    guide = AutoNormal(latent)
    params = started(latent, guide, Trace_ELBO(), X, Y)
    with pytest.raises(ValueError, match=r"the guide has draws of the function `f`.*sample_post"):
        sgp.posterior(latent, guide, params, X, Y)
    draws = guide.sample_posterior(KEY, params, sample_shape=(3,))
    assert sgp.posterior(latent, draws, X, Y).mean(XS).shape == (4,)
    assert sgp.posterior(latent, guide, params, X, Y, key=KEY).mean(XS).shape == (4,)


@pytest.mark.slow
def test_after_nuts(x64):
    """With fixed hyperparameters the posterior is the exact GP's."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern12(0.5), X))
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=1500, progress_bar=False)
    mcmc.run(KEY, X, Y)
    posterior = sgp.posterior(model, mcmc.get_samples(), X, Y)
    exact = sgp.GaussianProcess(sgp.kernels.Matern12(0.5), X, 0.25).condition(Y)
    error = 6.0 * np.sqrt(exact.variance(XS) / 1500)
    assert np.all(np.abs(posterior.mean(XS) - exact.mean(XS)) < error)
    np.testing.assert_allclose(posterior.variance(XS), exact.variance(XS), rtol=0.15)


@pytest.mark.slow
def test_of_features_in_mini_batches(x64):
    """The network is restored from the fit; the estimate of log|F| has no effect."""

    def model(X, y=None, batch_size=None):
        scale = numpyro.param("scale", 0.7)
        phi = sgp.features.RandomFourier(kernel(scale), 6, seed=0)
        weights = numpyro.param("weights", jnp.zeros(6))
        X_batch, y_batch = sgp.plate("rows", len(X), batch_size).take(X, y)
        logdet = sgp.log_determinants.Variational()
        gp = sgp.FeatureSpaceGP(phi, X_batch, 0.3, weights, num_data=len(X), logdet=logdet)
        numpyro.sample("y", gp, obs=y_batch)

    def guide(X, y=None, batch_size=None):
        pass

    rows, y, new_rows = (array.astype(jnp.float64) for array in (X, Y, XS))
    params = started(model, guide, Trace_ELBO(), rows, y, 4)
    posterior = sgp.posterior(model, guide, params, rows, y)
    phi = sgp.features.RandomFourier(kernel(0.8), 6, seed=0)
    Phi = phi(rows)
    weights = jnp.linalg.solve(Phi.T @ Phi / 0.3 + jnp.eye(6), Phi.T @ y) / 0.3
    np.testing.assert_allclose(posterior.mean(new_rows), phi(new_rows) @ weights, rtol=1e-9)
    with pytest.raises(ValueError, match="the plate `rows` takes a mini-batch"):
        sgp.posterior(model, guide, params, rows, y, 4)


@pytest.mark.slow
def test_single_values_are_hyperparameters():
    """Single values, such as `guide.median` returns, have the shapes of the sites."""

    def model(X, y=None):
        scales = numpyro.sample("scales", dist.LogNormal().expand([2]).to_event(1))
        noise = numpyro.sample("noise", dist.LogNormal())
        numpyro.sample("y", sgp.GaussianProcess(kernel(scales), X, noise), obs=y)

    rows = jnp.concatenate([X, X[::-1]], axis=1)
    expected = sgp.GaussianProcess(kernel(jnp.array([0.5, 2.0])), rows, 0.1).condition(Y).mean(rows)
    values = {"scales": np.array([0.5, 2.0]), "noise": 0.1}
    of_draws = {"scales": np.array([[0.5, 2.0]] * 2), "noise": np.array([0.1, 0.1])}
    for fit in (values, sgp.infer.Hyperparameters(values), of_draws):
        mean = sgp.posterior(model, fit, rows, Y).mean(rows)
        np.testing.assert_allclose(mean, expected, rtol=1e-4)
    guide = AutoNormal(model)
    svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
    params = svi.get_params(svi.init(KEY, rows, Y))
    by_hand = sgp.posterior(model, guide.median(params), rows, Y)
    np.testing.assert_allclose(
        by_hand.mean(rows), sgp.posterior(model, guide, params, rows, Y).mean(rows), rtol=1e-4
    )
    # One value of the function, and none.
    f = jnp.sin(X[:, 0])
    posterior = sgp.posterior(latent, {"lengthscale": 0.5, "noise": 0.1, "f": f}, X, Y)
    np.testing.assert_allclose(posterior.mean(X), f, atol=1e-3)
    with pytest.raises(ValueError, match="none of the function `f`"):
        sgp.posterior(latent, {"lengthscale": 0.5, "noise": 0.1}, X, Y)


@pytest.mark.parametrize(
    ("fit", "y", "message"),
    [
        ({"noise": jnp.ones(3)}, Y, r"no values of the latent sites \['lengthscale'\]"),
        (
            {"noise": jnp.ones((2, 3)), "lengthscale": jnp.ones((2, 3))},
            Y,
            r"a draw of the site `lengthscale` has shape \(3,\), and the model's site \(\)",
        ),
        ({"noise": jnp.ones(3), "lengthscale": jnp.ones(2)}, Y, "leading axis of draws"),
        ({"noise": jnp.ones(3), "lengthscale": jnp.ones(3)}, jnp.nan * Y, "`y` must be finite"),
        (
            {"noise": np.ones(3), "lengthscale": np.ones(3)},
            np.full(9, np.inf),
            "`y` must be finite",
        ),
        ({"noise": jnp.ones(3), "lengthscale": jnp.ones(3)}, None, "`y` has no observations"),
    ],
)
def test_draws_that_do_not_fit(fit, y, message):
    with pytest.raises(ValueError, match=message):
        sgp.posterior(collapsed, fit, X, y).mean(XS)


@pytest.mark.slow
def test_draws_of_autoguides():
    """AutoLaplaceApproximation draws its mode; a normalizing flow has no medians."""
    guide = AutoLaplaceApproximation(collapsed)
    svi = SVI(collapsed, guide, optax.adam(0.05), Trace_ELBO())
    params = svi.get_params(svi.init(KEY, X, Y))
    means = [sgp.posterior(collapsed, guide, params, X, Y, key=k).mean(XS) for k in (None, KEY)]
    assert not np.allclose(means[0], means[1], rtol=1e-3)
    flow = AutoIAFNormal(collapsed, hidden_dims=[2], num_flows=1)
    svi = SVI(collapsed, flow, optax.adam(0.05), Trace_ELBO())
    params = svi.get_params(svi.init(KEY, X, Y))
    with pytest.raises(ValueError, match="no medians"):
        sgp.posterior(collapsed, flow, params, X, Y)


def test_parameters_of_the_model_that_are_missing():
    def model(X, y=None):
        scale = numpyro.param("scale", 0.7)
        numpyro.sample("y", sgp.GaussianProcess(kernel(scale), X, 0.1), obs=y)

    def guide(X, y=None):
        pass

    with pytest.raises(ValueError, match="`params` lacks `scale`"):
        sgp.posterior(model, guide, {}, X, Y)


@pytest.mark.parametrize("kind", ["latent", "two"])
def test_noise_that_is_not_known(kind):
    """A latent normal site is not a likelihood, and two likelihoods are ambiguous."""
    process = sgp.SparseGP(kernel(0.7), X, X[::3], jnp.zeros(3), 0.5 * jnp.eye(3))

    def model(X, y=None):
        f = numpyro.sample("f", sgp.LatentGP(kernel(0.7), X))
        if kind == "latent":
            z = numpyro.sample("z", dist.Normal(f, 0.7).to_event(1))
            numpyro.sample("y", dist.Poisson(jnp.exp(z)).to_event(1), obs=y)
        else:
            numpyro.sample("y", dist.Normal(f, 0.2).to_event(1), obs=y)
            numpyro.sample("z", dist.Normal(f, 0.4).to_event(1), obs=y)

    def guide(X, y=None):
        numpyro.sample("f", process)
        if kind == "latent":
            numpyro.sample("z", dist.Delta(jnp.zeros(len(X))).to_event(1))

    posterior = sgp.posterior(model, guide, {}, X, jnp.ones(len(X), int))
    with pytest.raises(ValueError, match="has no Gaussian noise"):
        posterior.predictive(XS)


def test_a_mini_batch_of_a_collapsed_gp():
    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal())
        X, y = sgp.plate("rows", len(X), 4).take(X, y)
        numpyro.sample("y", sgp.GaussianProcess(kernel(0.5), X, noise), obs=y)

    with pytest.raises(ValueError, match="the plate `rows` takes a mini-batch"):
        sgp.posterior(model, {"noise": jnp.ones(2)}, X, Y)


def test_of_no_gp():
    def model(X, y=None):
        numpyro.sample("y", dist.Normal(0.0, numpyro.sample("s", dist.LogNormal())), obs=y)

    with pytest.raises(ValueError, match="the model has no GP site"):
        sgp.posterior(model, {"s": jnp.ones(3)}, X, Y)


def test_hyperparameters_that_lack_a_function_or_a_parameter_are_refused():
    X = jnp.linspace(0.0, 1.0, 12)[:, None]

    def latent(X, y):
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.3), X))
        numpyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)

    def collapsed(X, y):
        lengthscale = numpyro.param("lengthscale", 5.0)
        numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, 0.1), obs=y)

    with pytest.raises(ValueError, match="none of the function `f`"):
        sgp.posterior(latent, sgp.infer.Hyperparameters({}), X, X[:, 0])
    for values in ({}, {"lenghtscale": 0.3}):
        with pytest.raises(ValueError, match=r"none of the parameters \['lengthscale'\]"):
            sgp.posterior(collapsed, sgp.infer.Hyperparameters(values), X, X[:, 0])
    posterior = sgp.posterior(
        collapsed, sgp.infer.Hyperparameters({"lengthscale": 0.3}), X, X[:, 0]
    )
    assert posterior.kernel.lengthscale == 0.3


@pytest.mark.slow
def test_the_key_of_a_posterior_under_hyperparameters():
    X = jnp.linspace(0.0, 1.0, 12)[:, None]

    def model(X, y):
        estimator = sgp.estimators.Pathwise(num_probes=4)
        gp = sgp.GaussianProcess(sgp.kernels.RBF(0.3), X, 0.1, estimator=estimator)
        numpyro.sample("y", gp, obs=y)

    values = sgp.infer.Hyperparameters({})
    keys = (None, jax.random.key(1), jax.random.key(1), jax.random.key(2))
    variances = [sgp.posterior(model, values, X, X[:, 0], key=key).variance(X) for key in keys]
    np.testing.assert_array_equal(variances[1], variances[2])
    assert not np.allclose(variances[0], variances[1])
    assert not np.allclose(variances[1], variances[3])


def test_single_values_in_a_dict():
    """Values with the shapes of the sites, without an axis of draws."""

    def model(X, y=None):
        lengthscales = numpyro.sample("lengthscales", dist.LogNormal().expand([2]).to_event(1))
        noise = numpyro.param("noise", 0.3)
        numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(lengthscales), X, noise), obs=y)

    X = jnp.stack([jnp.linspace(0.0, 2.0, 9), jnp.cos(jnp.arange(9.0))], axis=1)
    values = {"lengthscales": [0.5, 0.9], "noise": 0.1}
    expected = sgp.posterior(model, sgp.infer.Hyperparameters(values), X, Y)
    np.testing.assert_array_equal(sgp.posterior(model, values, X, Y).mean(X), expected.mean(X))
    draws = {"lengthscales": np.array([[0.5, 0.9]] * 2), "noise": np.array([0.1, 0.1])}
    mixture = sgp.posterior(model, draws, X, Y)
    assert mixture.num_draws == 2
    np.testing.assert_allclose(mixture.mean(X), expected.mean(X), rtol=1e-5)
    with pytest.raises(ValueError, match=r"none of the parameters \['noise'\]"):
        sgp.posterior(model, {"lengthscales": [0.5, 0.9]}, X, Y)
    with pytest.raises(ValueError, match=r"leading axis of draws.*or single values"):
        sgp.posterior(model, {"lengthscales": np.ones((2, 2)), "noise": 0.1}, X, Y)
