"""Arguments of the model with the names of options, and arguments of two runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from numpyro_scalegp.infer import Hyperparameters, Predictive
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model

KEY = jax.random.key(0)
X = np.linspace(0.0, 4.0, 9)[:, None]
Y = np.sin(X[:, 0])
COUNTS = np.array([3, 6, 9, 8, 9, 5, 2, 1, 1])
NEW = X[::2] + 0.2

# Functions that run a model have options of these names.
OPTIONS = ["start", "num_samples", "max_epochs", "progress_bar", "key", "site"]


def latent(scale, X, y):
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(scale), X))
    numpyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=y)


def with_parameter(name, *, by_keyword=False):
    """A model with a parameter of the given name: the kernel's lengthscale."""
    star = "*, " if by_keyword else ""
    scope = {"latent": latent}
    exec(f"def model(X, y=None, {star}{name}=1.0): latent({name}, X, y)", scope)
    return scope["model"]


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_keyword_of_the_model_reaches_it(name, by_keyword):
    model, keyword = with_parameter(name, by_keyword=by_keyword), {name: 2.0}
    values = Hyperparameters({"f": Y})
    assert sgp.posterior(model, values, X, Y, **keyword).kernel.lengthscale == 2.0
    if not by_keyword and name == "site":  # by position, so that the keyword is the option
        assert sgp.posterior(model, values, X, Y, 2.0, site="f").kernel.lengthscale == 2.0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "by_keyword"), [("start", False), ("key", True)])
def test_a_keyword_of_the_model_reaches_it_after_a_fit(name, by_keyword):
    model, keyword = with_parameter(name, by_keyword=by_keyword), {name: 2.0}
    guide = sgp.guides.AutoSparseGP(model, inducing_points=X[::3])
    svi = SVI(model, guide, optax.adam(0.1), sgp.infer.QuadratureELBO())
    params = svi.get_params(svi.init(KEY, X, Y, **keyword))
    posteriors = [
        sgp.posterior(model, guide, params, X, Y, **keyword),
        sgp.posterior(handlers.scope(model, "", divider=""), guide, params, X, Y, **keyword),
        guide.posterior(params, X, Y, **keyword),
        sgp.posterior(model, {"f": Y[None]}, X, Y, **keyword).posterior_given({"f": Y}),
    ]
    for posterior in posteriors:
        assert posterior.kernel.lengthscale == 2.0
    drawn = guide.sample_posterior(KEY, params, X, Y, sample_shape=(3,), **keyword)
    assert drawn["f"].shape == (3, len(X))
    new = Predictive(model, guide=guide, params=params, num_samples=2)(KEY, NEW, **keyword)
    assert new["f"].shape == (2, len(NEW))


def test_keywords_of_other_functions():
    """A keyword goes to the model if that has a parameter of the name, else to the function."""

    class Runner:
        def __init__(self, model):
            self.model = model

        @model_keywords_first(lambda owner, *_: (owner.model, 2))
        def run(self, count, *args, rate=0.1, **kwargs):
            return count, rate, self.model(*args, **of_model(kwargs))

    Owner: Any = Runner
    assert Owner(lambda X, rate=1.0: (X, rate)).run(5, "X", rate=7.0) == (5, 0.1, ("X", 7.0))
    assert Owner(lambda X, rate=1.0: (X, rate)).run(5, "X", 3.0, rate=7.0) == (5, 7.0, ("X", 3.0))
    assert Owner(lambda X, count=1: (X, count)).run(5, "X", count=7) == (5, 0.1, ("X", 7))
    assert Owner(lambda X: X).run(count=5, X="X", rate=7.0) == (5, 7.0, "X")
    assert Owner(lambda **kwargs: kwargs).run(5, rate=7.0, X="X") == (5, 7.0, {"X": "X"})
    with pytest.raises(TypeError, match=r"run\(\) missing 1 required positional argument: 'count'"):
        Owner(lambda X: X).run()
    with pytest.raises(TypeError, match="unexpected keyword argument 'rat'"):
        Owner(lambda X: X).run(5, "X", rat=7.0)


