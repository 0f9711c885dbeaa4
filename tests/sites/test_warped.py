"""Gaussian processes with transformed observations, against the untransformed process."""

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions import transforms as T
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_scalegp as sgp
from numpyro_scalegp.infer import Hyperparameters, Predictive

KEY = jax.random.key(0)
N = 8
TRANSFORMS = {
    "exp": [T.ExpTransform()],
    "affine": [T.AffineTransform(2.0, -3.0)],
    "log": [T.ExpTransform(), T.AffineTransform(1.0, 2.0), T.ExpTransform().inv],
    "box_cox": [T.AffineTransform(10.0, 0.5), T.PowerTransform(2.0)],
    "composed": T.ComposeTransform([T.AffineTransform(0.0, 0.3), T.ExpTransform()]),
    "independent": [T.IndependentTransform(T.ExpTransform(), 1)],
    "sigmoid": [T.SigmoidTransform(), T.AffineTransform(0.0, 100.0)],
}


def forward(transforms, z):
    for transform in transforms if isinstance(transforms, list) else [transforms]:
        z = transform(z)
    return z


def rows(dtype):
    X = np.linspace(-1.5, 1.5, N)[:, None].astype(dtype)
    return X, np.sin(2.0 * X[:, 0]) + 0.1 * np.cos(20.0 * X[:, 0])


def process(X, lengthscale=0.8, **options):
    return sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, 0.05, mean=0.2, **options)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_pointwise_densities_are_those_of_leaving_one_out(name, dtype):
    """By the chain rule: the density of all rows over the density of all rows but one."""
    X, z = rows(dtype)
    transforms = TRANSFORMS[name]
    y = forward(transforms, jnp.asarray(z))

    def model(X, y=None):
        numpyro.sample("y", dist.TransformedDistribution(process(X), transforms), obs=y)

    draws = Predictive(model, posterior_samples={"unused": jnp.zeros(2)}).draws(KEY, X, y)
    log_likelihood = draws.log_likelihood["y"]
    assert log_likelihood.shape == draws.predictive["y"].shape == (2, N)

    def density(keep):
        fn = dist.TransformedDistribution(process(X[keep]), transforms)
        return fn.log_prob(y[keep])

    all_rows = np.arange(N)
    expected = [density(all_rows) - density(all_rows != i) for i in range(N)]
    np.testing.assert_allclose(
        log_likelihood[0], expected, rtol=2e-3 if dtype == "float32" else 1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "joint"), [("exp", True), ("affine", False), ("log", False), ("box_cox", True)]
)
def test_draws_at_new_inputs(name, joint, x64):
    X, z = rows("float64")
    transforms, new = TRANSFORMS[name], X[:3] + 0.1
    y = forward(transforms, jnp.asarray(z))

    def model(X, y=None):
        numpyro.sample("y", dist.TransformedDistribution(process(X), transforms), obs=y)

    samples = {"unused": jnp.zeros(4000)}
    predictive = Predictive(model, posterior_samples=samples, data=(X, y), joint=joint)
    draws = np.sort(np.asarray(predictive(KEY, new)["y"]), axis=0)
    normal = process(X).condition(z).predictive(new)
    quantiles = np.array([0.1, 0.5, 0.9])
    at = forward(transforms, normal.icdf(quantiles[:, None]))
    shares = np.mean(draws[:, None, :] <= np.sort(np.asarray(at), axis=0), axis=0)
    np.testing.assert_allclose(shares, np.broadcast_to(quantiles[:, None], shares.shape), atol=0.03)
    # At the data, and observations at new inputs.
    test = predictive.draws(KEY, new, y[:3]).log_likelihood["y"][0]
    fn = sgp.posterior(model, Hyperparameters({}), X, y).predictive(new)
    np.testing.assert_allclose(test, fn.log_prob(y[:3]), rtol=1e-9)


