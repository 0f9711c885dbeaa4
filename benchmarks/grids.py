"""Grids with gaps: seconds of the density, its gradient and predictions by a filter of places.

    python benchmarks/evidence.py grids grids-places

`births` has the log births of 51 states on 7,305 days (needs SCALEGP_DATA), of which a random third
is hidden; `made up` has as many hidden cells. The filter works in float32. Dense algebra, where it
is run, factorizes the matrix of the observed cells.
"""

import gzip
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from sparse import number_in

import numpyro_scalegp as sgp

K = sgp.kernels


def births():
    """Days, states, and standardized log births."""
    path = Path(os.environ["SCALEGP_DATA"]) / "births" / "births.csv.gz"
    with gzip.open(path, "rt") as file:
        table = np.genfromtxt(file, delimiter=",", skip_header=1)[:, 1:]
    Y = np.log(table + 1.0)
    Y = (Y - Y.mean(axis=0)) / Y.std(axis=0)
    days, states = (np.arange(float(n))[:, None] for n in Y.shape)
    W = np.random.default_rng(0).normal(size=(Y.shape[1], 3))
    return [days, states], Y, K.Coregion(0.5 * W, np.full(Y.shape[1], 0.3))


def made_up(num_times, num_places, seed):
    """Times, places in a square, and noise."""
    generator = np.random.default_rng(seed)
    times, places = np.arange(float(num_times))[:, None], generator.uniform(size=(num_places, 2))
    return [times, places], generator.normal(size=(num_times, num_places)), K.Matern52(0.3)


def seconds(function, *arguments, repeats=3):
    """The median time of calls after the first."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def record(data, split, seed, method):
    """Seconds for a grid, such as "1,000 times, 100 places"; for dense algebra with "dense"."""
    num_times, num_places = map(number_in, method.split(", ")[:2])
    made = births() if data == "births" else made_up(num_times, num_places, seed)
    inputs, Y, of_places = made
    observed = np.random.default_rng(seed).uniform(size=Y.shape) > 1.0 / 3.0
    estimator = sgp.estimators.StateSpace()

    def density(lengthscale, estimator=estimator):
        kernels = [K.Matern32(lengthscale), of_places]
        gp = sgp.GridGP(kernels, inputs, 0.1, observed=observed, estimator=estimator)
        return gp.log_prob(Y)

    result = {
        "value": seconds(jax.jit(density), 20.0),
        "gradient": seconds(jax.jit(jax.value_and_grad(density)), 20.0),
    }
    gp = sgp.GridGP(
        [K.Matern32(20.0), of_places], inputs, 0.1, observed=observed, estimator=estimator
    )
    result["prediction"] = seconds(lambda: gp.condition(Y).predictive(inputs).loc)
    if np.sum(observed) < 5000:
        dense = jax.jit(jax.value_and_grad(lambda value: density(value, None)))
        result["dense_gradient"] = seconds(dense, jnp.float32(20.0))
    return {f"grid_{name}_seconds": value for name, value in result.items()}