@pytest.mark.slow
def test_steps_that_the_model_counts():
    """`initial_hyperparameters` and `streams.run` have options of these names, too."""

    def model(X, y, *, num_steps, every=1):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
        numpyro.deterministic("seen", jnp.asarray(num_steps + every))
        numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, 0.1), obs=y)

    # Without the keyword the model cannot be called.
    values = sgp.infer.initial_hyperparameters(KEY, model, X, Y, num_steps=3)
    assert set(values) == {"lengthscale"}
    stream = sgp.streams.arrays(np.asarray(X), np.asarray(Y), batch_size=9, seed=0)
    svi = SVI(model, AutoDelta(model), optax.adam(0.1), numpyro.infer.Trace_ELBO())
    options = {"progress_bar": False, "every": 2}
    run: Any = sgp.streams.run
    result = run(svi, KEY, 2, stream, num_steps=3, **options)
    assert result.losses.shape == (2,)


def iterative(X, y=None):
    estimator = sgp.estimators.Pathwise(num_probes=2)
    numpyro.sample(
        "y", sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1, estimator=estimator), obs=y
    )


def exact(X, y=None):
    numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1), obs=y)


def laplace(X, y=None):
    numpyro.sample(
        "y", sgp.LaplaceGP(sgp.kernels.RBF(1.0), X, lambda f: dist.Normal(f, 1.0)), obs=y
    )


def features(X, y=None):
    phi = sgp.features.RandomFourier(sgp.kernels.RBF(1.0), 4, seed=0)
    logdet = sgp.log_determinants.MiniBatch()
    gp = sgp.FeatureSpaceGP(phi, X, 0.1, jnp.zeros(4), num_data=len(X), logdet=logdet)
    numpyro.sample("y", gp, obs=y)


def function(X, y=None):
    latent(1.0, X, y)


@pytest.mark.parametrize("option", ["num_samples", "max_epochs", "start", "key"])
@pytest.mark.parametrize("model", [exact, laplace, features, function])
def test_options_without_a_use_are_refused(model, option, unchecked):
    value = KEY if option == "key" else 3
    values = Hyperparameters({"f": Y} if model is function else {})
    with pytest.raises(ValueError, match=f"the GP site `[fy]` has no use for `{option}`"):
        sgp.posterior(model, values, X, Y, **{option: value})


@pytest.mark.parametrize("option", ["num_samples", "max_epochs", "start"])
def test_options_without_a_use_after_a_fit_are_refused(option, unchecked):
    guide = sgp.guides.AutoSparseGP(function, inducing_points=X[::3])
    svi = SVI(function, guide, optax.adam(0.1), sgp.infer.QuadratureELBO())
    params = svi.get_params(svi.init(KEY, X, Y))
    with pytest.raises(ValueError, match=f"`f` has no use for `{option}`"):
        sgp.posterior(function, guide, params, X, Y, **{option: 3})
    if option != "start":
        with pytest.raises(ValueError, match=f"`y` has no use for `{option}`"):
            sgp.posterior(exact, {"unused": jnp.zeros(2)}, X, Y, **{option: 3})


@pytest.mark.slow
def test_options_with_a_use(unchecked):
    posterior = sgp.posterior(iterative, Hyperparameters({}), X, Y, key=KEY, num_samples=3)
    assert posterior.sample(KEY, NEW, 3).shape == (3, len(NEW))
    with pytest.raises(TypeError, match="`progress_bar` must be"):
        sgp.posterior(exact, Hyperparameters({}), X, Y, progress_bar="no")


# Two runs of one model: at the data of the fit, and at new inputs.


def of_counts(X, y=None, exposure=None):
    numpyro.sample("v", dist.LogNormal(0, 0.1))
    gp = sgp.LaplaceGP(sgp.kernels.RBF(1.0), X, lambda f: dist.Poisson(exposure * jnp.exp(f)))
    numpyro.sample("y", gp, obs=y)


def of_rates(X, y=None, exposure=None):
    """A model of rates with the function among its latent sites."""
    numpyro.sample("v", dist.LogNormal(0, 0.1))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
    numpyro.sample("y", dist.Poisson(exposure * jnp.exp(f)).to_event(1), obs=y)