@pytest.mark.slow
def test_posterior_and_mixture(x64):
    X, z = rows("float64")
    new, powers = X[:3] + 0.1, np.array([0.5, 1.5])

    def model(X, y=None):
        power = numpyro.sample("power", dist.LogNormal())
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
        warp = [T.AffineTransform(3.0, 1.0), T.PowerTransform(power)]
        fn = dist.TransformedDistribution(process(X, lengthscale), warp)
        numpyro.sample("y", fn, obs=y)

    y = np.exp(0.3 * z)
    draws = {"power": powers, "lengthscale": np.array([0.6, 1.1])}
    singles = [
        process(X, s).condition(y ** (1 / p) - 3.0)
        for p, s in zip(powers, draws["lengthscale"], strict=True)
    ]
    posteriors = [
        sgp.posterior(model, Hyperparameters({"power": p, "lengthscale": s}), X, y)
        for p, s in zip(powers, draws["lengthscale"], strict=True)
    ]
    mixture = sgp.posterior(model, draws, X, y)
    densities = []
    for posterior, exact, power in zip(posteriors, singles, powers, strict=True):
        np.testing.assert_allclose(posterior.mean(new), exact.mean(new), rtol=1e-9)
        np.testing.assert_allclose(posterior.variance(new), exact.variance(new), rtol=1e-9)
        normal, jacobian = exact.predictive(new), (1 / power) * y[:3] ** (1 / power - 1)
        expected = normal.log_prob(y[:3] ** (1 / power) - 3.0) + np.log(jacobian)
        np.testing.assert_allclose(posterior.predictive(new).log_prob(y[:3]), expected, rtol=1e-9)
        median = posterior.predictive(new).icdf(0.5)
        np.testing.assert_allclose(median, (exact.mean(new) + 3.0) ** power, rtol=1e-9)
        densities.append(expected)
        assert posterior.sample(KEY, new, 2).shape == (2, 3)
        assert posterior.leave_one_out().batch_shape == (N,)
    mean = np.mean([single.mean(new) for single in singles], axis=0)
    np.testing.assert_allclose(mixture.mean(new), mean, rtol=1e-9)
    predictive = mixture.predictive(new)
    expected = np.logaddexp(*densities) - np.log(2.0)
    np.testing.assert_allclose(predictive.log_prob(y[:3]), expected, rtol=1e-9)
    assert predictive.sample(KEY, (5,)).shape == (5, 3)


