"""Only latent sites take values from the guide `rest`; deterministic sites are recomputed."""

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
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoMultivariateNormal, AutoNormal

import numpyro_scalegp as sgp
from numpyro_scalegp.tracing.runs import substituted
from numpyro_scalegp.tracing.sites import WithoutSite

KEY = jax.random.key(0)
KERNEL = sgp.kernels.RBF(0.9)
X = jnp.linspace(-1.5, 1.5, 12)[:, None]
Y = 3.0 + jnp.sin(2.0 * X[:, 0])


def model(X: Array, y: Array | None = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(3.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
    with numpyro.plate("rows", X.shape[0]):
        mean = numpyro.deterministic("mean", mu + f)
        numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)


def parts(model):
    guide = AutoGuideList(model)
    guide.append(AutoDelta(handlers.block(model, expose=["mu"])))
    return guide


def by_hand(X: Array, y: Array | None = None) -> None:
    numpyro.sample("mu", dist.Delta(numpyro.param("mu_value", jnp.array(3.0))))
    numpyro.deterministic("mean", jnp.zeros(3))


by_hand.median = lambda params: {"mu": params["mu_value"], "rows": jnp.zeros(2), "y": jnp.zeros(3)}

RESTS = {
    "normal": AutoNormal,
    "joint": AutoMultivariateNormal,
    "list": lambda: parts(WithoutSite(model, "f", sgp.LatentGP)),
    "by_hand": lambda: by_hand,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESTS)
def test_a_deterministic_site_follows_the_function(name):
    rest = RESTS[name]() if name in ("list", "by_hand") else RESTS[name]
    guide = sgp.guides.AutoHybridGP(model, rest=rest, inducing_points=X[::3], residual_points=X)
    svi = SVI(model, guide, optax.adam(0.1), sgp.infer.QuadratureELBO())
    state = svi.init(KEY, X, Y)
    params = guide.solve_mean(svi.get_params(state), X, Y).params
    mu = guide.median(params)["mu"]
    exact = sgp.GaussianProcess(KERNEL, X, 0.01, mean=mu).condition(Y)
    # At inputs other than in the fit.
    mean = guide.posterior(params, X[:5], Y[:5]).mean(X)
    np.testing.assert_allclose(mean + mu, exact.mean(X), atol=3e-3)
    if name != "by_hand":
        assert set(guide.median(params)) == {"mu"}


def test_what_is_substituted():
    def all_kinds() -> None:
        numpyro.param("a", 1.0)
        with numpyro.plate("rows", 2):
            inner = handlers.scope(lambda: numpyro.sample("z", dist.Normal()), prefix="in")
            numpyro.deterministic("twice", 2.0 * inner())
            numpyro.sample("y", dist.Normal(), obs=jnp.ones(2))

    ones = dict.fromkeys(["a", "rows", "in/z", "twice", "y"], jnp.full(2, 5))
    seeded = handlers.seed(all_kinds, KEY)
    trace = handlers.trace(substituted(seeded, ones, ones)).get_trace()
    values = {name: np.asarray(site["value"]).tolist() for name, site in trace.items()}
    expected = {"a": [5, 5], "rows": [0, 1], "in/z": [5, 5], "twice": [10, 10], "y": [1, 1]}
    assert values == expected
    trace = handlers.trace(substituted(seeded, {}, {}, {"rows": jnp.full(2, 5)})).get_trace()
    assert trace["rows"]["value"].tolist() == [5, 5]
