"""From data to posterior by the defaults: the ten lines of docs/methods/iterative.md on UCI data.

    python benchmarks/evidence.py road road-small road-large road-flights road-exact-peer

RMSE and negative log density on test data, in standardized units, and seconds for the
hyperparameters and for the solve, including compilation. GPyTorch's exact GP has the same kernel
and its own defaults: Adam with a learning rate of 0.1 for as many seconds as this package takes,
then predictions. It holds about eleven n x n arrays, 9.5 GiB for 15,000 observations. All data but
the flights need SCALEGP_DATA; GPyTorch needs the `bench` extra.
"""

import dataclasses
import functools
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from iterative import gpytorch_exact
from sparse import score, score_of

import numpyro_scalegp as sgp


def model(X, y=None, kernel=sgp.kernels.Matern32):
    """The model of the page, with a lengthscale for each input."""
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(1.0, 1.0).expand([X.shape[1]]).to_event(1)
    )
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    prior = kernel(lengthscale, variance), X, noise**2
    gp = sgp.GaussianProcess(*prior, estimator=sgp.estimators.Pathwise())
    numpyro.sample("y", gp, obs=y)


def load(name, split, num_rows):
    """A data set with `num_rows` of its training data, in random order."""
    flights = name == "flights"
    data = sgp.datasets.load_flights() if flights else sgp.datasets.load_uci(name, split)
    order = np.random.default_rng(split).permutation(len(data.X_train))[:num_rows]
    return dataclasses.replace(data, X_train=data.X_train[order], y_train=data.y_train[order])


QUICK = {"num_refinements": 0, "subset_size": 1000, "num_subsets": 1}


@functools.cache
def fit(name, split, seed, rows, quick, model=model):
    """The record of one data set and split with this package."""
    data = load(name, split, rows)
    arrays = data.X_train, data.y_train, data.X_test, data.y_test
    X, y, X_test, y_test = (jnp.array(array, jnp.float32) for array in arrays)
    start = time.perf_counter()
    options = QUICK if quick else {}
    values = sgp.infer.initial_hyperparameters(jax.random.key(seed), model, X, y, **options)
    fitting = time.perf_counter() - start
    start = time.perf_counter()
    posterior = sgp.posterior(model, values, X, y)
    solving = time.perf_counter() - start
    return {
        **score_of(posterior.predictive(X_test), y_test),
        "seconds": fitting + solving,
        "hyperparameters_seconds": fitting,
        "solve_seconds": solving,
        "solve_epochs": float(posterior.diagnostics["epochs"]),
        "noise": float(values["noise"]),
        "rows": len(X),
        "columns": X.shape[1],
    }


def exact_peer(data, seconds):
    """The record of GPyTorch's exact GP, trained for that many seconds."""
    import gpytorch
    import torch

    torch.manual_seed(0)
    start, num_steps = time.perf_counter(), 0
    model, objective = gpytorch_exact(np.float32(data.X_train), np.float32(data.y_train))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while time.perf_counter() - start < seconds:
            optimizer.zero_grad()
            (-objective()).backward()
            optimizer.step()
            num_steps += 1
        model.eval()
        model.likelihood.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            predictive = model.likelihood(model(torch.tensor(np.float32(data.X_test))))
            scores = score(predictive.mean.numpy(), predictive.variance.numpy(), data.y_test)
    return {**scores._asdict(), "seconds": time.perf_counter() - start, "steps": num_steps}


def record(data, split, seed, method, *, rows=None):
    """The record of a unit; "road-quick" has shorter settings.

    "gpytorch-exact" trains for as long as this package takes with its defaults.
    """
    scores = fit(data, split, seed, rows, method == "road-quick")
    if method == "gpytorch-exact":
        return exact_peer(load(data, split, rows), scores["seconds"])
    return scores