SOLVER = sgp.solvers.ConjugateGradients(1e-6, 50)
ESTIMATORS = {
    "SGPR": lambda X: sgp.estimators.SGPR(X[::2]),
    "Pathwise": lambda X: sgp.estimators.Pathwise(SOLVER, 64, num_features=512),
    "RandomFourier": lambda X: sgp.estimators.RandomFourier(64),
    "Vecchia": lambda X: sgp.estimators.Vecchia(4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator(name, x64):
    X, z = rows("float64")
    estimator, y = ESTIMATORS[name](X), np.exp(z)

    def model(X, y=None, is_warped=True):
        gp = process(X, estimator=estimator, key=KEY)
        log_normal = dist.TransformedDistribution(gp, T.ExpTransform())
        numpyro.sample("y", log_normal if is_warped else gp, obs=y)

    samples = {"unused": jnp.zeros(2)}
    warped = Predictive(model, posterior_samples=samples).draws(KEY, X, y)
    plain = Predictive(model, posterior_samples=samples).draws(KEY, X, z, False)
    expected = plain.log_likelihood["y"] - z
    np.testing.assert_allclose(warped.log_likelihood["y"], expected, rtol=1e-6)
    np.testing.assert_allclose(warped.predictive["y"], np.exp(plain.predictive["y"]), rtol=1e-6)
    new = [
        Predictive(model, posterior_samples=samples, data=data)(KEY, X[:3] + 0.1, None, data[2])[
            "y"
        ]
        for data in ((X, y, True), (X, z, False))
    ]
    np.testing.assert_allclose(new[0], np.exp(new[1]), rtol=1e-6)


@pytest.mark.slow
def test_a_log_normal_process_under_svi_and_nuts(x64):
    """Like the process of the logarithms, up to the Jacobian; with a state of the solver."""
    X, z = rows("float64")

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
        estimator = sgp.estimators.Pathwise(SOLVER, 8)
        gp = process(X, lengthscale, estimator=estimator, state="solver")
        numpyro.sample("y", dist.TransformedDistribution(gp, T.ExpTransform()), obs=y)

    guide = AutoNormal(model)
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
    result = svi.run(KEY, 3, X, np.exp(z), progress_bar=False)
    posterior = sgp.posterior(model, guide, result, X, np.exp(z), num_samples=4)
    median = guide.median(result.params)["lengthscale"]
    exact = process(X, median).condition(z)
    np.testing.assert_allclose(posterior.mean(X), exact.mean(X), rtol=1e-4)
    assert posterior.diagnostics["converged"]

    def exactly(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
        fn = dist.TransformedDistribution(process(X, lengthscale), T.ExpTransform())
        numpyro.sample("y", fn, obs=y)

    mcmc = MCMC(NUTS(exactly), num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(KEY, X, np.exp(z))
    exported = sgp.to_arviz(mcmc, key=KEY)
    assert exported["log_likelihood"]["y"].shape == (1, 20, N)
    lengthscale = np.asarray(exported["posterior"]["lengthscale"])[0, 3]
    expected = process(X, lengthscale).condition(z).leave_one_out().log_prob(z) - z
    np.testing.assert_allclose(exported["log_likelihood"]["y"][0, 3], expected, rtol=1e-6)
    assert np.isfinite(arviz.loo(exported).elpd_loo)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["laplace", "outputs", "groups"])
def test_other_processes(kind, x64):
    X, z = rows("float64")
    kernel = sgp.kernels.RBF(0.8)
    if kind == "outputs":
        z = np.stack([z, z**2], axis=1)

    def base(X):
        if kind == "laplace":
            return sgp.LaplaceGP(kernel, X, lambda f: dist.StudentT(30.0, f, 0.3))
        if kind == "outputs":
            outputs = sgp.kernels.Coregion(jnp.array([[1.0], [0.5]]), jnp.array([0.1, 0.2]))
            return sgp.MultiOutputGP(kernel, outputs, X, 0.1)
        return sgp.GaussianProcess(sgp.kernels.RBF(jnp.array([[0.8]])[:, 0]), X[None], 0.1)

    def model(X, y=None):
        numpyro.sample("y", dist.TransformedDistribution(base(X), T.ExpTransform()), obs=y)

    if kind == "groups":
        z = z[None]
    y = np.exp(z)
    posterior = sgp.posterior(model, Hyperparameters({}), X, y)
    np.testing.assert_allclose(posterior.mean(X), base(X).condition(z).mean(X), rtol=1e-6)
    samples = {"unused": jnp.zeros(2)}
    log_likelihood = (
        Predictive(model, posterior_samples=samples).draws(KEY, X, y).log_likelihood["y"][0]
    )
    expected = base(X).leave_one_out(base(X).condition(z)).log_prob(z) - z
    np.testing.assert_allclose(log_likelihood, expected, rtol=1e-6)
    new = Predictive(model, posterior_samples=samples, data=(X, y))(KEY, X[:3] + 0.1)["y"]
    assert new.shape == (2, *z.shape[:-1], 3) if kind != "outputs" else new.shape == (2, 3, 2)
    assert np.all(new > 0.0)


def features(X):
    phi = sgp.features.RandomFourier(sgp.kernels.RBF(1.0), 4, seed=0)
    logdet = sgp.log_determinants.MiniBatch()
    return sgp.FeatureSpaceGP(phi, X, 0.1, jnp.zeros(4), num_data=len(X), logdet=logdet)


def counts(X):
    return sgp.LaplaceGP(sgp.kernels.RBF(1.0), X, lambda f: dist.Poisson(jnp.exp(f)))


@pytest.mark.parametrize(
    ("base", "transform", "message"),
    [
        (process, T.PermuteTransform(jnp.arange(N)[::-1]), "`PermuteTransform` around a Gaussian"),
        (process, T.LowerCholeskyAffine(jnp.zeros(N), jnp.eye(N)), "`LowerCholeskyAffine` around"),
        (process, T.AbsTransform(), "`AbsTransform` around a Gaussian process is not a bijection"),
        (lambda X: process(X, observed=np.arange(N) < 5), T.ExpTransform(), "`observed` of a `Gau"),
        (features, T.ExpTransform(), "`FeatureSpaceGP` in a `TransformedD.*is scaled to all rows"),
        (counts, T.AffineTransform(0.0, 2.0), "`LaplaceGP` in a .* density that is discrete"),
        (lambda X: process(X).expand([2]), T.ExpTransform(), "`y` has a `TransformedDistrib"),
    ],
)
def test_what_is_refused(base, transform, message):
    X, _ = rows("float32")

    def model(X, y=None):
        numpyro.sample("y", dist.TransformedDistribution(base(X), transform), obs=y)

    samples = {"unused": jnp.zeros(2)}
    calls = [
        lambda: sgp.posterior(model, Hyperparameters({}), X, jnp.ones(N)),
        lambda: sgp.posterior(model, samples, X, jnp.ones(N)).mean(X),
        lambda: Predictive(model, posterior_samples=samples)(KEY, X, jnp.ones(N)),
        lambda: Predictive(model, posterior_samples=samples, data=(X, jnp.ones(N)))(KEY, X + 0.1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_observations_outside_of_the_transform():
    X, z = rows("float32")

    def model(X, y=None):
        numpyro.sample("y", dist.TransformedDistribution(process(X), T.ExpTransform()), obs=y)

    with pytest.raises(ValueError, match="`y` must lie in the support of the transformed"):
        sgp.posterior(model, Hyperparameters({}), X, z)


def test_a_transform_of_each_row(x64):
    """`Predictive` computes it at new rows, and a posterior cannot."""
    X, z = rows("float64")

    def model(X, y=None):
        warp = [T.AffineTransform(X[:, 0], 1.0 + X[:, 0] ** 2)]
        numpyro.sample("y", dist.TransformedDistribution(process(X), warp), obs=y)

    y, new = X[:, 0] + (1.0 + X[:, 0] ** 2) * z, X[::2] + 10.0
    predictive = Predictive(model, posterior_samples={"unused": jnp.zeros(4000)}, data=(X, y))
    expected = new[:, 0] + (1.0 + new[:, 0] ** 2) * 0.2
    np.testing.assert_allclose(predictive(KEY, new)["y"].mean(axis=0), expected, rtol=0.4)
    with pytest.raises(ValueError, match="the transform around the Gaussian process has an array"):
        sgp.posterior(model, Hyperparameters({}), X, y).predictive(new)


def test_a_transformed_function_is_refused():
    X, z = rows("float32")

    def model(X, y=None):
        prior = sgp.LatentGP(sgp.kernels.RBF(0.7), X)
        f = numpyro.sample("f", dist.TransformedDistribution(prior, T.ExpTransform()))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    message = "the GP site `f` has a `TransformedDistribution` around a `LatentGP`: write the latt"
    draws, y = {"f": jnp.ones((2, N))}, np.exp(z)
    svi = SVI(
        model,
        sgp.guides.AutoSparseGP(model, num_inducing=3),
        optax.adam(0.1),
        sgp.infer.QuadratureELBO(2),
    )
    calls = [
        lambda: svi.init(KEY, X, y),
        lambda: sgp.posterior(model, draws, X, y),
        lambda: Predictive(model, posterior_samples=draws, data=(X, y))(KEY, X),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    # At the rows of the draws it is an ordinary site.
    predictions = Predictive(model, posterior_samples=draws)(KEY, X, y)
    np.testing.assert_array_equal(predictions["f"], draws["f"])
    with pytest.raises(ValueError, match="neither observations nor draws at these inputs"):
        Predictive(model, posterior_samples=draws)(KEY, X + 1.0)
