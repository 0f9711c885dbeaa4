"""Every way to write a Gaussian process, under handlers and reparametrizations, at new inputs.

The new inputs are as many as in the fit, fewer, or more: values drawn at the inputs of the fit must
not be used at others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.distributions import transforms as T
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDiagonalNormal
from numpyro.infer.reparam import LocScaleReparam, NeuTraReparam, TransformReparam

import numpyro_scalegp as sgp
from numpyro_scalegp.infer import Predictive

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)
N, NUM_DRAWS = 12, 40
NOISE = 0.05
LOG_LENGTHSCALE = np.log(0.8)


def rows():
    X = np.linspace(-2.0, 2.0, N)[:, None]
    return X, truth(X)


def truth(X):
    return np.sin(2.0 * X[:, 0])


NEW = {
    "fewer": np.linspace(-1.6, 1.7, 5)[:, None],
    "same": np.linspace(1.9, -1.8, N)[:, None],
    "more": np.linspace(-1.9, 1.95, 17)[:, None],
}


def kernel():
    warp = T.AffineTransform(LOG_LENGTHSCALE - 0.1, 1.0)
    log = numpyro.sample("log", dist.TransformedDistribution(dist.Normal(0.1, 0.1), warp))
    scale = numpyro.sample("scale", dist.Normal(1.0, 0.01))
    return sgp.kernels.RBF(jnp.exp(log), scale**2)


def random_features():
    return sgp.features.RandomFourier(kernel(), 60, seed=0)


def by_features(X):
    logdet = sgp.log_determinants.MiniBatch()
    weights = jnp.zeros(60)
    features = random_features()
    return sgp.FeatureSpaceGP(features, X, NOISE**2, weights, num_data=len(X), logdet=logdet)


def of_outputs(X):
    outputs = sgp.kernels.Coregion(jnp.array([[1.0], [0.5]]), jnp.array([0.1, 0.2]))
    return sgp.MultiOutputGP(kernel(), outputs, X, NOISE**2)


def warped(X):
    gp = sgp.GaussianProcess(kernel(), X, NOISE**2)
    return dist.TransformedDistribution(gp, T.AffineTransform(0.0, 2.0))


COLLAPSED = {
    "exact": lambda X: sgp.GaussianProcess(kernel(), X, NOISE**2),
    "laplace": lambda X: sgp.LaplaceGP(kernel(), X, lambda f: dist.Normal(f, NOISE)),
    "features": by_features,
    "outputs": of_outputs,
    "warped": warped,
}
LATENT = {
    "latent": lambda X: sgp.LatentGP(kernel(), X),
    "neighbors": lambda X: sgp.NearestNeighborGP(kernel(), X, sgp.estimators.Vecchia(6)),
    "weights": lambda X: sgp.WeightSpaceGP(random_features(), X),
}


def model_of(kind):
    def collapsed(X, y=None):
        numpyro.sample("y", COLLAPSED[kind](X), obs=y)

    def latent(X, y=None):
        f = numpyro.sample("f", LATENT[kind](X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    return collapsed if kind in COLLAPSED else latent


def observations(kind, f):
    return {"outputs": np.stack([f, 0.5 * f], axis=-1), "warped": 2.0 * f}.get(kind, f)


def neutra(model):
    start = {"log": LOG_LENGTHSCALE, "scale": 1.0}
    guide = AutoDiagonalNormal(model, init_loc_fn=init_to_value(values=start))
    svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
    params = svi.get_params(svi.init(KEY, *rows()))
    return NeuTraReparam(guide, params).reparam(model)


WRAPPERS = {
    "plain": lambda model: model,
    "transform": lambda model: handlers.reparam(model, config={"log": TransformReparam()}),
    "loc_scale": lambda model: handlers.reparam(model, config={"scale": LocScaleReparam(0.0)}),
    "neutra": neutra,
    "white": lambda model: handlers.reparam(model, config={"f": sgp.infer.WhitenReparam()}),
    "scope": lambda model: handlers.scope(model, "inner"),
    "mask": lambda model: handlers.mask(model, mask=True),
    "block": lambda model: handlers.block(model, hide=["unknown"]),
}


def draws_of(wrapped, kind):
    """Draws of all latent and deterministic sites, all equal to the truth."""
    X, f = rows()
    values = {
        "log": LOG_LENGTHSCALE,
        "scale": 1.0,
        "f": f,
        "log_base": 0.1,
        "scale_decentered": 0.0,
    }
    values = {name: jnp.asarray(value) for name, value in values.items()}
    values |= {f"inner/{name}": value for name, value in values.items()}
    with handlers.block(), handlers.seed(rng_seed=0), handlers.substitute(data=values):
        prior = LATENT[kind](X) if kind in LATENT else None
    if prior is not None and kind != "neighbors":  # the minimum-norm white values of the function
        maps = jax.jacobian(prior.of_white)(jnp.zeros(prior.num_white))
        values["f_white"] = jnp.linalg.lstsq(maps, f)[0]
    values["auto_shared_latent"] = jnp.zeros(2)
    substituted = handlers.substitute(handlers.seed(wrapped, 0), data=values)
    trace = handlers.trace(substituted).get_trace(X, observations(kind, f))
    sites = {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "deterministic" or (site["type"] == "sample" and not site["is_observed"])
    }
    return {name: jnp.stack([value] * NUM_DRAWS) for name, value in sites.items()}


CASES = [
    *((kind, "plain") for kind in (*COLLAPSED, *LATENT)),
    *(("exact", name) for name in WRAPPERS if name not in ("plain", "white")),
    *(("latent", name) for name in WRAPPERS if name not in ("plain", "neutra", "mask", "block")),
    ("weights", "white"),
]


@pytest.mark.parametrize(("kind", "wrapper"), CASES)
def test_draws_follow_the_posterior(kind, wrapper, x64):
    X, f = rows()
    wrapped, y = WRAPPERS[wrapper](model_of(kind)), observations(kind, f)
    draws = draws_of(wrapped, kind)
    predictive = Predictive(wrapped, posterior_samples=draws, data=(X, y))
    posterior = sgp.posterior(wrapped, draws, X, y)
    for name, new in NEW.items():
        expected = truth(new)
        mean = np.asarray(posterior.mean(new))
        np.testing.assert_allclose(mean[..., 0] if mean.ndim > 1 else mean, expected, atol=0.1)
        predicted = predictive(KEY, new)
        (site,) = (site for site in predicted if site.endswith("y"))
        np.testing.assert_allclose(
            predicted[site].mean(axis=0), observations(kind, expected), atol=0.15, err_msg=name
        )
        # Each draw has independent noise.
        spread = np.asarray(predicted[site]).std(axis=0)
        assert np.all(spread > 0.4 * NOISE), name
        without = Predictive(wrapped, posterior_samples=draws)
        if (kind, wrapper) == ("weights", "white"):  # the weights are the same at any inputs
            mean = without(KEY, new)["y"].mean(axis=0)
            np.testing.assert_allclose(mean, expected, atol=0.15)
        else:
            with pytest.raises(ValueError, match=r"neither observations nor|a draw of the site"):
                without(KEY, new)


@pytest.mark.parametrize("kind", ["latent", "neighbors"])
def test_white_values_without_the_function(kind, x64):
    """As in draws of a NumPyro guide; for neighbors, with the function among the draws."""
    X, f = rows()
    wrapped = WRAPPERS["white"](model_of(kind))
    draws = draws_of(wrapped, kind) if kind == "latent" else draws_of(model_of(kind), kind)
    if kind == "latent":
        draws = {name: value for name, value in draws.items() if name != "f"}
    for new in NEW.values():
        predicted = Predictive(wrapped, posterior_samples=draws, data=(X, f))(KEY, new)
        np.testing.assert_allclose(predicted["f"].mean(axis=0), truth(new), atol=0.15)
        assert predicted["f"].shape == (NUM_DRAWS, len(new))
        np.testing.assert_allclose(
            sgp.posterior(wrapped, draws, X, f).mean(new), truth(new), atol=0.1
        )


@pytest.mark.parametrize("kind", ["exact", "laplace"])
def test_the_mean_of_each_run_is_its_own(kind, x64):
    """A mean function with covariates of the inputs, passed by keyword for each run."""
    X, f = rows()

    def model(X, y=None, *, level):
        if kind == "exact":
            gp = sgp.GaussianProcess(kernel(), X, NOISE**2, mean=level)
        else:
            gp = sgp.LaplaceGP(kernel(), X, lambda f: dist.Normal(f, NOISE), mean=level)
        numpyro.sample("y", gp, obs=y)

    draws = {"log": jnp.full(40, LOG_LENGTHSCALE), "scale": jnp.ones(40)}
    predictive = Predictive(model, posterior_samples=draws, data=((X, f + 3.0), {"level": 3.0}))
    for new in NEW.values():
        mean = predictive(KEY, new, level=50.0)["y"].mean(axis=0)
        np.testing.assert_allclose(mean, truth(new) + 50.0, atol=0.15)


def test_a_model_with_a_seed_of_its_own():
    message = "`model` has a fixed seed, with which all draws would be equal"
    with pytest.raises(ValueError, match=message):
        Predictive(handlers.scope(handlers.seed(model_of("exact"), 7), "inner"))
