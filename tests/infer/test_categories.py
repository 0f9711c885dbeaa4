"""Hyperparameters from exact fits, then an iterative posterior, for two correlated outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp

X = np.stack([np.random.default_rng(0).uniform(-2.0, 2.0, 90), np.resize([0.0, 1.0], 90)], axis=1)
SOLVER = sgp.solvers.ConjugateGradients(1e-3, 90, sgp.preconditioners.PivotedCholesky(20))
PATHWISE = sgp.estimators.Pathwise(SOLVER, num_probes=16, num_features=400)


def mean(X: Array) -> Array:
    wave = np.sin(2.0 * X[:, 0])
    return np.where(X[:, 1] == 0, wave, -0.7 * wave)


def model(X: Array, y: Array | None = None) -> None:
    W = numpyro.sample("W", dist.Normal(jnp.eye(2, 1), 1.0).to_event(2))
    category = numpyro.sample("own", dist.LogNormal(-4.0, 1.0).expand([2]).to_event(1))
    lengthscale = numpyro.sample("lengthscale", sgp.infer.lengthscale_prior(0.1, 4.0))
    kernel = sgp.kernels.RBF(lengthscale).on((0,)) * sgp.kernels.Coregion(W, category).on((1,))
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, 0.01, estimator=PATHWISE), obs=y)


@pytest.mark.slow
def test_hyperparameters_and_a_posterior_by_iteration(x64: None) -> None:
    """The second output is predicted where only the first one was observed."""
    is_training = (X[:, 1] == 0) | (X[:, 0] < 0.0)
    y = mean(X) + 0.1 * np.random.default_rng(1).normal(size=90)
    values = sgp.infer.initial_hyperparameters(
        jax.random.key(0), model, X[is_training], y[is_training], num_steps=40
    )
    B = values["W"] @ values["W"].T + jnp.diag(values["own"])
    assert B[0, 1] / jnp.sqrt(B[0, 0] * B[1, 1]) < -0.9
    posterior = sgp.posterior(model, values, X[is_training], y[is_training], key=jax.random.key(1))
    Xs = np.stack([np.linspace(0.2, 1.6, 15), np.ones(15)], axis=1)
    assert np.sqrt(np.mean((posterior.mean(Xs) - mean(Xs)) ** 2)) < 0.15
    message = "`Xs` must hold the kernel's categories in column 1, 0, 1, got 2.0 in row 0"
    with pytest.raises(ValueError, match=message):
        posterior.mean(Xs + np.array([0.0, 1.0]))
