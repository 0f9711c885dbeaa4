"""Nearest-neighbor estimators in models whose arguments are traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import Distribution

import numpyro_scalegp as sgp

generator = np.random.default_rng(0)
X = generator.uniform(0.0, 3.0, (12, 1)).astype(np.float32)
y = np.sin(X[:, 0])
Xs, key = X[:3] + 0.01, jax.random.key(0)
DRAWS = {"lengthscale": jnp.array([0.5, 0.8])}

ESTIMATORS = {
    "vecchia": sgp.estimators.Vecchia(5),
    "full_scale": sgp.estimators.FullScale(X[:3], num_neighbors=5),
}


def process(estimator: Any, lengthscale: Any, X: Any) -> sgp.GaussianProcess:
    return sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, 0.1, estimator=estimator)


def model_of(estimator: Any, change: Callable[[Any], Any]) -> Callable[..., None]:
    def model(X: Any, y: Any = None) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        numpyro.sample("y", process(estimator, lengthscale, change(X)), obs=y)

    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("change", [lambda X: X, lambda X: 2.0 * jnp.asarray(X)])
def test_draws_of_nuts_condition_as_one_value_does(name: str, change: Callable) -> None:
    """The inputs are an argument of the model, or computed from it."""
    estimator = ESTIMATORS[name]
    model = model_of(estimator, change)
    posteriors = [
        process(estimator, lengthscale, change(X)).condition(y)
        for lengthscale in DRAWS["lengthscale"]
    ]
    posterior = sgp.posterior(model, DRAWS, X, y)
    expected = np.mean([posterior.mean(Xs) for posterior in posteriors], axis=0)
    np.testing.assert_allclose(posterior.mean(Xs), expected, rtol=1e-4, atol=1e-5)
    predictive = sgp.infer.Predictive(model, posterior_samples=DRAWS)
    densities = predictive.draws(key, X, y).log_likelihood["y"]
    loo = [posterior.leave_one_out().log_prob(y) for posterior in posteriors]
    np.testing.assert_allclose(densities, loo, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_predictive_draws_at_other_rows_and_from_the_prior(name: str) -> None:
    model = model_of(ESTIMATORS[name], lambda X: X)
    predictive = sgp.infer.Predictive(model, posterior_samples=DRAWS, data=(X, y))
    assert np.all(np.isfinite(predictive(key, Xs)["y"]))
    # The inputs of another call have other neighbors.
    prior = sgp.infer.Predictive(model, num_samples=2)
    for rows in (X, X[::-1]):
        assert np.all(np.isfinite(prior(key, rows)["y"]))


def test_a_function_with_neighbors_is_drawn_from_its_prior() -> None:
    def model(X: Any) -> None:
        gp: Distribution = sgp.NearestNeighborGP(sgp.kernels.RBF(0.5), X, ESTIMATORS["vecchia"])
        numpyro.sample("f", gp)

    assert np.all(np.isfinite(sgp.infer.Predictive(model, num_samples=2)(key, X)["f"]))


def test_rows_that_are_sampled_have_no_neighbors_beforehand() -> None:
    def model(y: Any = None) -> None:
        rows = numpyro.sample("rows", dist.Normal(0.0, 1.0).expand([12, 1]).to_event(2))
        numpyro.sample("y", process(ESTIMATORS["full_scale"], 0.5, rows), obs=y)

    draws = {"rows": jnp.stack([jnp.asarray(X), 0.5 * jnp.asarray(X)])}
    with pytest.raises(ValueError, match="`X` is traced, and the neighbors of its rows are found"):
        sgp.posterior(model, draws, y).mean(Xs)