def of_means(X, y=None, exposure=None):
    numpyro.sample("v", dist.LogNormal(0, 0.1))
    gp = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1, mean=exposure)
    numpyro.sample("y", gp, obs=y)


FORMS = {
    "by position": (X, COUNTS, 5.0),
    "both": ((X, COUNTS), {"exposure": 5.0}),
    "by name": {"X": X, "y": COUNTS, "exposure": 5.0},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [of_counts, of_rates, of_means])
def test_a_keyword_goes_to_the_run_that_it_is_given_to(model, form, x64):
    f = jnp.log(COUNTS / 5.0) + 0.1 * jax.random.normal(KEY, (400, len(X)))
    samples = {"v": jnp.ones(400)} | ({"f": f} if model is of_rates else {})
    y = COUNTS if model is not of_means else COUNTS.astype(float)
    data = jax.tree.map(lambda leaf: y if leaf is COUNTS else leaf, FORMS[form])
    predictive = Predictive(model, posterior_samples=samples, data=data)
    mean = predictive(KEY, X, exposure=500.0)["y"].mean(axis=0)
    # From the posterior given the data with the exposure of the fit.
    exact = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1, mean=5.0)
    poisson = sgp.LaplaceGP(sgp.kernels.RBF(1.0), X, lambda f: dist.Poisson(5.0 * jnp.exp(f)))
    if model is of_means:
        expected = 495.0 + exact.condition(y).mean(X)
    elif model is of_counts:
        rate = poisson.condition(y)
        expected = 500.0 * jnp.exp(rate.mean(X) + 0.5 * rate.variance(X))
    else:
        expected = 100.0 * COUNTS
    np.testing.assert_allclose(mean, expected, rtol=0.1)
    np.testing.assert_array_equal(predictive(KEY, X=X, exposure=500.0)["y"].mean(axis=0), mean)


@pytest.mark.slow
def test_keywords_that_only_the_call_has(x64):
    predictive = Predictive(of_counts, posterior_samples={"v": jnp.ones(2)}, data=(X, COUNTS))
    with pytest.raises(
        ValueError, match=r"keywords \['exposure'\], and `data` has no values of th"
    ):
        predictive(KEY, NEW, exposure=500.0)
    guide = AutoDelta(of_means)
    svi = SVI(of_means, guide, optax.adam(0.1), numpyro.infer.Trace_ELBO())
    params = svi.get_params(svi.init(KEY, X, Y, exposure=5.0))
    options = {"guide": guide, "params": params, "num_samples": 2}
    with pytest.raises(ValueError, match=r"data=\(\(X, y\), \{\"exposure\": ...\}\)"):
        Predictive(of_means, data=(X, Y), **options)(KEY, NEW, exposure=500.0)
    # In a new process the guide is set up with the arguments of its fit.
    again = options | {"guide": AutoDelta(of_means)}
    draws = [
        Predictive(of_means, data=((X, Y), {"exposure": 5.0}), **arguments)(KEY, NEW, exposure=50.0)
        for arguments in (options, again)
    ]
    np.testing.assert_array_equal(draws[0]["y"], draws[1]["y"])


def test_a_model_of_keywords_alone(x64, unchecked):
    def model(*, X, exposure, y=None):
        of_counts(X, y, exposure)

    samples, data = {"v": jnp.ones(2)}, {"X": X, "y": COUNTS, "exposure": 5.0}
    predictive = Predictive(model, posterior_samples=samples, data=data)
    assert predictive(KEY, X=NEW, exposure=50.0)["y"].shape == (2, len(NEW))
    with pytest.raises(TypeError, match=r"the call must have the arguments.*argument: 'exposure'"):
        predictive(KEY, X=NEW)
    for wrong in ((X, COUNTS), {"X": X, "y": COUNTS}, {"X": X, "exposure": 5.0, "why": COUNTS}):
        with pytest.raises(TypeError, match="`data` must have the arguments of the model"):
            Predictive(model, posterior_samples=samples, data=wrong)
    with pytest.raises(TypeError, match="`data` must be the model's arguments: a tuple, a dict of"):
        Predictive(model, posterior_samples=samples, data=[X, COUNTS])
