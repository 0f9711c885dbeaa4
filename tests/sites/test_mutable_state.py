"""Sites that hold the state of an estimator."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp

X = jnp.linspace(-1.0, 1.0, 12)[:, None]


def gaussian_process(site: str, hyperparameter: Any, name: str) -> None:
    """A GP with a state."""
    kernel, key = sgp.kernels.RBF(hyperparameter), jax.random.key(0)
    prior = sgp.GaussianProcess(
        kernel, X, 0.1, estimator=sgp.estimators.Pathwise(), key=key, state=name
    )
    numpyro.sample(site, prior, obs=jnp.sin(X[:, 0]))


def feature_space(site: str, hyperparameter: Any, name: str) -> None:
    """A GP on features, with a state."""
    logdet = sgp.log_determinants.Variational(name=name)
    weights = jnp.zeros(1)
    prior = sgp.FeatureSpaceGP(
        lambda X: X * hyperparameter, X, 0.1, weights, num_data=100, logdet=logdet
    )
    numpyro.sample(site, prior, obs=jnp.sin(X[:, 0]))


GPS = pytest.mark.parametrize("gp", [gaussian_process, feature_space])


@GPS
@pytest.mark.parametrize("kind", ["sample", "param", "deterministic"])
def test_a_state_with_the_name_of_another_site(gp: Callable[..., None], kind: str) -> None:
    def model() -> None:
        if kind == "sample":
            gp("y", numpyro.sample("taken", dist.LogNormal(0.0, 1.0)), "taken")
        elif kind == "param":
            gp("y", numpyro.param("taken", 1.0), "taken")
        else:
            gp("y", numpyro.deterministic("taken", jnp.array(1.0)), "taken")

    svi = SVI(model, AutoDelta(model), numpyro.optim.Adam(0.01), Trace_ELBO())
    with pytest.raises(ValueError, match=f"the state `taken` has the name of.*, of type '{kind}'"):
        svi.run(jax.random.key(0), 2, progress_bar=False)


@pytest.mark.slow
@GPS
def test_two_states_of_one_name(gp: Callable[..., None]) -> None:
    def model(names: tuple[str, str]) -> None:
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        for i, name in enumerate(names):
            gp(f"y{i}", scale, name)

    svi = SVI(model, AutoDelta(model), numpyro.optim.Adam(0.01), Trace_ELBO())
    svi.run(jax.random.key(0), 2, ("first", "second"), progress_bar=False)
    with pytest.raises(ValueError, match=r"the state `first` has the name of.*, of type 'mutable'"):
        svi.run(jax.random.key(0), 2, ("first", "first"), progress_bar=False)
