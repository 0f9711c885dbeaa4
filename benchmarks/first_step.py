"""Seconds to start in a new process: imports, `SVI.init`, the first step, a posterior.

    python benchmarks/evidence.py first-step

The model of the documentation's first page, without a persistent cache of compiled programs.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import numpy as jnp
from jax import random

import numpyro_scalegp as sgp

PROCESS = """
import sys, time
began = time.perf_counter()
import first_step
first_step.measure(began, *map(int, sys.argv[1:]))
"""


def model(X, y, batch_size=None):
    """The model of the documentation's first page."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale, variance=2.0), X))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def measure(began, seed, num_inducing, batch_size):
    """Print seconds, and the number of programs that XLA compiled, in a process just started."""
    imported, compiled = time.perf_counter(), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, duration, **_: compiled.append(name) if "backend_compile" in name else None
    )

    def mark(values):
        jax.block_until_ready(values)
        return time.perf_counter(), len(compiled)

    keys = random.split(random.key(seed), 3)
    X = random.uniform(keys[0], (100_000, 2), minval=-3.0, maxval=3.0)
    y = X[:, 0] * jnp.sin(2.0 * X[:, 1]) + 0.3 * random.normal(keys[1], (100_000,))
    made = mark(y)
    guide = sgp.guides.AutoSparseGP(model, num_inducing=num_inducing)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, 2000))
    svi = numpyro.infer.SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())
    state = svi.init(keys[2], X, y, batch_size)
    initialized = mark(state.optim_state)
    update = jax.jit(svi.update, static_argnums=3)
    state, loss = update(state, X, y, batch_size)
    stepped = mark(loss)
    posterior = sgp.posterior(model, guide, svi.get_params(state), X, y)
    Xs = jnp.array([[1.0, 0.8]])
    predicted = mark((posterior.mean(Xs), posterior.variance(Xs)))
    measured = {
        "imports": imported - began,
        "init": initialized[0] - made[0],
        "init_programs": initialized[1] - made[1],
        "step": stepped[0] - initialized[0],
        "step_programs": stepped[1] - initialized[1],
        "first_step": stepped[0] - began,
        "posterior": predicted[0] - began,
    }
    print(json.dumps(measured))


def record(data, split, seed, method, *, num_inducing=512, batch_size=1024, repeats=3):
    """The record of a unit: medians over several new processes."""
    command = [sys.executable, "-c", PROCESS, *map(str, (seed, num_inducing, batch_size))]
    options = {
        "cwd": Path(__file__).parent,
        "env": os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    }
    runs = [json.loads(subprocess.check_output(command, **options)) for _ in range(repeats)]
    return {name: float(np.median([run[name] for run in runs])) for name in runs[0]}
