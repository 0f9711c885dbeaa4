"""Counts in time: Laplace's approximation in linear time, dense, and a variational sparse GP.

    python benchmarks/evidence.py time-counts time-counts-large

`time-counts`: ten folds of the coal-mining explosions in 333 bins (needs SCALEGP_DATA). In each
fold hyperparameters are estimated from the other bins, and the log density is the mean over the
bins of the fold. `time-counts-large`: the optimum over the hyperparameters of simulated counts,
from the medians of the priors, with compilation.
"""

import functools
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoDelta
from numpyro.optim import Minimize

import numpyro_scalegp as sgp

ESTIMATORS = {"linear time": sgp.estimators.StateSpace(), "dense": sgp.estimators.Cholesky()}


def poisson(exposure, f):
    return dist.Poisson(exposure * jnp.exp(f))


def hyperparameters(scale):
    """The kernel and the level, under priors for times with such a typical lengthscale."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(scale), 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(-1.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    return sgp.kernels.Matern52(lengthscale, variance), level


def integrated_out(X, exposure, y=None, *, estimator, scale):
    """The model with the function integrated out."""
    kernel, level = hyperparameters(scale)
    given_f = functools.partial(poisson, exposure)
    gp = sgp.LaplaceGP(kernel, X, given_f, mean=level, estimator=estimator)
    return numpyro.sample("y", gp, obs=y)


def latent(X, exposure, y=None, *, scale):
    """The same model with a site for the function."""
    kernel, level = hyperparameters(scale)
    f = numpyro.sample("f", sgp.LatentGP(kernel, X))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", poisson(exposure, level + f), obs=y)


def optimum(model, *arguments):
    """The guide at the optimum of the hyperparameters, and its parameters."""
    guide = AutoDelta(model, init_loc_fn=init_to_median)
    svi = SVI(model, guide, Minimize(method="BFGS"), Trace_ELBO())
    result = svi.run(jax.random.key(0), 1, *arguments, progress_bar=False)
    return guide, result


def coal():
    """Times in years, counts, and the order of the bins in which folds are cut."""
    folder = Path(os.environ["SCALEGP_DATA"]) / "time_counts"
    times, counts = np.loadtxt(folder / "coal_binned.csv", unpack=True)
    order = np.loadtxt(folder / "coal_cvind.csv").astype(int) - 1
    return (times - times[0])[:, None], counts, order


def folds(split, method):
    """The held-out log density of a fold."""
    X, y, order = coal()
    test = np.array_split(order, 10)[split]
    train = np.setdiff1d(order, test)
    width, scale = np.diff(X[:, 0]).mean(), 20.0
    start = time.perf_counter()
    if method in ESTIMATORS:
        model = functools.partial(integrated_out, estimator=ESTIMATORS[method], scale=scale)
        guide, result = optimum(model, X[train], width, y[train])
    else:
        model = functools.partial(latent, scale=scale)
        guide = sgp.guides.AutoSparseGP(model, num_inducing=50, rest=AutoDelta)
        optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 2000))
        svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())
        data = X[train], width, y[train]
        result = svi.run(jax.random.key(0), 2000, *data, progress_bar=False)
    medians = guide.median(result.params)
    posterior = sgp.posterior(model, guide, result, X[train], width, y[train])
    kernel = sgp.kernels.Matern52(medians["lengthscale"], medians["variance"])
    offset = 0.0 if method in ESTIMATORS else medians["level"]
    new = sgp.LaplaceGP(kernel, X[test], lambda f: poisson(width, offset + f))
    log_density = new.predictive(posterior).log_prob(y[test])
    return {
        "log_density": float(jnp.mean(log_density)),
        "lengthscale": float(medians["lengthscale"]),
        "seconds": time.perf_counter() - start,
    }


def large(seed, num_rows):
    """The optimum over hyperparameters with many counts."""
    generator = np.random.default_rng(seed)
    X = np.sort(generator.uniform(0.0, num_rows / 50.0, num_rows))[:, None]
    prior = sgp.GaussianProcess(
        sgp.kernels.Matern52(1.0, 0.5), X, 1e-9, estimator=sgp.estimators.StateSpace()
    )
    f = np.asarray(prior.sample(jax.random.key(seed)))
    y = generator.poisson(np.exp(0.5 + f))
    estimator = sgp.estimators.StateSpace()
    model = functools.partial(integrated_out, estimator=estimator, scale=2.0)
    start = time.perf_counter()
    guide, result = optimum(model, X, 1.0, y)
    medians = jax.block_until_ready(guide.median(result.params))
    seconds = time.perf_counter() - start
    return {name: float(value) for name, value in medians.items()} | {"seconds": seconds}


def record(data, split, seed, method, *, num_rows=None):
    """A fold of the coal data, or the optimum with simulated counts."""
    numpyro.enable_x64()
    return folds(split, method) if data == "coal" else large(seed, num_rows)
