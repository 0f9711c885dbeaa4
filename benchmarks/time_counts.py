"""Counts in time: Laplace and variational inference in linear time, dense, and sparse.

    python benchmarks/evidence.py time-counts time-counts-large

`time-counts`: ten folds of the coal-mining explosions in 333 bins, and of aircraft accidents in
bins of four weeks (needs SCALEGP_DATA). In each fold hyperparameters are estimated from the other
bins, and the log density is the mean over the bins of the fold. `time-counts-large`: the optimum
over the hyperparameters with simulated observations, with compilation.
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
from numpyro.infer import SVI, Trace_ELBO, init_to_median, init_to_value
from numpyro.infer.autoguide import AutoDelta
from numpyro.optim import Minimize

import numpyro_scalegp as sgp

ESTIMATORS = {
    "Laplace, linear time": sgp.estimators.StateSpace(),
    "Laplace, dense": sgp.estimators.Cholesky(),
}


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
    f = numpyro.sample("f", sgp.LatentGP(kernel, X, mean=level))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", poisson(exposure, f), obs=y)


def optimum(model, X, *arguments, init_loc_fn=init_to_median):
    """The guide at the optimum of the hyperparameters, and its parameters."""
    # Of densities per row, since BFGS stops early where gradients are large.
    model = numpyro.handlers.scale(model, 1.0 / len(X))
    guide = AutoDelta(model, init_loc_fn=init_loc_fn)
    svi = SVI(model, guide, Minimize(method="BFGS"), Trace_ELBO())
    result = svi.run(jax.random.key(0), 1, X, *arguments, progress_bar=False)
    return guide, result


def coal():
    """Times in years, counts, and the order of the bins in which folds are cut."""
    folder = Path(os.environ["SCALEGP_DATA"]) / "time_counts"
    times, counts = np.loadtxt(folder / "coal_binned.csv", unpack=True)
    order = np.loadtxt(folder / "coal_cvind.csv").astype(int) - 1
    return (times - times[0])[:, None], counts, order


def aircraft():
    """The same for bins of four weeks, in a random order."""
    file = Path(os.environ["SCALEGP_DATA"]) / "time_counts" / "aircraft_aircraft_accidents.txt"
    days = np.loadtxt(file, dtype="datetime64[D]").astype(int)
    edges = np.arange(days.min(), days.max() + 28, 28)
    counts, order = np.histogram(days, edges)[0], np.random.default_rng(0).permutation
    return (edges[:-1, None] - edges[0]) / 365.25, counts, order(len(counts))


def folds(data, split, method):
    """The held-out log density of a fold."""
    X, y, order = {"coal": coal, "aircraft": aircraft}[data]()
    test = np.array_split(order, 10)[split]
    train = np.setdiff1d(order, test)
    width, scale = np.diff(X[:, 0]).mean(), 20.0
    start = time.perf_counter()
    if method in ESTIMATORS:
        model = functools.partial(integrated_out, estimator=ESTIMATORS[method], scale=scale)
        guide, result = optimum(model, X[train], width, y[train])
    else:
        model = functools.partial(latent, scale=scale)
        guide = sgp.guides.AutoStateSpaceGP(model, rest=AutoDelta)
        if method == "sparse":
            guide = sgp.guides.AutoSparseGP(model, num_inducing=50, rest=AutoDelta)
        optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 2000))
        if method != "sparse":
            optimizer = sgp.infer.natural_gradients(optimizer, 0.5)
        svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())
        observations = X[train], width, y[train]
        result = svi.run(jax.random.key(0), 2000, *observations, progress_bar=False)
    medians = guide.median(result.params)
    posterior = sgp.posterior(model, guide, result, X[train], width, y[train])
    kernel = sgp.kernels.Matern52(medians["lengthscale"], medians["variance"])
    new = sgp.LaplaceGP(kernel, X[test], lambda f: poisson(width, f))
    log_density = new.predictive(posterior).log_prob(y[test])
    return {
        "log_density": float(jnp.mean(log_density)),
        "lengthscale": float(medians["lengthscale"]),
        "seconds": time.perf_counter() - start,
    }


def student_t(X, y=None):
    """A model of values with outliers."""
    kernel, level = hyperparameters(2.0)
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(kernel, X, mean=level))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.StudentT(3.0, f, scale), obs=y)


def variational(model, X, *arguments):
    """The guide of functions of time near the optimum, and its parameters.

    Hyperparameters are estimated from the first 10,000 rows, then from all rows.
    """

    def fitted(num_rows, num_steps, rate, init_loc_fn):
        guide = sgp.guides.AutoStateSpaceGP(
            model, rest=functools.partial(AutoDelta, init_loc_fn=init_loc_fn)
        )
        rates = optax.cosine_decay_schedule(rate, num_steps)
        optimizer = sgp.infer.natural_gradients(optax.adam(rates), 0.5, delay=8)
        svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())
        data = X[:num_rows], *(a[:num_rows] if np.ndim(a) else a for a in arguments)
        return guide, svi.run(jax.random.key(0), num_steps, *data, progress_bar=False)

    guide, result = fitted(10_000, 200, 0.2, init_to_median)
    start = init_to_value(values=guide.median(result.params))
    return fitted(len(X), 22, 0.05, start)


def large(seed, method, num_rows):
    """The optimum over hyperparameters with many observations."""
    generator = np.random.default_rng(seed)
    X = np.sort(generator.uniform(0.0, num_rows / 50.0, num_rows))[:, None]
    estimator = sgp.estimators.StateSpace()
    prior = sgp.GaussianProcess(sgp.kernels.Matern52(1.0, 0.5), X, 1e-9, estimator=estimator)
    f = 0.5 + np.asarray(prior.sample(jax.random.key(seed)))
    counts = generator.poisson(np.exp(f))
    values = f + 0.3 * generator.standard_t(3.0, num_rows)
    start = time.perf_counter()
    if method == "counts, Laplace":
        model = functools.partial(integrated_out, estimator=estimator, scale=2.0)
        guide, result = optimum(model, X, 1.0, counts)
    elif method == "counts, variational":
        model = functools.partial(latent, scale=2.0)
        guide, result = variational(model, X, 1.0, counts)
    else:
        guide, result = variational(student_t, X, values)
    medians = jax.block_until_ready(guide.median(result.params))
    seconds = time.perf_counter() - start
    return {name: float(value) for name, value in medians.items()} | {"seconds": seconds}


def record(data, split, seed, method, *, num_rows=None):
    """A fold of the real data, or the optimum with simulated observations."""
    numpyro.enable_x64()
    if data == "made up":
        return large(seed, method, num_rows)
    return folds(data, split, method)
